"""One line for a failed validation: where, what was got, what is allowed, the nearest valid name."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from upswing.errors import did_you_mean
from upswing.recipe.models import Recipe
from upswing.recipe.stages import STAGE_KINDS

Location = tuple[str | int, ...]

_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "dict_type": "keys and values",
    "tuple_type": "a list",
    "finite_number": "a finite number",
    "model_type": "keys and values",
    "model_attributes_type": "keys and values",
    "string_too_short": "text that isn't empty",
    "string_pattern_mismatch": "letters, digits, _ . and -",
    "too_short": "at least one item",
}
_BOUNDS = {"ge": "{} and more", "gt": "more than {}", "le": "up to {}", "lt": "less than {}"}


def explain(problem: ValidationError, source: str, changed: Mapping[Location, str]) -> str:
    """`source: key: what is wrong`. With several errors, an unknown key comes first: the others may follow from it."""
    errors = sorted(problem.errors(), key=lambda error: error["type"] != "extra_forbidden")
    first = errors[0]
    location = _plain(first["loc"])
    where = ".".join(str(part) for part in location)
    if key := first.get("ctx", {}).get("key"):
        where = f"{where}.{key}" if where else str(key)
    text = f"{source}: {where}: {_message(first, location)}"
    if override := next((given for path, given in changed.items() if ".".join(map(str, path)) == where), None):
        text += f" [from the override '{override}']"
    if len(errors) > 1:
        others = ", ".join(".".join(str(part) for part in _plain(error["loc"])) for error in errors[1:4])
        text += f" (and {len(errors) - 1} more: {others})"
    return text


def _plain(location: Location) -> Location:
    """Without the tag that a discriminated union puts behind a stage's index."""
    if len(location) > 2 and location[0] == "stages" and location[2] in STAGE_KINDS:
        return (*location[:2], *location[3:])
    return location


def _message(error: Any, location: Location) -> str:
    kind, got = error["type"], error.get("input")
    context = error.get("ctx", {})
    if kind == "recipe":
        return str(context["message"])
    if kind == "extra_forbidden":
        allowed = allowed_keys(error["loc"][:-1])
        return f"unknown key{did_you_mean(str(location[-1]), allowed)} (allowed: {', '.join(allowed)})"
    if kind == "missing":
        return f"missing, and it has no default: {describe(error['loc'])}"
    if kind == "union_tag_not_found":
        return f"missing the key 'stage' (allowed: {', '.join(STAGE_KINDS)})"
    if kind == "union_tag_invalid":
        tag = str(context["tag"])
        return f"stage: got '{tag}'{did_you_mean(tag, STAGE_KINDS)} (allowed: {', '.join(STAGE_KINDS)})"
    if kind == "literal_error":
        options = [option.strip("' ") for option in str(context["expected"]).replace(" or ", ", ").split(", ")]
        return f"got {_show(got)}{did_you_mean(str(got), options)} (allowed: {', '.join(options)})"
    return _value_message(kind, got, context, str(error["msg"]))


def _value_message(kind: str, got: Any, context: Mapping[str, Any], message: str) -> str:
    if kind in _EXPECTED:
        return f"got {_show(got)}, expected {_EXPECTED[kind]}"
    for bound, words in _BOUNDS.items():
        if bound in context:
            return f"got {_show(got)}; allowed: {words.format(context[bound])}"
    return f"got {_show(got)}; {message}"


def _show(value: Any) -> str:
    if isinstance(value, str):
        return f"'{value}'"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping | list | tuple):
        return f"{'keys and values' if isinstance(value, Mapping) else 'a list'} ({str(value)[:60]})"
    return repr(value)


def allowed_keys(location: Location) -> list[str]:
    """The keys of the section at a pydantic location (union tags included)."""
    return list(_fields(section_at(location)))


def describe(location: Location) -> str:
    """The description of the field at a location."""
    field = _fields(section_at(location[:-1])).get(str(location[-1]))
    return field.description or "" if field else ""


def _fields(section: type[BaseModel] | None) -> dict[str, FieldInfo]:
    return {field.alias or name: field for name, field in section.model_fields.items()} if section else {}


def section_at(location: Location) -> type[BaseModel] | None:
    """The model class at a location; None when there is none."""
    current: type[BaseModel] | None = Recipe
    for part in location:
        if isinstance(part, int):
            continue
        if part in STAGE_KINDS and current is None:
            current = STAGE_KINDS[part]
            continue
        leaves = _leaves(field.annotation) if (field := _fields(current).get(part)) else []
        models = [leaf for leaf in leaves if isinstance(leaf, type) and issubclass(leaf, BaseModel)]
        current = models[0] if len(models) == 1 else None
    return current


def _leaves(annotation: Any) -> list[Any]:
    if get_origin(annotation) in (Union, types.UnionType, tuple, Annotated):
        return [leaf for inner in get_args(annotation) for leaf in _leaves(inner)]
    return [annotation]
