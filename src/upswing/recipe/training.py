"""What every stage that trains weights has."""

from __future__ import annotations

from pydantic import Field

from upswing.recipe.fields import Count, GradientCheckpointing, NotNegative, Positive, Schedule, Text
from upswing.recipe.lora import Lora
from upswing.recipe.section import Section, null, opt


class TrainStage(Section):
    """Where weights come from and how they are optimised."""

    stage: str = Field(description="Kind of stage.")
    name: Text = Field(description="Name of the stage: its folder, and what later stages refer to.")
    from_: Text = opt(
        "previous", "Weights to start from: previous, base or the name of an earlier stage.", alias="from"
    )
    lr: Positive = Field(description="Peak learning rate.")
    schedule: Schedule = opt("constant", "Learning rate after warm-up.")
    weight_decay: NotNegative = opt(0.0, "AdamW weight decay.")
    grad_clip: Positive = opt(1.0, "Largest gradient norm; larger ones are scaled down.")
    max_tokens_per_pack: Count | None = null(
        "Tokens a packed forward may hold (a row or pair is never cut); bounds memory, but for keys and "
        "values that are copied where rows of a group part. null: 1024 on a CPU, 8192 on a GPU."
    )
    gradient_checkpointing: GradientCheckpointing = False
    lora: Lora = None
