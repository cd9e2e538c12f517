"""Gymnasium's environments whose observations are text, or made text, and whose actions can be named."""

from __future__ import annotations

import functools
import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from upswing.envs.adapters import library
from upswing.envs.base import AssistantMessage, Observation
from upswing.envs.generated import GeneratedEnv
from upswing.errors import ConfigError, EnvironmentBroken, did_you_mean
from upswing.plugins import load_object
from upswing.trajectory.types import StopReason, Task
from upswing.verify.deadline import call_with_deadline
from upswing.verify.options import REQUIRED
from upswing.verify.text import one_line

NAMES = {
    "FrozenLake": ("left", "down", "right", "up"),
    "CliffWalking": ("up", "right", "down", "left"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
    "Blackjack": ("stick", "hit"),
}
"""What Gymnasium's own text games call their actions, by the start of their id."""
_NO_LIMIT_S = 86_400.0
"""A step that hangs is the environment's fault: `limits.env_timeout_s` ends the trajectory, no tool's time limit."""
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


class Gymnasium(GeneratedEnv):
    """The agent calls `act`; what it is answered is the observation, and every step's reward counts.

    Options: `id`, a registered one or an import path of a function that makes an environment; `kwargs`, what it is made
    with (`{render_mode: ansi}`: the rendered picture is the observation); `actions`, a name for each action, as a list
    or a mapping to values; `to_text`, import path of a function that makes an observation text; `prompt`.
    An end is `env_done`, a cut by the environment's own limit `max_turns`. What names no action is answered with the
    names; `max_invalid_calls` of them in a row end the trajectory, and so does saying anything without a call.
    """

    name = "gymnasium"
    fixed = GeneratedEnv.fixed | {"expert_noise", "tool_timeout_s"}
    only_acts = True
    protocol = "tags"
    max_turns = 100
    tool_timeout_s = _NO_LIMIT_S
    id: str = REQUIRED
    kwargs: Mapping[str, Any] = {}
    actions: Sequence[str] | Mapping[str, Any] | None = None
    to_text: str | Callable[[Any], str] | None = None
    prompt: str | None = None
    _game: Any = None
    _steps, _earned, _return, _terminated, _truncated = 0, 0.0, 0.0, False, False

    def __init__(self, **options: Any) -> None:
        """Makes the environment once, to see that it can be played. Raises ConfigError."""
        super().__init__(**options)
        self._given = json.dumps(dict(self.kwargs), sort_keys=True)
        space, first = _probe(self.id, self._given)
        self._text(first)
        self._values = _actions(self.id, space, self.actions)
        self.equip({"act": self._tool()})

    def draw(self, rng: random.Random) -> Task:
        seed = rng.randrange(2**31)
        return self.make_task(f"{self.id} {self._given} {seed}", self.prompt or f"Play {self.id}.", seed=seed)

    async def reset(self, task: Task, seed: int) -> Observation:
        """The task's `seed` starts the game, so that all plays of a task start alike; without one, its id does."""
        self._steps, self._return, self._terminated, self._truncated = 0, 0.0, False, False
        start = task.data.get("seed", int.from_bytes(task.id.encode()[-3:], "big"))
        text = await call_with_deadline(self._begin, {"seed": start}, _NO_LIMIT_S)
        seen = await super().reset(task, seed)
        last = seen.messages[-1]
        return replace(seen, messages=(*seen.messages[:-1], replace(last, content=f"{last.content}\n\n{text}")))

    async def step(self, message: AssistantMessage) -> Observation:
        self._earned = 0.0
        seen = await super().step(message)
        self._return += self._earned
        cut = self._truncated and not self._terminated and seen.stop_reason is StopReason.ENV_DONE
        return replace(seen, reward=self._earned, stop_reason=StopReason.MAX_TURNS if cut else seen.stop_reason)

    def is_done(self) -> bool:
        return self._terminated or self._truncated

    def final(self) -> Mapping[str, Any]:
        return {"steps": self._steps, "return": self._return, "terminated": self._terminated}

    def close(self) -> None:
        game, self._game = self._game, None
        if game is not None:
            game.close()

    def _begin(self, seed: int) -> str:
        self._game = _make(self.id, self._given)
        return self._clean(self._text(self._game.reset(seed=seed)[0], self._game))

    def _tool(self) -> Callable[..., str]:
        def act(action: str) -> str:
            try:
                value = action if self._values is None else self._values[action]
                observation, reward, terminated, truncated, _ = self._game.step(value)
                self._steps, self._earned = self._steps + 1, self._earned + float(reward)
                self._terminated, self._truncated = bool(terminated), bool(truncated)
                return self._text(observation, self._game)
            except Exception as problem:
                raise EnvironmentBroken(f"{self.id}: step raised {type(problem).__name__}: {problem}") from problem

        act.__doc__ = "Take a step."
        if self._values is not None:
            act.__doc__ = f"Take a step: one of {', '.join(self._values)}."
            act.__annotations__["action"] = Literal[tuple(self._values)]
        return act

    def _text(self, observation: Any, game: Any = None) -> str:
        """An observation as text; raises ConfigError when it can't be."""
        if self.to_text is not None:
            to_text = self.to_text
            found = load_object(to_text, "to_text function", {}) if isinstance(to_text, str) else to_text
            return str(found(observation))
        if self.kwargs.get("render_mode") == "ansi":
            return _ESCAPES.sub("", game.render()) if game is not None else ""
        if not isinstance(observation, str):
            seen = f"{type(observation).__name__} {observation!r:.60}"
            how = "give to_text (such as builtins:str), or kwargs: {render_mode: ansi} where it has that"
            raise ConfigError(f"gymnasium environment '{self.id}' observes {seen}; {how}")
        return observation


def _make(id: str, kwargs: str) -> Any:
    gymnasium = library("gymnasium", "gymnasium")
    given = json.loads(kwargs)
    if id in gymnasium.registry:
        return gymnasium.make(id, **given)
    if ":" not in id:
        near = did_you_mean(id, gymnasium.registry)
        raise ConfigError(f"gymnasium has no environment '{id}'{near} (or an import path my_pkg.module:make_env)")
    return load_object(id, "gymnasium environment", {})(**given)


@functools.lru_cache(maxsize=64)
def _probe(id: str, kwargs: str) -> tuple[Any, Any]:
    """(action space, a first observation)."""
    try:
        game = _make(id, kwargs)
        first, _ = game.reset(seed=0)
        game.close()
    except ConfigError:
        raise
    except Exception as problem:
        text = f"{type(problem).__name__}: {one_line(problem)}"
        raise ConfigError(f"gymnasium environment '{id}' can't be made: {text}") from problem
    return game.action_space, first


def _actions(id: str, space: Any, given: Any) -> dict[str, Any] | None:
    """Action name -> value; None when the action is free text."""
    spaces = library("gymnasium.spaces", "gymnasium")
    if isinstance(given, Mapping):
        named = {str(name): value for name, value in given.items()}
        wrong = next((name for name, value in named.items() if not space.contains(value)), None)
        if wrong is not None or not named:
            raise ConfigError(f"gymnasium environment '{id}': action {wrong!r} isn't one of {space}")
        return named
    if isinstance(space, spaces.Text) and given is None:
        return None
    if not isinstance(space, spaces.Discrete):
        allowed = "Discrete, Text, or name the ones to use as actions: {name: value}"
        raise ConfigError(f"gymnasium environment '{id}' takes actions of {space}; allowed: {allowed}")
    values = range(int(space.start), int(space.start + space.n))
    found = NAMES.get(re.split(r"\d*-", id.rpartition("/")[2])[0], ())
    names = list(given) if given is not None else list(found if len(found) == space.n else map(str, values))
    if len(set(names)) != len(values) or not all(isinstance(name, str) and name.strip() == name for name in names):
        raise ConfigError(f"gymnasium environment '{id}' has {space.n} actions; got the names {names!r:.100}")
    return dict(zip(names, values, strict=True))
