"""An engine that plays given completions: for tests of everything above the engine, and for dry runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from upswing.engine.base import Capabilities, Completion, FinishReason, Sampling
from upswing.engine.stopping import StopChecker

Line = str | Sequence[int] | BaseException
"""What one call returns: text to encode, token ids as they are, or an exception to raise."""
Script = Sequence[Line] | Callable[[Sequence[int], Sampling, str | None], Line]


class ScriptedCall(NamedTuple):
    """One `generate` call as it arrived."""

    prompt: tuple[int, ...]
    sampling: Sampling
    session: str | None


@dataclass
class ScriptedEngine:
    """Plays `script`: the i-th call of a session gets its i-th line (calls without a session share one counter).

    A callable script is asked for each line instead. Text needs `tokenizer`; `end_token` is put after text.
    Stop tokens, stop strings and `max_tokens` cut the line as they would cut a real completion.
    """

    script: Script
    tokenizer: Any = None
    end_token: int | None = None
    logprob: float = -0.5
    """The log-prob of every token, in nats."""
    version: int = 0
    delay_s: float = 0.0
    """How long a call takes."""
    capabilities: Capabilities = field(default_factory=Capabilities)
    calls: list[ScriptedCall] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    closed: bool = False
    _played: dict[str | None, int] = field(default_factory=dict)

    async def generate(self, prompt: Sequence[int], sampling: Sampling, *, session: str | None = None) -> Completion:
        """The next line as a completion. Raises IndexError when the script has no more lines."""
        if self.closed:
            raise RuntimeError("the engine is closed")
        self.calls.append(ScriptedCall(tuple(prompt), sampling, session))
        line = self._next_line(prompt, sampling, session)
        await asyncio.sleep(self.delay_s)
        if isinstance(line, BaseException):
            raise line
        tokens, reason = self._cut(self._encode(line), sampling)
        return Completion(
            tokens=tuple(tokens),
            engine_logprobs=(self.logprob,) * len(tokens),
            policy_version=(self.version,) * len(tokens),
            finish_reason=reason,
        )

    def release(self, session: str) -> None:
        self.released.append(session)
        self._played.pop(session, None)

    async def update_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        self.version = version

    async def close(self) -> None:
        self.closed = True

    def _next_line(self, prompt: Sequence[int], sampling: Sampling, session: str | None) -> Line:
        if callable(self.script):
            return self.script(prompt, sampling, session)
        index = self._played.get(session, 0)
        self._played[session] = index + 1
        if index >= len(self.script):
            raise IndexError(
                f"the script has {len(self.script)} lines; session {session!r} asked for number {index + 1}"
            )
        return self.script[index]

    def _encode(self, line: str | Sequence[int]) -> list[int]:
        if not isinstance(line, str):
            return list(line)
        if self.tokenizer is None:
            raise ValueError("a scripted line is text, so ScriptedEngine needs a tokenizer")
        ids = list(self.tokenizer(line, add_special_tokens=False).input_ids)
        return ids if self.end_token is None else [*ids, self.end_token]

    def _cut(self, tokens: list[int], sampling: Sampling) -> tuple[list[int], FinishReason]:
        """Tokens up to the first stop or the limit. A line that just ends counts as stopped."""
        checker = StopChecker(sampling, self.tokenizer)
        for count in range(1, len(tokens) + 1):
            reason = checker.check(tokens[:count])
            if reason is not None:
                return tokens[:count], reason
        return tokens, FinishReason.STOP
