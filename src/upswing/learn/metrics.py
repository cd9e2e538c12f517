"""What an update reports. Means are sums with counts, so that they add up over micro-batches and ranks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch

RATIO_QUANTILES = {"ratio_p01": 0.01, "ratio_p99": 0.99, "ratio_p999": 0.999}


@dataclass(frozen=True)
class Mean:
    """A mean in the making."""

    total: float = 0.0
    count: int = 0

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)

    def __sub__(self, other: Mean) -> Mean:
        return Mean(self.total - other.total, self.count - other.count)

    @property
    def value(self) -> float:
        """NaN when nothing was counted."""
        return self.total / self.count if self.count else math.nan

    @classmethod
    def of(cls, values_N: torch.Tensor) -> Mean:
        return cls(float(values_N.detach().double().sum()), values_N.numel())


@dataclass(kw_only=True)
class Tally:
    """One update's means over loss tokens by name, maxima, counts, and values that are needed one by one."""

    lr: float = math.nan
    seconds: float = math.nan
    means: dict[str, Mean] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    values: dict[str, list[np.ndarray]] = field(default_factory=dict)
    squares: dict[str, float] = field(default_factory=dict)
    """Sums of squares over the packs of the optimizer step under way."""

    def add(self, name: str, values_N: torch.Tensor) -> None:
        self.means[name] = self.means.get(name, Mean()) + Mean.of(values_N)

    def add_value(self, name: str, value: float) -> None:
        self.means[name] = self.means.get(name, Mean()) + Mean(value, 1)

    def add_max(self, name: str, values_N: torch.Tensor) -> None:
        if values_N.numel():
            self.maxima[name] = max(self.maxima.get(name, -math.inf), float(values_N.max()))

    def add_all(self, **values_N: torch.Tensor) -> None:
        """Keep every value; memory is that of the update's loss tokens."""
        for name, found_N in values_N.items():
            self.values.setdefault(name, []).append(found_N.detach().cpu().numpy())

    def all(self, name: str) -> np.ndarray:
        """[N] in the order added."""
        return np.concatenate([*self.values.get(name, ()), np.zeros(0, np.float32)])

    def add_squares(self, name: str, values_N: torch.Tensor) -> None:
        if values_N.numel():
            self.squares[name] = self.squares.get(name, 0.0) + float(values_N.double().sum())

    def end_step(self) -> None:
        """The step's norms, where finite, enter their means."""
        for name, total in self.squares.items():
            if math.isfinite(total):
                self.add_value(name, math.sqrt(total))
        self.squares.clear()

    def quantiles(self, name: str, levels: Iterable[float]) -> list[float]:
        """NaN without values."""
        values_N = self.all(name)
        return [float(np.quantile(values_N, level)) if len(values_N) else math.nan for level in levels]

    def mean(self, name: str) -> Mean:
        return self.means.get(name, Mean())


@dataclass(frozen=True, kw_only=True)
class UpdateMetrics:
    """One `sft_update` or `rl_update`. Means run over the loss tokens that were computed; NaN where there were none."""

    loss: float
    """The aggregated loss, mean over the optimizer steps of the update."""
    grad_norm: float
    """Before clipping; mean over the steps whose gradient was finite, NaN when there was none."""
    grad_good: Mean
    """Norm of the loss's gradient at the last hidden states that predict tokens of positive advantage, whole loss
    included; mean over the steps."""
    grad_bad: Mean
    entropy: Mean
    """Nats, of the tempered policy."""
    entropy_first: Mean
    """Of tokens of the first turn, where an agent decides what to do at all."""
    entropy_later: Mean
    policy_logprob: Mean
    ratio: Mean
    """policy / old."""
    ratio_max: float
    ratio_p01: float
    """Quantiles over all loss tokens of all steps."""
    ratio_p99: float
    ratio_p999: float
    clipped_low: Mean
    clipped_high: Mean
    dual_clipped: Mean
    kl: Mean
    """k3 to the reference; count 0 without one."""
    kl_clamped_frac: Mean
    """Share of tokens so far from the reference that k3 no longer grows."""
    kl_old: Mean
    """k3 between the policy before the update and now: how far this update moved."""
    mismatch_abs: Mean
    """|engine - old| log-prob, where the engine gave one: sampler and learner disagree by this much."""
    mismatch_k3: Mean
    mismatch_max: float
    mismatch_chi2: float
    """Chi-squared of the learner's distribution from the sampler's: mean of (old / engine)^2, less 1."""
    ess_frac: float
    """Effective sample size over loss tokens, as a share of them: 1 where sampler and learner agree."""
    logprob_good: Mean
    """policy log-prob on tokens of positive advantage; its fall while reward rises is likelihood displacement."""
    logprob_bad: Mean
    kept: Mean
    """Share of tokens that correction and off-policy mask keep; count 0 without them."""
    llds: Mean
    """LLDS penalty a computed token, unweighted; count 0 without it."""
    value_loss: Mean
    """Of a value head; count 0 without one."""
    num_rows: int
    num_rows_skipped: int
    """Rows that were not computed: no loss token, or advantage exactly 0 with nothing else in the loss."""
    num_loss_tokens: int
    """In the batch, skipped rows included: what the denominators count."""
    num_tokens: int
    """Run through the model forward and backward, shared prefixes once; every pass counts."""
    num_tokens_recomputed: int
    """Of these, the ones whose activations were recomputed in the backward pass."""
    num_steps: int
    """Optimizer steps that were applied."""
    num_steps_skipped: int
    """Steps not applied because no token had a gradient, or the gradient was not finite."""
    num_nonfinite: int
    """Of these, the ones with a gradient that was not finite."""
    num_steps_stopped: int
    """Steps left out because the policy had moved too far (`kl_stop`)."""
    lr: float
    seconds: float

    def as_dict(self) -> dict[str, float]:
        """Flat numbers for a log; a mean becomes its value."""
        values = {spec.name: getattr(self, spec.name) for spec in fields(self)}
        return {name: value.value if isinstance(value, Mean) else float(value) for name, value in values.items()}


def update_metrics(tally: Tally) -> UpdateMetrics:
    """Read an update's tally: means and counts by their names."""
    names = [spec.name for spec in fields(UpdateMetrics) if spec.type == "Mean"]
    counts = [spec.name for spec in fields(UpdateMetrics) if spec.name.startswith("num_")]
    found: dict[str, Any] = {name: tally.mean(name) for name in names}
    found |= zip(RATIO_QUANTILES, tally.quantiles("ratio", RATIO_QUANTILES.values()), strict=True)
    return UpdateMetrics(
        **found | {name: tally.counts[name.removeprefix("num_")] for name in counts},
        loss=tally.mean("loss").value,
        grad_norm=tally.mean("grad_norm").value,
        ratio_max=tally.maxima.get("ratio", math.nan),
        mismatch_max=tally.maxima.get("mismatch", math.nan),
        mismatch_chi2=tally.mean("rho_squared").value - 1.0,
        ess_frac=_ess(tally.mean("rho"), tally.mean("rho_squared")),
        lr=tally.lr,
        seconds=tally.seconds,
    )


def _ess(rho: Mean, squared: Mean) -> float:
    return rho.value**2 / squared.value if squared.count else math.nan
