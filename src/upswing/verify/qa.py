"""Verifiers for short answers: strict match, exact match and F1 of SQuAD, and format validity.

The answer is what the environment read from where its protocol says; nothing here looks for it in a text. No answer
is a wrong answer (0). A task without accepted answers can't be scored (None).

Rewards should be strict: the SQuAD normaliser drops punctuation and case, so an agent can be paid for '.be' where '.'
was never asked for.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from upswing.trajectory.types import Outcome, ToolRecord
from upswing.verify.text import accepted

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_CLOSED = ("yes", "no", "noanswer")


def normalize(text: str) -> str:
    """SQuAD's normaliser: lower case, no ASCII punctuation, no articles, single spaces (after Unicode NFC)."""
    text = unicodedata.normalize("NFC", text).lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", text).split())


def strict_match(answer: str | None, gold: Sequence[str]) -> float | None:
    """1 when the answer is an accepted one, character by character; only outer whitespace and the Unicode form (NFC)
    are forgiven. Case, punctuation and inner spaces count."""
    return _best(answer, gold, _strict)


def exact_match(answer: str | None, gold: Sequence[str]) -> float | None:
    """1 when the answer is an accepted one after SQuAD's normaliser. Golds that it empties compare strictly."""
    return _best(answer, gold, lambda a, b: float(normalize(a) == normalize(b)) if normalize(b) else _strict(a, b))


def f1(answer: str | None, gold: Sequence[str]) -> float | None:
    """Token F1 of SQuAD, the best over the accepted answers; yes and no are all or nothing."""
    return _best(answer, gold, _f1)


def format_valid(
    outcome: Outcome, answer: str | None, tool_records: Sequence[ToolRecord], state: Mapping[str, Any]
) -> float:
    """1 when the trajectory followed its protocol to the end: completed, with an answer, without an invalid call.

    A tool that failed by itself is not the agent's fault and doesn't count.
    """
    if outcome is not Outcome.COMPLETED or answer is None or not answer.strip():
        return 0.0
    invalid = state.get("invalid_calls")
    if invalid is None:
        invalid = sum(not record.ok and not record.result.startswith("Error: ") for record in tool_records)
    return float(invalid == 0)


def _best(answer: str | None, gold: Sequence[str], judge: Callable[[str, str], float]) -> float | None:
    golds = accepted(gold)
    if not golds:
        return None
    return 0.0 if answer is None else max(judge(answer, one) for one in golds)


def _strict(answer: str, gold: str) -> float:
    a, b = (unicodedata.normalize("NFC", text).strip() for text in (answer, gold))
    return float(a == b)


def _f1(answer: str, gold: str) -> float:
    said, wanted = normalize(answer), normalize(gold)
    if not wanted:
        return _strict(answer, gold)
    if said != wanted and (said in _CLOSED or wanted in _CLOSED):
        return 0.0
    said_tokens, wanted_tokens = said.split(), wanted.split()
    common = sum((Counter(said_tokens) & Counter(wanted_tokens)).values())
    return 2 * common / (len(said_tokens) + len(wanted_tokens))
