"""The loss mask is made from what was noted when a token was appended, never from a token's value.

(A pad id is often the EOS id, and an EOS or a tag may stand inside a tool's answer: no value says what a token is.)
"""

from __future__ import annotations

from upswing.trajectory.types import BoolT, Branch


def loss_mask(branch: Branch) -> BoolT:
    """[T] bool, a copy: the tokens that enter the loss, which are the sampled ones."""
    return branch.sampled.copy()
