"""Masks are made from positions that were noted when a token was appended, never from a token's value.

(A pad id is often the EOS id, and an EOS or a tag may stand inside a tool's answer: no value says what a token is.)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from upswing.trajectory.types import BoolT, Branch


def loss_mask(branch: Branch, *, exclude_turns: Collection[int] = ()) -> BoolT:
    """[T] bool: the tokens that enter the loss = sampled tokens, less those of the excluded turns."""
    if not exclude_turns:
        return branch.sampled.copy()
    return branch.sampled & ~np.isin(branch.turn, np.asarray(sorted(exclude_turns), dtype=np.int64))


def length_mask(lengths_B: Sequence[int], width: int) -> npt.NDArray[np.bool_]:
    """[B, width] bool: True on the real tokens of right-padded rows, EOS included whatever its id.

    Raises ValueError when a row is longer than `width`.
    """
    lengths = np.asarray(lengths_B, dtype=np.int64)
    if lengths.size and int(lengths.max()) > width:
        raise ValueError(f"a row of {int(lengths.max())} tokens doesn't fit a width of {width}")
    mask: npt.NDArray[np.bool_] = np.arange(width)[None, :] < lengths[:, None]
    return mask
