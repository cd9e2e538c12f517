"""The `preference` stage, and what every stage that learns from pairs has. Null means: as the loss has it, or not
sampled; a resolved recipe shows what it was."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from upswing.recipe.fields import BelowOne, Bool, Count, CountOrZero, NotNegative, Positive, Several, Text
from upswing.recipe.lora import refuse_dropout
from upswing.recipe.section import null, opt, refuse
from upswing.recipe.training import TrainStage

Table = dict[str, dict[str, Any]]
"""Choice -> the keys that have an effect with it, and what they are when left out."""

# What a loss sets unless the recipe says otherwise, and so which options have an effect with it: null elsewhere.
LOSS_DEFAULTS: Table = {
    "dpo": {"beta": 0.1, "label_smoothing": 0.0, "robust": False, "nll_coef": 0.0},
    "ipo": {"beta": 0.1, "nll_coef": 0.0},
    "kto": {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0},
    "orpo": {"beta": 0.1, "nll_coef": 1.0},
    "simpo": {"beta": 2.0, "margin": 1.0, "nll_coef": 0.0},
}
SAMPLING_DEFAULTS: dict[str, Any] = {"tasks": 64, "samples": 8, "temperature": 1.0, "pairs_per_task": 4}


class PairStage(TrainStage):
    """What stages that learn from pairs have: the model's own trajectories, judged by the verifiers, or a file's."""

    file: Text | None = null("JSON Lines file of pairs (prompt, chosen, rejected); null: sample them.")
    tasks: Count | None = null("Train tasks sampled for pairs (64).")
    samples: Several | None = null("Samples a task (8).")
    temperature: Positive | None = null("Sampling temperature (1.0).")
    pairs_per_task: Count | None = null(
        "Most pairs of a task: best with worst, second best with second worst, ... (4, at most half of samples)."
    )
    validation_pairs: CountOrZero = opt(
        16, "Pairs held out, of prompts that aren't trained on, to measure what was learned."
    )
    epochs: Count = opt(1, "Passes over the pairs.")
    batch_size: Count = opt(16, "Pairs an update.")
    warmup_frac: BelowOne = opt(0.1, "Share of the updates during which the learning rate rises.")
    eval_every: CountOrZero = opt(10, "Updates between measurements on held-out pairs; 0: only before and after.")

    @classmethod
    def derived(cls, data: dict[str, Any]) -> dict[str, Any]:
        own = {"eval_every": 0} if data.get("validation_pairs") == 0 and "eval_every" not in data else {}
        if data.get("file") is not None:
            return own
        samples = data.get("samples") or SAMPLING_DEFAULTS["samples"]
        most = max(1, min(samples // 2, SAMPLING_DEFAULTS["pairs_per_task"])) if isinstance(samples, int) else 1
        return {**own, **SAMPLING_DEFAULTS, "pairs_per_task": most if data.get("labels", "pairs") == "pairs" else None}

    @model_validator(mode="after")
    def _pairs(self) -> Self:
        """Refuse what would be ignored."""
        for key in SAMPLING_DEFAULTS:
            if self.file is not None and getattr(self, key) is not None:
                raise refuse(key, f"got {getattr(self, key)} without effect, as the pairs come from file")
        if self.samples and self.pairs_per_task and self.pairs_per_task > (most := self.samples // 2):
            raise refuse("pairs_per_task", f"got {self.pairs_per_task}; allowed: 1 to {most}, half of samples")
        if self.eval_every and not self.validation_pairs:
            raise refuse("eval_every", f"got {self.eval_every} without effect, as validation_pairs is 0; set that too")
        return self

    def refuse_others(self, key: str, table: Table) -> None:
        """Refuse keys that only have an effect with other choices of `key`."""
        chosen = getattr(self, key)
        for name in {name: None for own in table.values() for name in own}:
            if getattr(self, name) is not None and name not in table[chosen]:
                having = ", ".join(choice for choice, own in table.items() if name in own)
                raise refuse(name, f"got {getattr(self, name)} without effect, as {key} is '{chosen}' (for: {having})")


class PreferenceStage(PairStage):
    """Preference tuning on pairs of a better and a worse trajectory: the model's own, judged by the verifiers, or from
    a file. The reference is the stage's own start."""

    stage: Literal["preference"] = opt("preference", "Kind of stage.")
    name: Text = opt("preference", "Name of the stage: its folder, and what later stages refer to.")
    loss: Literal["dpo", "ipo", "kto", "orpo", "simpo"] = opt(
        "dpo", "dpo, ipo (length-averaged), kto (unpaired), or without a reference orpo (with SFT) and simpo."
    )
    beta: Positive | None = null("How strongly log-probs count; small: may move far from the reference (0.1; simpo 2).")
    label_smoothing: Annotated[float, Field(strict=True, ge=0, lt=0.5)] | None = null(
        "Chance that a pair is the wrong way round (dpo; 0.0)."
    )
    robust: Bool | None = null("Unbiased instead of conservative use of label_smoothing (dpo; false).")
    margin: NotNegative | None = null("Reward margin wanted, gamma (simpo; 1.0).")
    nll_coef: NotNegative | None = null(
        "Weight of an SFT loss on the chosen side, which keeps it from becoming less likely (0.0; orpo "
        "1.0; not for kto)."
    )
    desirable_weight: Positive | None = null("Weight of chosen rows (kto; 1.0).")
    undesirable_weight: Positive | None = null("Weight of rejected rows (kto; 1.0).")
    lr: Positive = opt(1e-6, "Peak learning rate.")

    @classmethod
    def derived(cls, data: dict[str, Any]) -> dict[str, Any]:
        return {**LOSS_DEFAULTS.get(str(data.get("loss", "dpo")), {}), **super().derived(data)}

    @model_validator(mode="after")
    def _effective(self) -> Self:
        """Refuse what would be ignored."""
        refuse_dropout(self.lora)
        self.refuse_others("loss", LOSS_DEFAULTS)
        if self.robust and not self.label_smoothing:
            raise refuse("robust", "got true without effect, as label_smoothing is 0; set it too")
        if self.loss == "orpo" and not self.nll_coef:
            raise refuse("nll_coef", "got 0, but orpo is an SFT loss with a penalty; allowed: more than 0, such as 1.0")
        return self
