import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from upswing.algo.aggregate import AGGREGATIONS, focal_weights, token_weights
from upswing.algo.entropy import entropy_from_logits
from upswing.algo.loss import LOSSES, ppo_clip
from upswing.errors import ConfigError

SEQUENCES = torch.tensor([4, 4, 4, 4, 9, 2, 2])
LOSS = torch.tensor([1.0, 2, 3, 4, 10, -1, 5])
BY_HAND = {
    "token-mean": 24 / 7,
    "seq-mean-token-mean": (2.5 + 10 + 2) / 3,
    "seq-mean-token-sum": (10 + 10 + 4) / 3,
    "seq-mean-token-sum-norm": 24 / (3 * 50),
}


def norm(mode):
    return 50 if mode.endswith("norm") else None


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_by_hand(mode):
    weights = token_weights(SEQUENCES, mode=mode, norm_length=norm(mode))
    assert (weights * LOSS).sum().item() == pytest.approx(BY_HAND[mode], rel=1e-6)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_order_and_sequence_numbers_do_not_matter(mode):
    order = torch.tensor([5, 0, 4, 2, 6, 1, 3])
    renamed = 100 - SEQUENCES[order]
    weights = token_weights(renamed, mode=mode, norm_length=norm(mode))
    assert torch.equal(weights, token_weights(SEQUENCES, mode=mode, norm_length=norm(mode))[order])


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_no_tokens(mode):
    assert token_weights(SEQUENCES[:0], mode=mode, norm_length=norm(mode)).shape == (0,)


@st.composite
def cuts(draw):
    """Ragged sequences, their rank and micro-batch, and an order of the tokens."""
    lengths = draw(st.lists(st.integers(1, 7), min_size=1, max_size=8))
    places = st.lists(st.integers(0, 2), min_size=len(lengths), max_size=len(lengths))
    sequence = torch.repeat_interleave(torch.arange(len(lengths)) * 5 - 9, torch.tensor(lengths))
    rank, micro = (torch.tensor(draw(places)).repeat_interleave(torch.tensor(lengths)) for _ in range(2))
    return sequence, rank, micro, draw(st.integers(0, 10**6))


@settings(deadline=None, max_examples=40)
@given(cut=cuts(), mode=st.sampled_from(AGGREGATIONS), name=st.sampled_from(["ppo_clip", "gspo"]))
def test_gradients_do_not_depend_on_micro_batches_ranks_or_order(cut, mode, name):
    sequence, rank, micro, seed = cut
    generator = torch.Generator().manual_seed(seed)
    size = len(sequence)
    features = torch.randn(size, 3, generator=generator, dtype=torch.float64)
    old, advantages = torch.randn(2, size, generator=generator, dtype=torch.float64)
    theta = torch.randn(3, generator=generator, dtype=torch.float64, requires_grad=True)
    weights = torch.zeros(size)
    totals = {"num_tokens": size, "num_sequences": len(sequence.unique())}

    def gradient(at, weights_N):
        options = {"sequence_N": sequence[at]} if LOSSES[name].level == "sequence" else {}
        loss = LOSSES[name].function(features[at] @ theta, old[at], advantages[at], **options).loss_N
        return torch.autograd.grad((weights_N * loss).sum(), theta)[0]

    order = torch.randperm(size, generator=generator)
    whole = gradient(order, token_weights(sequence[order], mode=mode, norm_length=norm(mode)))
    total = torch.zeros_like(whole)
    for one in rank.unique():
        mine = rank == one
        weights[mine] = token_weights(sequence[mine], mode=mode, norm_length=norm(mode), **totals)
        total += sum(gradient(mine & (micro == m), weights[mine & (micro == m)]) for m in range(3))
    torch.testing.assert_close(total, whole, rtol=1e-11, atol=1e-12)


def test_a_rank_without_tokens_and_a_batch_without_tokens():
    """LOSS-04: an all-masked micro-batch adds exactly 0 with gradient 0, and the step equals the other one alone."""
    none, policy = SEQUENCES[:0], torch.zeros(0, requires_grad=True)
    for totals in ({}, {"num_tokens": 7, "num_sequences": 3}):
        weights = token_weights(none, mode="token-mean", **totals)
        loss = (weights * ppo_clip(policy, torch.zeros(0), torch.zeros(0)).loss_N).sum()
        assert loss == 0 and torch.autograd.grad(loss, policy)[0].shape == (0,)
    assert (token_weights(torch.tensor([4, 4]), mode="token-mean") * torch.tensor([1.0, 3.0])).sum() == 2.0


def test_a_group_without_preference_stays_in_the_denominator():
    """LOSS-05, the stated rule: groups [1, 1] and [1, 0], 10 tokens a row. Denominator 40 tokens, 4 sequences."""
    sequence = torch.arange(4).repeat_interleave(10)
    assert token_weights(sequence, mode="token-mean").unique().tolist() == pytest.approx([1 / 40])
    assert token_weights(sequence, mode="seq-mean-token-mean").unique().tolist() == pytest.approx([1 / 40])
    assert token_weights(sequence, mode="seq-mean-token-sum").unique().tolist() == pytest.approx([1 / 4])


def test_a_short_last_window_is_normalised_by_its_own_tokens():
    """GA-02: ten micro-batches in windows of four: three updates, each of weights that add up to 1."""
    micro = [torch.full((1 + i,), i) for i in range(10)]
    windows = [torch.cat(micro[i : i + 4]) for i in range(0, 10, 4)]
    assert len(windows) == 3
    for window in windows:
        assert token_weights(window, mode="token-mean").sum().item() == pytest.approx(1.0)
        assert token_weights(window, mode="seq-mean-token-mean").sum().item() == pytest.approx(1.0)


def test_refusals():
    with pytest.raises(ConfigError, match="did you mean 'token-mean'"):
        token_weights(SEQUENCES, mode="token_mean")
    with pytest.raises(ConfigError, match="needs norm_length"):
        token_weights(SEQUENCES, mode="seq-mean-token-sum-norm")
    with pytest.raises(ConfigError, match="no effect"):
        token_weights(SEQUENCES, mode="token-mean", norm_length=5)


def test_entropy():
    logits = torch.tensor([[0.0, 0, 0, 0], [0, 0, -torch.inf, -torch.inf], [50.0, 0, 0, 0]])
    assert entropy_from_logits(logits).tolist() == pytest.approx([1.3862944, 0.6931472, 0.0], abs=1e-6)


def test_entropy_of_ruled_out_tokens_has_a_finite_gradient():
    """LOSS-06: three equal logits and one of -inf; in half precision one certain token. A row of -inf is NaN."""
    logits = torch.tensor([[1.0, 1.0, 1.0, -math.inf]], dtype=torch.float64, requires_grad=True)
    entropy = entropy_from_logits(logits)
    assert entropy.item() == pytest.approx(math.log(3))
    (grad,) = torch.autograd.grad(entropy.sum(), logits)
    assert grad.abs().max() < 1e-12
    half = torch.tensor([[60000.0, -60000.0]], dtype=torch.float16, requires_grad=True)
    assert entropy_from_logits(half).item() == 0.0
    assert torch.autograd.grad(entropy_from_logits(half).sum(), half)[0].isfinite().all()
    assert entropy_from_logits(torch.full((1, 3), -math.inf)).isnan().all()


@pytest.mark.parametrize("gamma", [0.5, 1.0, 2.0])
def test_focal_weights_by_hand(gamma):
    p = torch.tensor([1.0, 0.9, 0.5, 1e-6], dtype=torch.float64)
    logprobs = p.log().requires_grad_()
    weights = focal_weights(logprobs, gamma)
    assert torch.allclose(weights, torch.tensor([(1 - x) ** gamma for x in p.tolist()], dtype=torch.float64))
    assert not weights.requires_grad
    assert focal_weights(torch.tensor([1e-7]), gamma).item() == 0.0  # rounded above 0: no NaN
    near = focal_weights(torch.tensor([-1e-6]), gamma).item()
    assert near == pytest.approx(1e-6**gamma, rel=1e-4)  # 1 - exp would have lost most digits
