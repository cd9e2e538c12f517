"""What every stage that learns from its own samples has, and the sections of such stages."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from upswing.recipe.fields import Bool, Count, CountOrZero, Float, Int, Positive, Section, Text, refuse
from upswing.recipe.lora import refuse_dropout
from upswing.recipe.training import TrainStage


class EarlyWarning(Section):
    """What is said loudly when nothing can be learned: every sample cut, or no group with a reward spread."""

    steps: Count = Field(default=3, description="First steps that are watched, and how many in a row must be bad.")
    truncated_frac: Annotated[float, Field(strict=True, gt=0, le=1)] = Field(
        default=1.0, description="Warn when at least this share of trajectories was truncated."
    )
    stop: Bool = Field(default=False, description="End the run with an error instead of only warning.")


class CurriculumSection(Section):
    """Prefers kinds of tasks that the agent solves sometimes: a kind's weight is s (1 - s) + floor, s its success."""

    tag: Text = Field(default="kind", description="The tasks' tag that says of which kind they are.")
    floor: Positive = Field(default=0.02, description="What is always or never solved keeps this weight.")


class CriticSection(Section):
    """PPO's critic."""

    kind: Literal["separate", "head"] = Field(
        default="separate",
        description="A model of its own (twice the memory), or a value head on the policy's last hidden state.",
    )
    lr: Positive | None = Field(default=None, description="Learning rate of a separate critic; null: 1e-4.")
    coef: Positive | None = Field(default=None, description="Weight of a head's value loss in the loss; null: 0.1.")
    clip: Positive | None = Field(default=0.2, description="How far a value may move from the old one; null: any.")
    warmup_steps: CountOrZero = Field(default=0, description="First steps that train only a separate critic.")

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        own = {"lr": 1e-4} if data.get("kind", "separate") == "separate" else {"coef": 0.1}
        return {**data, **{key: value for key, value in own.items() if data.get(key) is None}}

    @model_validator(mode="after")
    def _effective(self) -> Self:
        if self.kind == "head" and self.lr is not None:
            raise refuse("lr", f"got {self.lr:g} without effect: a head learns at the policy's rate; use coef")
        if self.kind == "separate" and self.coef is not None:
            raise refuse("coef", f"got {self.coef:g} without effect: a separate critic has a loss of its own; use lr")
        if self.kind == "head" and self.warmup_steps:
            raise refuse("warmup_steps", f"got {self.warmup_steps} without effect: a head trains with the policy")
        return self


class RlBase(TrainStage):
    """What every stage that learns from its own samples has."""

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
    warmup_steps: CountOrZero = Field(default=0, description="Steps during which the learning rate rises.")
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

    @model_validator(mode="after")
    def _sampling(self) -> Self:
        why = "RL would then sample from another distribution than the learner's log-probs are of"
        if self.top_p != 1.0:
            raise refuse("top_p", f"got {self.top_p}; allowed: 1.0 ({why}; use temperature)")
        if self.top_k != 0:
            raise refuse("top_k", f"got {self.top_k}; allowed: 0 ({why}; use temperature)")
        if self.warmup_steps >= self.steps and self.warmup_steps > 0:
            raise refuse("warmup_steps", f"got {self.warmup_steps}; allowed: fewer than the {self.steps} steps")
        refuse_dropout(self.lora)
        return self
