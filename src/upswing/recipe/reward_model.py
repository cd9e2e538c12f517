"""The `reward_model` stage of a recipe. Null means: as the labels have it; a resolved recipe shows what it was."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import model_validator

from upswing.recipe.fields import Bool, Count, CountOrZero, NotNegative, Positive, Text
from upswing.recipe.offline import PairStage, Table
from upswing.recipe.section import null, opt

LABEL_DEFAULTS: Table = {
    "pairs": {"margin": 0.0, "centring": 0.01, "file": None, "pairs_per_task": None},
    "outcome": {},
    "process": {"rollouts_per_step": 8, "hard_labels": False},
}


class RewardModelStage(PairStage):
    """A reward model learned from pairs of a better and a worse trajectory (the model's own, judged by the verifiers,
    or from a file), or from whether trajectories succeed. `rl` and `eval` stages name it; none starts from its
    weights."""

    stage: Literal["reward_model"] = opt("reward_model", "Kind of stage.")
    name: Text = opt("reward_model", "Name of the stage: its folder, and what `rl` stages refer to.")
    labels: Literal["pairs", "outcome", "process"] = opt(
        "pairs",
        "What is learned: which of two trajectories is better (pairs), whether one succeeded (outcome), or "
        "after each turn how likely it is to succeed from there (process; by rolling out again).",
    )
    rollouts_per_step: Count | None = null(
        "Times a trajectory is rolled out again from after each of its turns (process; 8)."
    )
    hard_labels: Bool | None = null("Label a turn 1 when any of these succeeds, not with their share (process; false).")
    validation_pairs: CountOrZero = opt(
        16, "Pairs (outcome, process: trajectories) held out, of prompts that aren't trained on."
    )
    batch_size: Count = opt(16, "Pairs (outcome, process: trajectories) an update.")
    margin: NotNegative | None = null("By how much a chosen trajectory should score more (pairs; 0.0).")
    centring: NotNegative | None = null("Weight of a penalty that keeps scores around 0 (pairs; 0.01).")
    epochs: Count = opt(1, "Passes over the data; reward models overfit after one or two.")
    lr: Positive = opt(2e-5, "Peak learning rate.")

    @classmethod
    def derived(cls, data: dict[str, Any]) -> dict[str, Any]:
        return {**LABEL_DEFAULTS.get(str(data.get("labels", "pairs")), {}), **super().derived(data)}

    @model_validator(mode="after")
    def _effective(self) -> Self:
        self.refuse_others("labels", LABEL_DEFAULTS)
        return self
