"""One completion on its way through the embedded engine."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

from upswing.engine.base import Completion, FinishReason, Sampling
from upswing.engine.slots import Slot
from upswing.engine.stopping import StopChecker
from upswing.trajectory.types import Int32T

_HEADROOM = 32
"""Tokens that every running request must have room for before another one begins, so that it isn't soon put back."""


@dataclass(eq=False)
class Request:
    """One completion on its way. `sequence` is prompt and sampled tokens, with room for all that may come."""

    sequence: Int32T
    num_prompt: int
    length: int
    """Tokens of `sequence` that there are: the prompt and those sampled."""
    sampling: Sampling
    session: str | None
    stop: StopChecker
    rng: random.Random
    future: asyncio.Future[Completion] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    slot: Slot = field(default_factory=lambda: Slot(-1))
    """Until it runs an empty one that is not in the table."""
    alike: int = -1
    """Running requests with the same number have the very same tokens."""
    tokens: list[int] = field(default_factory=list)
    engine_logprobs: list[float] = field(default_factory=list)
    entropy: list[float] = field(default_factory=list)
    policy_version: list[int] = field(default_factory=list)
    finish_reason: FinishReason = FinishReason.CANCELLED

    @property
    def positions(self) -> int:
        """Tokens that its slot should have room for when another one begins."""
        return min(self.length + _HEADROOM, len(self.sequence))

    @property
    def num_pending(self) -> int:
        """Tokens that must run through the model before the next one can be sampled."""
        return self.length - self.slot.length

    def add(self, token: int, logprob: float, entropy: float, version: int) -> bool:
        """Take a sampled token; True when the completion has ended."""
        self.sequence[self.length] = token
        self.length += 1
        self.tokens.append(token)
        self.engine_logprobs.append(logprob)
        self.entropy.append(entropy)
        self.policy_version.append(version)
        reason = self.stop.check(self.tokens)
        self.finish_reason = reason or FinishReason.CANCELLED
        return reason is not None

    def resolve(self) -> None:
        """Give the result to whoever awaits it. Event loop only."""
        if self.future.done():
            return
        completion = Completion(
            tokens=tuple(self.tokens),
            engine_logprobs=tuple(self.engine_logprobs),
            policy_version=tuple(self.policy_version),
            finish_reason=self.finish_reason,
            entropy=tuple(self.entropy),
        )
        self.future.set_result(completion)
