"""How `rl_update` turns advantages into a step."""

from __future__ import annotations

from dataclasses import dataclass

from upswing.algo import check_aggregation, check_clip, check_kl_estimator
from upswing.errors import ConfigError, did_you_mean

OLD_LOGPROBS = ("recompute", "engine")


@dataclass(frozen=True, kw_only=True)
class RLOptions:
    """How `rl_update` turns advantages into a step. Checked when made: ConfigError names what is wrong."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = 3.0
    """Bound on the ratio for negative advantages; None: none."""
    kl_coef: float = 0.0
    """Weight of the KL to the reference model, which is run only above 0."""
    kl_estimator: str = "k2"
    entropy_coef: float = 0.0
    """Weight of an entropy bonus."""
    aggregation: str = "token-mean"
    norm_length: float | None = None
    """Tokens to divide by in `seq-mean-token-sum-norm`."""
    temperature: float = 1.0
    """The one that the batch was sampled with."""
    updates_per_batch: int = 1
    """Passes over the batch."""
    minibatches: int = 1
    """Optimizer steps in each pass; each has its own denominators."""
    old_logprobs: str = "recompute"
    """Where they come from when there is more than one optimizer step: `recompute`, a forward before the first one; or
    `engine`, the sampler's own (bypass mode), which saves that forward and is as exact as engine and learner agree."""

    def __post_init__(self) -> None:
        check_clip(clip_low=self.clip_low, clip_high=self.clip_high, dual_clip=self.dual_clip)
        check_kl_estimator(self.kl_estimator)
        check_aggregation(self.aggregation, self.norm_length)
        if self.kl_coef < 0:
            raise ConfigError(f"kl_coef is {self.kl_coef}; it must be 0 (no KL) or above")
        if not self.temperature > 0:
            raise ConfigError(
                f"temperature is {self.temperature}; RL needs one above 0, the one that the batch was sampled with"
            )
        if self.old_logprobs not in OLD_LOGPROBS:
            raise ConfigError(
                f"old_logprobs is '{self.old_logprobs}'; allowed: {', '.join(OLD_LOGPROBS)}"
                f"{did_you_mean(self.old_logprobs, OLD_LOGPROBS)}"
            )
        for name in ("updates_per_batch", "minibatches"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")

    @property
    def regularised(self) -> bool:
        """Whether rows without an advantage have a gradient too."""
        return self.kl_coef > 0 or self.entropy_coef != 0

    @property
    def on_policy(self) -> bool:
        """One step a batch: the policy before the step is the policy of the step."""
        return self.updates_per_batch * self.minibatches == 1
