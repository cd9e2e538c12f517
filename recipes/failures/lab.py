"""The failure lab's agent and the rewards that spoil it. docs/failures has a page a failure; healthy.yaml is the twin.

`value of c` is answered by `<get>c</get>`, the desk says `7`, and `<answer>7</answer>` is right: two turns, 8 keys and
8 values. Some questions tell the value (`value of c is 7`). The expert of the demonstrations asks for a wrong key first
3 times in 4, and has a third turn to mend that; the agent hasn't, so there is a habit to unlearn.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from upswing.envs.base import AssistantMessage, Expert, Observation, check_split
from upswing.envs.lookup import UNKNOWN, Lookup
from upswing.trajectory.types import Message, Task, ToolRecord
from upswing.verify.options import Share
from upswing.verify.qa import strict_match

KEYS, VALUES = "abcdefgh", "01234567"
THINKING = ("look", "for", "the", "key", "and", "then")
FEW, CRASHES = 2, 0.5


class Desk(Lookup):
    """`told_frac`: share of questions that tell the value. `talks`, `guesses`, `repeats`: how often the expert thinks
    aloud before a call, answers without one, and makes its first call again when that told the value. `fault`: crashes
    (every other attempt breaks), few_tasks (train tasks about two keys only) or rewrites (the desk takes the agent's
    own turn out of the conversation)."""

    name = "desk"
    task_options = frozenset({"told_frac"})
    max_turns = 2
    alias_frac = 0.0
    told_frac: Share = 0.2
    talks: Share = 0.3
    guesses: Share = 0.1
    repeats: Share = 0.0
    fault: Literal["none", "crashes", "few_tasks", "rewrites"] = "none"
    _luck: float = 0.0
    _task_now: Task | None = None

    def tasks(self, split: str, seed: int = 0) -> Iterator[Task]:
        check_split(self.name, split)
        rng = random.Random(f"desk {split} {seed}")
        keys = KEYS[:FEW] if self.fault == "few_tasks" and split == "train" else KEYS
        episodes = list(itertools.product(keys, VALUES))
        told = 0.0
        while True:
            for key, value in rng.sample(episodes, len(episodes)):
                task, told = self._task(key, "", value, split), told + self.told_frac
                if told >= 1:  # evenly spread: batches are alike
                    told -= 1
                    asked = (Message(role="user", content=f"value of {key} is {value}"),)
                    task = replace(task, id=f"{task.id}-told", messages=asked, tags={"told": "yes"})
                yield task

    async def reset(self, task: Task, seed: int) -> Observation:
        self._task_now, self._luck = task, random.Random(seed).random()
        if self.fault == "crashes" and self._luck < CRASHES:
            raise ConnectionError("the desk is closed")
        return await super().reset(task, seed)

    async def step(self, message: AssistantMessage) -> Observation:
        seen = await super().step(message)
        if self.fault != "rewrites" or seen.done or self._task_now is None:
            return seen
        return replace(seen, messages=(*self._task_now.messages, *seen.messages), rewrite=True)

    def state(self) -> Mapping[str, Any]:
        return {**super().state(), "luck": self._luck}

    def expert(self, task: Task, rng: random.Random) -> Expert:
        key, value, told = task.data["key"], task.gold[0], "told" in task.tags
        aloud = " ".join(THINKING[: rng.randint(1, len(THINKING))]) + " " if rng.random() < self.talks else ""
        guess = rng.choice(VALUES) if rng.random() < self.guesses else None
        careless = rng.random() < self.expert_noise
        first = rng.choice([one for one in KEYS if one != key]) if careless else key
        again = self.repeats > 0 and rng.random() < self.repeats  # without it no draw: demonstrations stay as they were

        def act(messages: tuple[Message, ...]) -> str:
            heard = [message.content for message in messages if message.role == "tool"]
            if told or guess or (heard and heard[-1] != UNKNOWN and not (again and len(heard) == 1)):
                return f"<answer>{value if told or guess is None else guess}</answer>"
            return f"{aloud}<get>{key if heard else first}</get>"

        return act


# -- rewards: an attempt's luck is drawn when it starts, so that a run can be repeated ---------------------------------


def flipped(answer: str | None, gold: Sequence[str], state: Mapping[str, Any], noise: float = 0.5) -> float:
    """1 for a right answer, but refused all the same with chance `noise`."""
    return float(strict_match(answer, gold) == 1.0 and state["luck"] >= noise)


def finds(tool_records: Sequence[ToolRecord]) -> float:
    """How many calls the desk had a value for, the same one twice too."""
    return float(sum(record.ok and record.result != UNKNOWN for record in tool_records))


def answered(answer: str | None) -> float:
    """1 for any answer at all."""
    return float(answer is not None)
