"""The stages of a recipe: `sft`, `rl` and `eval`. Defaults are the vetted recipe."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from upswing.recipe.fields import (
    Bool,
    Count,
    CountOrZero,
    Float,
    Fraction,
    Int,
    NotNegative,
    Positive,
    Schedule,
    Section,
    Split,
    Text,
    refuse,
)
from upswing.recipe.lora import GradientCheckpointing, Lora

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
KlEstimator = Literal["k2", "k3", "k3_ratio"]

LENGTH_NORMALISED = "seq-mean-token-sum-norm"

# What an algorithm sets unless the recipe says otherwise. It fills keys in before validation, so that a resolved recipe
# shows what was used.
ALGORITHM_DEFAULTS: dict[str, dict[str, Any]] = {
    "grpo": {"normalize_std": True, "aggregation": "token-mean"},
    "dr_grpo": {"normalize_std": False, "aggregation": LENGTH_NORMALISED},
}


class Graduation(Section):
    """When SFT is good enough for RL to take over: format learned, loss flat, diversity kept."""

    enabled: Bool = Field(
        default=True, description="Check at every evaluation; off: train for all epochs without asking."
    )
    stop: Bool = Field(default=True, description="Stop SFT at the first check that passes.")
    tasks: Count = Field(default=24, description="Train tasks sampled for the check.")
    pass_k: Annotated[int, Field(strict=True, ge=2)] = Field(
        default=8, description="Samples a task; pass@k counts a task as solved when one of k samples is right."
    )
    temperature: Positive = Field(
        default=1.0, description="Sampling temperature of the check; use that of the RL stage."
    )
    flat_tol: NotNegative = Field(
        default=0.01,
        description="Validation loss counts as flat when its relative fall since the last check is below this.",
    )
    min_format_valid: Fraction = Field(default=0.9, description="Least share of samples in the right format.")
    min_passk_gain: Fraction = Field(default=0.1, description="Least pass@k minus pass@1.")
    min_entropy: NotNegative = Field(default=0.02, description="Least mean entropy in nats of sampled tokens.")
    min_mixed_frac: Fraction = Field(
        default=0.25,
        description="Least share of tasks that some samples solve and some don't: the tasks RL learns from.",
    )


class SftStage(Section):
    """Supervised fine-tuning on trajectories that a scripted expert plays in the environment."""

    stage: Literal["sft"] = Field(default="sft", description="Kind of stage.")
    name: Text = Field(default="sft", description="Name of the stage: its folder, and what later stages refer to.")
    from_: Text = Field(
        default="previous",
        alias="from",
        description="Weights to start from: previous, base or the name of an earlier stage.",
    )
    demonstrations: Count = Field(default=160, description="Expert trajectories to train on.")
    validation_demonstrations: CountOrZero = Field(
        default=32, description="Further expert trajectories for validation loss."
    )
    demonstrations_seed: Int = Field(
        default=0, description="Seed of the demonstrations; stages with the same seed train on the same ones."
    )
    env_args: dict[str, Any] = Field(
        default_factory=dict,
        description="Environment arguments for the demonstrations only, over those of env.args, such as a larger "
        "budget of searches for a wasteful expert.",
    )
    min_reward: Float = Field(default=1.0, description="Demonstrations that score less are left out.")
    epochs: Count = Field(default=1, description="Passes over the demonstrations.")
    batch_size: Count = Field(default=8, description="Trajectories an update.")
    lr: Positive = Field(default=1e-4, description="Peak learning rate.")
    schedule: Schedule = Field(default="constant", description="Learning rate after warm-up.")
    warmup_frac: Fraction = Field(
        default=0.05, description="Share of the updates during which the learning rate rises."
    )
    weight_decay: NotNegative = Field(default=0.0, description="AdamW weight decay.")
    grad_clip: Positive = Field(default=1.0, description="Largest gradient norm; larger ones are scaled down.")
    max_tokens_per_pack: Count = Field(default=4096, description="Tokens a packed forward may hold; bounds memory.")
    gradient_checkpointing: GradientCheckpointing = False
    lora: Lora = None
    eval_every: CountOrZero = Field(default=10, description="Updates between validations; 0: only at the end.")
    graduation: Graduation = Field(default_factory=Graduation, description="When SFT is good enough for RL.")
    time_limit_s: Positive | None = Field(
        default=None, description="Stop after so many seconds of training, repeating epochs until then."
    )
    time_limit_as: Text | None = Field(
        default=None, description="Name of an earlier stage whose wall time is the time limit (an SFT control for RL)."
    )

    @model_validator(mode="after")
    def _effective(self) -> Self:
        if self.time_limit_s is not None and self.time_limit_as is not None:
            raise refuse("time_limit_as", "got both time_limit_s and time_limit_as; keep one")
        if self.batch_size > self.demonstrations:
            raise refuse("batch_size", f"got {self.batch_size}, more than the {self.demonstrations} demonstrations")
        if self.graduation.enabled and self.graduation.stop and self.validation_demonstrations == 0:
            raise refuse(
                "validation_demonstrations",
                "got 0, but graduation needs a validation loss; allowed: 1 and more, or graduation.enabled: false",
            )
        return self


class EarlyWarning(Section):
    """What is said loudly when nothing can be learned: every sample cut, or no group with a reward spread."""

    steps: Count = Field(default=3, description="First steps that are watched, and how many in a row must be bad.")
    truncated_frac: Annotated[float, Field(strict=True, gt=0, le=1)] = Field(
        default=1.0, description="Warn when at least this share of trajectories was truncated."
    )
    stop: Bool = Field(default=False, description="End the run with an error instead of only warning.")


class RlStage(Section):
    """Reinforcement learning with group-relative advantages over whole multi-turn trajectories."""

    stage: Literal["rl"] = Field(default="rl", description="Kind of stage.")
    name: Text = Field(default="rl", description="Name of the stage: its folder, and what later stages refer to.")
    from_: Text = Field(
        default="previous",
        alias="from",
        description="Weights to start from: previous, base or the name of an earlier stage.",
    )
    algorithm: Literal["grpo", "dr_grpo"] = Field(
        default="grpo", description="Named choice of advantage and aggregation."
    )
    steps: Count = Field(description="Batches to sample and learn from.")
    tasks_per_step: Count = Field(default=8, description="Tasks a step (P).")
    group_size: Count = Field(default=8, description="Trajectories a task (G).")
    temperature: Positive = Field(default=1.0, description="Sampling temperature.")
    top_p: Float = Field(
        default=1.0, description="Only 1: otherwise the learner's log-probs are of another distribution."
    )
    top_k: Int = Field(
        default=0, description="Only 0 (keep all): otherwise the learner's log-probs are of another distribution."
    )
    lr: Positive = Field(default=2e-5, description="Peak learning rate.")
    schedule: Schedule = Field(default="constant", description="Learning rate after warm-up.")
    warmup_steps: CountOrZero = Field(default=0, description="Steps during which the learning rate rises.")
    weight_decay: NotNegative = Field(default=0.0, description="AdamW weight decay.")
    grad_clip: Positive = Field(default=1.0, description="Largest gradient norm; larger ones are scaled down.")
    minibatches: Count = Field(default=1, description="Updates that a batch is split into, by whole groups.")
    updates_per_batch: Count = Field(default=1, description="Passes over a batch.")
    old_logprobs: Literal["recompute", "engine"] | None = Field(
        default=None,
        description="Log-probs before the update, when a batch has several: recompute (the default, one more forward) "
        "or engine (the sampler's own; exact where engine and learner compute alike, see mismatch_max); null for one.",
    )
    clip_low: Annotated[float, Field(strict=True, gt=0, le=1)] = Field(
        default=0.2, description="The probability ratio is clipped below 1 - clip_low; 1: not."
    )
    clip_high: Positive = Field(default=0.28, description="The probability ratio is clipped above 1 + clip_high.")
    dual_clip: Float | None = Field(
        default=3.0,
        description="Bound on the loss of a bad sample that grew likely; above 1 + clip_high; null: none.",
    )
    normalize_std: Bool = Field(
        default=True, description="Divide advantages by the group's standard deviation (grpo: true, dr_grpo: false)."
    )
    aggregation: Aggregation = Field(
        default="token-mean",
        description="How token losses become one number: token-mean (all tokens alike), seq-mean-token-mean (all "
        "trajectories alike), seq-mean-token-sum, seq-mean-token-sum-norm (sum over norm_length; dr_grpo).",
    )
    norm_length: Count | None = Field(
        default=None,
        description="Tokens that seq-mean-token-sum-norm divides by (256 by default); other aggregations: null.",
    )
    kl_coef: NotNegative = Field(default=0.0, description="Weight of the KL to the stage's starting weights; 0: none.")
    kl_estimator: KlEstimator | None = Field(
        default=None,
        description="Estimator of that KL as a loss: k2 (default), k3 (as GRPO was published) or k3_ratio; k1 has no "
        "gradient in a loss and is refused.",
    )
    truncated: Literal["as_is", "zero", "mask"] = Field(
        default="as_is",
        description="Truncated trajectories keep their score (as_is), score 0 (zero), or keep it in the group's "
        "baseline without entering the loss (mask).",
    )
    max_tokens_per_pack: Count = Field(default=4096, description="Tokens a packed forward may hold; bounds memory.")
    eval_every: CountOrZero = Field(default=5, description="Steps between evaluations on dev; 0: none.")
    eval_tasks: Count = Field(default=64, description="Dev tasks an evaluation.")
    save_every: CountOrZero = Field(
        default=5, description="Steps between checkpoints to resume from; 0: only at the end."
    )
    keep_checkpoints: Count = Field(default=2, description="Checkpoints kept; older ones are deleted.")
    time_limit_s: Positive | None = Field(default=None, description="Stop after so many seconds; null: run all steps.")
    early_warning: EarlyWarning = Field(
        default_factory=EarlyWarning, description="Warning when nothing can be learned in the first steps."
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        filled = {**ALGORITHM_DEFAULTS.get(str(data.get("algorithm", "grpo")), {}), **data}
        kl_coef = filled.get("kl_coef")
        if isinstance(kl_coef, (int, float)) and kl_coef > 0 and filled.get("kl_estimator") is None:
            filled["kl_estimator"] = "k2"
        if filled.get("aggregation") == LENGTH_NORMALISED and filled.get("norm_length") is None:
            filled["norm_length"] = 256
        return filled

    @model_validator(mode="after")
    def _effective(self) -> Self:
        """Refuse what would be ignored or would silently train something else."""
        if self.group_size < 2:
            raise refuse("group_size", "got 1, but an advantage is relative to the group; allowed: 2 and more")
        if self.minibatches > self.tasks_per_step or self.tasks_per_step % self.minibatches:
            raise refuse(
                "minibatches",
                f"got {self.minibatches}, which doesn't divide the {self.tasks_per_step} tasks_per_step into equal "
                f"sets of whole groups; allowed: {divisors(self.tasks_per_step)}",
            )
        self._check_sampling()
        self._check_loss()
        if self.warmup_steps >= self.steps and self.warmup_steps > 0:
            raise refuse("warmup_steps", f"got {self.warmup_steps}; allowed: fewer than the {self.steps} steps")
        return self

    def _check_sampling(self) -> None:
        why = "RL would then sample from another distribution than the learner's log-probs are of"
        if self.top_p != 1.0:
            raise refuse("top_p", f"got {self.top_p}; allowed: 1.0 ({why}; use temperature)")
        if self.top_k != 0:
            raise refuse("top_k", f"got {self.top_k}; allowed: 0 ({why}; use temperature)")

    def _check_loss(self) -> None:
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high:
            allowed = f"more than 1 + clip_high = {1 + self.clip_high:g}, or null for none"
            raise refuse("dual_clip", f"got {self.dual_clip:g}; allowed: {allowed}")
        if self.algorithm == "dr_grpo" and self.normalize_std:
            raise refuse("normalize_std", "got true, but dr_grpo is defined without it; use false, or algorithm: grpo")
        if self.algorithm == "dr_grpo" and self.aggregation != LENGTH_NORMALISED:
            raise refuse(
                "aggregation",
                f"got '{self.aggregation}', but dr_grpo means '{LENGTH_NORMALISED}'; use that, or algorithm: grpo",
            )
        if self.norm_length is not None and self.aggregation != LENGTH_NORMALISED:
            raise refuse(
                "norm_length", f"got {self.norm_length} without effect, as aggregation is '{self.aggregation}'"
            )
        if self.old_logprobs is not None and self.minibatches * self.updates_per_batch == 1:
            why = "as a batch has one update, which needs none; set minibatches or updates_per_batch too"
            raise refuse("old_logprobs", f"got '{self.old_logprobs}' without effect, {why}")
        if self.kl_coef == 0 and self.kl_estimator is not None:
            raise refuse("kl_estimator", f"got '{self.kl_estimator}' without effect, as kl_coef is 0; set kl_coef too")


class EvalStage(Section):
    """Measure checkpoints on the same questions, each with a paired test against the one before it."""

    stage: Literal["eval"] = Field(default="eval", description="Kind of stage.")
    name: Text = Field(default="eval", description="Name of the stage: its folder.")
    of: tuple[Text, ...] = Field(
        default=("previous",),
        min_length=1,
        description="What is measured: previous, base or earlier stages; each is compared with the one before it.",
    )
    split: Split = Field(default="dev", description="Split of the tasks: train, dev or test.")
    tasks: Count = Field(default=200, description="Number of tasks.")
    greedy: Bool = Field(default=True, description="Take the likeliest token; false: sample.")
    samples: Count = Field(default=1, description="Samples a task; more than 1 needs greedy: false.")
    temperature: Positive | None = Field(
        default=None, description="Sampling temperature (1 by default); greedy has none."
    )
    seed: Int = Field(default=0, description="Seed of the tasks and of the sampling.")

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("greedy") is False and data.get("temperature") is None:
            return {**data, "temperature": 1.0}
        return data

    @model_validator(mode="after")
    def _effective(self) -> Self:
        if self.greedy and self.temperature is not None:
            raise refuse("temperature", f"got {self.temperature} without effect, as greedy is true; set greedy: false")
        if self.greedy and self.samples > 1:
            raise refuse("samples", f"got {self.samples}, but greedy samples are all alike; set greedy: false")
        if len(set(self.of)) < len(self.of):
            raise refuse("of", f"got {list(self.of)}; allowed: each name once")
        return self


Stage = Annotated[SftStage | RlStage | EvalStage, Field(discriminator="stage")]
STAGE_KINDS: dict[str, type[Section]] = {"sft": SftStage, "rl": RlStage, "eval": EvalStage}


def divisors(number: int) -> str:
    return ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)
