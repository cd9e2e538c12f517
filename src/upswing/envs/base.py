"""What an environment is: where a task is played."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from upswing.errors import ConfigError, did_you_mean
from upswing.trajectory.types import Message, StopReason, Task, ToolRecord, Trajectory
from upswing.verify.deadline import inline
from upswing.verify.options import set_options

SPLITS = ("train", "dev", "test")

Expert = Callable[[tuple[Message, ...]], str]
"""A scripted policy for one task: the conversation so far in, the next assistant text out (no end-of-turn token)."""


@dataclass(frozen=True, kw_only=True)
class AssistantMessage:
    """What the model said in one turn."""

    content: str
    """The raw text, end-of-turn token removed, nothing else changed."""
    finished: bool = True
    """False when the turn was cut by its token limit."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What the environment answers."""

    messages: tuple[Message, ...] = ()
    """From `reset`: the whole conversation to start with. From `step`: only what is new; empty when done."""
    rewrite: bool = False
    """From `step`: `messages` are the whole conversation from here on; the agent no longer sees what was before."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """JSON schemas (OpenAI function format) for the chat template; only from `reset`. Empty: the prompt itself
    explains the tools."""
    done: bool = False
    stop_reason: StopReason | None = None
    """Set when done."""
    answer: str | None = None
    """The final answer, when done and the agent gave one."""
    reward: float = 0.0
    """The environment's own reward for this step, if it has one; the sum is `Episode.env_reward`."""
    tool_records: tuple[ToolRecord, ...] = ()
    info: Mapping[str, Any] = field(default_factory=dict)


class Environment(ABC):
    """Plays one task at a time: `reset`, `step` until done, `close`.

    A new instance is made for every trajectory, so heavy shared parts (an index, a database) belong in a cached
    function. `reset`, `step` and `close` may be plain or async; plain ones run in a thread. An environment that can't
    go on raises; the trajectory is then `errored` and never scored.

    A class attribute with a type hint and a value is an option, of the constructor and of a recipe under `args`, and is
    checked by its hint.
    """

    name: str = ""
    fixed = frozenset({"name"})
    """Those that are no options."""
    task_options = frozenset[str]()
    """Options that matter to `tasks` alone."""
    play_options = frozenset[str]()
    """Options that don't matter to `tasks`."""

    def __init__(self, **options: Any) -> None:
        """Every option left out, or None, is the class attribute. Raises ConfigError for anything that can't work."""
        set_options(self, options, f"environment '{self.name or type(self).__name__}'")

    @abstractmethod
    def reset(self, task: Task, seed: int) -> Any:
        """Start a task -> Observation (or an awaitable of one)."""

    @abstractmethod
    def step(self, message: AssistantMessage) -> Any:
        """Take what the model said -> Observation (or an awaitable of one)."""

    @inline
    def close(self) -> Any:
        """Free what the episode holds; called exactly once, whatever happened."""
        return None

    @inline
    def state(self) -> Mapping[str, Any]:
        """The final state for verifiers; JSON-serialisable."""
        return {}

    def recovered(self, trajectory: Trajectory) -> bool | None:
        """Whether the agent got past a failed attempt, such as a search that missed; None when nothing failed, or when
        the environment can't tell (the default). Read by evaluation only."""
        return None

    def tasks(self, split: str, seed: int = 0) -> Iterator[Task]:
        """A stream of tasks of a split (`train`, `dev`, `test`), the same for the same seed. It may be endless."""
        raise NotImplementedError(f"{type(self).__name__} has no tasks of its own; give the recipe a dataset")

    def expert(self, task: Task, rng: random.Random) -> Expert:
        """A scripted policy that plays the task for demonstrations. It must not see more than the agent may learn."""
        raise NotImplementedError(f"{type(self).__name__} has no scripted expert; SFT then needs a dataset")


def check_split(env: str, split: str) -> None:
    """Raises ConfigError unless it is one of SPLITS."""
    if split not in SPLITS:
        raise ConfigError(f"{env} has no split '{split}'; allowed: {', '.join(SPLITS)}{did_you_mean(split, SPLITS)}")
