"""What the agent wrote, repeated or called too much: scores from 0 down to -1, for a weight to scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from upswing.errors import ConfigError
from upswing.trajectory.types import Message, Task, ToolRecord
from upswing.verify.options import Count, CountOrZero, Options


def written(messages: Sequence[Message], task: Task, num_turns: int) -> list[str]:
    """What the agent wrote, turn by turn, reasoning included; a prompt's example turns are not its own. Where the
    environment rewrote the conversation, only what the last one holds."""
    shown, texts = ([m.content for m in some if m.role == "assistant"] for some in (task.messages, messages))
    texts = texts[len(shown) :] if texts[: len(shown)] == shown else texts
    return texts[-num_turns:] if num_turns else []


@dataclass(frozen=True, kw_only=True)
class _Over(Options):
    """0 up to `free`, falling in a straight line to -1 at `limit` and beyond."""

    free: CountOrZero
    limit: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.limit <= self.free:
            raise ConfigError(f"limit: got {self.limit}; allowed: above free ({self.free})")

    def penalty(self, amount: int) -> float:
        return -min(max((amount - self.free) / (self.limit - self.free), 0.0), 1.0)


class LengthPenalty(_Over):
    """Of the characters that the agent wrote: DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13), counted in
    characters, as an Episode has no tokens."""

    def __call__(self, messages: Sequence[Message], task: Task, num_turns: int) -> float:
        return self.penalty(sum(map(len, written(messages, task, num_turns))))


class CallPenalty(_Over):
    """Of the tool calls that the agent made, invalid ones included."""

    def __call__(self, tool_records: Sequence[ToolRecord]) -> float:
        return self.penalty(len(tool_records))


@dataclass(frozen=True, kw_only=True)
class RepetitionPenalty(Options):
    """Minus the share of n-grams of words that had been written before: 0 when none is repeated (Open-R1's n-gram
    repetition penalty, with a largest penalty of -1)."""

    ngram: Count = 4

    def __call__(self, messages: Sequence[Message], task: Task, num_turns: int) -> float:
        grams: list[Any] = []
        for text in written(messages, task, num_turns):
            words = text.lower().split()
            grams += zip(*(words[start:] for start in range(self.ngram)), strict=False)
        return len(set(grams)) / len(grams) - 1 if grams else 0.0
