"""Task, messages, branches, trajectories, groups: what crosses every module boundary. All frozen.

Axis letters: T tokens of one branch, G group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

BoolT = npt.NDArray[np.bool_]
Int32T = npt.NDArray[np.int32]
Int16T = npt.NDArray[np.int16]
Float32T = npt.NDArray[np.float32]

ROLES = ("system", "user", "assistant", "tool")
SOURCES = ("policy", "expert", "text")


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A call that the agent asked for. `arguments` are as parsed; they may be wrong for the tool."""

    name: str
    """Empty where the turn, or the call in it, couldn't be read: counted as invalid, not as a call."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""


@dataclass(frozen=True, kw_only=True)
class Message:
    """One chat message. `content` is the raw text: of an assistant, everything it sampled, markup included."""

    role: str
    """One of ROLES."""
    content: str
    name: str | None = None
    """Name of the tool that answers, for `role='tool'`; None otherwise."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One problem. Never changes."""

    id: str
    messages: tuple[Message, ...]
    """What the conversation starts with (the environment may put a system message in front)."""
    gold: tuple[str, ...] = ()
    """Accepted answers; empty when the environment checks its state instead."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Whatever the environment or a verifier needs; JSON-serialisable."""
    tags: Mapping[str, str] = field(default_factory=dict)
    """Labels that metrics are broken down by, such as `{'kind': 'comparison', 'hops': '2'}`."""
    env: str = ""
    split: str = "train"


class Outcome(StrEnum):
    """How a rollout ended: exactly one of these."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ERRORED = "errored"
    CANCELLED = "cancelled"


class StopReason(StrEnum):
    """Why a trajectory ended."""

    ANSWERED = "answered"  # completed: the agent gave its final answer
    ENV_DONE = "env_done"  # completed: the environment ended the episode
    MAX_TURNS = "max_turns"  # truncated, as are all down to TIMEOUT
    MAX_TOKENS = "max_tokens"  # a turn was cut by its token limit
    CONTEXT_OVERFLOW = "context_overflow"
    INVALID_CALLS = "invalid_calls"  # too many invalid tool calls in a row
    TIMEOUT = "timeout"
    ERROR = "error"  # errored: tool, environment or engine broke
    CANCELLED = "cancelled"


@dataclass(frozen=True, kw_only=True, eq=False)
class Branch:
    """One exact token sequence that the model saw: a training sample. All arrays have the same length T."""

    tokens: Int32T
    sampled: BoolT
    """True exactly on the tokens that the agent produced, end-of-turn token included."""
    engine_logprobs: Float32T
    """Log-prob under the sampling distribution (after temperature); NaN where not sampled by a policy."""
    policy_version: Int32T
    """Weight version that sampled the token; -1 elsewhere, and everywhere in an expert's branch."""
    turn: Int16T
    """0-based turn index of sampled tokens; of other tokens, the turn that they precede."""

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, kw_only=True)
class DriftEvent:
    """Where a later prompt wasn't an exact extension of what the model had seen (or was, by repair)."""

    kind: str
    """`template` (the template re-rendered history, such as stripped thinking), `retokenised` or `rewritten`."""
    turn: int
    forked: bool
    """True when a new branch was opened; False when the difference was harmless and the held ids were extended."""
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class ToolRecord:
    """A tool call as it happened."""

    call: ToolCall
    result: str
    ok: bool
    """False when the call was invalid or the tool raised; the agent saw the error as `result`."""
    turn: int
    duration_s: float = 0.0
    retries: int = 0
    """Attempts before the last one, which failed and were tried again."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """What a verifier or rubric says. `value` None: it could not score, which is never 0."""

    value: float | None
    components: Mapping[str, float | None] = field(default_factory=dict)
    """Per verifier name, unweighted; None where that one could not score."""
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """One complete attempt at a task."""

    id: str
    task: Task
    branches: tuple[Branch, ...]
    messages: tuple[Message, ...]
    outcome: Outcome
    stop_reason: StopReason
    answer: str | None = None
    """The final answer, read only from where the protocol says; None when none was given."""
    tool_records: tuple[ToolRecord, ...] = ()
    num_turns: int = 0
    score: Score | None = None
    """None before scoring, and for errored and cancelled trajectories."""
    error: str | None = None
    """For `errored`: what broke, with the exception's type."""
    state: Mapping[str, Any] = field(default_factory=dict)
    """The environment's final state, for verifiers; JSON-serialisable."""
    drift: tuple[DriftEvent, ...] = ()
    source: str = "policy"
    """One of SOURCES: `policy` (sampled by an engine), `expert` (a demonstration: no log-probs, version -1) or `text`
    (a server's words, encoded here: no log-probs, version -1, maybe not the ids that it sampled; never RL's)."""
    seed: int = 0
    timing: Mapping[str, float] = field(default_factory=dict)
    """Seconds: `engine_s`, `env_s`, `total_s`."""

    @property
    def reward(self) -> float | None:
        """The score's value; None when there is none."""
        return None if self.score is None else self.score.value

    @property
    def num_sampled_tokens(self) -> int:
        return int(sum(int(branch.sampled.sum()) for branch in self.branches))


@dataclass(frozen=True, kw_only=True)
class Group:
    """The G trajectories of one task sampled together, errored ones included."""

    task: Task
    trajectories: tuple[Trajectory, ...]
