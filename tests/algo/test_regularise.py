import math

import pytest
import torch

from upswing.algo.regularise import (
    LLDS_GATES,
    adaptive_entropy_coef,
    informative_groups,
    llds,
    overlong_penalty,
    top_entropy_mask,
)
from upswing.errors import ConfigError

# Two turns of a preserved trajectory, one with advantage 0, one negative. Drops (old - policy) by hand:
SEQUENCE = torch.tensor([0, 0, 0, 0, 0, 1, 1, 2, 2])
TURN = torch.tensor([0, 0, 1, 1, 1, 0, 0, 0, 0])
DROP = torch.tensor([0.3, -0.1, 0.4, -0.3, -0.3, 0.2, 0.1, 0.9, 0.9], dtype=torch.float64)
ADVANTAGES = torch.tensor([1.0] * 5 + [0.0] * 2 + [-1.0] * 2, dtype=torch.float64)
OLD = torch.full((9,), -1.0, dtype=torch.float64)


def penalty(policy=None, where=slice(None), **options):
    policy = OLD - DROP if policy is None else policy
    parts = (policy, OLD, ADVANTAGES, SEQUENCE, TURN)
    return llds(*(part[where] for part in parts), **{"num_preserved": 7, **options})


@pytest.mark.parametrize(
    ("gate", "expected"),
    [
        ("action", [0.3, 0, 0, 0, 0, 0.2, 0.1, 0, 0]),  # turn 1 rose by 0.2 in all: closed
        ("response", [0, 0, 0, 0, 0, 0.2, 0.1, 0, 0]),  # trajectory 0 lost 0.0 in all: closed
        ("token", [0.3, 0, 0.4, 0, 0, 0.2, 0.1, 0, 0]),
    ],
)
def test_llds_by_hand(gate, expected):
    """The set is A >= 0, zero included; negatives never count; each gate sums over its own segment."""
    torch.testing.assert_close(penalty(gate=gate, gate_threshold=1e-9) * 7, torch.tensor(expected, dtype=torch.float64))


def test_llds_pulls_open_tokens_up_and_nothing_else():
    policy = (OLD - DROP).requires_grad_()
    (grad,) = torch.autograd.grad(penalty(policy).sum(), policy)
    torch.testing.assert_close(grad * 7, -torch.tensor([1.0, 0, 0, 0, 0, 1, 1, 0, 0], dtype=torch.float64))


@pytest.mark.parametrize("gate", LLDS_GATES)
def test_llds_is_inert_on_policy_and_without_preserved_tokens(gate):
    policy = OLD.clone().requires_grad_()
    term = penalty(policy, gate=gate).sum()
    assert term == 0 and not torch.autograd.grad(term, policy)[0].any()
    assert not penalty(where=ADVANTAGES < 0, gate=gate, num_preserved=0).any()
    assert penalty(where=slice(0), gate=gate, num_preserved=0).shape == (0,)


def test_llds_adds_up_over_micro_batches():
    parts = [penalty(where=SEQUENCE.eq(one)) for one in (2, 0, 1)]
    torch.testing.assert_close(torch.cat(parts).sum(), penalty().sum())


def test_llds_options():
    assert (penalty(gate_threshold=0.25) > 0).nonzero()[:, 0].tolist() == [5, 6]  # turn 0 lost 0.2, trajectory 1 0.3
    weighted = penalty(answer_N=SEQUENCE == 1, answer_weight=0.5) / penalty()
    assert weighted[[0, 5, 6]].tolist() == [1.0, 0.5, 0.5]
    with pytest.raises(ConfigError, match="did you mean 'action'"):
        penalty(gate="actions")


def test_llds_gates_from_weakest_to_strongest():
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        policy = OLD - torch.randn(9, generator=generator, dtype=torch.float64)
        token, action, response = (penalty(policy, gate=g).sum() for g in ("token", "action", "response"))
        assert token >= action and token >= response


def test_adaptive_entropy():
    assert adaptive_entropy_coef(0.01, 0.2, target=0.3) == pytest.approx((0.015, 0.015))
    assert adaptive_entropy_coef(0.01, 0.4, target=0.3) == pytest.approx((0.005, 0.0))
    assert adaptive_entropy_coef(0.002, 0.4, target=0.3) == (0.0, 0.0)
    assert adaptive_entropy_coef(0.999, 0.1, target=0.3) == (1.0, 1.0)
    assert adaptive_entropy_coef(0.01, math.nan, target=0.3) == (0.01, 0.0)


def test_overlong_penalty():
    lengths = torch.tensor([0, 16384, 18432, 20480, 99999])
    assert overlong_penalty(lengths, max_length=20480, cache=4096).tolist() == [0, 0, -0.5, -1, -1]
    assert overlong_penalty(lengths, max_length=20480, cache=4096, factor=0.5).tolist() == [0, 0, -0.25, -0.5, -0.5]
    assert overlong_penalty(torch.tensor([10, 11]), max_length=10, cache=0).tolist() == [0, -1]
    with pytest.raises(ConfigError, match="between 0 and max_length"):
        overlong_penalty(lengths, max_length=10, cache=11)


def test_groups_are_kept_or_dropped_whole():
    """ADV-03: g1, g2, g3 whole, g4 (never solved) and g5 (always) not at all; rows of groups interleaved."""
    outcomes = [[1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]]
    success, group = torch.tensor(outcomes).T.flatten().float(), torch.arange(5).repeat(4) * 3 - 6
    assert informative_groups(success, group).tolist() == [True, True, True, False, False] * 4
    order = torch.randperm(20, generator=torch.Generator().manual_seed(1))
    assert torch.equal(informative_groups(success[order], group[order]), informative_groups(success, group)[order])


@pytest.mark.parametrize(
    ("success", "kept"),
    [
        ([1.0, math.nan, 0.0], True),
        ([1.0, math.nan, 1.0], False),
        ([math.nan, math.nan], False),
        ([math.inf, 0.0], False),
        ([0.7], False),
        ([0.1 + 0.2, 0.3], False),
        ([1e9, 1e9 + 1], False),
        ([-1e9, 1e9], True),
        ([0.5, 0.501], True),
    ],
)
def test_unscored_rows_and_rounding_decide_nothing(success, kept):
    got = informative_groups(torch.tensor(success, dtype=torch.float64), torch.zeros(len(success), dtype=torch.long))
    assert got.tolist() == [kept] * len(success)


def test_no_groups():
    assert informative_groups(torch.zeros(0), torch.zeros(0, dtype=torch.long)).shape == (0,)


def test_top_entropy():
    entropy = torch.tensor([0.1, 2.0, 0.0, 1.0, 0.3, 0.2, 0.1, 0.1, 0.1, 0.0])
    assert top_entropy_mask(entropy).nonzero()[:, 0].tolist() == [1, 3]
    assert top_entropy_mask(entropy[:3]).tolist() == [False, True, False]
    assert top_entropy_mask(torch.ones(4)).all() and top_entropy_mask(entropy[:0]).shape == (0,)
