"""Per-token KL estimators from samples of the policy, and which of them may be a loss.

With l = policy - ref log-prob: k1 = l, k2 = l^2 / 2, k3 = exp(-l) - 1 + l (Schulman, "Approximating KL divergence").
What an estimator is worth as a *value* and as a *loss* differ (arXiv 2512.21852):

| estimator | value | gradient of its mean, samples from the policy |
|---|---|---|
| k1 | KL(policy, ref), unbiased | 0 in expectation: pure noise |
| k2 | biased | exactly that of KL(policy, ref) |
| k3 | KL(policy, ref), unbiased, >= 0 | that of KL(ref, policy): another objective |
| ratio * k3 (`k3_ratio`) | the same | exactly that of KL(policy, ref), also when samples are from the old policy |
"""

from __future__ import annotations

import torch

from upswing.algo.loss import MAX_LOG_RATIO, safe_ratio
from upswing.errors import ConfigError, did_you_mean

KL_LOSS_ESTIMATORS = ("k2", "k3", "k3_ratio")


def kl_k1(policy_logprobs_N: torch.Tensor, ref_logprobs_N: torch.Tensor) -> torch.Tensor:
    """policy - ref [N]: unbiased, may be negative. For metrics and rewards, never for a loss."""
    return policy_logprobs_N - ref_logprobs_N


def kl_k2(policy_logprobs_N: torch.Tensor, ref_logprobs_N: torch.Tensor) -> torch.Tensor:
    """(policy - ref)^2 / 2 [N]."""
    return 0.5 * (policy_logprobs_N - ref_logprobs_N).square()


def kl_k3(policy_logprobs_N: torch.Tensor, ref_logprobs_N: torch.Tensor) -> torch.Tensor:
    """exp(-l) - 1 + l [N], never negative. l is clamped to +-20, where the gradient is 0."""
    log_ratio_N = (policy_logprobs_N - ref_logprobs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(-log_ratio_N) + log_ratio_N


def check_kl_estimator(estimator: str) -> None:
    """Raises ConfigError for an estimator that can't be a loss, and says why."""
    if estimator == "k1":
        raise ConfigError(
            "kl_estimator is 'k1': as a loss its gradient is zero in expectation, so it would only add noise; "
            "use 'k2' or 'k3_ratio'"
        )
    if estimator not in KL_LOSS_ESTIMATORS:
        allowed = ", ".join(KL_LOSS_ESTIMATORS)
        hint = did_you_mean(estimator, KL_LOSS_ESTIMATORS)
        raise ConfigError(f"kl_estimator is '{estimator}'; allowed: {allowed}{hint}")


def kl_loss(
    policy_logprobs_N: torch.Tensor,
    ref_logprobs_N: torch.Tensor,
    *,
    estimator: str = "k2",
    old_logprobs_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """The KL penalty to the reference as a per-token loss [N]; gradient flows to `policy_logprobs_N`.

    `estimator`: `k2` (default), `k3_ratio` (needs `old_logprobs_N`, the policy that sampled) or `k3` (kept because
    GRPO was published with it; its gradient is that of the opposite KL). Raises ConfigError for `k1` and unknown ones.
    """
    check_kl_estimator(estimator)
    if estimator == "k2":
        return kl_k2(policy_logprobs_N, ref_logprobs_N)
    if estimator == "k3":
        return kl_k3(policy_logprobs_N, ref_logprobs_N)
    if old_logprobs_N is None:
        raise ValueError("kl estimator 'k3_ratio' needs old_logprobs_N")
    return safe_ratio(policy_logprobs_N, old_logprobs_N) * kl_k3(policy_logprobs_N, ref_logprobs_N)
