"""Policy losses: one loss per token. Aggregation over tokens is in `aggregate.py`.

Every loss has the shape `(policy_logprobs_N, old_logprobs_N, advantages_N, **options) -> LossTerms`, N running over
loss tokens only; those of level `sequence` also take `sequence_N`, integer ids that group the tokens of one exact
token sequence, all of them present in the call. A new one is a new function and a line in `LOSSES`.

At policy == old the gradient of every one is that of -advantages * policy_logprobs. `old_logprobs_N` and
`advantages_N` carry no gradient. With `dual_clip` c, a token of a negative advantage never costs more than c |A|: a
trajectory with bad tokens that became likelier would otherwise have an unbounded loss (arXiv 1912.09729).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from upswing.algo.aggregate import segment_sums
from upswing.errors import ConfigError

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-this before exp, so that a ratio is always finite (e^20 = 4.9e8)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LossTerms:
    """A per-token loss and what was clipped. All [N]; only `loss_N` and `ratio_N` carry gradient."""

    loss_N: torch.Tensor
    ratio_N: torch.Tensor
    """policy / old probability as the loss uses it: of the token, or of its sequence."""
    clipped_low_N: torch.Tensor
    """bool: ratio below the lower bound on a token with a negative advantage; its gradient is 0 (`cispo`: a constant
    weight)."""
    clipped_high_N: torch.Tensor
    """bool: ratio above the upper bound on a token with a positive advantage; its gradient is 0 (`cispo`: as above)."""
    dual_clipped_N: torch.Tensor
    """bool: negative advantage and ratio above the dual clip; its gradient is 0."""


def safe_ratio(policy_logprobs_N: torch.Tensor, old_logprobs_N: torch.Tensor) -> torch.Tensor:
    """exp(policy - old), the log-ratio clamped to +-20; gradient flows to `policy_logprobs_N` inside the clamp."""
    return _log_ratio(policy_logprobs_N, old_logprobs_N).exp()


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

    max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)); with A < 0 also min(..., -dual_clip A).
    """
    return _clipped(safe_ratio(policy_logprobs_N, old_logprobs_N), advantages_N, clip_low, clip_high, dual_clip)


def policy_gradient(
    policy_logprobs_N: torch.Tensor, old_logprobs_N: torch.Tensor, advantages_N: torch.Tensor
) -> LossTerms:
    """-A * policy_logprobs: REINFORCE, RLOO, GPG (arXiv 2504.02546). The ratio is only reported.

    Off-policy it needs a correction weight (`correction.py`), which multiplies the loss without gradient.
    """
    ratio_N = safe_ratio(policy_logprobs_N, old_logprobs_N)
    return _terms(-advantages_N * policy_logprobs_N, ratio_N)


def gspo(
    policy_logprobs_N: torch.Tensor,
    old_logprobs_N: torch.Tensor,
    advantages_N: torch.Tensor,
    *,
    sequence_N: torch.Tensor,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    dual_clip: float | None = 3.0,
) -> LossTerms:
    """GSPO (arXiv 2507.18071): PPO's clip on the sequence's ratio s = exp(mean of policy - old).

    Written per token, sg[s] exp(policy - sg[policy]): GSPO-token, which under `seq-mean-token-mean` has exactly the
    value and gradient of the sequence form, and gives per-token advantages their due. Under any other aggregation it
    is another objective. Ids of (sequence, turn) as `sequence_N` make it turn-level.
    """
    log_ratio_N = policy_logprobs_N - old_logprobs_N
    ratio_N = _sequence_ratio(log_ratio_N, sequence_N)
    return _clipped(ratio_N, advantages_N, clip_low, clip_high, dual_clip)


def gmpo(
    policy_logprobs_N: torch.Tensor,
    old_logprobs_N: torch.Tensor,
    advantages_N: torch.Tensor,
    *,
    sequence_N: torch.Tensor,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
    dual_clip: float | None = 3.0,
) -> LossTerms:
    """GMPO (arXiv 2507.20673): -A times the geometric mean of the sequence's one-sidedly clipped token ratios.

    The bounds are of the *log*-ratio: it is capped at clip_high where A > 0, and at -clip_low from below where A < 0.
    Written per token like `gspo`, exact under `seq-mean-token-mean`. The dual clip is on the geometric mean; the paper
    has none. Sequences without loss tokens count nowhere (verl's mean over rows counts them).
    """
    log_ratio_N = _log_ratio(policy_logprobs_N, old_logprobs_N)
    negative_N = advantages_N < 0
    kept_N = torch.where(negative_N, log_ratio_N.clamp(min=-clip_low), log_ratio_N.clamp(max=clip_high))
    ratio_N = _sequence_ratio(kept_N, sequence_N)
    fixed_N = log_ratio_N.detach()
    return _terms(
        -advantages_N * ratio_N,
        ratio_N,
        negative_N & (fixed_N < -clip_low),
        (advantages_N > 0) & (fixed_N > clip_high),
        dual=(advantages_N, dual_clip),
    )


def cispo(
    policy_logprobs_N: torch.Tensor,
    old_logprobs_N: torch.Tensor,
    advantages_N: torch.Tensor,
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
) -> LossTerms:
    """CISPO (MiniMax-M1, arXiv 2506.13585): -sg[clip(r, 1 - clip_low, 1 + clip_high)] A policy_logprobs.

    The weight is truncated whatever the sign of A, so that no token's gradient vanishes. Bounds are relative to 1 as
    everywhere here; TRL's `epsilon_high` is the absolute cap, 1 + clip_high, and it has no lower one (clip_low 1).
    """
    ratio_N = safe_ratio(policy_logprobs_N, old_logprobs_N)
    fixed_N = ratio_N.detach()
    weight_N = fixed_N.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss_N = -weight_N * advantages_N * policy_logprobs_N
    return _terms(loss_N, ratio_N, fixed_N < 1.0 - clip_low, fixed_N > 1.0 + clip_high)


def sapo(
    policy_logprobs_N: torch.Tensor,
    old_logprobs_N: torch.Tensor,
    advantages_N: torch.Tensor,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> LossTerms:
    """SAPO (arXiv 2511.20347): -A (4 / tau) sigmoid(tau (r - 1)), a soft clip; tau_pos where A > 0, else tau_neg.

    Bounded by 4 |A| / tau. Both temperatures must be above 0; the published aggregation is `seq-mean-token-mean`.
    """
    ratio_N = safe_ratio(policy_logprobs_N, old_logprobs_N)
    tau_N = torch.where(advantages_N > 0, tau_pos, tau_neg)
    return _terms(-advantages_N * torch.sigmoid(tau_N * (ratio_N - 1.0)) * 4.0 / tau_N, ratio_N)


def clip_cov(
    policy_logprobs_N: torch.Tensor,
    old_logprobs_N: torch.Tensor,
    advantages_N: torch.Tensor,
    *,
    selected_N: torch.Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
) -> LossTerms:
    """Clip-Cov (arXiv 2505.22617): `ppo_clip` without the tokens of `clip_cov_mask` [N]: their loss is 0.

    They stay in the denominators, as published.
    """
    ratio_N = safe_ratio(policy_logprobs_N, old_logprobs_N)
    return _clipped(ratio_N, advantages_N.masked_fill(selected_N, 0.0), clip_low, clip_high, dual_clip)


def kl_cov(
    policy_logprobs_N: torch.Tensor,
    old_logprobs_N: torch.Tensor,
    advantages_N: torch.Tensor,
    *,
    selected_N: torch.Tensor,
    cov_coef: float = 1.0,
    dual_clip: float | None = 3.0,
) -> LossTerms:
    """KL-Cov (arXiv 2505.22617): -A r, plus cov_coef |policy - old| on the tokens of `kl_cov_mask` [N].

    No PPO clip, as published; the dual clip is ours. cov_coef 1 is the paper's, 0.1 the default of verl's config.
    """
    ratio_N = safe_ratio(policy_logprobs_N, old_logprobs_N)
    terms = _terms(-advantages_N * ratio_N, ratio_N, dual=(advantages_N, dual_clip))
    penalty_N = torch.where(selected_N, cov_coef * _log_ratio(policy_logprobs_N, old_logprobs_N).abs(), 0.0)
    return LossTerms(**{**vars(terms), "loss_N": terms.loss_N + penalty_N})


def clip_cov_mask(
    old_logprobs_N: torch.Tensor,
    advantages_N: torch.Tensor,
    *,
    fraction: float = 2e-4,
    low: float = 1.0,
    high: float = 5.0,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """bool [N]: floor(fraction N) random tokens among those with low < covariance < high; fewer if there are fewer.

    covariance = (A - mean A)(old - mean old) over *all* loss tokens of the batch, N of them: call it once for the
    batch, so that the choice doesn't depend on micro-batches or ranks. Published is the same with the current
    log-probs, which at the first update are the old ones. The paper's floor is kept: a batch below 1 / fraction
    tokens selects none, where verl takes at least one.
    """
    cov_N = _covariance(old_logprobs_N, advantages_N)
    candidates = ((cov_N > low) & (cov_N < high)).nonzero()[:, 0]
    order = torch.randperm(len(candidates), generator=generator, device=None if generator is None else generator.device)
    return _chosen(cov_N, candidates[order.to(candidates.device)[: int(fraction * len(cov_N))]])


def kl_cov_mask(old_logprobs_N: torch.Tensor, advantages_N: torch.Tensor, *, fraction: float = 2e-3) -> torch.Tensor:
    """bool [N]: the floor(fraction N) tokens of largest covariance, as in `clip_cov_mask`, over the whole batch."""
    cov_N = _covariance(old_logprobs_N, advantages_N)
    return _chosen(cov_N, cov_N.topk(int(fraction * len(cov_N))).indices)


@dataclass(frozen=True, kw_only=True)
class LossSpec:
    """What a caller must know to use a loss by name."""

    function: Callable[..., LossTerms]
    options: tuple[str, ...] = ()
    """Options it takes; their defaults are the function's."""
    level: str = "token"
    """`sequence`: it takes `sequence_N`."""
    aggregation: str | None = None
    """The only aggregation with which it is the published objective; None: any."""
    select: Callable[..., torch.Tensor] | None = None
    """(old_logprobs_N, advantages_N, **select_options) -> bool [N] over the whole batch, before the first update; the
    loss takes its part of it as `selected_N`."""
    select_options: tuple[str, ...] = ()
    source: str


_CLIP = ("clip_low", "clip_high", "dual_clip")
LOSSES: Mapping[str, LossSpec] = MappingProxyType(
    {
        "ppo_clip": LossSpec(function=ppo_clip, options=_CLIP, source="arXiv 1707.06347, 2503.14476, 1912.09729"),
        "policy_gradient": LossSpec(function=policy_gradient, source="Williams 1992; arXiv 2402.14740, 2504.02546"),
        "gspo": LossSpec(
            function=gspo,
            options=_CLIP,
            level="sequence",
            aggregation="seq-mean-token-mean",
            source="arXiv 2507.18071",
        ),
        "gmpo": LossSpec(
            function=gmpo,
            options=_CLIP,
            level="sequence",
            aggregation="seq-mean-token-mean",
            source="arXiv 2507.20673",
        ),
        "cispo": LossSpec(function=cispo, options=("clip_low", "clip_high"), source="arXiv 2506.13585, 2510.13786"),
        "sapo": LossSpec(function=sapo, options=("tau_pos", "tau_neg"), source="arXiv 2511.20347"),
        "clip_cov": LossSpec(
            function=clip_cov,
            options=_CLIP,
            select=clip_cov_mask,
            select_options=("fraction", "low", "high", "generator"),
            source="arXiv 2505.22617",
        ),
        "kl_cov": LossSpec(
            function=kl_cov,
            options=("cov_coef", "dual_clip"),
            select=kl_cov_mask,
            select_options=("fraction",),
            source="arXiv 2505.22617",
        ),
    }
)


def _log_ratio(policy_logprobs_N: torch.Tensor, old_logprobs_N: torch.Tensor) -> torch.Tensor:
    return (policy_logprobs_N - old_logprobs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _sequence_ratio(log_ratio_N: torch.Tensor, sequence_N: torch.Tensor) -> torch.Tensor:
    """exp of the sequence's mean, with the gradient of a token's own `log_ratio_N` times that value."""
    fixed_N = log_ratio_N.detach()
    total_N, count_N = segment_sums(fixed_N, sequence_N)
    mean_N = (total_N / count_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return mean_N.exp() * (log_ratio_N - fixed_N).exp()


def _clipped(
    ratio_N: torch.Tensor, advantages_N: torch.Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> LossTerms:
    clipped_N = -advantages_N * ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high)
    fixed_N = ratio_N.detach()
    return _terms(
        torch.maximum(-advantages_N * ratio_N, clipped_N),
        ratio_N,
        (advantages_N < 0) & (fixed_N < 1.0 - clip_low),
        (advantages_N > 0) & (fixed_N > 1.0 + clip_high),
        dual=(advantages_N, dual_clip),
    )


def _terms(
    loss_N: torch.Tensor,
    ratio_N: torch.Tensor,
    low_N: torch.Tensor | None = None,
    high_N: torch.Tensor | None = None,
    *,
    dual: tuple[torch.Tensor, float | None] | None = None,
) -> LossTerms:
    """`dual`: (advantages, bound): caps the loss where the advantage is negative and the ratio above the bound."""
    none_N = torch.zeros_like(ratio_N, dtype=torch.bool)
    dual_N = none_N
    if dual is not None and dual[1] is not None:
        dual_N = (dual[0] < 0) & (ratio_N.detach() > dual[1])
        loss_N = torch.where(dual_N, -dual[1] * dual[0], loss_N)
    return LossTerms(
        loss_N=loss_N,
        ratio_N=ratio_N,
        clipped_low_N=none_N if low_N is None else low_N,
        clipped_high_N=none_N if high_N is None else high_N,
        dual_clipped_N=dual_N,
    )


def _covariance(old_logprobs_N: torch.Tensor, advantages_N: torch.Tensor) -> torch.Tensor:
    old_N = old_logprobs_N.detach()
    return (advantages_N - advantages_N.mean()) * (old_N - old_N.mean())


def _chosen(like_N: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(like_N, dtype=torch.bool).index_fill(0, index, True)
