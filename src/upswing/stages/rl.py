"""The loop of `rl` and `distill` stages: tasks -> rollout -> verifier -> advantage -> update -> weights."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from upswing.algo.regularise import informative_groups
from upswing.errors import UpswingError
from upswing.learn.critic import Critic
from upswing.learn.learner import Learner
from upswing.learn.metrics import UpdateMetrics
from upswing.monitor.progress import TaskProgress
from upswing.recipe import RlStage
from upswing.recipe.distill import DistillStage
from upswing.recipe.rl import GROUPED
from upswing.seeding import derive_seed
from upswing.stages.context import FINAL, RunContext
from upswing.stages.distill import DistillMethod
from upswing.stages.evaluate import SUCCESS, measure
from upswing.stages.policy import PolicyMethod
from upswing.stages.rl_metrics import batch_metrics, early_warning
from upswing.stages.rows import Batch
from upswing.trajectory.types import Group, Task
from upswing.trajectory.validate import validate_group

MODEL_OF_STEP = "step-{:06d}"


class Method(Protocol):
    """What a kind of stage makes of a step's groups."""

    learner: Learner
    critic: Critic | None

    async def learn(
        self, groups: Sequence[Group], step: int
    ) -> tuple[Batch, UpdateMetrics | None, dict[str, float]]: ...


@dataclass(kw_only=True)
class _Training:
    method: Method
    folder: Path
    step: int = 0
    """Finished steps."""
    saved: int = 0
    updating: bool = False
    """From the start of an update until its step counts as finished: not to be saved."""
    bad_steps: int = 0
    """Steps in a row, from the first on, in which nothing could be learned."""
    train_s: float = 0.0
    """Wall time of the finished steps, sampling included, evaluations left out."""

    @property
    def learner(self) -> Learner:
        return self.method.learner


async def run_rl(context: RunContext, stage: RlStage | DistillStage, index: int) -> dict[str, Any]:
    """Train and save the final weights -> facts for state.json. Goes on from the last checkpoint of a killed run."""
    training = _start(context, stage, index)
    await context.push_weights(training.learner.weights())
    if not any("eval_reward" in row and row["step"] == training.step for row in context.metrics.read(stage.name)):
        await _evaluate(context, stage, training)
    with context.progress.task(stage.name, total=stage.steps, unit="step", done=training.step) as shown:
        try:
            while not _is_over(stage, training):
                await _step(context, stage, training, shown)
                training.step += 1
                training.updating = False
                await _after_step(context, stage, training)
        except BaseException:  # an interrupt, or an error between updates: tasks that ran out, a full disk
            if not training.updating:
                _save(context, stage, training)
            raise
    training.learner.save(training.folder / FINAL, tokenizer=context.tokenizer)
    return {"steps": training.step, "train_s": round(training.train_s, 1)}


def _is_over(stage: RlStage | DistillStage, training: _Training) -> bool:
    timed_out = stage.time_limit_s is not None and training.train_s >= stage.time_limit_s
    return training.step >= stage.steps or timed_out


async def _step(context: RunContext, stage: RlStage | DistillStage, training: _Training, shown: TaskProgress) -> None:
    """One step of the loop."""
    started, before = time.perf_counter(), asdict(context.engine.stats)
    groups = await _groups(context, stage, training)
    rollout_s = time.perf_counter() - started
    training.updating = True
    batch, update, signals = await training.method.learn(groups, training.step)
    learned_s = time.perf_counter() - started
    await context.push_weights(training.learner.weights())
    step_s = time.perf_counter() - started
    training.train_s += step_s
    found = {} if update is None else update.as_dict()
    lost = {key: getattr(context.engine.stats, key) - before[key] for key in ("preemptions", "evictions")}
    values = {
        **batch_metrics(groups, batch.rewards_B.tolist(), context.recovered, context.rubric.at(training.step).weights),
        **{key: value for key, value in found.items() if key != "seconds"},
        **signals,
        **(lost if any(lost.values()) or context.recipe.engine.kv_memory_gb is not None else {}),
        "rollout_s": rollout_s,
        "update_s": found.get("seconds", 0.0),
        "sync_s": step_s - learned_s,
        "step_s": step_s,
        "train_s": training.train_s,
    }
    context.metrics.append(stage.name, training.step + 1, values)
    _report(context, stage, training, shown, values)


async def _groups(context: RunContext, stage: RlStage | DistillStage, training: _Training) -> list[Group]:
    """The step's groups. With dynamic sampling: batches until enough groups have a spread, whole ones kept in order."""
    batches = (stage.dynamic_sampling if isinstance(stage, RlStage) else None) or 1
    played: list[Group] = []
    kept: list[Group] = []
    extra = training.learner.extra  # of which a checkpoint keeps how far in its stream of tasks the stage is
    first = extra.get("batches", training.step)
    for number in range(batches):
        found = await _rollout(context, stage, _tasks(context, stage, first + number), training.step, number)
        played += found
        kept += found if batches == 1 else [group for group in found if _is_informative(group)]
        if len(kept) >= stage.tasks_per_step:
            break
    extra["batches"] = first + number + 1
    context.store.append(stage.name, training.step + 1, [t for group in played for t in group.trajectories])
    return kept[: stage.tasks_per_step] or found


def _is_informative(group: Group) -> bool:
    """By the verifier's success where there is one: a shaped reward makes every group look so."""
    scores = [t.score for t in group.trajectories if t.score is not None]
    found = [score.components.get(SUCCESS, score.value) for score in scores]
    values_B = torch.tensor([math.nan if value is None else value for value in found], dtype=torch.float64)
    return bool(informative_groups(values_B, torch.zeros(len(values_B), dtype=torch.long)).any())


def _tasks(context: RunContext, stage: RlStage | DistillStage, number: int) -> list[Task]:
    """Batch `number` of the stage's tasks: a slice of its stream, so that a resumed run sees what it would have."""
    seed = derive_seed(context.recipe.seed, stage.name, "tasks")
    tasks = context.tasks.take("train", seed, stage.tasks_per_step, skip=number * stage.tasks_per_step)
    if len(tasks) < stage.tasks_per_step:
        raise UpswingError(
            f"{stage.name}: the train tasks ran out at batch {number + 1}, {stage.tasks_per_step} tasks each; "
            "make the stream endless, or use fewer steps"
        )
    return tasks


async def _rollout(
    context: RunContext, stage: RlStage | DistillStage, tasks: Sequence[Task], step: int, number: int
) -> list[Group]:
    """Sample, score and check batch `number` of the step's groups."""
    total = len(tasks) * stage.group_size
    with context.progress.task(f"{stage.name}: rollouts of step {step + 1}", total=total, unit="trajectory") as shown:
        groups = await context.rollouts_at(step).groups(
            tasks,
            size=stage.group_size,
            sampling=context.sampling(temperature=stage.temperature),
            seed=derive_seed(context.recipe.seed, stage.name, step, *([number] if number else [])),
            on_done=lambda trajectory: shown.advance(1),
        )
    for group in groups:
        validate_group(group)
    return groups


def _report(
    context: RunContext,
    stage: RlStage | DistillStage,
    training: _Training,
    shown: TaskProgress,
    values: dict[str, Any],
) -> None:
    shown.update(
        training.step + 1,
        reward=round(values["reward"], 3),
        entropy=round(values.get("entropy", math.nan), 3),
        zero_variance=round(values["zero_variance_frac"], 2),
        calls=round(values["tool_calls"], 2),
    )
    if values.get("num_nonfinite"):
        context.warn(
            "update skipped",
            evidence=f"the gradient of {values['num_nonfinite']:.0f} update(s) was not finite",
            remedy="Lower the learning rate if it happens again.",
            stage=stage.name,
            step=training.step + 1,
        )
    rules = stage.early_warning
    if not isinstance(stage, RlStage) or stage.advantage not in GROUPED:
        values = {**values, "informative_frac": math.nan}  # it learns without a spread of rewards within groups
    trouble = early_warning(values, rules.truncated_frac, context.recipe.limits.turn_tokens)
    training.bad_steps = (
        training.bad_steps + 1 if trouble and training.bad_steps == training.step else training.bad_steps
    )
    if trouble and training.bad_steps == rules.steps == training.step + 1:
        title, evidence, remedy = trouble
        context.warn(title, evidence=evidence, remedy=remedy, stage=stage.name, step=training.step + 1)
        if rules.stop:
            raise UpswingError(f"{stage.name}: {title}: {evidence}. {remedy}")


async def _after_step(context: RunContext, stage: RlStage | DistillStage, training: _Training) -> None:
    if stage.save_every and training.step % stage.save_every == 0:
        _save(context, stage, training)
    await _evaluate(context, stage, training)


async def _evaluate(context: RunContext, stage: RlStage | DistillStage, training: _Training) -> None:
    """Greedy success on fixed dev tasks."""
    if not stage.eval_every or training.step % stage.eval_every:
        return
    tasks = context.tasks.take("dev", derive_seed(context.recipe.seed, "dev", "rl"), stage.eval_tasks)
    label = f"{stage.name}: dev after step {training.step}"
    summary, _ = await measure(context, tasks, label=label, temperature=0.0, samples=1, seed=0)
    strict = summary.components.get(SUCCESS, summary.reward)
    values = {
        "eval_reward": summary.reward.mean,
        "eval_low": strict.low,
        "eval_high": strict.high,
        "eval_tool_calls": summary.costs["tool_calls"].mean,
        "eval_recovery": summary.recovery.mean,
        **{f"eval_{name}": interval.mean for name, interval in summary.components.items()},
    }
    context.metrics.append(stage.name, training.step, values)
    by_kind = {
        kind: round(row.get(SUCCESS, row["reward"]).mean, 2) for kind, row in summary.by_tag.get("kind", {}).items()
    }
    context.note(f"{label}: {SUCCESS} {strict.mean:.3f} [{strict.low:.3f}, {strict.high:.3f}] {by_kind or ''}")


# -- checkpoints ------------------------------------------------------------------------------------------------------


def _start(context: RunContext, stage: RlStage | DistillStage, index: int) -> _Training:
    """A fresh learner, or the one of the newest whole checkpoint, with what came after it forgotten."""
    method: Method = (
        PolicyMethod(context, stage, index) if isinstance(stage, RlStage) else DistillMethod(context, stage, index)
    )
    training = _Training(method=method, folder=context.out / "checkpoints" / stage.name)
    whole = [path for path in training.folder.glob("step-??????") if method.critic is None or _critic(path).exists()]
    newest = max(whole, default=None)
    if newest is not None:
        method.learner.load(newest)
        if method.critic is not None:
            method.critic.load(_critic(newest))
        training.step = training.saved = int(newest.name.removeprefix("step-"))
        rows = [row for row in context.metrics.read(stage.name) if "train_s" in row and row["step"] <= training.step]
        training.train_s = float(rows[-1]["train_s"]) if rows else 0.0
        context.note(f"{stage.name}: resumed after step {training.step}")
    context.metrics.truncate_after(stage.name, training.step if newest else -1)
    context.store.discard_after(stage.name, training.step)
    return training


def _save(context: RunContext, stage: RlStage | DistillStage, training: _Training) -> None:
    """Save the state after the last finished step; older checkpoints beyond `keep_checkpoints` go."""
    if training.step == training.saved:
        return
    path = training.folder / MODEL_OF_STEP.format(training.step)
    if training.method.critic is not None:  # first, so that a policy never stands without it
        training.method.critic.save(_critic(path))
    training.learner.save(path, tokenizer=context.tokenizer)
    training.saved = training.step
    for old in sorted(training.folder.glob("step-??????"))[: -stage.keep_checkpoints]:
        shutil.rmtree(old)
        shutil.rmtree(_critic(old), ignore_errors=True)


def _critic(path: Path) -> Path:
    """Where the critic of a checkpoint is."""
    return path.with_name(f"critic-{path.name}")
