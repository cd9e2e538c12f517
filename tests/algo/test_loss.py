import inspect
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from upswing.algo.aggregate import segment_sums, token_weights, turn_ids
from upswing.algo.loss import LOSSES, check_clip, clip_cov_mask, kl_cov_mask, ppo_clip
from upswing.errors import ConfigError

UNBOUNDED = {"policy_gradient", "cispo"}  # of these only the gradient is bounded


def terms(log_ratio, advantage, **options):
    policy = torch.tensor(log_ratio, dtype=torch.float64, requires_grad=True)
    out = ppo_clip(policy, torch.zeros_like(policy), torch.tensor(advantage, dtype=torch.float64), **options)
    (grad,) = torch.autograd.grad(out.loss_N.sum(), policy)
    return out, grad


def call(name, policy, old, advantages, sequence, **options):
    spec = LOSSES[name]
    if spec.level == "sequence":
        options["sequence_N"] = sequence
    if spec.select is not None:
        options.setdefault("selected_N", torch.zeros(len(old), dtype=torch.bool))
    return spec.function(policy, old, advantages, **options)


def grad_of(name, policy, old, advantages, sequence, weights=None, **options):
    policy = policy.clone().requires_grad_()
    loss = call(name, policy, old, advantages, sequence, **options).loss_N
    return torch.autograd.grad((loss * (1.0 if weights is None else weights)).sum(), policy)[0]


@st.composite
def batches(draw, scale=0.3):
    """(policy, old, advantages, sequence) in float64: ragged sequences, one advantage each, tokens shuffled."""
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    sequence = torch.repeat_interleave(torch.arange(len(lengths)) * 7 - 3, torch.tensor(lengths))
    size = len(sequence)
    advantages = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
    order = torch.randperm(size, generator=generator)
    old = -torch.rand(size, generator=generator, dtype=torch.float64) * 3
    policy = old + scale * torch.randn(size, generator=generator, dtype=torch.float64)
    return policy, old, torch.repeat_interleave(advantages, torch.tensor(lengths))[order], sequence[order]


@pytest.mark.parametrize("name", LOSSES)
def test_on_policy_the_gradient_is_that_of_minus_advantage_times_logprob(name):
    old = torch.tensor([-0.5, -2.0, -1.0, -0.1], dtype=torch.float64)
    advantages = torch.tensor([1.5, -0.5, 0.0, 3.0], dtype=torch.float64)
    got = grad_of(name, old, old, advantages, torch.tensor([0, 0, 1, 1]))
    torch.testing.assert_close(got, -advantages, rtol=0, atol=1e-6 if name == "sapo" else 1e-14)


@pytest.mark.parametrize("name", LOSSES)
def test_a_bad_token_that_became_likely_costs_a_bounded_amount(name):
    """Log-ratios of log 1e6 and of 1e4 with A < 0: no loss above 4 |A|, and no gradient above 5 |A|."""
    old, advantages = torch.tensor([-20.0, -1e4], dtype=torch.float64), torch.full((2,), -2.0, dtype=torch.float64)
    policy = old + torch.tensor([math.log(1e6), 1e4 - 1], dtype=torch.float64)
    sequence = torch.tensor([0, 1])
    if name not in UNBOUNDED:
        assert call(name, policy, old, advantages, sequence).loss_N.max() <= 8.0
    assert grad_of(name, policy, old, advantages, sequence).abs().max() <= 10.0


@pytest.mark.parametrize("name", LOSSES)
def test_extreme_and_empty_inputs_stay_finite(name):
    old = torch.tensor([-1e4, -1.0, -1.0, -1e4], dtype=torch.float64)
    policy, advantages = old.flip(0) * 0.9, torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    sequence = torch.arange(4)
    assert call(name, policy, old, advantages, sequence).loss_N.isfinite().all()
    assert grad_of(name, policy, old, advantages, sequence).isfinite().all()
    assert call(name, policy[:0], old[:0], advantages[:0], sequence[:0]).loss_N.shape == (0,)


@settings(deadline=None, max_examples=15)
@given(batch=batches(), modulo=st.integers(2, 3))
def test_every_loss_can_be_computed_per_micro_batch(batch, modulo):
    """Whole sequences, whatever else is in the call and in whatever order: each token has the same loss."""
    policy, old, advantages, sequence = batch
    for name in LOSSES:
        whole = call(name, *batch).loss_N
        for part in range(modulo):
            where = (sequence % modulo == part).nonzero()[:, 0].flip(0)
            alone = call(name, policy[where], old[where], advantages[where], sequence[where]).loss_N
            torch.testing.assert_close(alone, whole[where], rtol=1e-12, atol=1e-12)


def sequence_form(name, policy, old, advantages, sequence):
    """GSPO and GMPO as their papers write them: one term a sequence, then the mean."""
    losses = []
    for one in sequence.unique():
        at = sequence == one
        log_ratio, advantage = (policy - old)[at], advantages[at][0]
        if name == "gspo":
            ratio = log_ratio.mean().exp()
            losses.append(-torch.min(ratio * advantage, ratio.clamp(0.97, 1.04) * advantage))
        else:
            sign = advantage.sign()
            inner = sign * torch.min(sign * log_ratio, sign * log_ratio.clamp(-0.2, 0.3))
            losses.append(-advantage * inner.mean().exp())
    return torch.stack(losses).mean()


@settings(deadline=None, max_examples=25)
@given(batch=batches())
@pytest.mark.parametrize(
    ("name", "options"),
    [("gspo", {"clip_low": 0.03, "clip_high": 0.04}), ("gmpo", {"clip_low": 0.2, "clip_high": 0.3})],
)
def test_the_token_form_equals_the_sequence_form(name, options, batch):
    policy, old, advantages, sequence = batch
    weights = token_weights(sequence, mode=LOSSES[name].aggregation).double()
    whole = policy.clone().requires_grad_()
    expected = sequence_form(name, whole, old, advantages, sequence)
    got = (call(name, *batch, **options, dual_clip=None).loss_N * weights).sum()
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7)
    (expected_grad,) = torch.autograd.grad(expected, whole)
    got_grad = grad_of(name, *batch, weights=weights, **options, dual_clip=None)
    torch.testing.assert_close(got_grad, expected_grad, rtol=1e-6, atol=1e-7)


def test_gspo_under_token_mean_is_another_objective():
    old, sequence = torch.zeros(4, dtype=torch.float64), torch.tensor([0, 1, 1, 1])
    policy, advantages = torch.tensor([0.1, 0.2, 0.2, 0.2]).double(), torch.tensor([1.0, -1.0, -1.0, -1.0]).double()
    token, seq = (token_weights(sequence, mode=m).double() for m in ("token-mean", "seq-mean-token-mean"))
    options = {"clip_low": 0.9, "clip_high": 0.9}
    assert (call("gspo", policy, old, advantages, sequence, **options).loss_N * (token - seq)).sum().abs() > 0.1


def test_gspo_per_turn_has_one_ratio_a_turn_however_many_turns():
    """Twelve turns: a mask that knows only nine (seen in public) would drop the rest."""
    sequence, turn = torch.zeros(24, dtype=torch.long), torch.arange(12).repeat_interleave(2)
    ids = turn_ids(torch.cat([sequence, sequence - 1]), torch.cat([turn, turn]))
    assert len(ids.unique()) == 24
    policy = turn.double() / 100
    got = call("gspo", policy, torch.zeros(24).double(), torch.ones(24).double(), ids[:24], clip_high=5.0, dual_clip=9)
    torch.testing.assert_close(got.ratio_N, policy.exp())


def test_a_loss_takes_the_options_its_table_names():
    for name, spec in LOSSES.items():
        taken = {p.name for p in inspect.signature(spec.function).parameters.values() if p.kind is p.KEYWORD_ONLY}
        given_by_caller = {"sequence_N"} if spec.level == "sequence" else set()
        given_by_caller |= {"selected_N"} if spec.select else set()
        assert taken == set(spec.options) | given_by_caller, name
        if spec.select:
            assert set(spec.select_options) == set(list(inspect.signature(spec.select).parameters)[2:])


def test_the_sign_of_the_advantage_decides_what_is_clipped():
    """LOSS-03: clipping the ratio alone, without the max against the unclipped term, gets the first and last wrong."""
    ratios, advantages = [math.log(r) for r in (10, 10, 0.5, 0.5)], [-1.0, 1.0, -1.0, 1.0]
    plain, grad = terms(ratios, advantages, dual_clip=None)
    assert plain.loss_N.tolist() == pytest.approx([10.0, -1.2, 0.8, -0.5])
    assert grad.tolist() == pytest.approx([10.0, 0.0, 0.0, -0.5])
    dual, grad = terms(ratios, advantages, dual_clip=3.0)
    assert dual.loss_N.tolist() == pytest.approx([3.0, -1.2, 0.8, -0.5])
    assert grad.tolist() == pytest.approx([0.0, 0.0, 0.0, -0.5])


def test_clipping_by_hand():
    ratios = [1.5, 0.5, 1.5, 0.5, 1.1]
    out, grad = terms([math.log(r) for r in ratios], [1.0, 1.0, -1.0, -1.0, 1.0], clip_low=0.2, clip_high=0.28)
    assert out.loss_N.tolist() == pytest.approx([-1.28, -0.5, 1.5, 0.8, -1.1])
    assert grad.tolist() == pytest.approx([0.0, -0.5, 1.5, 0.0, -1.1])
    assert out.clipped_high_N.tolist() == [True, False, False, False, False]
    assert out.clipped_low_N.tolist() == [False, False, False, True, False]


@pytest.mark.parametrize("log_ratio", [2.0, math.log(1e6), 90.0, 1e4])
def test_dual_clip_bounds_the_loss_of_a_bad_token(log_ratio):
    out, grad = terms([log_ratio], [-2.0], dual_clip=3.0)
    assert out.loss_N.item() == 6.0 and grad.item() == 0.0 and out.dual_clipped_N.item()
    free, _ = terms([log_ratio], [-2.0], dual_clip=None)
    assert free.loss_N.item() > 6.0 and math.isfinite(free.loss_N.item())


def test_dual_clip_leaves_good_tokens_and_moderate_ratios_alone():
    plain, dual = terms([3.0, 0.5], [1.0, -1.0], dual_clip=None), terms([3.0, 0.5], [1.0, -1.0], dual_clip=3.0)
    assert torch.equal(plain[0].loss_N, dual[0].loss_N) and torch.equal(plain[1], dual[1])


def test_cispo_truncates_the_weight_and_keeps_every_gradient():
    ratio = torch.tensor([0.1, 1.1, 9.0, 9.0], dtype=torch.float64)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    old, none = torch.full((4,), -3.0, dtype=torch.float64), torch.zeros(4)
    got = grad_of("cispo", old + ratio.log(), old, advantages, none, clip_low=0.2, clip_high=4.0)
    assert got.tolist() == pytest.approx([-0.8, 1.1, -5.0, 5.0])
    assert grad_of("cispo", old + ratio.log(), old, advantages, none)[0] == pytest.approx(-0.1)


def test_sapo_gate_by_closed_form():
    ratio, tau = torch.tensor([0.3, 1.0, 2.5], dtype=torch.float64), 1.05
    gate = torch.sigmoid(tau * (ratio - 1))
    got = grad_of("sapo", ratio.log(), torch.zeros(3).double(), -torch.ones(3).double(), None)
    torch.testing.assert_close(got, 4 * gate * (1 - gate) * ratio, rtol=1e-6, atol=0)


def test_clip_cov_zeroes_and_kl_cov_penalises_the_selected():
    old, advantages = torch.tensor([-1.0, -1.0]).double(), torch.tensor([1.0, 1.0]).double()
    policy, selected = old + 0.1, torch.tensor([True, False])
    assert grad_of("clip_cov", policy, old, advantages, None, selected_N=selected)[0] == 0
    assert grad_of("clip_cov", policy, old, advantages, None, selected_N=selected)[1] == pytest.approx(-math.exp(0.1))
    got = grad_of("kl_cov", policy, old, advantages, None, selected_N=selected, cov_coef=0.5)
    assert got.tolist() == pytest.approx([0.5 - math.exp(0.1), -math.exp(0.1)])
    fallen = grad_of("kl_cov", old - 0.1, old, advantages, None, selected_N=selected, cov_coef=0.5)
    assert fallen.tolist() == pytest.approx([-0.5 - math.exp(-0.1), -math.exp(-0.1)])


def test_covariance_masks_by_hand():
    """Means are -1.5 and 0.5: covariances 4.5, -0.5, 0.5, 1.5 (over a tiny batch), repeated to reach the fraction."""
    old, advantages = torch.tensor([0.0, -1.0, -2.0, -3.0]).repeat(5), torch.tensor([3.5, -0.5, -0.5, -0.5]).repeat(5)
    cov = (advantages - 0.5) * (old + 1.5)
    assert cov[:4].tolist() == [4.5, -0.5, 0.5, 1.5]
    chosen = clip_cov_mask(old, advantages, fraction=0.3, low=1.0, high=5.0)
    assert chosen.sum() == 6 and set(cov[chosen].tolist()) <= {4.5, 1.5}
    assert clip_cov_mask(old, advantages, fraction=0.3, low=1.0, high=2.0).nonzero()[:, 0].tolist() == [
        3,
        7,
        11,
        15,
        19,
    ]
    assert set(cov[kl_cov_mask(old, advantages, fraction=0.25)].tolist()) == {4.5}
    assert kl_cov_mask(old, advantages, fraction=0.25).sum() == 5


@pytest.mark.parametrize("size", [0, 1, 9])
def test_a_batch_too_small_for_the_fraction_selects_nothing(size):
    old, advantages = torch.linspace(-9, 0, size), torch.linspace(-9, 9, size)
    assert (
        not clip_cov_mask(old, advantages, fraction=0.1).any() and not kl_cov_mask(old, advantages, fraction=0.1).any()
    )


def test_the_random_choice_repeats_with_its_generator():
    old, advantages = torch.linspace(-9, 0, 200), torch.linspace(-2, 2, 200)
    pick = [
        clip_cov_mask(old, advantages, fraction=0.05, generator=torch.Generator().manual_seed(s)) for s in (1, 1, 2)
    ]
    assert torch.equal(pick[0], pick[1]) and not torch.equal(pick[0], pick[2]) and pick[2].sum() == 10


def test_segment_sums():
    total, count = segment_sums(torch.tensor([1.0, 2, 3, 4]), torch.tensor([5, -1, 5, 0]))
    assert total.tolist() == [4.0, 2.0, 4.0, 4.0] and count.tolist() == [2, 1, 2, 1]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"clip_low": 0.0}, "clip_low"),
        ({"clip_low": 1.5}, "clip_low"),
        ({"clip_high": -0.1}, "clip_high"),
        ({"dual_clip": 1.0}, "dual_clip"),
        ({"clip_high": math.nan}, "clip_high"),
    ],
)
def test_senseless_bounds_are_refused_by_name(options, named):
    with pytest.raises(ConfigError, match=named):
        check_clip(**{"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0, **options})
