"""Corrections for samples that aren't from the policy being trained: train-inference mismatch and staleness.

Three policies: the engine's (it sampled), the old one (the learner before this update) and the current one. The ratio
rho = old / engine (drift 1) is corrected here, by a weight without gradient that multiplies the loss; policy / old
(drift 2) is the ratio inside the loss. Their product is the full importance weight, so:

- *decoupled PPO* (arXiv 2110.00641; AReaL, 2505.24298) is any loss with these weights, old being the proximal policy:
  recomputed, or approximated by `proximal_logprobs`;
- *bypass* (the engine's log-probs taken as old ones) has the whole correction inside the loss. Pass the same
  log-probs here and every weight is 1: it can't be counted twice. Passing recomputed ones here would.

Rejected tokens have weight 0 but stay in the denominators of the aggregation, as in AReaL: rejection then shrinks the
step, where a new count would blow the survivors up. Log the kept fraction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from upswing.algo.aggregate import segment_sums
from upswing.algo.loss import MAX_LOG_RATIO
from upswing.errors import ConfigError, did_you_mean


@dataclass(frozen=True, kw_only=True)
class CorrectionSpec:
    """One kind: which statistic of rho is bounded, what happens outside the bounds, and the default bounds."""

    statistic: str
    """`token`: rho; `product`: of rho over the sequence; `mean`: geometric, of rho over the sequence; `k3`: mean of
    rho - 1 - log rho over the sequence, 0 at no mismatch."""
    action: str
    """`truncate`: weight = statistic clamped to the bounds. `mask`: weight = statistic, 0 outside. `reject`: weight =
    1, 0 outside."""
    low: float
    high: float
    source: str


CORRECTIONS: Mapping[str, CorrectionSpec] = MappingProxyType(
    {
        "tis": CorrectionSpec(statistic="token", action="truncate", low=0.0, high=2.0, source="Yao et al. 2025, TIS"),
        "seq_tis": CorrectionSpec(
            statistic="product", action="truncate", low=0.0, high=2.0, source="Liu, Li et al. 2025"
        ),
        "mis": CorrectionSpec(statistic="token", action="mask", low=0.0, high=3.0, source="Liu, Li et al. 2025"),
        "seq_mis": CorrectionSpec(
            statistic="product", action="mask", low=0.0, high=3.0, source="Liu, Li et al. 2025; arXiv 2510.26788"
        ),
        "icepop": CorrectionSpec(statistic="token", action="mask", low=0.5, high=5.0, source="arXiv 2510.18855"),
        "geo_rs": CorrectionSpec(
            statistic="mean", action="reject", low=0.999, high=1.001, source="Liu, Li et al. 2025, part 3"
        ),
        "k3_rs": CorrectionSpec(statistic="k3", action="reject", low=0.0, high=0.01, source="verl, rollout correction"),
    }
)


@dataclass(frozen=True, kw_only=True, eq=False)
class CorrectionTerms:
    """Both [N], without gradient."""

    weights_N: torch.Tensor
    """Multiplies the loss; 0 where rejected."""
    kept_N: torch.Tensor
    """bool."""


def check_correction(kind: str, low: float | None = None, high: float | None = None) -> tuple[float, float]:
    """The bounds of `kind`, defaults filled in. Raises ConfigError: unknown kind, or bounds that exclude rho = 1."""
    if kind not in CORRECTIONS:
        raise ConfigError(f"correction is '{kind}'; allowed: {', '.join(CORRECTIONS)}{did_you_mean(kind, CORRECTIONS)}")
    spec = CORRECTIONS[kind]
    low, high = spec.low if low is None else low, spec.high if high is None else high
    neutral = 0.0 if spec.statistic == "k3" else 1.0
    if not (0.0 <= low <= neutral <= high and low < high):
        raise ConfigError(
            f"correction '{kind}' has bounds low {low:g} and high {high:g}; they must be 0 or above and have "
            f"{neutral:g} (no mismatch) between them, such as {spec.low:g} and {spec.high:g}"
        )
    return low, high


def correction_weights(
    old_logprobs_N: torch.Tensor,
    engine_logprobs_N: torch.Tensor,
    sequence_N: torch.Tensor,
    *,
    kind: str,
    low: float | None = None,
    high: float | None = None,
) -> CorrectionTerms:
    """Weights for rho = old / engine; `low` and `high` bound the statistic of `kind` (ratios, not logs), inclusive.

    All [N]. A NaN engine log-prob is unknown: a kind with statistic `token` gives it weight 1; in the others it is no
    evidence, and the token shares its sequence's fate. Logs are clamped to +-20, the sum over a long sequence too.
    Raises ConfigError as `check_correction`.
    """
    low, high = check_correction(kind, low, high)
    spec = CORRECTIONS[kind]
    log_rho_N, known_N = _log_rho(old_logprobs_N, engine_logprobs_N)
    if spec.statistic == "k3":
        value_N = _sequence_mean(log_rho_N.expm1() - log_rho_N, known_N, sequence_N)
    else:
        if spec.statistic == "product":
            log_rho_N = segment_sums(log_rho_N, sequence_N)[0].clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        elif spec.statistic == "mean":
            log_rho_N = _sequence_mean(log_rho_N, known_N, sequence_N)
        value_N = log_rho_N.exp()
    kept_N = torch.ones_like(known_N) if spec.action == "truncate" else (value_N >= low) & (value_N <= high)
    weights_N = {"truncate": value_N.clamp(low, high), "mask": value_N, "reject": torch.ones_like(value_N)}[spec.action]
    return CorrectionTerms(weights_N=weights_N * kept_N, kept_N=kept_N)


def opsm_mask(
    policy_logprobs_N: torch.Tensor,
    engine_logprobs_N: torch.Tensor,
    advantages_N: torch.Tensor,
    sequence_N: torch.Tensor,
    *,
    delta: float = 0.5,
) -> torch.Tensor:
    """Off-policy sequence mask (DeepSeek-V3.2, arXiv 2512.02556): bool [N], False on tokens to leave out.

    Left out: tokens with A < 0 in a sequence whose mean of engine - policy log-probs is above `delta` nats: a bad
    sample that the current policy would hardly produce teaches nothing. NaN engine log-probs count nowhere.
    """
    log_rho_N, known_N = _log_rho(policy_logprobs_N, engine_logprobs_N)
    return (advantages_N >= 0) | (-_sequence_mean(log_rho_N, known_N, sequence_N) <= delta)


def proximal_logprobs(
    policy_logprobs_N: torch.Tensor,
    engine_logprobs_N: torch.Tensor,
    version_N: torch.Tensor,
    *,
    policy_version: int,
) -> torch.Tensor:
    """Log-probs of the proximal policy (version `policy_version` - 1) without its forward pass, no gradient, [N].

    AReaL's interpolation per token: engine + alpha (policy - engine), alpha = (policy_version - 1 - v) /
    (policy_version - v) with v the version that sampled the token; a token not older than the proximal policy has
    alpha 0. Where the engine's log-prob is NaN: the policy's.
    """
    lag_N = (policy_version - version_N).to(policy_logprobs_N.dtype)
    alpha_N = ((lag_N - 1.0) / lag_N.clamp(min=1.0)).clamp(0.0, 1.0)
    policy_N = policy_logprobs_N.detach()
    return torch.where(engine_logprobs_N.isnan(), policy_N, torch.lerp(engine_logprobs_N, policy_N, alpha_N))


def mismatch_stats(old_logprobs_N: torch.Tensor, engine_logprobs_N: torch.Tensor) -> dict[str, float]:
    """How far the learner's log-probs are from the engine's, over tokens where both are known; {} if there are none.

    `mismatch_mean`, `mismatch_max`: of |old - engine|; `mismatch_k3`: KL(engine, old); `mismatch_chi2`: of old from
    engine; `mismatch_ess_frac`: effective sample size / N; `mismatch_rho_p999`: quantile of rho. Worth an alarm
    (verl's documentation): chi2 > 1, ess_frac < 0.3.
    """
    log_rho_N, known_N = _log_rho(old_logprobs_N, engine_logprobs_N)
    log_rho_N = log_rho_N[known_N].double()
    if len(log_rho_N) == 0:
        return {}
    rho_N = log_rho_N.exp()
    stats = {
        "mean": log_rho_N.abs().mean(),
        "max": log_rho_N.abs().max(),
        "k3": (log_rho_N.expm1() - log_rho_N).mean(),
        "chi2": rho_N.square().mean() - 1.0,
        "ess_frac": rho_N.mean().square() / rho_N.square().mean(),
        "rho_p999": rho_N.kthvalue(-(-999 * len(rho_N) // 1000)).values,
    }
    return {f"mismatch_{name}": float(value) for name, value in stats.items()}


def _log_rho(old_logprobs_N: torch.Tensor, engine_logprobs_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """log(old / engine) clamped to +-20, 0 where unknown, without gradient; and where it is known."""
    known_N = ~engine_logprobs_N.isnan()
    log_rho_N = (old_logprobs_N.detach() - engine_logprobs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_rho_N.masked_fill(~known_N, 0.0), known_N


def _sequence_mean(values_N: torch.Tensor, known_N: torch.Tensor, sequence_N: torch.Tensor) -> torch.Tensor:
    """Mean over the known tokens of each sequence, 0 where there are none."""
    count_N = segment_sums(known_N.to(values_N.dtype), sequence_N)[0]
    return segment_sums(values_N, sequence_N)[0] / count_N.clamp(min=1.0)
