"""What the small built-in environments share: endless tasks drawn at random, each in one split by what it is."""

from __future__ import annotations

import random
import zlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from hashlib import blake2s
from importlib.resources import files
from typing import Any

import yaml

from upswing.envs.base import AssistantMessage, Expert, Observation, check_split
from upswing.envs.tool_env import ToolEnv
from upswing.trajectory.types import Message, Outcome, StopReason, Task, ToolCall, Trajectory
from upswing.verify.options import Share

_SPLITS = ("train", "train", "train", "dev", "test")


def split_of(identity: str) -> str:
    """The split that a task belongs to, by its identity alone: three in five train, one dev, one test."""
    return _SPLITS[zlib.crc32(identity.encode()) % len(_SPLITS)]


def book(name: str) -> dict[str, Any]:
    """The words and forms that an environment makes its tasks of: `{name}.yaml`."""
    return dict(yaml.safe_load(files("upswing.envs").joinpath(f"{name}.yaml").read_text(encoding="utf-8")))


class GeneratedEnv(ToolEnv):
    """A ToolEnv that makes its tasks up. `draw` makes one; its identity must say all that the task is."""

    fixed = ToolEnv.fixed | {"tools", "mcp", "source", "in_order"}
    in_order = True
    expert_noise: Share = 0.0
    """The chance that the expert slips, so that demonstrations show how to go on."""
    only_acts = False
    """Whether acts alone win: saying anything else than a call ends the episode, without an answer."""

    @abstractmethod
    def draw(self, rng: random.Random) -> Task:
        """A task at random, of any split."""

    def tasks(self, split: str, seed: int = 0) -> Iterator[Task]:
        """Endless tasks of a split, the same for the same seed; ConfigError for an unknown split."""
        check_split(self.name, split)
        rng = random.Random(f"{self.name} {split} {seed}")
        return (task for task in iter(lambda: self.draw(rng), None) if task.split == split)

    def make_task(
        self, identity: str, question: str, *, gold: tuple[str, ...] = (), split_by: str = "", **data: Any
    ) -> Task:
        """A task in the split that `split_by`, else its identity, belongs to; `kind` in `data` becomes a tag."""
        return Task(
            id=f"{self.name}-{blake2s(f'{identity} {question}'.encode(), digest_size=8).hexdigest()}",
            messages=(Message(role="user", content=question),),
            gold=gold,
            data=data,
            tags={"kind": data["kind"]} if "kind" in data else {},
            env=self.name,
            split=split_of(split_by or identity),
        )

    async def reset(self, task: Task, seed: int) -> Observation:
        self.answer = ""
        self.start(task)
        return await super().reset(task, seed)

    def start(self, task: Task) -> None:
        """Set the episode up."""

    async def step(self, message: AssistantMessage) -> Observation:
        seen = await super().step(message)
        if seen.answer is not None:
            self.answer = seen.answer.strip()
            if self.only_acts:
                return Observation(done=True, stop_reason=StopReason.ENV_DONE)
        return seen

    def state(self) -> Mapping[str, Any]:
        """The counts of calls, `answer`, and what `final` adds."""
        return {**super().state(), "answer": self.answer, **self.final()}

    def final(self) -> Mapping[str, Any]:
        """What a verifier compares with the task's `final_state`."""
        return {}

    def recovered(self, trajectory: Trajectory) -> bool | None:
        """Whether the agent finished after a call that failed, with one that worked; None when no call failed."""
        failed = [index for index, record in enumerate(trajectory.tool_records) if not record.ok]
        if not failed:
            return None
        worked = any(record.ok for record in trajectory.tool_records[failed[0] + 1 :])
        return worked and trajectory.outcome is Outcome.COMPLETED

    def expert(self, task: Task, rng: random.Random) -> Expert:
        """Says what `speak` does."""
        if type(self).speak is GeneratedEnv.speak:
            return super().expert(task, rng)
        careless = rng.random() < self.expert_noise

        def act(messages: tuple[Message, ...]) -> str:
            return self.speak(task, messages, [m.content for m in messages if m.role == "tool"], careless)

        return act

    def speak(self, task: Task, messages: tuple[Message, ...], heard: list[str], careless: bool) -> str:
        """The expert's next turn; `heard`: what its calls were answered. `careless`: it slips this time."""
        raise NotImplementedError

    def call(self, tool: str, **arguments: Any) -> str:
        """How an expert writes a call in this environment's protocol."""
        return self.parser.render([ToolCall(name=tool, arguments=arguments)])

    def say(self, answer: str) -> str:
        """How an expert writes its final answer."""
        return f"<answer>{answer}</answer>" if self.protocol == "tags" else answer
