"""Masks by position, never by value."""

from __future__ import annotations

import numpy as np
import pytest

from upswing.trajectory.masks import length_mask, loss_mask

from .test_validate import branch


def test_pad_id_equal_to_eos_keeps_the_real_eos():
    """TOK-03: EOS = pad = 2. Row 0 ended with a real EOS at position 2; an EOS elsewhere would be kept as well."""
    rows = np.array([[10, 11, 2, 2, 2], [10, 2, 12, 13, 14]])
    mask = length_mask([3, 5], width=rows.shape[1])
    assert mask.tolist() == [[True, True, True, False, False], [True] * 5]


def test_length_mask_of_nothing_and_of_too_much():
    assert length_mask([], 4).shape == (0, 4)
    assert length_mask([0], 2).tolist() == [[False, False]]
    with pytest.raises(ValueError, match="a row of 5 tokens doesn't fit a width of 4"):
        length_mask([5], 4)


def test_loss_mask_is_what_was_sampled_whatever_the_ids():
    same_ids = branch()
    same_ids.tokens[:] = 2
    assert np.array_equal(loss_mask(same_ids), same_ids.sampled)


def test_loss_mask_excludes_turns_and_shares_no_memory():
    one = branch()
    assert loss_mask(one, exclude_turns={0}).tolist() == [False, False, False, False, False, True]
    assert not loss_mask(one, exclude_turns=[0, 1]).any()
    loss_mask(one)[:] = False
    assert one.sampled.any()
