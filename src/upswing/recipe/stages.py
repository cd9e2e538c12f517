"""The stages of a recipe: `sft`, `rl` and `eval`. Defaults are the vetted recipe."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from upswing.recipe.distill import DistillStage
from upswing.recipe.fields import Bool, Count, CountOrZero, Float, Fraction, Int, NotNegative, Positive, Several, Text
from upswing.recipe.offline import PreferenceStage
from upswing.recipe.reward_model import RewardModelStage
from upswing.recipe.rl import RlStage
from upswing.recipe.section import Section, null, opt, refuse
from upswing.recipe.training import TrainStage


class Graduation(Section):
    """When SFT is good enough for RL to take over: format learned, loss flat, diversity kept."""

    enabled: Bool = opt(True, "Check at every evaluation; off: train for all epochs without asking.")
    stop: Bool = opt(True, "Stop SFT at the first check that passes.")
    tasks: Count = opt(24, "Train tasks sampled for the check.")
    pass_k: Several = opt(8, "Samples a task; pass@k counts a task as solved when one of k samples is right.")
    temperature: Positive = opt(1.0, "Sampling temperature of the check; use that of the RL stage.")
    flat_tol: NotNegative = opt(
        0.01, "Validation loss counts as flat when its relative fall since the last check is below this."
    )
    min_format_valid: Fraction = opt(0.9, "Least share of samples in the right format.")
    min_passk_gain: Fraction = opt(0.1, "Least pass@k minus pass@1.")
    min_entropy: NotNegative = opt(0.02, "Least mean entropy in nats of sampled tokens.")
    min_mixed_frac: Fraction = opt(
        0.25, "Least share of tasks that some samples solve and some don't: the tasks RL learns from."
    )


class SftStage(TrainStage):
    """Supervised fine-tuning on trajectories that a scripted expert plays in the environment."""

    stage: Literal["sft"] = opt("sft", "Kind of stage.")
    name: Text = opt("sft", "Name of the stage: its folder, and what later stages refer to.")
    demonstrations: Count = opt(160, "Expert trajectories to train on.")
    validation_demonstrations: CountOrZero = opt(32, "Further expert trajectories for validation loss.")
    demonstrations_seed: Int = opt(
        0, "Seed of the demonstrations; stages with the same seed and arguments train on the same."
    )
    env_args: dict[str, Any] = opt(
        dict,
        "Environment arguments for playing the demonstrations, over those of env.args, such as a larger "
        "budget of searches for a wasteful expert.",
    )
    task_args: dict[str, Any] = opt(
        dict,
        "Environment arguments for the choice of the demonstrations' tasks, over those of env.args, such as more "
        "of the kinds that need practice.",
    )
    min_reward: Float = opt(1.0, "Demonstrations that score less are left out.")
    epochs: Count = opt(1, "Passes over the demonstrations.")
    batch_size: Count = opt(8, "Trajectories an update.")
    lr: Positive = opt(1e-4, "Peak learning rate.")
    focal_gamma: Annotated[float, Field(strict=True, ge=0, le=5)] = opt(
        0.0,
        "Weigh each token's loss by (1 - p)^gamma, p its probability (focal loss): what is known hardly counts, rare "
        "decisions do. 0: all alike.",
    )
    warmup_frac: Fraction = opt(0.05, "Share of the updates during which the learning rate rises.")
    eval_every: CountOrZero = opt(10, "Updates between validations; 0: only at the end.")
    graduation: Graduation = opt(Graduation, "When SFT is good enough for RL.")
    time_limit_s: Positive | None = null("Stop after so many seconds of training, repeating epochs until then.")
    time_limit_as: Text | None = null(
        "Name of an earlier stage whose wall time is the time limit (an SFT control for RL)."
    )

    @model_validator(mode="after")
    def _effective(self) -> Self:
        if self.time_limit_s is not None and self.time_limit_as is not None:
            raise refuse("time_limit_as", "got both time_limit_s and time_limit_as; keep one")
        if self.batch_size > self.demonstrations:
            raise refuse("batch_size", f"got {self.batch_size}, more than the {self.demonstrations} demonstrations")
        if self.graduation.enabled and self.validation_demonstrations == 0:
            why = "graduation needs a validation loss; allowed: 1 and more, or graduation.enabled: false"
            raise refuse("validation_demonstrations", f"got 0, but {why}")
        return self


class EvalStage(Section):
    """Measure checkpoints on the same questions, each with a paired test against the one before it."""

    stage: Literal["eval"] = opt("eval", "Kind of stage.")
    name: Text = opt("eval", "Name of the stage: its folder.")
    of: tuple[Text, ...] = opt(
        ("previous",),
        "What is measured: previous, base or earlier stages; each is compared with the one before it.",
        min_length=1,
    )
    split: Literal["train", "dev", "test"] = opt("dev", "Split of the tasks: train, dev or test.")
    tasks: Count = opt(200, "Number of tasks.")
    greedy: Bool = opt(True, "Take the likeliest token; false: sample.")
    samples: Count = opt(1, "Samples a task; more than 1 needs greedy: false.")
    temperature: Positive | None = null("Sampling temperature (1 by default); greedy has none.")
    best_of: Several | None = null(
        "Also measure the best of so many samples, as reward_model scores them, beside pass@1 and pass@k."
    )
    reward_model: Text | None = null("Earlier reward_model stage that chooses (best_of).")
    choose_by: Literal["last", "min", "product"] | None = null(
        "What it chooses by: its score at the end (last, the default), or with labels: process the least "
        "or the product of the chances after each turn (best_of)."
    )
    seed: Int = opt(0, "Seed of the tasks and of the sampling.")

    @classmethod
    def derived(cls, data: dict[str, Any]) -> dict[str, Any]:
        own: dict[str, Any] = {"temperature": 1.0} if data.get("greedy") is False else {}
        return own | ({"choose_by": "last"} if data.get("best_of") is not None else {})

    @model_validator(mode="after")
    def _effective(self) -> Self:
        if self.greedy and self.temperature is not None:
            raise refuse("temperature", f"got {self.temperature} without effect, as greedy is true; set greedy: false")
        if self.greedy and self.samples > 1:
            raise refuse("samples", f"got {self.samples}, but greedy samples are all alike; set greedy: false")
        if self.best_of is not None and self.best_of > self.samples:
            raise refuse("best_of", f"got {self.best_of}; allowed: 2 to samples ({self.samples}, with greedy: false)")
        if (self.best_of is None) != (self.reward_model is None):
            missing, given = ("best_of", "reward_model") if self.best_of is None else ("reward_model", "best_of")
            raise refuse(missing, f"got nothing, but {given} needs it; set both or neither")
        if self.choose_by is not None and self.best_of is None:
            raise refuse("choose_by", f"got '{self.choose_by}' without effect, as best_of is null; set it too")
        if len(set(self.of)) < len(self.of):
            raise refuse("of", f"got {list(self.of)}; allowed: each name once")
        return self


Stage = Annotated[
    SftStage | RlStage | PreferenceStage | RewardModelStage | DistillStage | EvalStage, Field(discriminator="stage")
]
STAGE_KINDS: dict[str, type[Section]] = {
    "sft": SftStage,
    "rl": RlStage,
    "preference": PreferenceStage,
    "reward_model": RewardModelStage,
    "distill": DistillStage,
    "eval": EvalStage,
}
