"""The engine's contract: tokens in, tokens and the sampling distribution's log-probs out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, runtime_checkable

import torch


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to sample one completion. The defaults sample from the model's own distribution."""

    max_tokens: int = 256
    temperature: float = 1.0
    """0 is greedy: log-probs are then of the untempered distribution (temperature 1)."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all."""
    min_p: float = 0.0
    stop_tokens: tuple[int, ...] = ()
    """Ends the completion; the stop token is part of the completion (and is trained)."""
    stop_strings: tuple[str, ...] = ()
    """Ends the completion once its text contains one; every sampled token is kept."""
    seed: int = 0
    """0 or more. Same prompt, seed, weights and batch shape: same tokens."""


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What was sampled. The three tuples have one entry a token, the stop token included."""

    tokens: tuple[int, ...]
    engine_logprobs: tuple[float, ...]
    policy_version: tuple[int, ...]
    finish_reason: FinishReason
    entropy: tuple[float, ...] = ()
    """Entropy in nats of the sampling distribution at each token; empty when the engine can't tell."""


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What an engine can do; of a server: what it was found to do. docs/engine.md has the table."""

    token_in: bool = True
    """Prompts are token ids."""
    token_out: bool = True
    """Completions are the very ids that were sampled."""
    exact_logprobs: bool = True
    """Log-probs are of the distribution that was sampled from."""
    weight_updates: bool = True
    """New weights are taken while it serves, and what was cached of the old ones is dropped."""
    versions: bool = True
    """It says which weights sampled the tokens, so that a restart is noticed."""
    prefix_cache: bool = True
    """A turn's prompt is computed only where it is longer than the turn before."""
    cancel: bool = True
    """A completion that nobody waits for any more is stopped."""
    seeds: bool = True
    """Same prompt, seed, weights and batch shape: same tokens."""

    def missing(self) -> tuple[str, ...]:
        """The names of what training needs and this lacks."""
        return tuple(name for name in NEEDED if not getattr(self, name))


NEEDED = {
    "token_in": "takes no token ids",
    "token_out": "gives no token ids",
    "exact_logprobs": "gives no log-probs of the distribution that it samples from",
    "weight_updates": "takes no new weights",
    "versions": "doesn't say which weights sampled a token",
}
"""What training can't do without -> what is said of an engine that lacks it."""


@runtime_checkable
class Engine(Protocol):
    capabilities: Capabilities

    async def generate(self, prompt: Sequence[int], sampling: Sampling, *, session: str | None = None) -> Completion:
        """Sample one completion of `prompt`.

        `session` names a trajectory: its cache is kept after the call for the next turn, until `release(session)`.
        Cancelling the awaiting task cancels the request and frees its memory.
        """
        ...

    def release(self, session: str) -> None:
        """Free what is kept for a session. Unknown sessions are ignored."""
        ...

    async def update_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Load weights (Hugging Face parameter names) as policy `version`; every cached key and value is dropped."""
        ...

    async def close(self) -> None:
        """Stop; requests still running end as cancelled."""
        ...


@dataclass(kw_only=True)
class EngineStats:
    """Counters since the engine started."""

    prefill_tokens: int = 0
    """Tokens run through the model as prompt."""
    cached_tokens: int = 0
    """Prompt tokens that were found in the cache instead, or computed for another request with the same ones."""
    decode_tokens: int = 0
    evictions: int = 0
    """Idle sessions that lost their cache to another request."""
    preemptions: int = 0
    """Running requests that lost theirs, for want of memory, and were computed again from the tokens they had."""
    weight_bytes: int = 0
    """Of the new weights that it was given, in the form in which they went."""


def reason_of(engine: object) -> str:
    """Of an engine behind a server that hasn't answered, in brackets; empty when none is known."""
    problem = getattr(getattr(engine, "server", None), "problem", "")
    return f" ({problem})" if problem else ""
