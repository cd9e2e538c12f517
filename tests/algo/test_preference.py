"""Preference losses against values by hand, finite differences, TRL, and what must hold whatever the numbers."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from upswing.algo.preference import (
    LARGEST_MEAN,
    dpo_loss,
    ipo_loss,
    kto_baseline,
    kto_loss,
    log_odds,
    nll_loss,
    orpo_loss,
    pair_terms,
    preferred,
    simpo_loss,
)

PAIRED = ("dpo", "ipo", "orpo", "simpo")


def wide(*values):
    return torch.tensor(values, dtype=torch.float64)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def numbers(seed=0, size=6):
    """Sums of both sides and of their reference, and lengths: [P] each, in the order of `pair_terms`."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [torch.randint(2, 9, (size,), generator=generator).double() for _ in range(2)]
    policy = [-lengths[side] * torch.rand(size, generator=generator).double() - 0.1 for side in (0, 1)]
    ref = [one + torch.randn(size, generator=generator).double() for one in policy]
    return [*policy, *ref, *lengths]


def test_dpo_by_hand():
    """beta 0.5, margins 2, 0 and -4."""
    want = [-math.log(sigmoid(1.0)), math.log(2), -math.log(sigmoid(-2.0))]
    assert dpo_loss(wide(2, 0, -4), beta=0.5).tolist() == pytest.approx(want, rel=1e-14)


def test_smoothed_and_robust_by_hand():
    right, wrong = -math.log(sigmoid(1.0)), -math.log(sigmoid(-1.0))
    assert dpo_loss(wide(2), beta=0.5, label_smoothing=0.1).item() == pytest.approx(0.9 * right + 0.1 * wrong)
    robust = dpo_loss(wide(2), beta=0.5, label_smoothing=0.1, robust=True).item()
    assert robust == pytest.approx((0.9 * right - 0.1 * wrong) / 0.8)
    with pytest.raises(ValueError, match=r"less than 0\.5"):
        dpo_loss(wide(2), label_smoothing=0.5, robust=True)


def test_smoothed_dpo_is_least_where_the_policy_is_as_sure_as_the_labels():
    """sigmoid(beta margin) = 1 - e there, so the gradient vanishes."""
    margin = wide(math.log(0.9 / 0.1) / 0.5).requires_grad_()
    dpo_loss(margin, beta=0.5, label_smoothing=0.1).sum().backward()
    assert margin.grad.item() == pytest.approx(0, abs=1e-14)


@given(st.floats(-30, 30), st.floats(0, 0.49), st.floats(0.01, 2))
@settings(max_examples=50, deadline=None)
def test_robust_dpo_is_unbiased_under_flipped_labels(margin, flip, beta):
    """In expectation over flips it is plain DPO on clean labels; the smoothed one isn't."""
    clean = dpo_loss(wide(margin), beta=beta).item()
    seen = [dpo_loss(wide(m), beta=beta, label_smoothing=flip, robust=True).item() for m in (margin, -margin)]
    assert (1 - flip) * seen[0] + flip * seen[1] == pytest.approx(clean, rel=1e-7, abs=1e-7)


def test_dpo_gradient_at_no_margin_is_half_beta():
    margin = wide(0.0).requires_grad_()
    dpo_loss(margin, beta=0.3).sum().backward()
    assert margin.grad.item() == pytest.approx(-0.15, rel=1e-14)


def test_dpo_is_finite_with_finite_gradient_at_any_margin():
    margin = wide(-1e6, 1e6).requires_grad_()
    loss = dpo_loss(margin, beta=0.1)
    loss.sum().backward()
    assert loss.tolist() == pytest.approx([1e5, 0])
    assert margin.grad.tolist() == pytest.approx([-0.1, 0])


def test_ipo_averages_over_length():
    """Log-ratios 6 over 3 tokens and -8 over 2: margin 2 + 4 = 6; beta 0.25 wants 2. Sums would give 14."""
    sums = [wide(-3), wide(-10), wide(-9), wide(-2)]
    terms = pair_terms("ipo", *sums, wide(3), wide(2), beta=0.25)
    assert terms.loss_P.item() == pytest.approx((6 - 2) ** 2)
    assert ipo_loss(wide(2), beta=0.25).item() == 0


def test_simpo_and_orpo_by_hand():
    assert simpo_loss(wide(-0.5), wide(-1.5), beta=2, margin=1).item() == pytest.approx(-math.log(sigmoid(1)))
    odds = [math.exp(mean) / (1 - math.exp(mean)) for mean in (-0.5, -1.5)]
    want = -0.1 * math.log(sigmoid(math.log(odds[0] / odds[1])))
    assert orpo_loss(wide(-0.5), wide(-1.5), beta=0.1).item() == pytest.approx(want, rel=1e-13)
    assert nll_loss(wide(-0.5)).item() == 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_odds_are_exact_near_certainty_and_far_from_it(dtype):
    means = torch.tensor([-1e-5, -1e-3, -0.7, -20.0, -200.0], dtype=dtype, requires_grad=True)
    want = [float(m) - math.log(-math.expm1(float(m))) for m in means.detach()]
    found = log_odds(means)
    found.sum().backward()
    assert found.tolist() == pytest.approx(want, rel=1e-14, abs=1e-6 if dtype == torch.float32 else 1e-14)
    slope = [1 / -math.expm1(float(m)) for m in means.detach()]  # d/dx log-odds = 1 / (1 - p)
    assert means.grad.tolist() == pytest.approx(slope, rel=1e-5 if dtype == torch.float32 else 1e-10)


def test_log_odds_of_certainty_are_bounded():
    mean = torch.zeros(1, requires_grad=True)
    odds = log_odds(mean)
    odds.sum().backward()
    assert odds.item() == pytest.approx(-math.log(-LARGEST_MEAN), rel=1e-5)
    assert mean.grad.item() == 0


@pytest.mark.parametrize("loss", PAIRED)
def test_gradients_equal_finite_differences(loss):
    fixed = numbers()

    def total(chosen, rejected):
        terms = pair_terms(loss, chosen, rejected, *fixed[2:], beta=0.3, margin=0.2, nll_coef=0.4)
        return terms.loss_P

    inputs = [one.clone().requires_grad_() for one in fixed[:2]]
    assert torch.autograd.gradcheck(total, inputs)


@pytest.mark.parametrize("robust", [False, True])
def test_swapping_the_sides_mirrors_dpo(robust):
    """Flipped pairs with chance e are the unflipped ones with chance 1 - e (cDPO); rewards change places."""
    chosen, rejected, ref_chosen, ref_rejected, *lengths = numbers()
    swapped = (rejected, chosen, ref_rejected, ref_chosen, *reversed(lengths))
    one = pair_terms("dpo", *numbers(), beta=0.3, label_smoothing=0.2, robust=robust)
    two = pair_terms("dpo", *swapped, beta=0.3, label_smoothing=0.2, robust=robust)
    torch.testing.assert_close(two.chosen_rewards_P, one.rejected_rewards_P)
    if not robust:
        other = pair_terms("dpo", *swapped, beta=0.3, label_smoothing=0.8)
        torch.testing.assert_close(other.loss_P, one.loss_P)
    plain = [pair_terms("dpo", *sides, beta=0.3).loss_P for sides in (numbers(), swapped)]
    torch.testing.assert_close(one.loss_P + two.loss_P, plain[0] + plain[1])  # both kinds only move mass across


@pytest.mark.parametrize("loss", ["dpo", "ipo"])
def test_a_change_of_both_policies_cancels(loss):
    """What the prompt adds to policy and reference alike has no effect."""
    values = numbers()
    moved = [one + 17.0 for one in values[:4]]
    got, want = (pair_terms(loss, *sides, *values[4:], beta=0.2).loss_P for sides in (moved, values[:4]))
    torch.testing.assert_close(got, want)


def test_an_unknown_loss_is_refused():
    with pytest.raises(ValueError, match="'kto'"):
        pair_terms("kto", *numbers(), beta=0.1)


def test_kto_by_hand():
    """Weights 1 and 1.5, baseline 1: 1 - sigmoid(0.5 (3 - 1)) and 1.5 (1 - sigmoid(0.5 (1 - 3)))."""
    loss = kto_loss(
        wide(3, 3), torch.tensor([True, False]), wide(1)[0], beta=0.5, desirable_weight=1.0, undesirable_weight=1.5
    )
    assert loss.tolist() == pytest.approx([1 - sigmoid(1), 1.5 * (1 - sigmoid(-1))], rel=1e-14)


def test_kto_baseline_is_clamped_detached_and_defined_without_rows():
    log_ratios = wide(-4, 1).requires_grad_()
    baseline = kto_baseline(log_ratios)
    assert baseline.item() == 0 and not baseline.requires_grad
    assert kto_baseline(wide(4, 1)).item() == 2.5
    assert kto_baseline(wide()).item() == 0


def test_kto_gradient_pushes_desirable_up_and_undesirable_down():
    ratios = wide(0.5, 0.5).requires_grad_()
    kto_loss(ratios, torch.tensor([True, False]), wide(0)[0], beta=0.5).sum().backward()
    slope = 0.5 * sigmoid(0.25) * (1 - sigmoid(0.25))
    assert ratios.grad.tolist() == pytest.approx([-slope, slope])


def test_ties_count_half():
    assert preferred(wide(3, 0, -1)).tolist() == [1, 0.5, 0]


def _trl(kind, values, **changes):
    """The losses of TRL's trainers, called without a trainer."""
    trainers = pytest.importorskip("trl.experimental.cpo.cpo_trainer", reason="TRL isn't installed")
    self = type("Settings", (), {"beta": 0.3, "label_smoothing": 0.0, "simpo_gamma": 0.0, "loss_type": kind})
    for name, value in {"alpha": 0.0, **changes}.items():
        setattr(self, name, value)
    self.accelerator = type("Device", (), {"device": "cpu"})
    return trainers.CPOTrainer.cpo_loss(self, *values)


@pytest.mark.parametrize("margin", [0.0, 0.7])
def test_simpo_is_that_of_trl(margin):
    values = numbers()
    means = values[0] / values[4], values[1] / values[5]
    theirs, chosen, rejected = _trl("simpo", means, simpo_gamma=margin)
    ours = pair_terms("simpo", *values, beta=0.3, margin=margin)
    torch.testing.assert_close(ours.loss_P, theirs)
    torch.testing.assert_close(ours.chosen_rewards_P, chosen)
    torch.testing.assert_close(ours.rejected_rewards_P, rejected)


def test_ipo_over_sums_is_that_of_trls_cpo():
    """Its margin has no reference and no length: the same function of another margin."""
    values = numbers()
    theirs, *_ = _trl("ipo", values[:2])
    torch.testing.assert_close(ipo_loss(values[0] - values[1], beta=0.3), theirs)


def test_orpo_is_that_of_trl():
    trainers = pytest.importorskip("trl.experimental.orpo.orpo_trainer", reason="TRL isn't installed")
    values = numbers()
    means = values[0] / values[4], values[1] / values[5]
    self = type("Settings", (), {"beta": 0.3, "accelerator": type("Device", (), {"device": "cpu"})})
    theirs, chosen, rejected, *_ = trainers.ORPOTrainer.odds_ratio_loss(self, *means)
    ours = pair_terms("orpo", *values, beta=0.3)
    torch.testing.assert_close(ours.loss_P.float(), -theirs)  # theirs is what they subtract, in float32
    torch.testing.assert_close(ours.chosen_rewards_P.float(), chosen)
    torch.testing.assert_close(ours.rejected_rewards_P.float(), rejected)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_smoothed_dpo_is_that_of_trl(smoothing):
    """Their CPO with loss `sigmoid` is DPO with a uniform reference, and still smooths."""
    values = numbers()
    theirs, *_ = _trl("sigmoid", values[:2], label_smoothing=smoothing)
    flat = [torch.zeros_like(values[0])] * 2
    ours = pair_terms("dpo", *values[:2], *flat, *values[4:], beta=0.3, label_smoothing=smoothing)
    torch.testing.assert_close(ours.loss_P, theirs)
