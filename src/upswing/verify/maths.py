r"""Mathematical equivalence. Parsing is math-verify's (whole text or nothing), numbers are compared exactly here.

math-verify 0.9 alone accepts what it shouldn't: it parses parts of a text, rounds at six digits, and takes 9 for 9 %.
So its extraction isn't used, constants, equations and the members of sets, tuples, intervals and matrices are compared
by their difference, and only what is left (unions, chains of inequalities) is asked of `math_verify.verify`.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from upswing.errors import ConfigError
from upswing.trajectory.types import Score
from upswing.verify.numeric import read_quantity
from upswing.verify.text import TimedReader, accepted, unscored
from upswing.verify.worker import Workers

MAX_CHARS = 1000
"""A longer text is no final answer."""
_WRAPPERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
_REPAIRS = (
    (re.compile(r"(?<=[0-9])(?:\\[,! ;]|\{,\})(?=[0-9]{3}(?![0-9]))"), ""),
    (re.compile(r"\\[,;:!> ]|~|\{\}|\\(?:q?quad|thinspace|enspace)(?![A-Za-z])"), " "),
    (re.compile(r"\\(?:mathrm|text)\s*\{\s*([ei])\s*\}"), r"\1"),
    (re.compile(r"(?<![\\A-Za-z])(sqrt|pi|sin|cos|tan|ln|log|exp)(?![A-Za-z])"), r"\\\1"),
    (re.compile(r"\\sqrt\s*\(([^()]*)\)"), r"\\sqrt{\1}"),
    (re.compile(r"\\varnothing"), r"\\emptyset"),
)
_COMMANDS = re.compile(r"\\(?:text|mathrm|mathbf|operatorname|begin|end)\s*\{[^{}]*\}|\\[A-Za-z]+|\b(?:and|or)\b")
_WORD = re.compile(r"[A-Za-z]{3,}|[0-9]\s+[0-9]")
"""Prose, and two numbers side by side (which the parser adds up): no mathematics."""
_workers = Workers("upswing.verify.maths:equivalent")


@dataclass(frozen=True, kw_only=True)
class Math(TimedReader):
    """1 when the answer is mathematically equal to an accepted one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError("it needs math-verify; install it with: pip install 'upswing[math]'")

    async def __call__(self, answer: str | None, gold: Sequence[str]) -> float | Score:
        golds = accepted(gold)
        # Asked even without an answer: a gold that can't be read must not look like a wrong answer.
        value = await _workers.judge(self.timeout_s, "".join(golds[:1]), gold=golds, text=self.read(answer))
        return unscored(f"no accepted answer is mathematics: {golds!r:.200}") if value is None else value


def equivalent(gold: list[str], text: str) -> bool | None:
    """Runs in the worker. None when no accepted answer can be read; what SymPy can't compare isn't equal."""
    golds = [found for found in map(parse, gold) if found is not None]
    if not golds:
        return None
    answer = parse(text)
    try:
        return answer is not None and any(same(one, answer) for one in golds)
    except (MemoryError, RecursionError):
        raise
    except Exception:
        return False


def warm_up() -> None:
    """What every worker starts with: a pair that is known to be equal."""
    if not equivalent([r"\frac{1}{3}"], r"$\frac{2}{6}$"):
        raise RuntimeError("math-verify doesn't see that 1/3 is 2/6")


@functools.lru_cache(maxsize=256)
def parse(text: str) -> Any:
    """A SymPy object, floats made exact; None when the whole text isn't mathematics."""
    import sympy
    from latex2sympy2_extended import NormalizationConfig, latex2sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig

    number = read_quantity(text)
    if number is not None and not number.unit:
        return sympy.Rational(number.value.numerator, number.value.denominator)
    text = text.strip().rstrip(".").replace("−", "-")
    for start, end in _WRAPPERS:
        if text.startswith(start) and text.endswith(end) and len(text) > len(start + end):
            text = text[len(start) : -len(end)]
    for pattern, repaired in _REPAIRS:
        text = pattern.sub(repaired, text)
    if len(text) > MAX_CHARS or _WORD.search(_COMMANDS.sub(",", text)) or re.search(r"\\f?box", text):
        return None
    rules = NormalizationConfig(malformed_operators=True, boxed="none")
    try:
        found = latex2sympy(
            text, normalization_config=rules, conversion_config=ConversionConfig(lowercase_symbols=False)
        )
    except (MemoryError, RecursionError):
        raise
    except Exception:  # the parser has no error of its own
        return None
    if not isinstance(found, sympy.Basic | sympy.MatrixBase) or found.has(sympy.nan, sympy.zoo):
        return None
    if found is sympy.S.EmptySet and "emptyset" not in text:
        return None  # an "interval" whose ends are the wrong way round
    exact = {number: sympy.Rational(str(number)) for number in found.atoms(sympy.Float)}
    exact |= {symbol: sympy.I for symbol in found.free_symbols if symbol.name == "i"}
    try:
        return _shortened(found, exact) if isinstance(found, sympy.And) else found.xreplace(exact)
    except AttributeError:  # a chain of relations that becomes a single one
        return None


def _shortened(chain: Any, exact: Mapping[Any, Any]) -> Any:
    """x = c of x = b = c where b is c, such as x = 10/2 = 5; any other chain as it is."""
    import sympy

    if all(isinstance(one, sympy.Eq) for one in chain.args):
        parts = chain._unsorted_args
        first, *others = (side.xreplace(exact) for side in (parts[0].lhs, *(one.rhs for one in parts)))
        if all(same(others[-1], one) and not one.has(first) for one in others):
            return sympy.Eq(first, others[-1])
    return chain.xreplace(exact)


def same(gold: Any, said: Any) -> bool:
    """Whether two parsed answers are equal."""
    import sympy as sp
    from math_verify import verify

    relations = (sp.Rel, sp.And)
    if isinstance(said, sp.Eq) and said.lhs.is_Symbol and not isinstance(gold, relations):
        said = said.rhs
    if isinstance(gold, sp.Eq) and gold.lhs.is_Symbol and not isinstance(said, relations):
        gold = gold.rhs
    if isinstance(gold, sp.Expr) and isinstance(said, sp.Expr):
        return _same_expression(gold.doit(), said.doit())
    if isinstance(gold, sp.Rel) and isinstance(said, sp.Rel):
        return _same_relation(gold, said)
    if isinstance(gold, sp.FiniteSet) and isinstance(said, sp.FiniteSet):
        return len(gold) == len(said) and all(any(same(one, other) for other in said) for one in gold)
    kind, members = _members(gold)
    other_kind, others = _members(said)
    if kind and other_kind:
        return kind == other_kind and all(map(same, members, others))
    if any(isinstance(said, one) != isinstance(gold, one) for one in relations) and not isinstance(said, sp.Set):
        return False
    return bool(verify(gold, said, float_rounding=30, numeric_precision=60, timeout_seconds=None, raise_on_error=True))


def _members(value: Any) -> tuple[Any, Any]:
    """(what two such must have in common, its members in order); (None, ()) for what has none."""
    import sympy as sp

    if isinstance(value, sp.Tuple):
        return ("tuple", len(value)), value
    if isinstance(value, sp.Interval):
        return ("interval", value.left_open, value.right_open), (value.start, value.end)
    return (("matrix", value.shape), value.flat()) if isinstance(value, sp.MatrixBase) else (None, ())


def _same_expression(gold: Any, said: Any) -> bool:
    import sympy as sp

    if gold == said or gold.is_infinite or said.is_infinite or (gold.is_Rational and said.is_Rational):
        return bool(gold == said)
    if gold.free_symbols | said.free_symbols:
        return (gold - said).equals(0) is True
    scale = max(abs(sp.N(gold, 30)), abs(sp.N(said, 30)))
    # Numbers that agree to 25 digits: equal unless SymPy can tell them apart.
    return abs(sp.N(gold - said, 30)) <= scale / 10**25 and (gold - said).equals(0) is not False


def _same_relation(gold: Any, said: Any) -> bool:
    """Equal up to a constant factor, which an inequality's must be positive; a > b is b < a."""
    import sympy as sp

    turned = {sp.Gt: sp.Lt, sp.Ge: sp.Le}
    kind, other = (turned.get(type(one), type(one)) for one in (gold, said))
    if kind is not other:
        return False
    if not all(isinstance(side, sp.Expr) for one in (gold, said) for side in one.args):
        return same(gold.lhs, said.lhs) and same(gold.rhs, said.rhs)
    ordered = kind in (sp.Lt, sp.Le)
    one, two = (x.lts - x.gts if ordered else x.lhs - x.rhs for x in (gold, said))
    ratio = sp.simplify(one / two)
    return not ratio.free_symbols and bool(ratio.is_finite and (ratio.is_positive if ordered else ratio.is_nonzero))
