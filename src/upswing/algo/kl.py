"""Per-token KL estimators from samples of the policy, and which of them may be a loss or a reward.

With l = policy - ref log-prob: k1 = l, k2 = l^2 / 2, k3 = exp(-l) - 1 + l (Schulman, "Approximating KL divergence").
What an estimator is worth as a *value* and as a *loss* differ (arXiv 2512.21852):

| estimator | value | gradient of its mean, samples from the policy |
|---|---|---|
| k1 | KL(policy, ref), unbiased | 0 in expectation: pure noise |
| k2 | biased | exactly that of KL(policy, ref) |
| k3 | KL(policy, ref), unbiased, >= 0 | that of KL(ref, policy): another objective |
| ratio * k3 (`k3_ratio`) | the same | exactly that of KL(policy, ref), also when samples are from the old policy |
| k1 in the *reward* | - | exactly that of KL(policy, ref), through the policy gradient |

Far from the reference (|l| > 20, `kl_clamped`) the value of k3 stops at e^20 - 21 and its gradient is 0: a policy that
has collapsed is no longer pulled back. k2 and k3_ratio keep their gradient, l and ratio * l, at any distance.
"""

from __future__ import annotations

import math

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
    # d(ratio k3) = ratio l d(policy) in closed form: autograd would lose the cancelling half where k3 is clamped.
    ratio_N, fixed_N = safe_ratio(policy_logprobs_N, old_logprobs_N).detach(), policy_logprobs_N.detach()
    slope_N = ratio_N * kl_k1(fixed_N, ref_logprobs_N)
    return ratio_N * kl_k3(fixed_N, ref_logprobs_N) + slope_N * (policy_logprobs_N - fixed_N)


def kl_reward(logprobs_N: torch.Tensor, ref_logprobs_N: torch.Tensor, *, estimator: str = "k1") -> torch.Tensor:
    """The KL of each token to subtract from its reward, times a coefficient: k1, without gradient, [N].

    `logprobs_N`: of the policy that sampled (old_logprobs). Raises ConfigError for any other estimator: the policy
    gradient leaves out the gradient of the reward itself, and only k1's is zero in expectation.
    """
    if estimator != "k1":
        raise ConfigError(
            f"kl_estimator is '{estimator}' with the KL in the reward; only 'k1' has the right gradient there; "
            "use it, or put the KL in the loss"
        )
    return kl_k1(logprobs_N.detach(), ref_logprobs_N)


def kl_clamped(policy_logprobs_N: torch.Tensor, ref_logprobs_N: torch.Tensor) -> torch.Tensor:
    """bool [N]: |policy - ref| is beyond the clamp. Any at all is worth an alarm."""
    return kl_k1(policy_logprobs_N.detach(), ref_logprobs_N).abs() > MAX_LOG_RATIO


def adaptive_kl_coef(coef: float, kl: float, *, target: float, horizon: float, num_samples: int) -> float:
    """The next KL coefficient (Ziegler et al., arXiv 1909.08593): coef (1 + clip(kl / target - 1, +-0.2) n / horizon).

    `kl`: mean over the batch, in the unit of `target`; NaN leaves the coefficient. n: samples since the last step, at
    most `horizon`. Raises ConfigError unless target and horizon are above 0.
    """
    if not (target > 0 and horizon > 0):
        raise ConfigError(f"kl target is {target} and horizon {horizon}; both must be above 0, such as 0.1 and 10000")
    if math.isnan(kl):
        return coef
    error = min(max(kl / target - 1.0, -0.2), 0.2)
    return coef * (1.0 + error * min(num_samples / horizon, 1.0))
