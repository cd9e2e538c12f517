"""The `reward_model` stage of a recipe. Null means: as the labels have it; a resolved recipe shows what it was."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from upswing.recipe.fields import Bool, Count, CountOrZero, NotNegative, Positive, Text
from upswing.recipe.offline import PairStage, Table, fill_in, refuse_others

LABEL_DEFAULTS: Table = {
    "pairs": {"margin": 0.0, "centring": 0.01, "file": None, "pairs_per_task": None},
    "outcome": {},
    "process": {"rollouts_per_step": 8, "hard_labels": False},
}


class RewardModelStage(PairStage):
    """A reward model learned from pairs of a better and a worse trajectory (the model's own, judged by the verifiers,
    or from a file), or from whether trajectories succeed. `rl` and `eval` stages name it; none starts from its
    weights."""

    stage: Literal["reward_model"] = Field(default="reward_model", description="Kind of stage.")
    name: Text = Field(
        default="reward_model", description="Name of the stage: its folder, and what `rl` stages refer to."
    )
    labels: Literal["pairs", "outcome", "process"] = Field(
        default="pairs",
        description="What is learned: which of two trajectories is better (pairs), whether one succeeded (outcome), or "
        "after each turn how likely it is to succeed from there (process; by rolling out again).",
    )
    rollouts_per_step: Count | None = Field(
        default=None, description="Times a trajectory is rolled out again from after each of its turns (process; 8)."
    )
    hard_labels: Bool | None = Field(
        default=None, description="Label a turn 1 when any of these succeeds, not with their share (process; false)."
    )
    validation_pairs: CountOrZero = Field(
        default=16, description="Pairs (outcome, process: trajectories) held out, of prompts that aren't trained on."
    )
    batch_size: Count = Field(default=16, description="Pairs (outcome, process: trajectories) an update.")
    margin: NotNegative | None = Field(
        default=None, description="By how much a chosen trajectory should score more (pairs; 0.0)."
    )
    centring: NotNegative | None = Field(
        default=None, description="Weight of a penalty that keeps scores around 0 (pairs; 0.01)."
    )
    epochs: Count = Field(default=1, description="Passes over the data; reward models overfit after one or two.")
    lr: Positive = Field(default=2e-5, description="Peak learning rate.")

    @model_validator(mode="before")
    @classmethod
    def _fill_in_labels(cls, data: Any) -> Any:
        return fill_in(data, "labels", "pairs", LABEL_DEFAULTS)

    @model_validator(mode="after")
    def _effective(self) -> Self:
        refuse_others(self, "labels", LABEL_DEFAULTS)
        return self
