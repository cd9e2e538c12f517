"""Corrections of rho = old / engine: bounds by hand, and exact expectations by enumeration."""

import math

import pytest
import torch

from upswing.algo.aggregate import token_weights
from upswing.algo.correction import (
    CORRECTIONS,
    check_correction,
    correction_weights,
    mismatch_stats,
    opsm_mask,
    proximal_logprobs,
)
from upswing.algo.loss import ppo_clip
from upswing.errors import ConfigError

NAN = math.nan
ENGINE = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
OLD = torch.tensor([0.4, 0.25, 0.35], dtype=torch.float64).log()


def weights(kind, rho, sequence=None, **bounds):
    log_rho = torch.tensor(rho, dtype=torch.float64).log()
    sequence = torch.zeros(len(rho), dtype=torch.long) if sequence is None else torch.tensor(sequence)
    return correction_weights(log_rho - 1, torch.full_like(log_rho, -1.0), sequence, kind=kind, **bounds)


def test_token_bounds_are_of_rho_and_asymmetric():
    """Bounds on -log rho, as seen in public, would keep [1/1.6, 1/0.6] = [0.625, 1.667] instead of [0.6, 1.6]."""
    rho = [0.59, 0.61, 1.0, 1.59, 1.65]
    got = weights("mis", rho, low=0.6, high=1.6)
    assert got.weights_N.tolist() == pytest.approx([0.0, 0.61, 1.0, 1.59, 0.0])
    assert got.kept_N.tolist() == [False, True, True, True, False]
    assert weights("icepop", [0.49, 0.51, 4.9, 5.1]).weights_N.tolist() == pytest.approx([0.0, 0.51, 4.9, 0.0])
    tis = weights("tis", [0.1, 1.9, 7.0])
    assert tis.weights_N.tolist() == pytest.approx([0.1, 1.9, 2.0]) and tis.kept_N.all()


def test_sequence_kinds_by_hand():
    rho, sequence = [2.0, 4.0, 0.25, 1.5, 1.2], [8, 3, 3, 8, 8]
    assert weights("seq_tis", rho, sequence).weights_N.tolist() == pytest.approx([2.0, 1.0, 1.0, 2.0, 2.0])
    assert weights("seq_mis", rho, sequence).weights_N.tolist() == pytest.approx([0, 1, 1, 0, 0])
    assert weights("seq_mis", rho, sequence, high=4.0).weights_N.tolist() == pytest.approx([3.6, 1, 1, 3.6, 3.6])
    geo = weights("geo_rs", [1.01, 1.0, 1.3, 0.9985 / 1.3], [0, 0, 1, 1])
    assert geo.weights_N.tolist() == [0.0, 0.0, 1.0, 1.0]  # 1.005 and sqrt(0.9985) = 0.99925
    k3 = weights("k3_rs", [1.2, 1.0, 1.1], [0, 0, 1])  # (0.2 - log 1.2) / 2 = 0.0088; 0.1 - log 1.1 = 0.0047
    assert k3.weights_N.tolist() == [1.0, 1.0, 1.0]
    assert weights("k3_rs", [1.2, 1.1], [0, 1]).weights_N.tolist() == [0.0, 1.0]  # 0.0177


@pytest.mark.parametrize("kind", CORRECTIONS)
def test_unknown_engine_logprobs_change_nothing(kind):
    old = torch.tensor([-1.0, -2.0, -1.0, -2.0])
    unknown = correction_weights(old, torch.full((4,), NAN), torch.zeros(4, dtype=torch.long), kind=kind)
    assert unknown.weights_N.tolist() == [1.0] * 4 and unknown.kept_N.all()
    engine = torch.tensor([NAN, -2.0, -1.004, -2.0])
    some = correction_weights(old, engine, torch.tensor([0, 0, 1, 1]), kind=kind)
    assert some.weights_N.isfinite().all() and some.weights_N[0] == 1.0


def test_an_unknown_token_is_no_evidence_in_a_mean():
    """One token known, 1 % off: the mean is 1.01 and not diluted by the three that are unknown."""
    engine = torch.tensor([-1.0, NAN, NAN, NAN])
    got = correction_weights(engine.nan_to_num(-1.0) + math.log(1.003), engine, torch.zeros(4).long(), kind="geo_rs")
    assert not got.kept_N.any()


@pytest.mark.parametrize("kind", CORRECTIONS)
@pytest.mark.parametrize("gap", [0.01, -0.01, math.inf])
def test_long_sequences_and_impossible_tokens_stay_finite(kind, gap):
    engine = torch.full((20_000,), -1.0)
    old = engine + gap if math.isfinite(gap) else torch.full_like(engine, -math.inf)
    got = correction_weights(old, engine, torch.zeros(20_000, dtype=torch.long), kind=kind)
    assert got.weights_N.isfinite().all()


@pytest.mark.parametrize("kind", CORRECTIONS)
def test_bypass_has_nothing_left_to_correct(kind):
    """With the engine's log-probs as the old ones the loss's own ratio is the whole correction."""
    engine = torch.tensor([-1.0, -7.0, -0.2])
    assert correction_weights(engine, engine, torch.tensor([0, 0, 1]), kind=kind).weights_N.tolist() == [1.0] * 3


def test_rejected_tokens_stay_in_the_denominator():
    got = weights("mis", [1.0, 1.0, 99.0, 99.0])
    share = token_weights(torch.zeros(4, dtype=torch.long), mode="token-mean")
    assert (share * got.weights_N).sum() == 0.5


def test_an_untruncated_sequence_weight_is_unbiased():
    """E under the engine of w f = E under the old policy of f, by enumeration of the nine sequences of two tokens."""
    pairs = torch.cartesian_prod(torch.arange(3), torch.arange(3))
    value = torch.linspace(-1, 2, 9, dtype=torch.float64)
    engine, old = ENGINE[pairs], OLD[pairs]
    sequence = torch.arange(9).repeat_interleave(2)
    got = correction_weights(old.flatten(), engine.flatten(), sequence, kind="seq_tis", high=1e9).weights_N[::2]
    expected = (old.sum(1).exp() * value).sum()
    torch.testing.assert_close((engine.sum(1).exp() * got * value).sum(), expected)
    truncated = correction_weights(old.flatten(), engine.flatten(), sequence, kind="seq_tis", high=1.1).weights_N[::2]
    assert ((engine.sum(1).exp() * truncated * value).sum() - expected).abs() > 1e-3


def test_decoupled_ppo_has_the_gradient_of_the_current_policy():
    """Samples of the engine, ratio to the proximal policy in the loss, rho as weight: together exact importance
    sampling, as long as nothing is clipped. Without rho, or with rho on top of a bypassed ratio, it isn't."""
    logits = torch.tensor([0.1, -0.2, 0.05], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, -0.5, 0.3], dtype=torch.float64)
    policy = torch.log_softmax(logits, -1)
    (exact,) = torch.autograd.grad(-(policy.exp() * advantages).sum(), logits, retain_graph=True)

    def estimate(old, rho_of):
        rho = correction_weights(rho_of, ENGINE, torch.arange(3), kind="tis", high=1e9).weights_N
        loss = ppo_clip(policy, old, advantages, clip_low=1.0, clip_high=50.0, dual_clip=None).loss_N
        return torch.autograd.grad((ENGINE.exp() * rho * loss).sum(), logits, retain_graph=True)[0]

    torch.testing.assert_close(estimate(OLD, OLD), exact)
    torch.testing.assert_close(estimate(ENGINE, ENGINE), exact)
    assert (estimate(OLD, ENGINE) - exact).abs().max() > 0.01
    assert (estimate(ENGINE, OLD) - exact).abs().max() > 0.01


def test_weights_carry_no_gradient():
    old = OLD.clone().requires_grad_()
    assert not correction_weights(old, ENGINE, torch.arange(3), kind="tis").weights_N.requires_grad


def test_off_policy_sequences_are_masked_only_where_the_advantage_is_negative():
    engine = torch.tensor([-1.0, -1.0, -1.0, -1.0, -1.0, NAN])
    policy = torch.tensor([-1.4, -1.8, -1.9, -1.9, -1.4, -9.0], requires_grad=True)
    sequence, advantages = torch.tensor([0, 0, 1, 1, 2, 2]), torch.tensor([-1.0, -1.0, 1.0, 0.0, -1.0, -1.0])
    assert opsm_mask(policy, engine, advantages, sequence, delta=0.5).tolist() == [False, False, True, True, True, True]
    assert opsm_mask(policy, engine, advantages, sequence, delta=0.7).all()


def test_proximal_logprobs_by_version():
    """Log-probs that move linearly with the version are interpolated exactly; fresh tokens have no drift to remove."""
    version = torch.tensor([3, 5, 7, 8, 9, 6])
    engine = -2.0 + 0.1 * version.double()
    engine[5] = NAN
    policy = torch.full((6,), -2.0 + 0.1 * 8, dtype=torch.float64, requires_grad=True)
    got = proximal_logprobs(policy, engine, version, policy_version=8)
    assert got.tolist() == pytest.approx([-1.3, -1.3, -1.3, -1.2, -1.1, -1.2]) and not got.requires_grad


def test_mismatch_statistics_are_exact_on_a_full_enumeration():
    """Each outcome as often as the engine samples it: k3, chi2 and ESS are then the exact divergences."""
    times = torch.tensor([5, 3, 2])
    old, engine = OLD.repeat_interleave(times), ENGINE.repeat_interleave(times)
    got = mismatch_stats(torch.cat([old, torch.tensor([-3.0])]), torch.cat([engine, torch.tensor([NAN])]))
    p, q = ENGINE.exp(), OLD.exp()
    assert got["mismatch_k3"] == pytest.approx((p * (p / q).log()).sum().item())
    assert got["mismatch_chi2"] == pytest.approx((q**2 / p).sum().item() - 1)
    assert got["mismatch_ess_frac"] == pytest.approx(1 / (q**2 / p).sum().item())
    assert got["mismatch_mean"] == pytest.approx((p * (p / q).log().abs()).sum().item())
    assert got["mismatch_max"] == pytest.approx(math.log(1.75)) and got["mismatch_rho_p999"] == pytest.approx(1.75)


def test_mismatch_statistics_at_the_edges():
    assert mismatch_stats(OLD, torch.full((3,), NAN)) == {} == mismatch_stats(OLD[:0], ENGINE[:0])
    same = mismatch_stats(OLD, OLD)
    assert (
        same["mismatch_ess_frac"] == 1.0 and same["mismatch_k3"] == same["mismatch_chi2"] == same["mismatch_max"] == 0
    )
    tail = mismatch_stats(torch.arange(1.0, 2001.0).double().log(), torch.zeros(2000))
    assert tail["mismatch_rho_p999"] == pytest.approx(1998.0) and tail["mismatch_ess_frac"] < 0.76


@pytest.mark.parametrize(
    ("kind", "bounds", "message"),
    [
        ("tiss", {}, "did you mean 'tis'"),
        ("mis", {"low": 1.2}, "no mismatch"),
        ("tis", {"high": 0.5}, "no mismatch"),
        ("icepop", {"low": -1.0}, "0 or above"),
        ("k3_rs", {"high": -0.1}, "no mismatch"),
        ("geo_rs", {"high": NAN}, "no mismatch"),
    ],
)
def test_refusals(kind, bounds, message):
    with pytest.raises(ConfigError, match=message):
        check_correction(kind, **bounds)
