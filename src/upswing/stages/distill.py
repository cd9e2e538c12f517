"""What a `distill` stage does with a step's trajectories: the reverse KL to a teacher. The loop is `rl.py`'s."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from upswing.algo.distill import check_same_vocabulary
from upswing.engine.torch import TorchEngine
from upswing.errors import ConfigError, ModelNotFound, did_you_mean
from upswing.learn.critic import Critic
from upswing.learn.distill import distill_update
from upswing.learn.learner import Learner
from upswing.learn.metrics import UpdateMetrics
from upswing.learn.options import RLOptions
from upswing.learn.schedule import Schedule
from upswing.models.load import load_model
from upswing.models.resolve import resolve_model
from upswing.recipe import DistillStage, Recipe
from upswing.recipe.models import NO_POLICY
from upswing.stages.context import RunContext
from upswing.stages.policy import to_the_end
from upswing.stages.rows import Batch, make_batch
from upswing.trajectory.types import Group


def check_teacher(recipe: Recipe, stage: DistillStage, index: int) -> None:
    """Raises ConfigError unless the teacher is an earlier stage or a model that can be found, and not the student."""
    stages = _stages(recipe, index)
    teacher, student = (recipe.source_of(index, name) for name in (stage.teacher, stage.from_))
    if teacher == student or (student == "base" and teacher == recipe.model):
        why = "the weights that the student starts from, so that there is nothing to learn; use another stage or model"
        raise ConfigError(f"stages.{index}.teacher: got '{stage.teacher}', {why}")
    try:
        if teacher not in stages:
            resolve_model(teacher, download=False)
    except ModelNotFound as problem:
        why = f"'{teacher}' ({', '.join(stages)}{did_you_mean(teacher, stages)}), and {problem}"
        raise ConfigError(f"stages.{index}.teacher: no earlier stage with weights {why}") from None


def _stages(recipe: Recipe, index: int) -> list[str]:
    """Whose weights a stage can use, by name."""
    return ["base", *(other.name for other in recipe.stages[:index] if not isinstance(other, NO_POLICY))]


class DistillMethod:
    """Learns from whatever was sampled: the teacher judges, so that a trajectory needs no score."""

    critic: Critic | None = None

    def __init__(self, context: RunContext, stage: DistillStage, index: int) -> None:
        self.context, self.stage = context, stage
        student = context.source_model(context.recipe.source_of(index, stage.from_))
        name = context.recipe.source_of(index, stage.teacher)
        known = name in _stages(context.recipe, index)
        teacher = load_model(str(context.checkpoint(name) or context.recipe.model) if known else name)
        judge: Any = teacher.model
        self.teacher = judge.to(student.device).requires_grad_(False)
        check_same_vocabulary(context.tokenizer.get_vocab(), teacher.tokenizer.get_vocab())
        # The teacher is the learner's reference: it is run on the same rows in the same way.
        options = context.trainer_options(stage)
        options["schedule"] = Schedule(kind=stage.schedule, warmup=stage.warmup_steps, total=stage.steps)
        self.learner = Learner(context.adapted(student, stage), ref_model=self.teacher, **options)

    async def learn(self, groups: Sequence[Group], step: int) -> tuple[Batch, UpdateMetrics | None, dict[str, float]]:
        if isinstance(self.context.engine, TorchEngine):
            await to_the_end(self.context.engine.forget_cache())  # the learner's memory now; dropped anyway
        batch = make_batch(groups, truncated="as_is", unscored=True)
        temperature = self.stage.temperature
        if self.stage.kl == "full":
            return batch, distill_update(self.learner, batch.rows, self.teacher, temperature=temperature), {}
        # With every advantage 0 only the KL is left, and k2's gradient is the policy gradient of the sampled tokens'
        # reverse KL, teacher - own log-prob as advantage (`algo.distill.distill_advantages`), without its forward.
        options = RLOptions(loss="policy_gradient", kl_coef=1.0, kl_estimator="k2", temperature=temperature)
        return batch, self.learner.rl_update(batch.rows, options), {}
