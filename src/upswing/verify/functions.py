"""A plain function becomes a verifier: its parameters are named like the Episode's fields and filled from it."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any

from upswing.errors import ConfigError, did_you_mean
from upswing.plugins import load_object
from upswing.trajectory.types import Score, Task
from upswing.verify.base import Episode
from upswing.verify.deadline import DeadlineExceeded, call_with_deadline, is_async
from upswing.verify.options import Options, no_argument
from upswing.verify.text import one_line

FIELDS = tuple(field.name for field in dataclasses.fields(Episode))
WHOLE = "episode"
"""A parameter of this name gets the Episode itself."""
DEFAULT_TIMEOUT_S = 30.0
BUILTIN: Mapping[str, str] = {
    "strict_match": "upswing.verify.qa:strict_match",
    "exact_match": "upswing.verify.qa:exact_match",
    "f1": "upswing.verify.qa:f1",
    "format": "upswing.verify.qa:format_valid",
    "numeric": "upswing.verify.numeric:Numeric",
    "math": "upswing.verify.maths:Math",
    "choice": "upswing.verify.forms:Choice",
    "json_schema": "upswing.verify.forms:JsonSchema",
    "regex": "upswing.verify.forms:Regex",
    "countdown": "upswing.verify.numeric:countdown",
    "code": "upswing.verify.code:Code",
    "tool_calls": "upswing.verify.actions:ToolCalls",
    "state": "upswing.verify.actions:State",
    "retrieval_hit": "upswing.verify.actions:RetrievalHit",
    "length_penalty": "upswing.verify.penalties:LengthPenalty",
    "repetition_penalty": "upswing.verify.penalties:RepetitionPenalty",
    "call_penalty": "upswing.verify.penalties:CallPenalty",
    "http": "upswing.verify.http:Http",
    "judge": "upswing.verify.judge:Judge",
    "versus_reference": "upswing.verify.pairwise:VersusReference",
    "pairwise": "upswing.verify.pairwise:Pairwise",
}
ELSEWHERE: Mapping[str, str] = {
    "env_reward": "upswing.envs.adapters:env_reward",
    "reasoning_gym": "upswing.envs.adapters.reasoning_gym:Scorer",
    "trl": "upswing.envs.adapters.trl:Reward",
}
"""Those of layers above this one."""
NEEDS: Mapping[str, tuple[str, ...]] = {
    "choice": ("gold", "data.choices"),
    "countdown": ("data.numbers", "data.target"),
    "tool_calls": ("data.calls",),
    "state": ("data.final_state",),
    "retrieval_hit": ("data.evidence",),
    "versus_reference": ("gold",),
    "reasoning_gym": (),
}
"""What a task must have for them. Any other needs a gold if its parameter `gold` has no default."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verifier:
    """A checked function, `await verifier(episode) -> Score`. Make one with `verifier_from`."""

    name: str
    function: Callable[..., Any]
    fields: tuple[str, ...]
    """The Episode fields that it reads."""
    options: Mapping[str, Any]
    timeout_s: float
    inline: bool = False
    """Called where it is, without a thread and a deadline: it is quick, or keeps its time itself."""
    needs: tuple[str, ...] = ()
    """What a task must have, or there is no score: `gold`, and `data.KEY`."""

    @functools.cached_property
    def at_once(self) -> bool:
        """Whether it never waits, so that nothing is won by calling others meanwhile."""
        return self.inline and not is_async(self.function)

    def lacks(self, task: Task) -> str | None:
        """The first of `needs` that a task doesn't have."""
        if "gold" in self.needs and not any(one.strip() if isinstance(one, str) else True for one in task.gold or ()):
            return "gold"
        data = {f"data.{key}": value for key, value in task.data.items()}
        return next((field for field in self.needs if field != "gold" and data.get(field) is None), None)

    async def __call__(self, episode: Episode) -> Score:
        """The score; value None with the reason when it raised, took too long or gave no finite number."""
        kwargs: dict[str, Any] = {name: episode if name == WHOLE else getattr(episode, name) for name in self.fields}
        kwargs.update(self.options)
        try:
            if not self.inline:
                return to_score(await call_with_deadline(self.function, kwargs, self.timeout_s))
            found = self.function(**kwargs)
            return to_score(await found if inspect.isawaitable(found) else found)
        except DeadlineExceeded as error:
            return Score(value=None, reason=f"took longer than {self.timeout_s:g} s ({error})")
        except KeyboardInterrupt:
            raise
        except (Exception, SystemExit, GeneratorExit) as error:
            return Score(value=None, reason=f"{type(error).__name__}: {error}"[:500])

    async def score(self, episode: Episode) -> Score:
        """The same, under the name that rubrics have."""
        return await self(episode)


def to_score(value: Any) -> Score:
    """What a verifier returned, as a Score: a number or a boolean; None and non-finite numbers could not score."""
    if isinstance(value, Score):
        return finite(value)
    if value is None:
        return Score(value=None, reason="the verifier returned None")
    if not isinstance(value, numbers.Real) and callable(getattr(value, "item", None)):
        try:
            value = value.item()  # a NumPy or torch scalar
        except (ValueError, RuntimeError):
            return Score(value=None, reason=f"the verifier returned {type(value).__name__} of more than one number")
    if not isinstance(value, numbers.Real):
        return Score(value=None, reason=f"the verifier returned {type(value).__name__}, not a number")
    return finite(Score(value=float(value)))


def finite(score: Score) -> Score:
    """A value or component that is NaN or infinite couldn't be scored: None."""
    if all(value is None or math.isfinite(value) for value in (score.value, *score.components.values())):
        return score
    parts = {k: v if v is not None and math.isfinite(v) else None for k, v in score.components.items()}
    if score.value is None or math.isfinite(score.value):
        return dataclasses.replace(score, components=parts)
    reason = f"the verifier returned {score.value}. {score.reason}".strip()
    return dataclasses.replace(score, value=None, components=parts, reason=reason)


def verifier_from(
    given: Any, args: Mapping[str, Any] | None = None, *, name: str | None = None, timeout_s: float = DEFAULT_TIMEOUT_S
) -> Verifier:
    """A verifier from a function, a class, a built-in name or an import path (`pkg.module:check`, `file.py:check`).

    `args` fill its other keyword parameters (of a class: its constructor's). Raises ConfigError when it asks for what
    an Episode doesn't have, or doesn't take an argument.
    """
    args = dict(args or {})
    if isinstance(given, Verifier):
        if args:
            raise ConfigError(f"verifier '{given.name}' is already made and takes no arguments ({', '.join(args)})")
        return given
    label = name or _label(given)
    function = load_object(given, "verifier", {**BUILTIN, **ELSEWHERE}) if isinstance(given, str) else given
    if inspect.isclass(function):
        function, args = _instance(function, args, f"verifier '{label}'"), {}
    inline = isinstance(function, Options) or str(getattr(function, "__module__", "")).startswith("upswing.verify.")
    if not callable(function):
        raise ConfigError(f"verifier '{label}' must be a function, got {type(function).__name__}")
    fields = _fields_of(function, args, label)
    gold = inspect.signature(function).parameters.get("gold")
    needs: tuple[str, ...] = () if gold is None or gold.default is not gold.empty else ("gold",)
    needs = NEEDS.get(given, needs) if isinstance(given, str) else needs
    return Verifier(
        name=label, function=function, fields=fields, options=args, timeout_s=timeout_s, inline=inline, needs=needs
    )


def _label(given: Any) -> str:
    if isinstance(given, str):
        return given.rpartition(":")[2] or given
    target = given.func if isinstance(given, functools.partial) else given
    return str(getattr(target, "__name__", None) or getattr(target, "name", None) or type(target).__name__)


def check_arguments(cls: Callable[..., Any], args: Mapping[str, Any], what: str) -> None:
    """Raises ConfigError when `cls(**args)` would not fit the constructor's signature."""
    parameters = inspect.signature(cls).parameters.values()
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for key in args:
            if key not in named:
                raise ConfigError(no_argument(what, key, named))
    for parameter in parameters:
        if parameter.name in named and parameter.default is parameter.empty and parameter.name not in args:
            raise ConfigError(f"{what} needs the argument '{parameter.name}'; put it under args")


def _instance(cls: type, args: Mapping[str, Any], what: str) -> Any:
    check_arguments(cls, args, what)
    try:
        return cls(**args)
    except ConfigError as error:
        raise ConfigError(f"{what}: {error}") from None
    except Exception as error:
        raise ConfigError(f"{what} can't be made: {type(error).__name__}: {one_line(error)}") from error


def _fields_of(function: Callable[..., Any], args: Mapping[str, Any], label: str) -> tuple[str, ...]:
    """The Episode fields that a function asks for. Raises ConfigError when it can't be called."""
    allowed = (*FIELDS, WHOLE)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise ConfigError(f"verifier '{label}': its parameters can't be read; wrap it in a Python function") from None
    named = [p for p in parameters if p.kind is not p.VAR_KEYWORD]
    for p in named:
        if p.kind in (p.VAR_POSITIONAL, p.POSITIONAL_ONLY):
            raise ConfigError(f"verifier '{label}': parameter '{p}' must be a plain named one")
        if p.name not in (*allowed, *args) and p.default is p.empty:
            raise ConfigError(
                f"verifier '{label}' asks for '{p.name}', which an Episode doesn't have"
                f"{did_you_mean(p.name, allowed)} (fields: {', '.join(allowed)}; or set it under args)"
            )
    options = [p.name for p in named if p.name not in allowed]
    for key in args:
        if key in allowed:
            raise ConfigError(f"verifier '{label}': argument '{key}' is filled from the Episode and can't be set")
        if key not in options and len(named) == len(parameters):
            raise ConfigError(no_argument(f"verifier '{label}'", key, options))
    return tuple(p.name for p in named if p.name in allowed)
