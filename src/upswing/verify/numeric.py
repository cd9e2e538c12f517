"""Numbers with units and a tolerance, and arithmetic on given numbers. Everything is an exact fraction."""

from __future__ import annotations

import ast
import operator
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal, NamedTuple

from upswing.errors import ConfigError
from upswing.trajectory.types import Score
from upswing.verify.options import Amount
from upswing.verify.text import Reader, accepted, read_answer, unscored

UNITS: Mapping[str, str] = {
    "%": "0.01",
    "percent": "0.01",
    "km": "1000 m",
    "cm": "0.01 m",
    "mm": "0.001 m",
    "kg": "1000 g",
    "mg": "0.001 g",
    "ms": "0.001 s",
    "min": "60 s",
    "h": "3600 s",
    "L": "1 l",
    "ml": "0.001 l",
    "mL": "0.001 l",
}
"""Unit -> how many of which base unit. Any other text after a number is a base unit of its own."""
MAX_CHARS = 200

_DIGITS = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[1-9][0-9]*|0)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.[0-9]*)?|\.[0-9]+)"
_QUANTITY = re.compile(
    rf"(?P<sign>[+-]?)\s*(?P<currency>[$€£¥]?)"
    rf"(?:\\[dt]?frac\{{(?P<top>{_DECIMAL})\}}\{{(?P<bottom>{_DECIMAL})\}}"
    rf"|(?P<number>{_DECIMAL})"
    rf"(?:[eE](?P<e>[+-]?[0-9]{{1,3}})|\s*(?:[×x*·]|\\times|\\cdot)\s*10\s*\^\s*(?P<brace>\{{)?(?P<power>[+-]?[0-9]{{1,3}})"
    rf"(?(brace)\}})|\s*/\s*(?P<over>{_DECIMAL}))?)"
    rf"\s*(?P<unit>(?![\s0-9.,+\-/*^]).*)",
    re.DOTALL,
)
_LEAD = re.compile(r"(?:the\s+)?(?:final\s+)?answer(?:\s+is)?\s*:?\s*", re.IGNORECASE)
_WRAPPERS = (("**", "**"), ("$", "$"), (r"\(", r"\)"))
_BRACKETS = dict.fromkeys(map(ord, "[](){}'\""))
_TEXT = re.compile(r"\\(?:text|mathrm)\s*\{([^{}]*)\}")


class Quantity(NamedTuple):
    """`value` in the base unit `unit` ('' for none)."""

    value: Fraction
    unit: str
    currency: str
    factor: Fraction
    """Base units in one of the unit that was written."""


def read_quantity(text: str, units: Mapping[str, str] = UNITS, decimal: str = ".") -> Quantity | None:
    """The one number that a text is, or None. `decimal` is the decimal mark; the other of `.` and `,` groups thousands,
    in threes or not at all. Not a number: NaN, infinities, a text with anything but a unit after the number."""
    if len(text) > MAX_CHARS:
        return None
    text = text.strip().removesuffix(".")
    text = text[lead.end() :] if (lead := _LEAD.match(text)) else text
    text = _TEXT.sub(r"\1", text.replace("−", "-").replace("{,}", ","))
    text = text.replace(r"\%", "%").replace(r"\$", "$").replace(r"\,", " ")
    for start, end in _WRAPPERS:
        if text.startswith(start) and text.endswith(end) and len(text) > len(start + end):
            text = text[len(start) : -len(end)].strip()
    if decimal == ",":
        text = text.translate({ord(","): ".", ord("."): ","})
    found = _QUANTITY.fullmatch(text)
    if found is None:
        return None
    part = {key: value.replace(",", "") for key, value in found.groupdict().items() if value}
    below = Fraction(part.get("bottom") or part.get("over") or "1")
    if not below:
        return None
    value = Fraction(part.get("top") or part["number"]) / below
    value *= Fraction(10) ** int(part.get("e") or part.get("power") or "0")
    name = " ".join(found["unit"].split())
    times, _, base = units[name].partition(" ") if name in units else ("1", "", name)
    factor, signed = Fraction(times), -value if found["sign"] == "-" else value
    return Quantity(signed * factor, base, found["currency"], factor)


@dataclass(frozen=True, kw_only=True)
class Numeric(Reader):
    """1 when the answer is an accepted number, within the larger of `tolerance` (in the accepted answer's unit) and
    `relative` times it."""

    tolerance: Amount = 0.0
    relative: Amount = 0.0
    units: Mapping[str, Any] = field(default_factory=dict)
    """More units, such as `{mile: 1609.344 m}`."""
    decimal: Literal[".", ","] = "."
    many: bool = False
    """A list of numbers in their order, separated by spaces, commas or semicolons; brackets and quotes are ignored."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, size in self.units.items():
            if not re.fullmatch(r"[0-9.]*[1-9][0-9.]*(?: \S+)?", str(size)) or str(size).count(".") > 1:
                raise ConfigError(f"units.{name}: got {size!r}; allowed: a number and a base unit, such as '1000 m'")

    def __call__(self, answer: str | None, gold: Sequence[str]) -> float | Score:
        golds = [one for one in map(self._read, accepted(gold)) if one]
        if not golds:
            return unscored(f"no accepted answer is a number: {list(gold)!r:.200}")
        said = self._read(self.read(answer))
        return float(any(len(said) == len(one) and all(map(self._close, said, one)) for one in golds))

    def _read(self, text: str) -> list[Quantity]:
        """Empty when it isn't what it should be."""
        parts = [text]
        if self.many:
            parts = re.split(r"[\s;]+" if self.decimal == "," else r"[\s,;]+", text.translate(_BRACKETS).strip())
        found = [read_quantity(part, {**UNITS, **self.units}, self.decimal) for part in parts]
        return [one for one in found if one] if all(found) else []

    def _close(self, said: Quantity, gold: Quantity) -> bool:
        allowed = max(Fraction(str(self.tolerance)) * gold.factor, Fraction(str(self.relative)) * abs(gold.value))
        # A currency's sign may be left out, not exchanged.
        alike = said.unit == gold.unit and (said.currency == gold.currency or not (said.currency and gold.currency))
        return alike and abs(said.value - gold.value) <= allowed


OPERATORS: Mapping[type[ast.operator], Any] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv
}  # fmt: skip


def countdown(answer: str | None, data: Mapping[str, Any]) -> float | Score:
    """1 when the answer is an expression of + - * / and brackets over `data['numbers']`, each used exactly as often as
    it is given there, that comes to `data['target']`. Nothing else in it is ever evaluated."""
    if not data.get("numbers") or data.get("target") is None:
        return unscored("the task's data has no 'numbers' and 'target'")
    text = (read_answer(answer) or "").translate({ord("×"): "*", ord("÷"): "/", ord("−"): "-"})
    if len(text) > MAX_CHARS or not re.fullmatch(r"[0-9+\-*/()\s]+", text):
        return 0.0
    used: Counter[Fraction] = Counter()
    try:
        value = _evaluate(ast.parse(text, mode="eval").body, used)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return 0.0
    given = Counter(Fraction(str(number)) for number in data["numbers"])
    return float(value == Fraction(str(data["target"])) and used == given)


def _evaluate(node: ast.expr, used: Counter[Fraction]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used[Fraction(node.value)] += 1
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        result: Fraction = OPERATORS[type(node.op)](_evaluate(node.left, used), _evaluate(node.right, used))
        return result
    raise ValueError("not arithmetic")
