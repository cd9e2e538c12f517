"""Verifiers: what turns a finished trajectory into a Score."""

from upswing.verify.base import Episode
from upswing.verify.functions import verifier_from
from upswing.verify.qa import strict_match
from upswing.verify.rubric import Rubric, rubric_from

__all__ = ["Episode", "Rubric", "rubric_from", "strict_match", "verifier_from"]
