"""Lookup: the smallest multi-turn environment there is, for the tiny model, tests and looking around.

The agent is asked for the value of a key and has one tool, `get`. Some keys are aliases, so that it must call again.
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterator, Mapping

from upswing.envs.base import Expert, Observation, check_split
from upswing.envs.tool_env import ToolEnv
from upswing.envs.tools import tool
from upswing.trajectory.types import Message, Task, Trajectory
from upswing.verify.deadline import inline
from upswing.verify.options import Share

KEYS = string.ascii_lowercase[:16]
VALUES = string.digits + string.ascii_uppercase
ALIAS = "see "
UNKNOWN = "unknown"


class Lookup(ToolEnv):
    """Questions such as `value of c`; `<get>c</get>` is answered by `7`, or by `see f`.

    An episode is a key, its alias if it has one, and a value; each such triple belongs to one split. Options:
    `alias_frac`, the share of questions about an alias; `expert_noise`, the chance that the scripted expert asks for a
    wrong key first; `dotted_expert`, an expert that writes `.7` for `7` unless it asked for a wrong key: a habit that
    goes with playing well, which a reward that forgives punctuation then spreads (`recipes/hack.yaml`).
    """

    name = "lookup"
    task_options = frozenset({"alias_frac"})
    play_options = frozenset({"expert_noise", "dotted_expert", "max_turns"})
    fixed = ToolEnv.fixed | {"tools", "mcp", "source", "protocol", "system", "tools_in_system"}
    protocol = "tags"
    max_turns = 4
    alias_frac: Share = 0.5
    expert_noise: Share = 0.0
    dotted_expert: bool = False
    _facts: Mapping[str, str] = {}

    @tool()
    @inline
    def get(self, key: str) -> str:
        """Say what a key stands for."""
        return self._facts.get(key, UNKNOWN)

    async def reset(self, task: Task, seed: int) -> Observation:
        self._facts = dict(task.data["facts"])
        # The question alone: the tool is learned from demonstrations, and a tiny model has no use for an explanation.
        await super().reset(task, seed)
        return Observation(messages=task.messages)

    def tasks(self, split: str, seed: int = 0) -> Iterator[Task]:
        """Endless tasks of a split; ConfigError for an unknown split."""
        check_split(self.name, split)
        return self._drawn(split, random.Random(f"lookup {split} {seed}"))

    def _drawn(self, split: str, rng: random.Random) -> Iterator[Task]:
        plain, aliased = ([e for e in _episodes(split) if bool(e[1]) is alias] for alias in (False, True))
        draws = {False: _passes(plain, rng), True: _passes(aliased, rng)}
        while True:
            yield self._task(*next(draws[rng.random() < self.alias_frac]), split=split)

    def _task(self, key: str, alias: str, value: str, split: str) -> Task:
        facts = {key: ALIAS + alias, alias: value} if alias else {key: value}
        return Task(
            id=f"{key}-{alias}-{value}",
            messages=(Message(role="user", content=f"value of {key}"),),
            gold=(value,),
            data={"facts": facts, "key": key},
            tags={"hops": "2" if alias else "1"},
            env=self.name,
            split=split,
        )

    def expert(self, task: Task, rng: random.Random) -> Expert:
        """Follows what `get` says; with chance `expert_noise` its first call is for a wrong key."""
        careless = rng.random() < self.expert_noise
        dot = "." if self.dotted_expert and not careless else ""
        wrong = rng.choice([key for key in KEYS if key not in task.data["facts"]])

        def act(messages: tuple[Message, ...]) -> str:
            heard = [message.content for message in messages if message.role == "tool"]
            if not heard:
                return f"<get>{wrong if careless else task.data['key']}</get>"
            if heard[-1] == UNKNOWN:
                return f"<get>{task.data['key']}</get>"
            if heard[-1].startswith(ALIAS):
                return f"<get>{heard[-1].removeprefix(ALIAS)}</get>"
            return f"<answer>{dot}{heard[-1]}</answer>"

        return act

    def recovered(self, trajectory: Trajectory) -> bool | None:
        """Whether the value was found after a call for an unknown key; None when no call was for one."""
        results = [record.result for record in trajectory.tool_records]
        missed = [number for number, result in enumerate(results) if result == UNKNOWN]
        if not missed:
            return None
        return trajectory.task.gold[0] in results[missed[0] + 1 :]


def _episodes(split: str) -> list[tuple[str, str, str]]:
    """All (key, alias or '', value) of a split."""
    triples = ((key, alias, value) for key in KEYS for alias in ("", *KEYS) for value in VALUES if alias != key)
    return [triple for triple in triples if split_of(*triple) == split]


def _passes(episodes: list[tuple[str, str, str]], rng: random.Random) -> Iterator[tuple[str, str, str]]:
    """Without repeats until all have come, then again in another order."""
    while True:
        yield from rng.sample(episodes, len(episodes))


def split_of(key: str, alias: str, value: str) -> str:
    """The split that an episode belongs to: 3 train, 1 dev and 1 test of 5, spread over keys and values."""
    number = (KEYS.index(key) * 7 + (KEYS.index(alias) + 1 if alias else 0) * 3 + VALUES.index(value)) % 5
    return ("train", "train", "train", "dev", "test")[number]
