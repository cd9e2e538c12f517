"""Verifiers: what turns a finished trajectory into a Score."""

from upswing.verify.base import Episode
from upswing.verify.functions import Verifier, to_score, verifier_from
from upswing.verify.qa import BUILTIN, exact_match, f1, format_valid, normalize, strict_match
from upswing.verify.rubric import Rubric, SelfCheckReport, SelfCheckRow, rubric_from, self_check

__all__ = [
    "BUILTIN",
    "Episode",
    "Rubric",
    "SelfCheckReport",
    "SelfCheckRow",
    "Verifier",
    "exact_match",
    "f1",
    "format_valid",
    "normalize",
    "rubric_from",
    "self_check",
    "strict_match",
    "to_score",
    "verifier_from",
]
