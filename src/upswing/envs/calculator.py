"""Calculator: arithmetic that a small model can't do in its head, with a tool that can."""

from __future__ import annotations

import ast
import math
import operator
import random
from fractions import Fraction
from typing import Annotated

from pydantic import Field

from upswing.envs.generated import GeneratedEnv
from upswing.trajectory.types import Message, Task
from upswing.verify.numeric import OPERATORS

MAX_CHARS, MAX_BITS, MAX_EXPONENT = 200, 4096, 64
_WORDS = {"+": "plus", "-": "minus", "*": "times", "/": "divided by"}
_OPERATORS = {**OPERATORS, ast.FloorDiv: lambda a, b: Fraction(a // b), ast.Mod: operator.mod}


def calculate(expression: str) -> str:
    """Work out an arithmetic expression exactly.

    Args:
        expression: Numbers with + - * / // % ** and parentheses, such as (12 + 30) * 4.
    """
    if len(expression) > MAX_CHARS:
        raise ValueError(f"the expression has {len(expression)} characters; at most {MAX_CHARS}")
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ValueError("not an arithmetic expression; write such as (12 + 30) * 4") from None
    value = _value(tree)
    if value.denominator == 1:
        return str(value.numerator)
    return format(float(value), ".12g")


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool) and math.isfinite(number):
            return Fraction(str(number))
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
            return -_value(operand) if isinstance(sign, ast.USub) else _value(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            base, exponent = _value(left), _value(right)
            if exponent.denominator != 1 or abs(exponent) > MAX_EXPONENT or (base == 0 and exponent < 0):
                raise ValueError(f"a power's exponent must be a whole number of at most {MAX_EXPONENT}")
            return _small(Fraction(base ** int(exponent)))
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            a, b = _value(left), _value(right)
            if b == 0 and not isinstance(sign, ast.Add | ast.Sub | ast.Mult):
                raise ValueError("division by zero")
            return _small(_OPERATORS[type(sign)](a, b))
    raise ValueError(f"{ast.unparse(node)[:40]!r} is not arithmetic; only numbers, + - * / // % ** and parentheses")


def _small(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise ValueError("the result is too large")
    return value


class Calculator(GeneratedEnv):
    """Questions such as `What is (4821 - 77) * 36?`, in signs or in words; the answer is a whole number.

    Options: `num_terms`, how many numbers at most; `max_number`; `expert_noise`, the chance that the expert's first
    call is one that the tool can't read, so that demonstrations show how to go on.
    """

    name = "calculator"
    task_options = frozenset({"num_terms", "max_number"})
    tools = (calculate,)
    max_turns = 4
    num_terms: Annotated[int, Field(ge=2, le=8)] = 4
    max_number: Annotated[int, Field(ge=9, le=10**9)] = 9999

    def draw(self, rng: random.Random) -> Task:
        text, value = self._expression(rng, rng.randint(2, self.num_terms))
        asked = text if rng.random() < 0.5 else " ".join(_WORDS.get(part, part) for part in text.split())
        return self.make_task(text, f"What is {asked}?", gold=(str(value),), expression=text)

    def _expression(self, rng: random.Random, terms: int) -> tuple[str, int]:
        """A random tree and its value; divisions come out even."""
        if terms == 1:
            number = rng.randint(2, self.max_number)
            return str(number), number
        split = rng.randint(1, terms - 1)
        (a, x), (b, y) = self._expression(rng, split), self._expression(rng, terms - split)
        signs = ["+", "-", "*"] + ["/"] * (y != 0 and x % y == 0) * 3
        sign = rng.choice(signs)
        a, b = (text if text.isdigit() else f"({text})" for text in (a, b))
        value = {"+": x + y, "-": x - y, "*": x * y}[sign] if sign != "/" else x // y
        return f"{a} {sign} {b}", value

    def speak(self, task: Task, messages: tuple[Message, ...], heard: list[str], careless: bool) -> str:
        expression = task.data["expression"]
        if not heard and careless:
            return self.call("calculate", expression=expression.replace("*", "x") + " =")
        if not heard or heard[-1].startswith("Error"):
            return self.call("calculate", expression=expression)
        return self.say(heard[-1])
