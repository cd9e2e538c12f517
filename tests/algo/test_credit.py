import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from upswing.algo.advantage import group_relative, whiten
from upswing.algo.credit import (
    gae,
    gigpo,
    min_form,
    mt_grpo,
    place_rewards,
    place_turn_rewards,
    potential_shaping,
    process_step_end,
    reinforce_pp,
    returns_to_go,
    spread_turns,
)

NAN = math.nan
ids = torch.tensor
NONE = torch.zeros(0, dtype=torch.long)


def doubles(values):
    return torch.tensor(values, dtype=torch.float64)


@st.composite
def conversations(draw):
    """(loss_mask [B, T], turn [B, T], order): up to four trajectories with tool tokens (False) between and after the
    agent's, one perhaps without any, and an order of their loss tokens that mixes them but keeps each one's time."""
    num_rows, length = draw(st.integers(1, 4)), draw(st.integers(1, 8))
    mask = np.array(draw(st.lists(st.booleans(), min_size=num_rows * length, max_size=num_rows * length)))
    mask = mask.reshape(num_rows, length)
    # A new turn starts after each run of tool tokens.
    turn = np.cumsum(~mask[:, :-1] & mask[:, 1:], 1)
    turn = np.concatenate([np.zeros((num_rows, 1), int), turn], 1)
    sequence = draw(st.permutations(np.nonzero(mask)[0].tolist()))
    seen, order = [0] * num_rows, []
    for row in sequence:
        order.append((row, np.flatnonzero(mask[row])[seen[row]]))
        seen[row] += 1
    return mask, turn, tuple(np.array(order, int).reshape(-1, 2).T)


def skip_observation_gae(rewards, values, mask, gamma, lam):
    """verl's backward loop over [B, T] with tool tokens in place."""
    advantages = np.zeros_like(values)
    for row in range(len(mask)):
        after = running = 0.0
        for t in reversed(range(mask.shape[1])):
            if mask[row, t]:
                running = rewards[row, t] + gamma * after - values[row, t] + gamma * lam * running
                after = values[row, t]
            advantages[row, t] = running
    return advantages


# --- placing ---


def test_the_reward_is_on_the_last_loss_token_of_its_trajectory():
    """ADV-12 and ADV-13: observations don't exist here; trajectory 2 has no loss token and its 10 goes nowhere."""
    rewards = torch.tensor([1.0, 2.0, 10.0, NAN])
    placed = place_rewards(rewards, ids([1, 0, 1, 3, 0, 3]))
    torch.testing.assert_close(placed, torch.tensor([0, 0, 2, 0, 1, NAN]), equal_nan=True)
    assert placed.dtype == rewards.dtype
    assert place_rewards(rewards, NONE).tolist() == []


@pytest.mark.parametrize("sequence", [[0, 2], [-1, 0], [0.0, 1.0]])
def test_ids_that_name_no_trajectory_are_refused(sequence):
    with pytest.raises(ValueError, match="ids must be"):
        place_rewards(torch.zeros(2), torch.tensor(sequence))


def test_turn_rewards():
    sequence, turn = ids([0, 1, 0, 0, 1]), ids([0, 1, 0, 2, 1])
    rewards = {(0, 0): 1.0, (0, 1): 5.0, (0, 2): 2.0, (1, 0): 7.0, (1, 3): 3.0, (9, 0): 4.0}
    # (0, 1) and (1, 3) have no token: their rewards fall to the turn before. (1, 0) and (9, 0): nothing led there.
    assert place_turn_rewards(rewards, sequence, turn).tolist() == [0, 0, 6, 2, 3]
    assert spread_turns({(0, 0): 1.0, (1, 1): 2.0}, sequence, turn).tolist() == [1, 2, 1, 0, 2]


def test_each_row_uses_its_own_tokens():
    """ADV-09: one advantage, two steps with masks [0,1,1,1] and [1,0,0,0]; copying the last step's tensor gives the
    first [2,0,0,0]."""
    spread = spread_turns({(0, 0): 2.0, (0, 1): 2.0}, ids([0, 0, 0, 0]), ids([0, 0, 0, 1]))
    assert spread.tolist() == [2.0] * 4


# --- returns ---


def test_returns_by_hand():
    """ADV-12: the reward isn't lost with gamma 0 and crosses the observations with gamma 1."""
    assert returns_to_go(place_rewards(torch.ones(1), ids([0, 0])), ids([0, 0]), gamma=0.0).tolist() == [0, 1]
    assert returns_to_go(place_rewards(torch.ones(1), ids([0] * 4)), ids([0] * 4)).tolist() == [1] * 4
    rewards, sequence = doubles([0, 0, 1, 4, 8]), ids([0, 1, 0, 0, 1])
    assert returns_to_go(rewards, sequence, gamma=0.5).tolist() == [1.5, 4, 3, 4, 8]
    # Inside a turn undiscounted; from turn 0 to 2 two turns are crossed.
    got = returns_to_go(rewards, sequence, turn_N=ids([0, 0, 0, 2, 0]), gamma_turn=0.5)
    assert got.tolist() == [2, 8, 2, 4, 8]
    got = returns_to_go(doubles([0, 0, 1]), ids([0] * 3), gamma=0.5, turn_N=ids([0, 0, 1]), gamma_turn=0.9)
    assert got.tolist() == pytest.approx([0.45, 0.9, 1])
    with pytest.raises(ValueError, match="belong together"):
        returns_to_go(rewards, sequence, gamma_turn=0.5)


def test_an_unscored_trajectory_has_no_credit_anywhere_and_moves_nobody():
    """Its turn rewards from before the failure don't count either."""
    sequence, rewards = ids([0, 1, 0, 1, 1]), doubles([1, 1, NAN, 2, 3])
    alone_sequence, alone = ids([0, 0, 0]), doubles([1, 2, 3])
    assert returns_to_go(rewards, sequence).tolist() == [0, 6, 0, 5, 3]
    got = reinforce_pp(rewards, sequence)
    assert got[[0, 2]].tolist() == [0, 0]
    torch.testing.assert_close(got[[1, 3, 4]], reinforce_pp(alone, alone_sequence))
    values = doubles([0.3, 0.1, 0.4, 0.2, 0.5])
    for turn in (None, ids([0, 0, 1, 1, 1])):
        advantages, returns = gae(rewards, values, sequence, lam=0.9, turn_N=turn, whiten_advantages=True)
        assert advantages[[0, 2]].tolist() == [0, 0] and returns[[0, 2]].tolist() == [0.3, 0.4]
        same = gae(
            alone,
            values[[1, 3, 4]],
            alone_sequence,
            lam=0.9,
            turn_N=None if turn is None else turn[[1, 3, 4]],
            whiten_advantages=True,
        )
        torch.testing.assert_close(advantages[[1, 3, 4]], same[0])


def test_reinforce_pp_whitens_all_tokens_together():
    rewards, sequence = doubles([-0.1, 0.2, 1, 0, 0.5]), ids([0, 1, 0, 1, 1])
    returns = returns_to_go(rewards, sequence)
    assert returns.tolist() == pytest.approx([0.9, 0.7, 1, 0.5, 0.5])
    torch.testing.assert_close(reinforce_pp(rewards, sequence), whiten(returns))
    assert reinforce_pp(doubles([0, 0, 0.9, 0.9]), ids([0, 0, 0, 1])).tolist() == [0.0] * 4


# --- GAE ---


@settings(max_examples=40, deadline=None)
@given(conversations(), st.integers(0, 99), st.sampled_from([0.0, 0.7, 1.0]), st.sampled_from([0.0, 0.9, 1.0]))
def test_gae_of_the_loss_tokens_is_the_skip_observation_gae_of_all_tokens(conversation, seed, gamma, lam):
    mask, _, order = conversation
    rng = np.random.default_rng(seed)
    values, rewards = rng.normal(size=mask.shape), rng.normal(size=mask.shape)
    expected = skip_observation_gae(rewards, values, mask, gamma, lam)
    got, returns = gae(
        torch.tensor(rewards[order]), torch.tensor(values[order]), torch.tensor(order[0]), gamma=gamma, lam=lam
    )
    np.testing.assert_allclose(got, expected[order], atol=1e-12)
    np.testing.assert_allclose(returns, (expected + values)[order], atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(conversations(), st.integers(0, 99))
def test_gae_over_turns_is_gae_with_a_turn_for_a_token(conversation, seed):
    mask, turn, order = conversation
    rng = np.random.default_rng(seed)
    rewards, values, bootstrap = rng.normal(size=mask.shape), rng.normal(size=mask.shape), rng.normal(size=len(mask))
    turns = [
        (row, k, np.flatnonzero(mask[row] & (turn[row] == k)))
        for row in range(len(mask))
        for k in np.unique(turn[row][mask[row]])
    ]
    tokens = [rewards[row, where].sum() for row, _, where in turns], [values[row, where[0]] for row, _, where in turns]
    options = {"gamma": 0.8, "lam": 0.6, "bootstrap_B": torch.tensor(bootstrap)}
    per_turn = gae(doubles(tokens[0]), doubles(tokens[1]), ids([t[0] for t in turns], dtype=torch.long), **options)
    got = gae(
        torch.tensor(rewards[order]),
        torch.tensor(values[order]),
        torch.tensor(order[0]),
        turn_N=torch.tensor(turn[order]),
        **options,
    )
    number = {(row, k): i for i, (row, k, _) in enumerate(turns)}
    slots = torch.tensor([number[row, turn[row, t]] for row, t in zip(*order, strict=True)], dtype=torch.long)
    torch.testing.assert_close(got, tuple(x[slots] for x in per_turn))


def test_gae_limits():
    rewards, values, sequence = doubles([0, 1, 2, 0]), doubles([0.5, 0.1, 0.2, 0.4]), ids([3, 0, 3, 0])
    monte_carlo, returns = gae(rewards, values, sequence, gamma=0.9, lam=1.0)
    torch.testing.assert_close(returns, returns_to_go(rewards, sequence, gamma=0.9))
    torch.testing.assert_close(monte_carlo, returns - values)
    one_step, _ = gae(rewards, values, sequence, gamma=0.9, lam=0.0)
    torch.testing.assert_close(one_step, doubles([0.9 * 0.2 - 0.5, 1 + 0.9 * 0.4 - 0.1, 2 - 0.2, -0.4]))
    # A cut trajectory goes on with the value after it; trajectory 0 ended.
    cut, _ = gae(rewards, values, sequence, gamma=0.9, lam=0.0, bootstrap_B=doubles([0, 0, 0, 10]))
    torch.testing.assert_close(cut - one_step, doubles([0, 0, 9, 0]))
    whitened, kept = gae(rewards, values, sequence, gamma=0.9, whiten_advantages=True)
    torch.testing.assert_close(whitened, whiten(monte_carlo))
    assert torch.equal(kept, returns)


def test_no_tokens_at_all():
    none = doubles([])
    for got in (*gae(none, none, NONE), *gae(none, none, NONE, turn_N=NONE, whiten_advantages=True)):
        assert got.shape == (0,)
    assert reinforce_pp(none, NONE).shape == returns_to_go(none, NONE).shape == (0,)
    assert mt_grpo(doubles([1, 0]), ids([0, 0]), {}, NONE, NONE).shape == (0,)
    assert gigpo(none, NONE, [], ids([0]))[1] == 0.0
    for function in (process_step_end, min_form, potential_shaping):
        extra = [ids([0, 0])] if function is process_step_end else []
        assert function(none, NONE, *extra).shape == (0,)


def test_shapes_are_checked():
    three, two = doubles([0, 0, 0]), ids([0, 0])
    for call in (
        lambda: returns_to_go(three, two),
        lambda: gae(three, three, two),
        lambda: gae(three, doubles([0]), ids([0, 0, 0])),
        lambda: gae(three, three, ids([0, 0, 0]), turn_N=two),
        lambda: gae(three, three, ids([0, 0, 1]), bootstrap_B=doubles([0])),
        lambda: gigpo(three, two, ["a", "b"], ids([0, 0])),
        lambda: gigpo(three, ids([0, 0, 1]), ["a", "b"], ids([0, 0])),
        lambda: min_form(three, two),
        lambda: potential_shaping(three, two),
        lambda: process_step_end(three, ids([0, 0, 2]), two),
        lambda: mt_grpo(three, two, {}, two, two),
        lambda: mt_grpo(three, ids([0, 0, 0]), {(3, 0): 1.0}, two, two),
        lambda: spread_turns({}, two, ids([0])),
    ):
        with pytest.raises(ValueError):
            call()


# --- GiGPO ---


def test_gigpo_by_hand():
    """Two trajectories meet at 'door'; the second comes back to it. 'hall' of another task is another place."""
    trajectory = ids([0, 0, 1, 1, 1, 2])
    anchors = ["hall", "door", "door", "cellar", "door", "hall"]
    rewards = doubles([0, 1, 0, 0, 0, 1])
    got, size = gigpo(rewards, trajectory, anchors, ids([8, 8, 9]), omega=0.5, gamma=0.5)
    # Episodes 1 and 0, so +-0.5. At the door the returns are 1, 0 and 0. Everything else stands alone.
    expected = [0.5, 0.5 + 0.5 * 2 / 3, -0.5 - 0.5 / 3, -0.5, -0.5 - 0.5 / 3, 0]
    assert got.tolist() == pytest.approx(expected)
    assert size == 6 / 4
    got, _ = gigpo(rewards, trajectory, anchors, ids([8, 8, 9]), omega=0.5, gamma=0.5, normalize_std=True)
    door = group_relative(doubles([1, 0, 0]), ids([0, 0, 0])).tolist()
    unit = 0.5**0.5
    expected = [unit, unit + 0.5 * door[0], -unit + 0.5 * door[1], -unit, -unit + 0.5 * door[2], 0]
    assert got.tolist() == pytest.approx(expected, abs=1e-5)


def test_gigpo_discounts_the_step_return_and_not_the_episode():
    got, _ = gigpo(doubles([0, 1, 1]), ids([0, 0, 1]), ["s", "x", "s"], ids([0, 0]))
    assert got.tolist() == pytest.approx([(0.95 - 1) / 2, 0, (1 - 0.95) / 2])


def test_gigpo_counts_a_trajectory_once_however_long():
    """A long failure doesn't drag the baseline down: its idle steps change no episode advantage."""
    for steps in (1, 7):
        trajectory = ids([0, 1, *[2] * steps])
        anchors = [object() for _ in range(2 + steps)]
        got, size = gigpo(doubles([1, 1, *[0] * steps]), trajectory, anchors, ids([0, 0, 0]))
        assert got.tolist() == pytest.approx([1 / 3, 1 / 3, *[-2 / 3] * steps]) and size == 1.0


def test_gigpo_leaves_unscored_and_stepless_trajectories_out():
    trajectory, anchors = ids([0, 1, 2, 2]), ["a", "a", "a", "b"]
    got, size = gigpo(doubles([1, 0, 0.5, NAN]), trajectory, anchors, ids([0, 0, 0, 0]))
    alone, _ = gigpo(doubles([1, 0]), ids([0, 1]), ["a", "a"], ids([0, 0]))
    assert got.tolist() == [*alone.tolist(), 0, 0] and size == 2.0


# --- MT-GRPO ---


def test_mt_grpo_by_hand():
    """Trajectory 0 calls two tools, 1 calls one, 2 none and answers right."""
    outcome, group = doubles([1.0, 0.0, 1.0]), ids([4, 4, 4])
    turn_rewards = {(0, 0): 1.0, (0, 1): 0.5, (1, 0): 0.0}
    sequence, turn = ids([0, 1, 0, 2, 0, 1, 2]), ids([0, 0, 1, 0, 2, 1, 0])
    got = mt_grpo(outcome, group, turn_rewards, sequence, turn, turn_weight=0.5)
    out, combined = group_relative(outcome, group), group_relative(doubles([2.5, 0.0, 1.0]), group)
    first = group_relative(doubles([1.0, 0.0]), ids([0, 0]))
    expected = [
        out[0] + 0.5 * first[0],
        out[1] + 0.5 * first[1],
        out[0],  # its turn reward has no peer at turn 1
        combined[2],
        out[0],
        out[1],
        combined[2],
    ]
    torch.testing.assert_close(got, torch.stack(expected))
    assert got[3] < 0 < out[2]  # right, but it dodged the tools


def test_mt_grpo_without_any_tool_is_grpo():
    outcome, group = doubles([1, 0, 0, 1, 1]), ids([0, 1, 0, 1, 0])
    sequence = ids([4, 2, 0, 3, 1, 0])
    got = mt_grpo(outcome, group, {}, sequence, torch.zeros_like(sequence))
    torch.testing.assert_close(got, group_relative(outcome, group)[sequence])


def test_mt_grpo_leaves_the_unscored_out():
    tokens = ids([0, 1, 2, 3]), ids([0, 0, 0, 0])
    turn_rewards = {(0, 0): 1.0, (1, 0): 0.0, (2, 0): 9.0, (3, 0): NAN}
    got = mt_grpo(doubles([1, 0, NAN, 0.5]), ids([0] * 4), turn_rewards, *tokens)
    outcome = group_relative(doubles([1, 0, NAN, 0.5]), ids([0] * 4))
    first = group_relative(doubles([1, 0]), ids([0, 0]))
    torch.testing.assert_close(got, torch.stack([outcome[0] + first[0], outcome[1] + first[1], outcome[2], outcome[3]]))
    assert got[2] == 0


# --- process rewards ---


def test_step_scores_of_the_group_are_normalised_and_summed_from_the_step_on():
    scores, trajectory = doubles([1, 0, 0.5, 0.5]), ids([0, 1, 0, 1])
    z = (scores - 0.5) / (scores.std() + 1e-6)
    got = process_step_end(scores, trajectory, ids([0, 0]))
    torch.testing.assert_close(got, doubles([z[0] + z[2], z[1] + z[3], z[2], z[3]]))


def test_step_scores_without_a_peer_or_without_a_difference_teach_nothing():
    trajectory = ids([0, 0, 1, 1])
    assert process_step_end(doubles([1, 0, NAN, NAN]), trajectory, ids([0, 0])).tolist() == [0.0] * 4
    assert process_step_end(doubles([1, 0, 0, 1]), trajectory, ids([0, 1])).tolist() == [0.0] * 4
    assert process_step_end(torch.full((4,), 0.9), trajectory, ids([0, 0])).tolist() == [0.0] * 4
    got = process_step_end(doubles([1, NAN, 0, 0.5]), trajectory, ids([0, 0]))
    assert got[1] == 0 and got[0] == pytest.approx(1.0, abs=1e-5)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(-1, 1), min_size=1, max_size=6), st.sampled_from([0.02, 0.1, 1.0]))
def test_min_form_sums_to_a_soft_minimum(scores, temperature):
    both = doubles([*scores, 0.5])
    trajectory = ids([0] * len(scores) + [1])
    got = min_form(both, trajectory, temperature=temperature)
    total = got[:-1].sum().item()
    assert min(scores) - 1e-12 <= total <= sum(scores) / len(scores) + 1e-12
    assert total <= min(scores) + temperature * math.log(len(scores)) + 1e-12  # gap of a Gibbs mean
    assert got[-1] == 0.5
    weights = np.exp(-np.array(scores) / temperature)
    np.testing.assert_allclose(got[:-1], weights / weights.sum() * np.array(scores), atol=1e-12)


def test_min_form_credit_is_the_minimum_up_to_the_worst_step_and_then_nothing():
    trajectory = ids([0, 0, 0, 0])
    credit = returns_to_go(min_form(doubles([0.9, -0.8, 0.7, 0.9]), trajectory, temperature=0.01), trajectory)
    assert credit.tolist() == pytest.approx([-0.8, -0.8, 0, 0], abs=1e-12)
    assert min_form(doubles([0.9, NAN, 0.7]), ids([0, 0, 1]))[1] == 0
    assert min_form(doubles([NAN, 1e4, -1e4]), ids([0, 1, 1])).tolist() == [0.0, 0.0, -1e4]
    with pytest.raises(ValueError, match="temperature"):
        min_form(doubles([0.9]), ids([0]), temperature=0.0)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 99), st.sampled_from([0.0, 0.5, 0.95, 1.0]))
def test_potential_shaping_telescopes_and_moves_no_group(seed, gamma):
    """The return from every step moves by -Phi of its state, so with a shared start no advantage of a group moves."""
    rng = np.random.default_rng(seed)
    trajectory = torch.tensor(rng.permutation([0, 0, 0, 1, 1, 2]))
    potentials, rewards = torch.tensor(rng.normal(size=6)), torch.tensor(rng.normal(size=6))
    first = torch.tensor([int((trajectory == i).nonzero()[0]) for i in range(3)])
    potentials[first] = 0.3
    shaping = potential_shaping(potentials, trajectory, gamma=gamma)
    plain = returns_to_go(rewards, trajectory, gamma=gamma)
    shaped = returns_to_go(rewards + shaping, trajectory, gamma=gamma)
    torch.testing.assert_close(shaped, plain - potentials, rtol=0, atol=1e-12)
    together = ids([0, 0, 0])
    torch.testing.assert_close(
        group_relative(shaped[first], together, normalize_std=False),
        group_relative(plain[first], together, normalize_std=False),
        rtol=0,
        atol=1e-12,
    )


def test_a_potential_that_is_missing_makes_the_trajectory_unscored():
    shaping = potential_shaping(doubles([1, NAN, 2]), ids([0, 0, 1]))
    assert shaping[:2].isnan().all() and shaping[2] == -2
    assert returns_to_go(shaping + 1, ids([0, 0, 1])).tolist() == [0, 0, -1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_dtype_is_kept_and_no_gradient_flows(dtype):
    x = torch.tensor([1.0, 0.0, 0.5], dtype=dtype, requires_grad=True)
    trajectory = ids([0, 1, 0])
    for got in (
        place_rewards(x, ids([0, 1, 2])),
        returns_to_go(x, trajectory),
        reinforce_pp(x, trajectory),
        *gae(x, x, trajectory),
        gigpo(x, trajectory, "aab", ids([0, 0]))[0],
        mt_grpo(x, ids([0, 0, 0]), {(0, 0): 1.0}, trajectory, trajectory),
        process_step_end(x, trajectory, ids([0, 0])),
        min_form(x, trajectory),
        potential_shaping(x, trajectory),
    ):
        assert got.dtype == dtype and not got.requires_grad
