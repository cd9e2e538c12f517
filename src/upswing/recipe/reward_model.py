"""The `reward_model` stage of a recipe."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from upswing.recipe.fields import Count, CountOrZero, NotNegative, Positive, Schedule, Section, Text, refuse
from upswing.recipe.lora import GradientCheckpointing, Lora
from upswing.recipe.offline import SAMPLING_DEFAULTS


class RewardModelStage(Section):
    """A reward model learned from pairs of a better and a worse trajectory: the model's own, judged by the verifiers,
    or from a file. An `rl` stage names it as its `reward_model`; no stage starts from its weights."""

    loss: ClassVar[str] = "bradley_terry"
    """Read where pairs are made: both sides are needed."""

    stage: Literal["reward_model"] = Field(default="reward_model", description="Kind of stage.")
    name: Text = Field(
        default="reward_model", description="Name of the stage: its folder, and what `rl` stages refer to."
    )
    from_: Text = Field(
        default="previous",
        alias="from",
        description="Weights to start from, under a new head: previous, base or the name of an earlier stage.",
    )
    margin: NotNegative = Field(default=0.0, description="By how much a chosen trajectory should score more.")
    centring: NotNegative = Field(default=0.01, description="Weight of a penalty that keeps scores around 0.")
    file: Text | None = Field(
        default=None, description="JSON Lines file of pairs (prompt, chosen, rejected); null: sample them."
    )
    tasks: Count | None = Field(default=None, description="Train tasks sampled for pairs (64).")
    samples: Annotated[int, Field(strict=True, ge=2)] | None = Field(default=None, description="Samples a task (8).")
    temperature: Positive | None = Field(default=None, description="Sampling temperature (1.0).")
    pairs_per_task: Count | None = Field(
        default=None, description="Most pairs of a task, best with worst first (half of samples, up to 4)."
    )
    validation_pairs: CountOrZero = Field(
        default=16,
        description="Pairs held out, of prompts that aren't trained on, to measure what the scores are worth.",
    )
    epochs: Count = Field(default=1, description="Passes over the pairs; reward models overfit after one or two.")
    batch_size: Count = Field(default=16, description="Pairs an update.")
    lr: Positive = Field(default=2e-5, description="Peak learning rate.")
    schedule: Schedule = Field(default="constant", description="Learning rate after warm-up.")
    warmup_frac: Annotated[float, Field(strict=True, ge=0, lt=1)] = Field(
        default=0.1, description="Share of the updates during which the learning rate rises."
    )
    weight_decay: NotNegative = Field(default=0.0, description="AdamW weight decay.")
    grad_clip: Positive = Field(default=1.0, description="Largest gradient norm; larger ones are scaled down.")
    max_tokens_per_pack: Count = Field(
        default=4096, description="Tokens a packed forward may hold (a pair is never cut); bounds memory."
    )
    gradient_checkpointing: GradientCheckpointing = False
    lora: Lora = None
    eval_every: CountOrZero = Field(
        default=10, description="Updates between measurements on held-out pairs; 0: only before and after."
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if data.get("validation_pairs") == 0:
            data = {"eval_every": 0, **data}
        if data.get("file") is not None:
            return data
        samples = data.get("samples") or SAMPLING_DEFAULTS["samples"]
        most = max(1, min(samples // 2, SAMPLING_DEFAULTS["pairs_per_task"])) if isinstance(samples, int) else 1
        own = {**SAMPLING_DEFAULTS, "pairs_per_task": most}
        return {**data, **{key: value for key, value in own.items() if data.get(key) is None}}

    @model_validator(mode="after")
    def _effective(self) -> Self:
        """Refuse what would be ignored."""
        for key in SAMPLING_DEFAULTS:
            if self.file is not None and getattr(self, key) is not None:
                raise refuse(key, f"got {getattr(self, key)} without effect, as the pairs come from file")
        if self.samples is not None and self.pairs_per_task is not None and self.pairs_per_task > self.samples // 2:
            most = self.samples // 2
            raise refuse("pairs_per_task", f"got {self.pairs_per_task}; allowed: 1 to {most}, half of samples")
        if self.eval_every and not self.validation_pairs:
            raise refuse("eval_every", f"got {self.eval_every} without effect, as validation_pairs is 0; set that too")
        return self
