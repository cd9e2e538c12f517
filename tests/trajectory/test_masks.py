"""Masks by position, never by value."""

from __future__ import annotations

import numpy as np

from upswing.trajectory.masks import loss_mask

from .test_validate import branch


def test_eos_equal_to_pad_is_trained_where_it_was_sampled_and_nowhere_else():
    """TOK-03: EOS = pad = 2, which here ends a turn, stands in a tool's answer and would be padding too."""
    one = branch(sampled=(0, 1, 1, 0, 0, 1), turn=(0, 0, 0, 1, 1, 1))
    one.tokens[:] = [10, 11, 2, 2, 12, 2]
    assert loss_mask(one).tolist() == [False, True, True, False, False, True]


def test_loss_mask_is_what_was_sampled_whatever_the_ids():
    same_ids = branch()
    same_ids.tokens[:] = 2
    assert np.array_equal(loss_mask(same_ids), same_ids.sampled)
    loss_mask(same_ids)[:] = False
    assert same_ids.sampled.any()
