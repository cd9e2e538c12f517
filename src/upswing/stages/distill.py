"""What a `distill` stage does with a step's trajectories: the reverse KL to a teacher. The loop is `rl.py`'s."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from upswing.algo.distill import check_same_vocabulary, distill_advantages
from upswing.errors import UpswingError
from upswing.learn.critic import Critic
from upswing.learn.distill import distill_update
from upswing.learn.learner import Learner
from upswing.learn.metrics import UpdateMetrics
from upswing.learn.rows import spread
from upswing.learn.schedule import Schedule
from upswing.models.load import load_model
from upswing.recipe.distill import DistillStage
from upswing.stages.context import RunContext
from upswing.stages.policy import at_loss
from upswing.stages.rows import Batch, make_batch
from upswing.trajectory.types import Group


class DistillMethod:
    """Learns from whatever was sampled: the teacher judges, so that a trajectory needs no score."""

    critic: Critic | None = None

    def __init__(self, context: RunContext, stage: DistillStage, index: int) -> None:
        self.context, self.stage = context, stage
        student = context.source_model(context.recipe.source_of(index, stage.from_))
        earlier = [other.name for other in context.recipe.stages[:index]]
        teacher = load_model(str(context.checkpoint(stage.teacher)) if stage.teacher in earlier else stage.teacher)
        self.teacher = teacher.model.requires_grad_(False)
        check_same_vocabulary(context.loaded.tokenizer.get_vocab(), teacher.tokenizer.get_vocab())
        # The teacher is the learner's reference: it is run on the same rows in the same way.
        self.learner = Learner(
            context.adapted(student, stage),
            ref_model=self.teacher,
            schedule=Schedule(kind=stage.schedule, warmup=stage.warmup_steps, total=stage.steps),
            **context.trainer_options(stage),
        )

    async def learn(self, groups: Sequence[Group], step: int) -> tuple[Batch, UpdateMetrics | None, dict[str, float]]:
        batch = make_batch(groups, truncated="as_is", unscored=True)
        if not batch.rows:
            raise UpswingError(f"{self.stage.name}: no trajectory of step {step + 1} can be trained on; all errored")
        if self.stage.kl == "full":
            update = distill_update(self.learner, batch.rows, self.teacher, temperature=self.stage.temperature)
            return batch, update, {}
        own, teacher = (
            at_loss(batch.rows, self.learner.logprobs(batch.rows, self.stage.temperature, reference=which))
            for which in (False, True)
        )
        advantages_N = distill_advantages(own, teacher)
        arrays = spread(batch.rows, advantages_N.numpy())
        rows = [replace(row, advantage=array) for row, array in zip(batch.rows, arrays, strict=True)]
        update = self.learner.rl_update(rows, loss="policy_gradient", temperature=self.stage.temperature)
        return batch, update, {"teacher_kl": float(-advantages_N.mean()) if len(advantages_N) else float("nan")}
