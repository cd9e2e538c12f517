"""How `rl_update` turns advantages into a step."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from upswing.algo.aggregate import check_aggregation
from upswing.algo.correction import check_correction
from upswing.algo.kl import check_kl_estimator
from upswing.algo.loss import LOSSES, LossSpec, check_clip
from upswing.algo.regularise import LLDS_GATES
from upswing.errors import ConfigError, did_you_mean

OLD_LOGPROBS = ("recompute", "engine")


@dataclass(frozen=True, kw_only=True)
class RLOptions:
    """Choices of a policy loss and what is added to it. Checked when made: ConfigError names what is wrong."""

    loss: str = "ppo_clip"
    """A name in `algo.loss.LOSSES`; the fields down to `ratio_level` are its options, None its own default."""
    clip_low: float | None = None
    clip_high: float | None = None
    dual_clip: float | None = 3.0
    """Bound on the ratio for negative advantages; None: none."""
    tau_pos: float | None = None
    tau_neg: float | None = None
    cov_fraction: float | None = None
    cov_coef: float | None = None
    ratio_level: str = "sequence"
    """What a sequence-level loss takes its ratio of: `sequence` (the exact token sequence of a row) or `turn`."""
    correction: str | None = None
    """A name in `algo.correction.CORRECTIONS`, applied to old / engine log-probs."""
    correction_low: float | None = None
    correction_high: float | None = None
    opsm_delta: float | None = None
    """Nats a token beyond which a bad sequence that the policy has left behind is masked; None: never."""
    kl_coef: float = 0.0
    """Weight of the KL to the reference in the loss; the reference is run only above 0."""
    kl_estimator: str = "k2"
    entropy_coef: float = 0.0
    """Weight of an entropy bonus."""
    llds_coef: float = 0.0
    llds_gate: str = "action"
    llds_answer_weight: float = 1.0
    """Weight of a sequence's last turn in LLDS."""
    value_coef: float = 0.0
    """Weight of the value head's loss."""
    value_clip: float | None = None
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
    """Where they come from: `recompute`, a forward before the first optimizer step if there are several; or `engine`,
    the sampler's own (bypass mode), which saves that forward and is as exact as engine and learner agree."""
    kl_stop: float | None = None
    """Leave out a batch's remaining steps once the mean k3 of a step to the policy before the batch is above this."""

    def __post_init__(self) -> None:
        for name, allowed in (("loss", LOSSES), ("old_logprobs", OLD_LOGPROBS), ("llds_gate", LLDS_GATES)):
            value = getattr(self, name)
            if value not in allowed:
                raise ConfigError(f"{name} is '{value}'; allowed: {', '.join(allowed)}{did_you_mean(value, allowed)}")
        if "clip_low" in self.spec.options:
            low, high = (0.2 if value is None else value for value in (self.clip_low, self.clip_high))
            check_clip(
                clip_low=low, clip_high=high, dual_clip=self.dual_clip if "dual_clip" in self.spec.options else None
            )
        if self.correction is not None:
            check_correction(self.correction, self.correction_low, self.correction_high)
        check_kl_estimator(self.kl_estimator)
        check_aggregation(self.aggregation, self.norm_length)
        required = self.spec.aggregation
        if required is not None and self.aggregation != required:
            raise ConfigError(f"aggregation is '{self.aggregation}', but loss '{self.loss}' needs '{required}'")
        for name in ("kl_coef", "llds_coef", "value_coef"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be 0 (none) or above")
        for name in ("temperature", "tau_pos", "tau_neg", "value_clip", "opsm_delta", "kl_stop"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} is {value}; it must be above 0")
        for name in ("updates_per_batch", "minibatches"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")

    @classmethod
    def of(cls, stage: Any, **changes: Any) -> RLOptions:
        """Those of a recipe's stage, whose keys have the same names; null leaves the default, a dual_clip of 0 none."""
        names = [field.name for field in fields(cls)]
        found = {name: getattr(stage, name, None) for name in names}
        found = {name: value for name, value in found.items() if value is not None} | changes
        return cls(**{**found, "dual_clip": found.get("dual_clip") or None})

    @property
    def spec(self) -> LossSpec:
        return LOSSES[self.loss]

    @property
    def loss_args(self) -> dict[str, Any]:
        """Keyword arguments of the loss function."""
        given = {name: getattr(self, name) for name in self.spec.options}
        return {name: value for name, value in given.items() if value is not None or name == "dual_clip"}

    @property
    def regularised(self) -> bool:
        """Whether rows without an advantage have a gradient too."""
        terms = (self.kl_coef, self.entropy_coef, self.llds_coef, self.value_coef)
        return any(terms) or "cov_coef" in self.spec.options  # its penalty is on tokens of any advantage

    @property
    def on_policy(self) -> bool:
        """One step a batch, no choice among its tokens, and no ratio to the sampler: the policy of the step is all that
        it needs."""
        single = self.updates_per_batch * self.minibatches == 1
        return single and self.spec.select is None and self.old_logprobs != "engine"
