"""The table of `kl.py` against a softmax whose KL is known exactly."""

import pytest
import torch

from upswing.algo import kl_k1, kl_k2, kl_k3, kl_loss
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


def test_extreme_log_ratios_stay_finite():
    far = torch.tensor([-300.0, 300.0])
    assert kl_k3(far, torch.zeros(2)).isfinite().all()


def test_unknown_estimator_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'k3_ratio'"):
        kl_loss(LOGITS, REF, estimator="k3_ratios")
