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
from upswing.trajectory.types import Score
from upswing.verify import qa
from upswing.verify.base import Episode
from upswing.verify.deadline import DeadlineExceeded, call_with_deadline

FIELDS = tuple(field.name for field in dataclasses.fields(Episode))
WHOLE = "episode"
"""A parameter of this name gets the Episode itself."""
DEFAULT_TIMEOUT_S = 30.0


class Verifier:
    """A checked function, `await verifier(episode) -> Score`. Make one with `verifier_from`."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str,
        fields: tuple[str, ...],
        options: Mapping[str, Any],
        timeout_s: float,
        inline: bool = False,
    ) -> None:
        self.name = name
        self.function = function
        self.fields = fields
        """The Episode fields that it reads."""
        self.options = dict(options)
        self.timeout_s = timeout_s
        self._inline = inline

    async def __call__(self, episode: Episode) -> Score:
        """The score; value None with the reason when it raised, took too long or gave no finite number."""
        kwargs = {name: episode if name == WHOLE else getattr(episode, name) for name in self.fields}
        kwargs.update(self.options)
        try:
            if self._inline:
                return to_score(self.function(**kwargs))
            return to_score(await call_with_deadline(self.function, kwargs, self.timeout_s))
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
        return _checked(value)
    if value is None:
        return Score(value=None, reason="the verifier returned None")
    if not isinstance(value, numbers.Real) and callable(getattr(value, "item", None)):
        try:
            value = value.item()  # a NumPy or torch scalar
        except (ValueError, RuntimeError):
            return Score(value=None, reason=f"the verifier returned {type(value).__name__} of more than one number")
    if not isinstance(value, numbers.Real):
        return Score(value=None, reason=f"the verifier returned {type(value).__name__}, not a number")
    return _checked(Score(value=float(value)))


def _checked(score: Score) -> Score:
    if score.value is None or math.isfinite(score.value):
        return score
    return dataclasses.replace(score, value=None, reason=f"the verifier returned {score.value}. {score.reason}".strip())


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
    function = _load(given) if isinstance(given, str) else given
    inline = function in qa.BUILTIN.values()
    if inspect.isclass(function):
        function, args = _instance(function, args, label), {}
    if not callable(function):
        raise ConfigError(f"verifier '{label}' must be a function, got {type(function).__name__}")
    if not (math.isfinite(timeout_s) and timeout_s > 0):
        raise ConfigError(f"verifier '{label}': timeout_s must be a positive number of seconds, got {timeout_s}")
    fields = _fields_of(function, args, label)
    return Verifier(function, name=label, fields=fields, options=args, timeout_s=timeout_s, inline=inline)


def _label(given: Any) -> str:
    if isinstance(given, str):
        return given.rpartition(":")[2] or given
    target = given.func if isinstance(given, functools.partial) else given
    return str(getattr(target, "__name__", None) or getattr(target, "name", None) or type(target).__name__)


def _load(spec: str) -> Any:
    if spec in qa.BUILTIN:
        return qa.BUILTIN[spec]
    from upswing.plugins import load_object

    paths = {key: f"{function.__module__}:{function.__name__}" for key, function in qa.BUILTIN.items()}
    return load_object(spec, "verifier", paths)


def _instance(cls: type, args: Mapping[str, Any], label: str) -> Any:
    try:
        inspect.signature(cls).bind(**args)
    except TypeError as error:
        raise ConfigError(f"verifier '{label}': {error}; its arguments are {inspect.signature(cls)}") from None
    return cls(**args)


def _fields_of(function: Callable[..., Any], args: Mapping[str, Any], label: str) -> tuple[str, ...]:
    """The Episode fields that a function asks for. Raises ConfigError when it can't be called."""
    allowed = (*FIELDS, WHOLE)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise ConfigError(f"verifier '{label}': its parameters can't be read; wrap it in a Python function") from None
    fields, named, takes_any = [], [], False
    for parameter in parameters:
        if parameter.kind is parameter.VAR_KEYWORD:
            takes_any = True
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
            raise ConfigError(f"verifier '{label}': parameter '{parameter}' must be a plain named one")
        named.append(parameter.name)
        if parameter.name in allowed:
            fields.append(parameter.name)
        elif parameter.name not in args and parameter.default is parameter.empty:
            raise ConfigError(
                f"verifier '{label}' asks for '{parameter.name}', which an Episode doesn't have"
                f"{did_you_mean(parameter.name, allowed)} (fields: {', '.join(allowed)}; or set it under args)"
            )
    options = [key for key in named if key not in fields]
    for key in args:
        if key in allowed:
            raise ConfigError(f"verifier '{label}': argument '{key}' is filled from the Episode and can't be set")
        if key not in named and not takes_any:
            known = ", ".join(options) or "none"
            raise ConfigError(
                f"verifier '{label}' has no argument '{key}'; allowed: {known}{did_you_mean(key, options)}"
            )
    return tuple(fields)
