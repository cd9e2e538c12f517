"""Where an answer is read from, and what the built-in verifiers share."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from upswing.trajectory.types import Score
from upswing.verify.options import Options

Timeout = Annotated[float, Field(ge=0.01, allow_inf_nan=False)]
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_TAG = re.compile(r"(</?answer>)")


def read_answer(answer: str | None, place: str = "whole") -> str | None:
    r"""The final answer in the Episode's, or None when there is none.

    Reasoning is cut first: everything up to the last `</think>`; an unclosed `<think>` leaves no answer. Then `whole`
    is all of it, `tag` what is in the one `<answer>…</answer>`, and `boxed` what is in \boxed{…} or \fbox{…}: several
    boxes must say the same, and one that is empty or not closed leaves no answer.
    """
    text = (answer or "").rpartition("</think>")[2]
    if "<think>" in text:
        return None
    if place == "boxed":
        text = _boxed(text)
    elif place == "tag":
        parts = _TAG.split(text)
        text = parts[2] if parts[1::2] == ["<answer>", "</answer>"] else ""
    return text.strip() or None


def _boxed(text: str) -> str:
    found, at = set(), 0
    while (box := _BOX.search(text, at)) is not None:
        depth, at = 0, box.end()
        for brace in _BRACE.finditer(text, at) if text.startswith("{", at) else ():
            depth += {"{": 1, "}": -1}.get(brace.group(), 0)
            if depth == 0:
                break
        else:
            return ""
        found.add(text[at + 1 : brace.start()].strip())
        at = brace.end()
    return found.pop() if len(found) == 1 else ""


def accepted(gold: str | Sequence[str]) -> list[str]:
    """The accepted answers that say anything; a bare string is one answer, not its letters."""
    return [one for one in ([gold] if isinstance(gold, str) else gold) if one.strip()]


def one_line(problem: BaseException) -> str:
    return " ".join(str(problem).split())[:300]


def unscored(reason: str) -> Score:
    """Could not be judged, which is never 0."""
    return Score(value=None, reason=reason)


def same_value(a: Any, b: Any) -> bool:
    """Whether two JSON values are equal: 1 and 1.0 are, true and 1 aren't, NaN equals nothing."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_value(value, b[key]) for key, value in a.items())
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same_value, a, b))
    return isinstance(a, bool) == isinstance(b, bool) and bool(a == b)


@dataclass(frozen=True, kw_only=True)
class Reader(Options):
    """A verifier of an answer that is read from a place."""

    answer_in: Literal["whole", "boxed", "tag"] = "whole"

    def read(self, answer: str | None) -> str:
        """Empty when there is no answer."""
        return read_answer(answer, self.answer_in) or ""


@dataclass(frozen=True, kw_only=True)
class TimedReader(Reader):
    """One that asks a worker."""

    timeout_s: Timeout = 5.0
