"""The `distill` stage of a recipe."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from upswing.recipe.fields import Count, Text
from upswing.recipe.rl_base import RlBase
from upswing.recipe.section import opt


class DistillStage(RlBase):
    """On-policy distillation: the model samples, and learns the reverse KL to a teacher on its own trajectories."""

    stage: Literal["distill"] = opt("distill", "Kind of stage.")
    name: Text = opt("distill", "Name of the stage: its folder, and what later stages refer to.")
    teacher: Text = Field(
        description="Earlier stage, or a model as `model:` takes it; it must have the same vocabulary."
    )
    kl: Literal["sampled", "full"] = opt(
        "sampled", "KL of the sampled tokens as their advantage, or over the whole vocabulary (exact, more compute)."
    )
    group_size: Count = opt(1, "Trajectories a task (G).")
