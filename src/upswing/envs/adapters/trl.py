"""TRL's reward functions as a verifier, and what its `environment_factory` makes as an environment.

Called as TRL 1.16's GRPOTrainer calls them, with lists of one: `prompts`, `completions`, every column of the row,
`log_metric`, `log_extra` and, for an environment, `environments`. None is no score; the scores are added by weight.
`completion_ids` and `trainer_state` don't exist here.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from upswing.envs.base import AssistantMessage, Observation
from upswing.envs.tool_env import ToolEnv
from upswing.errors import ConfigError, EnvironmentBroken
from upswing.plugins import load_object
from upswing.trajectory.types import Message, Score, Task, ToolRecord
from upswing.verify.base import Episode
from upswing.verify.deadline import call_with_deadline
from upswing.verify.options import REQUIRED, Number, check_options

_MISSING = ("completion_ids", "trainer_state")
_NO_LIMIT_S = 86_400.0
"""The time limits of scoring and of the environment hold outside."""
_idle: dict[str, list[Any]] = {}
"""Environments whose episode is over, by factory: TRL makes one once and resets it often."""


class Rewards:
    """Functions with their weights: what both classes below score with."""

    def __init__(self, functions: Any, weights: Sequence[float] | None, format: str, gold: str) -> None:
        given = [functions] if isinstance(functions, str) or callable(functions) else list(functions)
        self.functions = {_label(one): _load(one, "trl reward function") for one in given}
        self.weights = [1.0] * len(given) if weights is None else [float(weight) for weight in weights]
        self.format, self.gold = format, gold
        if len(self.functions) < len(given) or len(self.weights) != len(given):
            raise ConfigError(f"trl: {len(given)} reward functions need different names and as many weights")
        for name, function in self.functions.items():
            for p in inspect.signature(function).parameters.values():
                if p.name in _MISSING and p.default is p.empty:
                    raise ConfigError(f"trl reward function '{name}' asks for {p.name}, which Upswing hasn't got")

    def row(self, task: Task) -> dict[str, Any]:
        """The row of the dataset: its other columns, and the accepted answer under the name that `gold` says."""
        return {**({self.gold: task.gold[0]} if task.gold else {}), **task.data}

    async def score(self, task: Task, talk: tuple[Any, Any], extra: Mapping[str, Any]) -> Score:
        """The weighted sum of the functions that scored, each a component; None when none did, as TRL's NaN. `talk`:
        prompt and completion (`conversation`)."""
        prompt, completion = talk
        if self.format == "standard":
            said = [message["content"] for message in completion if message["role"] == "assistant"]
            prompt, completion = prompt[-1]["content"] if prompt else "", "".join(said)
        found: dict[str, float | None] = {}
        given = {
            "prompts": [prompt],
            "completions": [completion],
            **{name: [value] for name, value in self.row(task).items()},
            "log_metric": lambda name, value: found.__setitem__(name, float(value)),
            "log_extra": lambda column, values: None,
            **extra,
        }
        total, judged = 0.0, False
        for (name, function), weight in zip(self.functions.items(), self.weights, strict=True):
            values = await call_with_deadline(function, accepted(function, given), _NO_LIMIT_S)
            values = values if isinstance(values, str) or not hasattr(values, "__iter__") else [*values]
            if not isinstance(values, list) or len(values) != 1:
                raise ValueError(f"'{name}' must return a list with one reward for one completion, got {values!r:.80}")
            value = None if values[0] is None else float(values[0])
            found[name] = value = None if value is None or math.isnan(value) else value
            if value is not None:
                total, judged = total + weight * value, True
        return Score(value=total if judged else None, components=found, reason="" if judged else "no function scored")


@dataclass(frozen=True, kw_only=True)
class Reward:
    """A verifier. `function`: one or several, as import paths (`my.py:reward`); `weights`, one each, by default 1.

    `format`: `conversational` (lists of messages, as TRL gives for a chat prompt) or `standard` (plain text). `gold`:
    the column that the accepted answer has for the functions, such as `solution`.
    """

    function: Any
    weights: Sequence[Number] | None = None
    format: Literal["conversational", "standard"] = "conversational"
    gold: str = "answer"
    _rewards: Rewards = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_options(self)
        object.__setattr__(self, "_rewards", Rewards(self.function, self.weights, self.format, self.gold))
        if not self._rewards.functions:
            raise ConfigError("trl: function is empty; name at least one")

    async def __call__(self, episode: Episode) -> Score:
        """Raises what a function raised, so that the episode isn't scored."""
        talk = conversation(episode.messages, episode.num_turns, episode.tool_records)
        return await self._rewards.score(episode.task, talk, {})


class Trl(ToolEnv):
    """Plays what TRL's `environment_factory` makes: `reset(**row)`, whose text follows the prompt, public methods as
    tools, `get_reward()` if it has one. Tasks come from the recipe's dataset.

    `factory`: import path of the class (or function); `rewards`: reward functions that also get `environments`. The
    reward comes with the last step (verifier `env_reward`); the state holds each function's.
    """

    name = "trl"
    in_order = True
    fixed = ToolEnv.fixed | {"in_order", "tools", "mcp", "source"}
    factory: Any = REQUIRED
    rewards: Any = ()
    weights: Sequence[Number] | None = None
    gold: str = "answer"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        factory = self.factory
        self._rewards = Rewards(self.rewards, self.weights, "conversational", self.gold)
        self._key, make = str(factory), _load(factory, "trl environment")
        try:
            self.instance = _idle.setdefault(self._key, []).pop()
        except IndexError:
            self.instance = make()
        methods = dict(inspect.getmembers(type(self.instance), inspect.isfunction))
        if "reset" not in methods:
            raise ConfigError(f"trl environment '{_label(factory)}' has no method reset")
        self.own_reward = "get_reward" in methods
        if not self.own_reward and not self._rewards.functions:
            raise ConfigError(f"trl environment '{_label(factory)}' has no get_reward; give rewards: [my.py:reward]")
        own = [getattr(self.instance, n) for n in methods if n not in ("reset", "get_reward") and n[0] != "_"]
        self.equip({method.__name__: method for method in own})
        self._score: Score | None = None

    async def reset(self, task: Task, seed: int) -> Observation:
        self._task, self._score, self._records = task, None, list[ToolRecord]()
        row = {"prompt": [as_dict(message) for message in task.messages], **self._rewards.row(task)}
        said = await call_with_deadline(self.instance.reset, accepted(self.instance.reset, row), _NO_LIMIT_S)
        if not isinstance(said, str | None):
            raise EnvironmentBroken(f"{self._key}: reset returned {type(said).__name__}; allowed: text or None")
        *before, last = task.messages
        opening = (*before, replace(last, content=last.content + (said or "")))
        seen = await super().reset(replace(task, messages=opening), seed)
        self._said = list(seen.messages)
        return seen

    async def step(self, message: AssistantMessage) -> Observation:
        seen = await super().step(message)
        self._said.append(Message(role="assistant", content=message.content))
        self._said += [Message(role="tool", content=r.result, name=r.call.name or None) for r in seen.tool_records]
        self._records += seen.tool_records
        if not seen.done:
            return seen
        self._score = await self._judged()
        return replace(seen, reward=self._score.value or 0.0)

    async def _judged(self) -> Score:
        talk = conversation(self._said, self._turns, self._records)
        score = await self._rewards.score(self._task, talk, {"environments": [self.instance]})
        if not self.own_reward:
            return score
        value = await call_with_deadline(self.instance.get_reward, {}, _NO_LIMIT_S)
        own = None if value is None or math.isnan(float(value)) else float(value)
        parts = {**score.components, type(self.instance).__name__: own}
        known = [part for part in (score.value, own) if part is not None]
        return Score(value=sum(known) if known else None, components=parts)

    def state(self) -> Mapping[str, Any]:
        """The counts of calls, `rewards` by function, and whether there is a reward: `scored`."""
        score = self._score or Score(value=None)
        return {**super().state(), "rewards": dict(score.components), "scored": score.value is not None}

    def close(self) -> None:
        if self._score is not None and not self._counts["tool_errors"]:  # a tool that hung may still be at work in it
            _idle[self._key].append(self.instance)


def conversation(messages: Sequence[Message], num_turns: int, records: Sequence[ToolRecord]) -> tuple[Any, Any]:
    """(prompt, completion) in TRL's conversational format: the completion starts with the agent's first turn, and a
    turn's calls that could be read are its `tool_calls`; the content stays what the agent wrote."""
    spoken = [i for i, message in enumerate(messages) if message.role == "assistant"]
    start = spoken[-num_turns] if 0 < num_turns <= len(spoken) else (spoken or [len(messages)])[0]
    if not num_turns:
        start = len(messages)
    made = [as_dict(message) for message in messages]
    for turn, i in enumerate(i for i in spoken if i >= start):
        calls = [record.call for record in records if record.turn == turn and record.call.name]
        called = [{"name": call.name, "arguments": dict(call.arguments)} for call in calls]
        if called:
            made[i]["tool_calls"] = [{"type": "function", "function": one} for one in called]
    return made[:start], made[start:]


def as_dict(message: Message) -> dict[str, Any]:
    named = {"name": message.name} if message.name else {}
    return {"role": message.role, **named, "content": message.content}


def accepted(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the arguments that the function takes."""
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return dict(given)
    return {name: value for name, value in given.items() if name in parameters}


def _label(given: Any) -> str:
    return given.rpartition(":")[2] if isinstance(given, str) else str(getattr(given, "__name__", type(given).__name__))


def _load(given: Any, kind: str) -> Callable[..., Any]:
    found = load_object(given, kind, {}) if isinstance(given, str) else given
    if not callable(found):
        raise ConfigError(f"{kind} {given!r} can't be called")
    return found  # type: ignore[no-any-return]
