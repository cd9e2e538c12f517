"""Answers of a given form: one of several choices, a JSON document, a text that a pattern describes."""

from __future__ import annotations

import importlib.util
import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from upswing.errors import ConfigError
from upswing.trajectory.types import Score
from upswing.verify.strict_json import DECIMALS
from upswing.verify.text import Reader, TimedReader, accepted, unscored
from upswing.verify.worker import Workers

_LEAD = re.compile(r"(?:the\s+)?(?:(?:correct|final)\s+)?(?:answer|option|choice)(?:\s+is)?\s*:?\s+", re.IGNORECASE)
_LETTER = re.compile(r"\(?([A-Za-z0-9])(?:\)|\b)[.:]?(?:\s+(.+))?", re.DOTALL)
_matches = Workers("upswing.verify.forms:matches")
_fits = Workers("upswing.verify.forms:fits_schema")


@dataclass(frozen=True, kw_only=True)
class Choice(Reader):
    """1 when the answer names exactly the right one of `data['choices']` (a list for A, B, …, or letter: text), by its
    letter, its text or both. Anything more, such as 'A or B', is wrong. Without choices only letters are read."""

    def __call__(self, answer: str | None, gold: Sequence[str], data: Mapping[str, Any]) -> float | Score:
        given = data.get("choices") or {}
        pairs = given.items() if isinstance(given, Mapping) else zip("ABCDEFGHIJKLMNOPQRSTUVWXYZ", given, strict=False)
        choices = {str(letter).upper(): _key(str(text)) for letter, text in pairs}
        right = {_letter(one, choices) for one in accepted(gold)} - {None}
        if not right:
            return unscored(f"no accepted answer is one of the choices: {list(gold)!r:.200}")
        return float(_letter(self.read(answer), choices) in right)


def _letter(text: str, choices: Mapping[str, str]) -> str | None:
    """A single letter or digit that labels a choice is that label, also where it is some choice's text."""
    text = text.strip().strip("*")
    text = text[lead.end() :] if (lead := _LEAD.match(text)) else text
    if not _key(text):
        return None
    found = _LETTER.fullmatch(text)
    letter = found.group(1).upper() if found else ""
    if found and not found.group(2) and (letter in choices or (not choices and letter.isalpha())):
        return letter
    named = next((letter for letter, choice in choices.items() if choice == _key(text)), None)
    return letter if found and not named and choices.get(letter) == _key(found.group(2) or "") else named


def _key(text: str) -> str:
    return " ".join(unicodedata.normalize("NFC", text).casefold().split()).rstrip(".")


@dataclass(frozen=True, kw_only=True)
class Regex(TimedReader):
    """1 when `pattern` (or the task's `data['pattern']`) matches the whole answer, as Python's `re.fullmatch`."""

    pattern: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            re.compile(self.pattern or "")
        except (re.error, TypeError) as error:
            raise ConfigError(f"pattern: got {self.pattern!r}, no regular expression ({error})") from None

    async def __call__(self, answer: str | None, data: Mapping[str, Any]) -> float | Score:
        pattern = data.get("pattern") if self.pattern is None else self.pattern
        if not isinstance(pattern, str):
            return unscored("there is no pattern: neither the argument nor the task's data['pattern']")
        said = self.read(answer)
        return await _matches.judge(self.timeout_s, pattern=pattern, text=said) if said else 0.0


def matches(pattern: str, text: str) -> bool:
    """Runs in the worker."""
    return re.fullmatch(pattern, text) is not None


@dataclass(frozen=True, kw_only=True)
class JsonSchema(TimedReader):
    """1 when the whole answer is one JSON document that fits `schema` (or the task's `data['schema']`), draft 2020-12
    unless its `$schema` says otherwise. NaN, infinities and doubled keys are no JSON; nothing is fetched."""

    schema: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if importlib.util.find_spec("jsonschema") is None:
            raise ConfigError("it needs jsonschema; install it with: pip install 'upswing[json]'")
        if self.schema is not None:
            try:
                _validator(self.schema)
            except Exception as error:
                text = str(getattr(error, "message", error))
                raise ConfigError(f"schema: no JSON schema ({' '.join(text.split())[:200]})") from None

    async def __call__(self, answer: str | None, data: Mapping[str, Any]) -> float | Score:
        schema = data.get("schema") if self.schema is None else self.schema
        if schema is None:
            return unscored("there is no schema: neither the argument nor the task's data['schema']")
        return await _fits.judge(self.timeout_s, schema=schema, text=self.read(answer))  # type: ignore[no-any-return]


def fits_schema(schema: Any, text: str) -> bool:
    """Runs in the worker."""
    # Decimals: 0.3 is a multiple of 0.1.
    validator = _validator(DECIMALS.decode(json.dumps(schema)))
    try:
        document = DECIMALS.decode(text)
        json.dumps(json.loads(text), ensure_ascii=False).encode()  # half a surrogate pair is no text
    except (ValueError, RecursionError):
        return False
    return bool(validator.is_valid(document))


def _validator(schema: Any) -> Any:
    """Raises for what is no schema."""
    from jsonschema.validators import Draft202012Validator, validator_for
    from referencing import Registry

    kind = validator_for(schema, default=Draft202012Validator)
    kind.check_schema(schema)
    return kind(schema, registry=Registry())
