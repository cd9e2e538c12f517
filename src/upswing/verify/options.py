"""Options by their type hints: what recipes give environments and verifiers, checked by pydantic when one is made."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, get_origin

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from upswing.errors import ConfigError, did_you_mean

REQUIRED: Any = object()
"""The value of a class attribute that has to be given."""
_KEY = re.compile(r"(?!(?:str|int|float|bool|none|constrained-\w+)$)[\w-]+")
"""What of a place is no name of a type, of which a union has one for each of its parts."""
Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@functools.cache
def options_of(cls: type) -> Mapping[str, TypeAdapter[Any]]:
    """The public fields, or class attributes with a hint and a value, but for `cls.fixed` -> what checks them."""
    hints: dict[str, Any] = {}
    for each in reversed(cls.__mro__):
        try:
            hints |= inspect.get_annotations(each, eval_str=True)
        except NameError:  # a user's class whose hints are only for a type checker has no options of its own
            continue
    fixed = getattr(cls, "fixed", ())
    there = {*dir(cls), *getattr(cls, "__dataclass_fields__", ())}
    own = {name: hint for name, hint in hints.items() if name[0] != "_" and name in there and name not in fixed}
    return {name: _adapter(hint) for name, hint in own.items() if get_origin(hint) is not ClassVar}


def _adapter(hint: Any) -> TypeAdapter[Any]:
    try:
        return TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True))
    except Exception:  # what pydantic has no words for isn't checked
        return TypeAdapter(Any)


def check_options(made: Any, what: str = "") -> None:
    """Raises ConfigError for the first option whose value isn't what its hint says; nothing is converted."""
    for name, adapter in options_of(made.__class__).items():
        value = getattr(made, name)
        if value is None and getattr(type(made), name, REQUIRED) is None:  # what stands for "none" there
            continue
        try:
            adapter.validate_python(value, strict=True)
        except ValidationError as error:
            raise ConfigError(f"{what}{': ' if what else ''}{problem(error, name)}") from None


def set_options(made: Any, given: Mapping[str, Any], what: str) -> None:
    """Give `made` its options; one that is None or left out is the class's own. Raises ConfigError."""
    known = options_of(made.__class__)
    for name, value in given.items():
        if name not in known:
            raise ConfigError(no_argument(what, name, known))
        if value is not None:
            setattr(made, name, value)
    for name in known:
        if getattr(made, name) is REQUIRED:
            raise ConfigError(f"{what} needs the argument '{name}'; put it under args")
    check_options(made, what)


def no_argument(what: str, name: str, known: Any) -> str:
    return f"{what} has no argument '{name}'; allowed: {', '.join(known) or 'none'}{did_you_mean(name, known)}"


def problem(error: ValidationError, name: str = "", known: Iterable[str] = ()) -> str:
    """What pydantic found wrong, as `name: got …; allowed: …`; `known`: the keys that there are."""
    found = error.errors(include_url=False)
    # What is there but shouldn't be says more than what is missing; of a union, what fits best.
    first = max(found, key=lambda each: (each["type"] == "extra_forbidden", len(each["loc"])))
    path = (str(part) for part in first["loc"] if _KEY.fullmatch(str(part)))
    where, message = ".".join(filter(None, (name, *path))), str(first["msg"])
    if first["type"] in ("missing", "json_invalid"):
        return ": ".join(filter(None, (where, message)))
    if first["type"] == "extra_forbidden":
        hint = did_you_mean(str(first["loc"][-1]), known)
        return f"{where}: there is no such key; allowed: {', '.join(known)}{hint}"
    got, allowed = first["input"], re.sub(r"^(?:Input should be|\w+ should have) ", "", message)
    if "Sequence" in message:
        allowed = "a list"
    elif first["type"] == "literal_error":
        names = re.findall("'([^']*)'", message)
        allowed = ", ".join(names) + did_you_mean(str(got), names)
    return f"{where}: got {got!r:.100}; allowed: {allowed}"


@dataclass(frozen=True, kw_only=True)
class Options:
    """A verifier of ours: its fields are checked by their hints, and it keeps its time itself. Raises ConfigError."""

    def __post_init__(self) -> None:
        check_options(self)
