import math
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from upswing.algo.advantage import (
    ema_baseline,
    gdpo,
    gpg,
    group_relative,
    has_signal,
    opo,
    pass_at_k,
    reinforce,
    reinforce_pp_baseline,
    remax,
    rloo,
    top_minus_second,
    tree,
    whiten,
)
from upswing.errors import ConfigError

NAN = math.nan

# name -> (rewards_B, group_B, extra_B) -> advantages_B. `extra_B`: a positive integer for each row.
ESTIMATORS = {
    "grpo": lambda r, g, x: group_relative(r, g),
    "dr_grpo": lambda r, g, x: group_relative(r, g, normalize_std=False),
    "rloo": lambda r, g, x: rloo(r, g),
    "opo": opo,
    "gpg": lambda r, g, x: gpg(r, g),
    "top_minus_second": lambda r, g, x: top_minus_second(r, g),
    "gdpo": lambda r, g, x: gdpo(torch.stack([r, r * x], 1), g, [1.0, 0.5]),
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "tree": lambda r, g, x: tree(r, g, x % 2),
    "pass_at_2": lambda r, g, x: pass_at_k((r > 0).to(r.dtype) + 0 * r, g, k=2),
    "reinforce, batch mean": lambda r, g, x: reinforce(r, baseline="batch"),
}
every = pytest.mark.parametrize("name", ESTIMATORS)


def relative(rewards, groups, **options):
    return group_relative(torch.tensor(rewards, dtype=torch.float32), torch.tensor(groups), **options)


def doubles(values):
    return torch.tensor(values, dtype=torch.float64)


def some_batch(seed, unscored=False):
    """(rewards, groups, extra): interleaved groups of four to six rows, coarse rewards so that ties occur."""
    rng = np.random.default_rng(seed)
    groups = rng.permutation(np.repeat(np.arange(4), rng.integers(4, 7, 4)))
    rewards = rng.integers(-4, 5, len(groups)) / 4
    if unscored:
        for group in range(4):
            lost = rng.choice(np.flatnonzero(groups == group), rng.integers(0, 3), replace=False)
            rewards[lost] = rng.choice([NAN, math.inf, -math.inf], len(lost))
    return torch.tensor(rewards), torch.tensor(groups), torch.tensor(rng.integers(1, 10, len(groups)))


seeds = st.integers(0, 2**20)


# --- what holds for all of them ---


@every
@settings(max_examples=10, deadline=None)
@given(seed=seeds)
def test_ids_decide_and_not_positions(name, seed):
    """Renaming the groups changes nothing; permuting the rows permutes the advantages."""
    rewards, groups, extra = some_batch(seed, unscored=True)
    rng = np.random.default_rng(seed + 1)
    order = torch.tensor(rng.permutation(len(rewards)))
    renamed = torch.tensor(rng.permutation(range(-50, -40)))[groups]
    expected = ESTIMATORS[name](rewards, groups, extra)
    got = ESTIMATORS[name](rewards[order], renamed[order], extra[order])
    torch.testing.assert_close(got, expected[order], rtol=0, atol=1e-9)


@every
@settings(max_examples=10, deadline=None)
@given(seed=seeds)
def test_unscored_rows_get_zero_and_might_as_well_not_be_there(name, seed):
    rewards, groups, extra = some_batch(seed, unscored=True)
    scored = torch.isfinite(rewards)
    got = ESTIMATORS[name](rewards, groups, extra)
    assert (got[~scored] == 0).all()
    alone = ESTIMATORS[name](rewards[scored], groups[scored], extra[scored])
    torch.testing.assert_close(got[scored], alone, rtol=0, atol=1e-12)


@every
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.9, 1 / 3, -3.3, 1e6])
def test_a_group_of_equal_rewards_is_exactly_zero_beside_a_varied_one(name, reward):
    """The batch around it, and whitening over it, must not leak in. (The batch mean has the batch for a group.)"""
    varied = [] if name == "reinforce, batch mean" else [0.0, 1.0, 1.0, 0.5]
    rewards = torch.tensor([reward] * 16 + varied, dtype=torch.float32)
    groups = torch.tensor([4] * 16 + [2] * len(varied))
    extra = torch.full((len(rewards),), 3)
    assert ESTIMATORS[name](rewards, groups, extra)[:16].tolist() == [0.0] * 16


@pytest.mark.parametrize("name", [n for n in ESTIMATORS if n not in ("pass_at_2", "reinforce, batch mean")])
def test_one_scored_member_has_no_peer_and_gets_zero(name):
    for rewards in ([0.7], [0.7, NAN], [NAN, NAN], [0.7, 0.1, 0.2]):
        groups = [0] * len(rewards) if len(rewards) < 3 else [0, 1, 1]
        got = ESTIMATORS[name](doubles(rewards), torch.tensor(groups), torch.ones(len(rewards), dtype=torch.long))
        assert got[0] == 0 and got.isfinite().all()


@every
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_the_dtype_is_kept_and_no_gradient_flows(name, dtype):
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=dtype, requires_grad=True)
    got = ESTIMATORS[name](rewards, torch.tensor([0, 0, 0, 0]), torch.tensor([1, 2, 3, 4]))
    assert got.dtype == dtype and not got.requires_grad and got.shape == (4,)


@every
def test_an_empty_batch_is_no_error(name):
    empty = torch.zeros(0, dtype=torch.long)
    assert ESTIMATORS[name](doubles([]), empty, empty).shape == (0,)


@every
def test_wrong_shapes_are_refused(name):
    ids = torch.zeros(2, dtype=torch.long)
    with pytest.raises(ValueError):
        ESTIMATORS[name](torch.zeros(3, 2), ids, ids)
    if name != "reinforce, batch mean":
        with pytest.raises(ValueError):
            ESTIMATORS[name](torch.zeros(3), ids, torch.ones(3, dtype=torch.long))


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "gpg", "opo", "tree", "reinforce, batch mean"])
@settings(max_examples=10, deadline=None)
@given(seed=seeds)
def test_a_constant_added_to_all_rewards_changes_nothing(name, seed):
    """verl's alpha of GPG counts non-zero rewards and fails this."""
    rewards, groups, extra = some_batch(seed)
    shifted = ESTIMATORS[name](rewards + 3.0, groups, extra)
    torch.testing.assert_close(shifted, ESTIMATORS[name](rewards, groups, extra), rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "gpg", "tree", "gdpo"])
@settings(max_examples=10, deadline=None)
@given(seed=seeds)
def test_advantages_of_a_group_sum_to_zero_duplicated_rollouts_or_not(name, seed):
    rewards, groups, extra = some_batch(seed)
    copies = torch.tensor(np.random.default_rng(seed + 1).integers(1, 4, len(rewards)))
    rewards, groups, extra = (x.repeat_interleave(copies) for x in (rewards, groups, extra))
    got = ESTIMATORS[name](rewards, groups, extra)
    for group in groups.unique():
        assert got[groups == group].sum().abs() < 1e-9


# --- GRPO ---


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


def test_interleaved_groups_by_hand():
    """ADV-07: pairs by position would give [0.5, -0.5, 0, 0], the whole batch [0.75, -0.25, -0.25, -0.25]."""
    assert relative([1.0, 0, 0, 0], [1, 2, 1, 2], normalize_std=False).tolist() == [0.5, 0, -0.5, 0]


@pytest.mark.parametrize("broken", [NAN, math.inf, -math.inf])
def test_a_missing_reward_by_hand(broken):
    """ADV-05 and ADV-06: left out of mean and std; not a reward of 0."""
    centred = relative([1.0, broken, 0.0, 1.0], [0] * 4, normalize_std=False)
    assert centred.tolist() == pytest.approx([1 / 3, 0, -2 / 3, 1 / 3], abs=1e-6)
    scaled = relative([1.0, broken, 0.0, 1.0], [0] * 4, eps=1e-4)
    assert scaled.tolist() == pytest.approx([0.577, 0, -1.155, 0.577], abs=5e-4)
    inactive = relative([-1.0, broken, -1.0, -1.0], [0] * 4)
    assert inactive.tolist() == [0.0] * 4


def test_micro_batches_smaller_than_the_group_would_change_it():
    """CFG-02: advantages belong to the whole group; computing them on a split gives another answer."""
    whole = relative([1.0, 1.0, 0.0, 0.0], [0] * 4)
    halves = torch.cat([relative([1.0, 1.0], [0, 0]), relative([0.0, 0.0], [0, 0])])
    assert whole.abs().min() > 0.8 and halves.abs().max() == 0


def test_truncated_rows_are_masked_after_the_advantages():
    """ADV-10: the means are of the full groups (0.5 and 0.25); dropping the truncated row first would move one."""
    rewards, groups = [1.0, 0, 1, 0, 0, 0, 0, 1], [0] * 4 + [1] * 4
    got = relative(rewards, groups, normalize_std=False)
    assert got.tolist() == [0.5, -0.5, 0.5, -0.5, -0.25, -0.25, -0.25, 0.75]
    kept = [i for i in range(8) if i != 2]
    torn = relative([rewards[i] for i in kept], [groups[i] for i in kept], normalize_std=False)
    assert torn[0] != got[0] and torch.equal(torn[3:], got[4:])


def test_a_trajectory_without_loss_tokens_counts_by_its_score():
    """ADV-13's rule: the score given to it is a score; a peer is measured against it, and its length weighs nothing."""
    rewards, groups = torch.tensor([10.0, 0.0]), torch.tensor([0, 0])
    assert group_relative(rewards, groups, normalize_std=False).tolist() == [5.0, -5.0]
    assert opo(rewards, groups, torch.tensor([0, 3])).tolist() == [10.0, 0.0]
    assert opo(rewards, groups, torch.tensor([0, 0])).tolist() == [0.0, 0.0]
    whitened = reinforce_pp_baseline(torch.tensor([10.0, 0, 5]), torch.tensor([0, 0, 0]), torch.tensor([0, 2, 2]))
    assert whitened[0] == 0 and whitened[1] == -whitened[2] != 0


def test_integer_rewards_would_be_truncated_and_are_refused():
    with pytest.raises(ValueError, match="floating"):
        group_relative(torch.tensor([1, 0]), torch.tensor([0, 0]))


def test_shapes_are_checked():
    with pytest.raises(ValueError, match="same length"):
        group_relative(torch.zeros(3), torch.zeros(2, dtype=torch.long))


def test_groups_without_signal_go_as_a_whole():
    """ADV-03: the single success and its failed siblings stay together."""
    rewards = doubles([1, 0, 0, 0, 1, 1, 1, 0, 1, 1, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1])
    groups = torch.arange(20) // 4
    assert has_signal(rewards, groups).tolist() == [True] * 12 + [False] * 8
    rewards[3] = rewards[17] = NAN
    assert has_signal(rewards, groups).tolist() == [True] * 3 + [False] + [True] * 8 + [False] * 8


# --- the others, by hand ---


def test_reinforce():
    rewards = doubles([1.0, NAN, 0.0, 0.5])
    assert reinforce(rewards, baseline=0.25).tolist() == [0.75, 0.0, -0.25, 0.25]
    assert reinforce(rewards, baseline=0.0).tolist() == [1.0, 0.0, 0.0, 0.5]
    assert reinforce(rewards, baseline="batch").tolist() == [0.75, 0.0, -0.75, 0.0]
    for bad in ("mean", NAN, math.inf):
        with pytest.raises(ConfigError, match="'batch' or a finite number"):
            reinforce(rewards, baseline=bad)


def test_moving_average():
    assert ema_baseline(None, doubles([1.0, NAN, 0.0]), 0.9) == 0.5
    assert ema_baseline(0.5, doubles([1.0, math.inf]), 0.9) == pytest.approx(0.55)
    assert ema_baseline(0.5, doubles([NAN]), 0.9) == 0.5 and ema_baseline(None, doubles([]), 0.9) == 0.0


def test_rloo_is_the_mean_of_the_others():
    assert rloo(doubles([1, 0, 0.5, 7]), torch.tensor([0, 0, 0, 1])).tolist() == pytest.approx([0.75, -0.75, 0, 0])


def test_remax():
    greedy = doubles([0.5, NAN, 0.25, math.inf])
    assert remax(doubles([1.0, 1.0, NAN, 0.0]), greedy).tolist() == [0.5, 0.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="greedy_rewards_B"):
        remax(doubles([1.0]), greedy)


@settings(max_examples=10, deadline=None)
@given(seed=seeds)
def test_opo_minimises_the_length_weighted_square(seed):
    """b = argmin sum len (r - b)^2, so the length-weighted advantages of a group sum to 0."""
    rewards, groups, lengths = some_batch(seed)
    got = opo(rewards, groups, lengths)
    for group in groups.unique():
        assert (lengths * got)[groups == group].sum().abs() < 1e-9


def test_gpg_rescales_by_the_groups_with_signal():
    rewards, groups = doubles([1, 0, 1, 1, 0, 0, NAN, 0]), torch.tensor([0, 0, 1, 1, 2, 2, 2, 0])
    # 7 scored, 3 of them in the one group with signal
    assert gpg(rewards, groups).tolist() == pytest.approx([7 / 3 * x for x in [2 / 3, -1 / 3, 0, 0, 0, 0, 0, -1 / 3]])


@pytest.mark.parametrize("n", range(2, 8))
def test_pass_at_k_against_all_subsets(n):
    for k in range(1, n + 1):
        for num_right in range(n + 1):
            right = [1.0] * num_right + [0.0] * (n - num_right)
            value = {s: max(right[i] for i in s) for s in combinations(range(n), k)}
            values = np.array(list(value.values()))
            own = np.array([np.mean([v for s, v in value.items() if i in s]) for i in range(n)])
            expected = (own - values.mean()) / values.std() if values.std() > 0 else np.zeros(n)
            got = pass_at_k(doubles(right), torch.zeros(n, dtype=torch.long), k=k)
            np.testing.assert_allclose(got, expected, atol=1e-12)


def test_pass_at_1_is_grpo_with_the_population_std():
    rewards = doubles([1, 0, 0, 1, 0])
    got = pass_at_k(rewards, torch.zeros(5, dtype=torch.long), k=1)
    torch.testing.assert_close(got, (rewards - rewards.mean()) / rewards.std(correction=0))


@pytest.mark.parametrize(("sizes", "k"), [([1, 3], 1), ([3, 4], 4), ([3, 3], 0), ([2, 2], -1)])
def test_pass_at_k_needs_k_members(sizes, k):
    groups = torch.tensor([g for g, size in enumerate(sizes) for _ in range(size)])
    with pytest.raises(ValueError, match=f"k is {k} and the smallest group has {min(sizes)}"):
        pass_at_k(torch.zeros(len(groups)), groups, k=k)


def test_pass_at_k_refuses_partial_rewards_and_bears_unscored_ones():
    with pytest.raises(ValueError, match="0 or 1"):
        pass_at_k(doubles([0.5, 1.0]), torch.tensor([0, 0]), k=1)
    assert pass_at_k(doubles([1.0, 0.0, NAN]), torch.tensor([0] * 3), k=3).tolist() == [0.0] * 3


def test_top_minus_second():
    got = top_minus_second(doubles([1.0, 0.25, 0.5, 1.0, 1.0, 0.0]), torch.tensor([0, 0, 0, 1, 1, 1]), eps=0.0)
    assert got.tolist() == pytest.approx([0.5 / doubles([1, 0.25, 0.5]).std().item(), 0, 0, 0, 0, 0])


def test_gdpo_keeps_apart_what_a_sum_makes_equal():
    """The rare reward is worth more than the common one; GRPO on the sum can't tell (1, 0) from (0, 1)."""
    rewards = doubles([[1, 0], [0, 1], [0, 1], [0, 1]])
    groups = torch.zeros(4, dtype=torch.long)
    assert group_relative(rewards.sum(1), groups).tolist() == [0.0] * 4
    weighted = gdpo(rewards, groups, [1.0, 0.5])
    assert weighted[0] > 0 > weighted[1] and weighted.std().item() == pytest.approx(1.0, abs=1e-6)


def test_gdpo_components():
    groups = torch.zeros(3, dtype=torch.long)
    varied, constant = [1.0, 0.0, 0.5], [0.9, 0.9, 0.9]
    alone = gdpo(doubles([varied]).T, groups, [1.0])
    assert torch.equal(gdpo(doubles([varied, constant]).T, groups, [1.0, 5.0]), alone)
    # Only the second component of the first row is missing: its own first one still counts.
    got = gdpo(doubles([varied, [NAN, 1.0, 0.0]]).T, groups, [1.0, 1.0])
    raw = group_relative(doubles(varied), groups) + group_relative(doubles([NAN, 1.0, 0.0]), groups)
    torch.testing.assert_close(got, raw / raw.std())
    assert gdpo(doubles([[NAN, NAN], [1, 0], [0, 1]]), groups, [1.0, 1.0])[0] == 0
    with pytest.raises(ValueError, match="K weights"):
        gdpo(doubles([varied]).T, groups, [1.0, 1.0])


@settings(max_examples=10, deadline=None)
@given(seed=seeds)
def test_reinforce_pp_baseline_is_whitening_over_tokens(seed):
    rewards, groups, lengths = some_batch(seed, unscored=True)
    live = has_signal(rewards, groups)
    centred = group_relative(rewards, groups, normalize_std=False)
    expected = torch.zeros_like(rewards).repeat_interleave(lengths)
    live_N = live.repeat_interleave(lengths)
    expected[live_N] = whiten(centred.repeat_interleave(lengths)[live_N])
    got = reinforce_pp_baseline(rewards, groups, lengths).repeat_interleave(lengths)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-9)


def test_tree_compares_the_trees_which_normalising_twice_would_not():
    rewards, groups, trees = doubles([1, 0, 1, 1, 0, 0, 1, 0]), torch.zeros(8, dtype=torch.long), torch.arange(8) // 2
    got = tree(rewards, groups, trees)
    assert got[2] == got[3] > 0 > got[4]  # whole trees of right and of wrong leaves
    twice = group_relative(group_relative(rewards, groups), trees)
    torch.testing.assert_close(twice, group_relative(rewards, trees), rtol=1e-5, atol=0)
    assert twice[2] == twice[4] == 0
    # Tree numbers may repeat in other groups.
    both = tree(torch.cat([rewards, 1 - rewards]), torch.cat([groups, groups + 1]), torch.cat([trees, trees]))
    torch.testing.assert_close(both, torch.cat([got, -got]))


def test_whiten():
    values = doubles([1.0, 2.0, 6.0])
    torch.testing.assert_close(whiten(values), (values - 3) / math.sqrt(7 + 1e-8))
    torch.testing.assert_close(whiten(values, shift_mean=False), (values - 3) / math.sqrt(7 + 1e-8) + 3)
    assert whiten(doubles([0.3, 0.1 + 0.2, 0.3])).tolist() == [0.0] * 3
    assert whiten(doubles([0.9, 0.9]), shift_mean=False).tolist() == [0.9, 0.9]
    assert whiten(doubles([1.0, NAN, 3.0])).tolist() == pytest.approx([-(0.5**0.5), 0, 0.5**0.5])


def test_whitening_fewer_than_two_values():
    """ADV-14: only centred, never n - 1 = 0. The masked tokens of that case aren't here to begin with."""
    assert whiten(doubles([3.0])).tolist() == [0.0] and whiten(doubles([3.0]), shift_mean=False).tolist() == [3.0]
    assert whiten(doubles([])).tolist() == [] and whiten(doubles([NAN])).tolist() == [0.0]
    assert reinforce_pp_baseline(doubles([1, 0]), torch.tensor([0, 0]), torch.tensor([1, 0])).tolist() == [0.0, 0.0]
