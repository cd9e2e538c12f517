"""What every stage that learns from its own samples has, and the sections of such stages."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from upswing.recipe.fields import Bool, Count, CountOrZero, Float, Int, Positive, Text, UpToOne
from upswing.recipe.lora import refuse_dropout
from upswing.recipe.section import Section, null, opt, refuse
from upswing.recipe.training import TrainStage


class EarlyWarning(Section):
    """What is said loudly when nothing can be learned: every sample cut, or no group with a reward spread."""

    steps: Count = opt(3, "First steps that are watched, and how many in a row must be bad.")
    truncated_frac: UpToOne = opt(1.0, "Warn when at least this share of trajectories was truncated.")
    stop: Bool = opt(False, "End the run with an error instead of only warning.")


class CurriculumSection(Section):
    """Prefers kinds of tasks that the agent solves sometimes: a kind's weight is s (1 - s) + floor, s its success
    (`strict_match` where it is measured, in the reward or not; else what the reward's positive parts earn)."""

    tag: Text = opt("kind", "The tasks' tag that says of which kind they are.")
    floor: Positive = opt(0.02, "What is always or never solved keeps this weight.")


class CriticSection(Section):
    """PPO's critic."""

    kind: Literal["separate", "head"] = opt(
        "separate", "A model of its own (twice the memory), or a value head on the policy's last hidden state."
    )
    lr: Positive | None = null("Learning rate of a separate critic; null: 1e-4.")
    coef: Positive | None = null("Weight of a head's value loss in the loss; null: 0.1.")
    clip: Positive | None = opt(0.2, "How far a value may move from the old one; null: any.")
    warmup_steps: CountOrZero = opt(0, "First steps that train only a separate critic.")

    @classmethod
    def derived(cls, data: dict[str, Any]) -> dict[str, Any]:
        return {"lr": 1e-4} if data.get("kind", "separate") == "separate" else {"coef": 0.1}

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
    tasks_per_step: Count = opt(8, "Tasks a step (P).")
    group_size: Count = opt(8, "Trajectories a task (G).")
    temperature: Positive = opt(1.0, "Sampling temperature.")
    top_p: Float = opt(1.0, "Only 1: otherwise the learner's log-probs are of another distribution.")
    top_k: Int = opt(0, "Only 0 (keep all): otherwise the learner's log-probs are of another distribution.")
    lr: Positive = opt(2e-5, "Peak learning rate.")
    warmup_steps: CountOrZero = opt(0, "Steps during which the learning rate rises.")
    eval_every: CountOrZero = opt(5, "Steps between evaluations on dev; 0: none.")
    eval_tasks: Count = opt(64, "Dev tasks an evaluation.")
    save_every: CountOrZero = opt(5, "Steps between checkpoints to resume from; 0: only at the end.")
    keep_checkpoints: Count = opt(2, "Checkpoints kept; older ones are deleted.")
    time_limit_s: Positive | None = null("Stop after so many seconds; null: run all steps.")
    early_warning: EarlyWarning = opt(EarlyWarning, "Warning when nothing can be learned in the first steps.")

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
