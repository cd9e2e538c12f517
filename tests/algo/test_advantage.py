import math

import pytest
import torch

from upswing.algo import group_relative

NAN = math.nan


def relative(rewards, groups, **options):
    return group_relative(torch.tensor(rewards, dtype=torch.float32), torch.tensor(groups), **options)


def test_one_winner_of_four_has_the_closed_form():
    """(G-1)/sqrt(G) for the winner and -1/sqrt(G) for the others, with the unbiased std."""
    got = relative([1.0, 0, 0, 0], [7, 7, 7, 7])
    assert got.tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)


def test_without_std_it_is_reward_minus_mean():
    assert relative([1.0, 0, 0, 0], [0] * 4, normalize_std=False).tolist() == [0.75, -0.25, -0.25, -0.25]


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.9, 0.1 + 0.2, -3.3, 1e6])
@pytest.mark.parametrize("normalize_std", [True, False])
def test_equal_rewards_are_exactly_zero(reward, normalize_std):
    """Sixteen times 0.9 in float32 leaves a residue in mean and std that the division would blow up."""
    rewards = [reward] * 16
    rewards[3] += 1e-8 * max(1, abs(reward))
    assert relative(rewards, [5] * 16, normalize_std=normalize_std, eps=1e-9).tolist() == [0.0] * 16


def test_a_small_but_real_difference_is_kept():
    assert relative([0.5, 0.501], [0, 0]).abs().min() > 0.5


def test_groups_go_by_id_and_not_by_adjacency():
    rewards, groups = [1.0, 5.0, 0.0, 7.0, 0.0, 6.0], [3, 9, 3, 9, 3, 9]
    got = relative(rewards, groups)
    order = [4, 1, 2, 5, 0, 3]
    permuted = relative([rewards[i] for i in order], [groups[i] for i in order])
    assert torch.equal(permuted, got[order])
    assert got[[0, 2, 4]].tolist() == relative([1.0, 0.0, 0.0], [0, 0, 0]).tolist()


@pytest.mark.parametrize("broken", [NAN, math.inf, -math.inf])
def test_unscored_trajectories_do_not_move_the_baseline(broken):
    got = relative([1.0, broken, 0.0, 0.0], [0] * 4)
    assert got[1] == 0.0
    assert got[[0, 2, 3]].tolist() == relative([1.0, 0.0, 0.0], [0] * 3).tolist()


@pytest.mark.parametrize("rewards", [[1.0], [1.0, NAN], [NAN, NAN], []])
def test_fewer_than_two_scored_have_nothing_to_compare_with(rewards):
    assert relative(rewards, [0] * len(rewards)).tolist() == [0.0] * len(rewards)


def test_micro_batches_smaller_than_the_group_would_change_it():
    """CFG-02: advantages belong to the whole group; computing them on a split gives another answer."""
    whole = relative([1.0, 1.0, 0.0, 0.0], [0] * 4)
    halves = torch.cat([relative([1.0, 1.0], [0, 0]), relative([0.0, 0.0], [0, 0])])
    assert whole.abs().min() > 0.8 and halves.abs().max() == 0


def test_shapes_are_checked():
    with pytest.raises(ValueError, match="same length"):
        group_relative(torch.zeros(3), torch.zeros(2, dtype=torch.long))
