"""The `reward_model` stage of a recipe."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from upswing.recipe.fields import Count, NotNegative, Positive, Text
from upswing.recipe.offline import PairStage


class RewardModelStage(PairStage):
    """A reward model learned from pairs of a better and a worse trajectory: the model's own, judged by the verifiers,
    or from a file. An `rl` stage names it as its `reward_model`; no stage starts from its weights."""

    stage: Literal["reward_model"] = Field(default="reward_model", description="Kind of stage.")
    name: Text = Field(
        default="reward_model", description="Name of the stage: its folder, and what `rl` stages refer to."
    )
    margin: NotNegative = Field(default=0.0, description="By how much a chosen trajectory should score more.")
    centring: NotNegative = Field(default=0.01, description="Weight of a penalty that keeps scores around 0.")
    epochs: Count = Field(default=1, description="Passes over the pairs; reward models overfit after one or two.")
    lr: Positive = Field(default=2e-5, description="Peak learning rate.")
