"""Policy losses: one loss per token. Aggregation over tokens is in `aggregate.py`.

Every loss has the shape `(policy_logprobs_N, old_logprobs_N, advantages_N, **options) -> LossTerms`, N running over
loss tokens only; a new one is a new function.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from upswing.errors import ConfigError

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-this before exp, so that a ratio is always finite (e^20 = 4.9e8)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LossTerms:
    """A per-token loss and what was clipped. All [N]; only `loss_N` and `ratio_N` carry gradient."""

    loss_N: torch.Tensor
    ratio_N: torch.Tensor
    """policy / old probability."""
    clipped_low_N: torch.Tensor
    """bool: ratio fell below 1 - clip_low on a token with a negative advantage; its gradient is 0."""
    clipped_high_N: torch.Tensor
    """bool: ratio rose above 1 + clip_high on a token with a positive advantage; its gradient is 0."""
    dual_clipped_N: torch.Tensor
    """bool: negative advantage and ratio above the dual clip; its gradient is 0."""


def safe_ratio(policy_logprobs_N: torch.Tensor, old_logprobs_N: torch.Tensor) -> torch.Tensor:
    """exp(policy - old), the log-ratio clamped to +-20; gradient flows to `policy_logprobs_N` inside the clamp."""
    return (policy_logprobs_N - old_logprobs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def check_clip(*, clip_low: float, clip_high: float, dual_clip: float | None) -> None:
    """Raises ConfigError for clip bounds that make no sense."""
    if not 0.0 < clip_low <= 1.0:
        raise ConfigError(f"clip_low is {clip_low}; it must be above 0 and at most 1 (1: no lower clip), such as 0.2")
    if not clip_high > 0.0:
        raise ConfigError(f"clip_high is {clip_high}; it must be above 0, such as 0.2 or 0.28")
    if dual_clip is not None and not dual_clip > 1.0 + clip_high:
        raise ConfigError(
            f"dual_clip is {dual_clip}; it must be above 1 + clip_high = {1 + clip_high:g}, such as 3.0, "
            "or null for none"
        )


def ppo_clip(
    policy_logprobs_N: torch.Tensor,
    old_logprobs_N: torch.Tensor,
    advantages_N: torch.Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
) -> LossTerms:
    """PPO's clipped loss (arXiv 1707.06347) with separate bounds (DAPO, 2503.14476) and dual clip (1912.09729).

    max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)); with A < 0 also min(..., -dual_clip A), without which the loss
    is unbounded when a token of a bad trajectory becomes likelier. All inputs [N]; `old_logprobs_N` and
    `advantages_N` carry no gradient. With policy == old (on-policy) the gradient is that of -A * policy_logprobs.
    """
    ratio_N = safe_ratio(policy_logprobs_N, old_logprobs_N)
    unclipped_N = -advantages_N * ratio_N
    clipped_N = -advantages_N * ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss_N = torch.maximum(unclipped_N, clipped_N)
    fixed_N = ratio_N.detach()
    negative_N = advantages_N < 0
    dual_N = torch.zeros_like(negative_N)
    if dual_clip is not None:
        dual_N = negative_N & (fixed_N > dual_clip)
        loss_N = torch.where(dual_N, -dual_clip * advantages_N, loss_N)
    return LossTerms(
        loss_N=loss_N,
        ratio_N=ratio_N,
        clipped_low_N=negative_N & (fixed_N < 1.0 - clip_low),
        clipped_high_N=(advantages_N > 0) & (fixed_N > 1.0 + clip_high),
        dual_clipped_N=dual_N,
    )
