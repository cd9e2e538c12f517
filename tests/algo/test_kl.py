"""The table of `kl.py` against a softmax whose KL is known exactly."""

import math
from itertools import pairwise

import pytest
import torch

from upswing.algo.kl import adaptive_kl_coef, kl_clamped, kl_k1, kl_k2, kl_k3, kl_loss, kl_reward
from upswing.errors import ConfigError

REF = torch.log_softmax(torch.tensor([0.3, -1.0, 0.8, 0.1, -0.4, 0.6], dtype=torch.float64), -1)
LOGITS = torch.tensor([1.0, 0.2, -0.5, 0.7, 0.0, -0.3], dtype=torch.float64)
OLD = torch.log_softmax(torch.tensor([0.5, 0.5, -0.1, 0.2, 0.3, 0.0], dtype=torch.float64), -1)


def exact_gradient(kind):
    logits = LOGITS.clone().requires_grad_()
    policy = torch.log_softmax(logits, -1)
    reverse = (policy.exp() * (policy - REF)).sum()
    forward = (REF.exp() * (REF - policy)).sum()
    return torch.autograd.grad({"reverse": reverse, "forward": forward}[kind], logits)[0]


def estimator_gradient(loss, sampler):
    """Gradient of the expected loss, samples from `sampler`: an exact sum over the six outcomes."""
    logits = LOGITS.clone().requires_grad_()
    policy = torch.log_softmax(logits, -1)
    probs = (policy if sampler is None else sampler).detach().exp()
    return torch.autograd.grad((probs * loss(policy)).sum(), logits)[0]


def test_k2_has_the_reverse_gradient():
    got = estimator_gradient(lambda policy: kl_loss(policy, REF, estimator="k2"), None)
    torch.testing.assert_close(got, exact_gradient("reverse"), rtol=0, atol=1e-12)


@pytest.mark.parametrize("sampler", [None, OLD])
def test_ratio_k3_has_the_reverse_gradient_off_policy_too(sampler):
    old = torch.log_softmax(LOGITS, -1) if sampler is None else sampler
    got = estimator_gradient(lambda p: kl_loss(p, REF, estimator="k3_ratio", old_logprobs_N=old), sampler)
    torch.testing.assert_close(got, exact_gradient("reverse"), rtol=0, atol=1e-12)


def test_k3_has_the_forward_gradient():
    got = estimator_gradient(lambda policy: kl_loss(policy, REF, estimator="k3"), None)
    torch.testing.assert_close(got, exact_gradient("forward"), rtol=0, atol=1e-12)
    assert (got - exact_gradient("reverse")).norm() > 0.1 * got.norm()


def test_k1_would_have_no_gradient_and_is_refused():
    assert estimator_gradient(lambda policy: kl_k1(policy, REF), None).abs().max() < 1e-12
    with pytest.raises(ConfigError, match="zero in expectation"):
        kl_loss(LOGITS, REF, estimator="k1")


def test_values():
    policy = torch.log_softmax(LOGITS, -1)
    exact = (policy.exp() * (policy - REF)).sum()
    for estimate in (kl_k1, kl_k3):
        torch.testing.assert_close((policy.exp() * estimate(policy, REF)).sum(), exact)
    assert (kl_k3(policy, REF) >= 0).all() and (kl_k2(policy, REF) >= 0).all()


def test_k1_in_the_reward_has_the_reverse_gradient_and_k3_would_not():
    """Policy gradient with the KL as a cost that carries no gradient: -(-kl) * logprob, samples from the policy."""
    logits = LOGITS.clone().requires_grad_()
    policy = torch.log_softmax(logits, -1)
    cost = kl_reward(policy, REF)
    assert not cost.requires_grad
    got = torch.autograd.grad((policy.detach().exp() * cost * policy).sum(), logits, retain_graph=True)[0]
    torch.testing.assert_close(got, exact_gradient("reverse"), rtol=0, atol=1e-12)
    wrong = torch.autograd.grad((policy.detach().exp() * kl_k3(policy, REF).detach() * policy).sum(), logits)[0]
    assert (wrong - exact_gradient("reverse")).norm() > 0.1 * wrong.norm()
    with pytest.raises(ConfigError, match="only 'k1'"):
        kl_reward(policy, REF, estimator="k3")


@pytest.mark.parametrize("estimator", ["k2", "k3", "k3_ratio"])
def test_descent_on_the_penalty_alone_approaches_the_reference(estimator):
    """KL-01: the sign. No reward, 20 steps of 0.1: the exact KL falls monotonically from 0.111."""
    logits, ref = torch.tensor([1.0, 0.0], dtype=torch.float64), torch.log_softmax(torch.zeros(2).double(), -1)
    values = []
    for _ in range(21):
        logits.requires_grad_()
        policy = torch.log_softmax(logits, -1)
        values.append((policy.exp() * (policy - ref)).sum().item())
        loss = kl_loss(policy, ref, estimator=estimator, old_logprobs_N=policy.detach())
        (grad,) = torch.autograd.grad((policy.detach().exp() * loss).sum(), logits)
        logits = logits.detach() - 0.1 * grad
    assert values[0] == pytest.approx(0.1109, abs=1e-4)
    assert all(b < a for a, b in pairwise(values)) and values[-1] < 0.6 * values[0]


def test_only_loss_tokens_count():
    """KL-06: two tokens that a tool wrote, 7 nats away, are not among the loss tokens; all five would sum to -14."""
    policy, ref = torch.tensor([-1.0, -1, -9, -9, -1]), torch.tensor([-1.0, -1, -2, -2, -1])
    loss_mask = torch.tensor([True, True, False, False, True])
    assert kl_k1(policy, ref).sum() == -14 and kl_k1(policy[loss_mask], ref[loss_mask]).sum() == 0


@pytest.mark.parametrize("gap", [-300.0, -119.0, -20.5, 20.5, 300.0])
def test_far_from_the_reference_value_and_gradient_are_finite_and_stated(gap):
    """KL-03: k3 is capped with gradient 0 (bounded before exp, so never NaN); k2 and k3_ratio still pull back."""
    policy, ref = torch.tensor([gap - 1.0], dtype=torch.float64, requires_grad=True), torch.tensor([-1.0]).double()
    values, grads = {}, {}
    for estimator in ("k2", "k3", "k3_ratio"):
        loss = kl_loss(policy, ref, estimator=estimator, old_logprobs_N=policy.detach())
        values[estimator], grads[estimator] = loss.item(), torch.autograd.grad(loss.sum(), policy)[0].item()
    cap = math.exp(20) - 21 if gap < 0 else math.exp(-20) + 19
    assert values["k3"] == values["k3_ratio"] == pytest.approx(cap)
    assert grads["k3"] == 0 and grads["k2"] == pytest.approx(gap) and grads["k3_ratio"] == pytest.approx(gap)
    assert kl_clamped(policy, ref).tolist() == [True] and kl_clamped(ref + 19, ref).tolist() == [False]


def test_ratio_k3_is_the_product_that_autograd_sees():
    policy = torch.log_softmax(LOGITS, -1).requires_grad_()
    product = (policy - OLD).exp() * kl_k3(policy, REF)
    got = kl_loss(policy, REF, estimator="k3_ratio", old_logprobs_N=OLD)
    torch.testing.assert_close(got, product)
    expected = torch.autograd.grad(product.sum(), policy)[0]
    torch.testing.assert_close(torch.autograd.grad(got.sum(), policy)[0], expected)


def test_adaptive_coefficient():
    step = {"target": 0.1, "horizon": 1000, "num_samples": 100}
    assert adaptive_kl_coef(0.5, 0.11, **step) == pytest.approx(0.5 * (1 + 0.1 * 0.1))
    assert adaptive_kl_coef(0.5, 9.0, **step) == pytest.approx(0.5 * 1.02) == adaptive_kl_coef(0.5, math.inf, **step)
    assert adaptive_kl_coef(0.5, -9.0, **step) == pytest.approx(0.5 * 0.98)
    assert adaptive_kl_coef(0.5, 0.1, **step) == 0.5 == adaptive_kl_coef(0.5, math.nan, **step)
    assert adaptive_kl_coef(0.5, 0.0, target=0.1, horizon=10, num_samples=10**6) == pytest.approx(0.4)
    with pytest.raises(ConfigError, match="above 0"):
        adaptive_kl_coef(0.5, 0.1, target=0.0, horizon=10, num_samples=1)


def test_unknown_estimator_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'k3_ratio'"):
        kl_loss(LOGITS, REF, estimator="k3_ratios")
