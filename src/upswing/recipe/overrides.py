"""`key=value` from the command line, put into a recipe's plain data."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from upswing.errors import ConfigError, did_you_mean
from upswing.recipe.yaml_reader import parse_value

Path = tuple[str | int, ...]


def apply_overrides(
    data: Mapping[str, Any], overrides: Sequence[str], *, top_keys: Sequence[str]
) -> tuple[dict[str, Any], dict[Path, str]]:
    """A deep copy of `data` with the overrides applied in order, and which path each one changed.

    A path is keys and list indices joined by dots; a stage may be named by its name: `stages.rl.lr` or `rl.lr`. Checked
    here: the first key (a recipe's key, `top_keys`, or a stage's name) and list indices; the rest by the validation.
    """
    result = copy.deepcopy(dict(data))
    changed: dict[Path, str] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"override '{override}': expected key=value, such as rl.lr=1e-5")
        keys = key.strip().split(".")
        stages = [name for name in _stage_names(result) if name]
        if keys[0] not in top_keys and keys[0] in stages:
            if len(keys) == 1:
                raise ConfigError(f"override '{override}': '{key}' is a stage; name a key of it, such as {key}.lr=1e-5")
            keys = ["stages", *keys]
        elif keys[0] not in top_keys:
            allowed = [*top_keys, *stages]
            hint = did_you_mean(keys[0], allowed)
            raise ConfigError(f"override '{override}': unknown key '{keys[0]}'{hint} (allowed: {', '.join(allowed)})")
        path = _put(result, keys, parse_value(text), override)
        changed[path] = override
    return result, changed


def _put(data: dict[str, Any], keys: list[str], value: Any, override: str) -> Path:
    stages = _stage_names(data)
    where: Any = data
    path: list[str | int] = []
    for position, key in enumerate(keys):
        here = ".".join(keys[: position + 1])
        step = _step(where, key, stages if path == ["stages"] else [], here, override)
        path.append(step)
        if position == len(keys) - 1:
            where[step] = value
        else:
            if isinstance(where, dict) and where.get(step) is None:
                where[step] = {}
            where = _section(where, step)
    return tuple(path)


def _section(where: Any, step: str | int) -> Any:
    """The container at `step`; a shorthand string (`env: geo_search`) is written out so that keys can be set in it."""
    inner = where[step]
    if isinstance(inner, str):
        inner = where[step] = {{"dataset": "train", "agent": "function"}.get(str(step), "name"): inner}
    return inner


def _step(where: Any, key: str, names: Sequence[str], here: str, override: str) -> str | int:
    if isinstance(where, dict):
        return key
    if not isinstance(where, list):
        raise ConfigError(f"override '{override}': '{here}' is inside a {type(where).__name__}, which has no keys")
    if key in names:
        return names.index(key)
    if key.isdigit() and int(key) < len(where):
        return int(key)
    allowed = [*(str(i) for i in range(len(where))), *names]
    raise ConfigError(
        f"override '{override}': no '{here}'{did_you_mean(key, names)} (allowed in its place: {', '.join(allowed)})"
    )


def _stage_names(data: Mapping[str, Any]) -> list[str]:
    """Names of the stages in order; a stage without a name has that of its kind."""
    stages = data.get("stages")
    if not isinstance(stages, list):
        return []
    return [str(s.get("name", s.get("stage", ""))) if isinstance(s, dict) else "" for s in stages]
