"""The `rl` stage. A step is the README's loop: tasks -> rollout -> verifier -> advantage -> update -> weights."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from upswing.errors import UpswingError
from upswing.learn.learner import Learner
from upswing.learn.metrics import UpdateMetrics
from upswing.learn.schedule import Schedule
from upswing.monitor.progress import TaskProgress
from upswing.recipe import RlStage
from upswing.seeding import derive_seed
from upswing.stages.context import FINAL, RunContext
from upswing.stages.evaluate import SUCCESS, measure
from upswing.stages.rl_metrics import batch_metrics, early_warning
from upswing.stages.rows import rl_rows
from upswing.trajectory.types import Group, Task
from upswing.trajectory.validate import validate_group

MODEL_OF_STEP = "step-{:06d}"


@dataclass(kw_only=True)
class _Training:
    learner: Learner
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


async def run_rl(context: RunContext, stage: RlStage, index: int) -> dict[str, Any]:
    """Train and save the final weights -> facts for state.json. Goes on from the last checkpoint of a killed run."""
    training = _start(context, stage, index)
    await context.push_weights(training.learner.weights())
    if not any("eval_reward" in row and row["step"] == training.step for row in context.metrics.read(stage.name)):
        await _evaluate(context, stage, training)
    with context.progress.task(stage.name, total=stage.steps, unit="step") as shown:
        shown.update(training.step)
        try:
            while not _is_over(stage, training):
                await _step(context, stage, training, shown)
                training.step += 1
                training.updating = False
                await _after_step(context, stage, training)
        except (asyncio.CancelledError, KeyboardInterrupt):
            if not training.updating:
                _save(context, stage, training)
            raise
    training.learner.save(training.folder / FINAL, tokenizer=context.loaded.tokenizer)
    return {"steps": training.step, "train_s": round(training.train_s, 1)}


def _is_over(stage: RlStage, training: _Training) -> bool:
    timed_out = stage.time_limit_s is not None and training.train_s >= stage.time_limit_s
    return training.step >= stage.steps or timed_out


async def _step(context: RunContext, stage: RlStage, training: _Training, shown: TaskProgress) -> None:
    """One step of the loop."""
    started = time.perf_counter()
    tasks = _tasks(context, stage, training.step)
    groups = await _rollout(context, stage, tasks, training.step)
    rollout_s = time.perf_counter() - started
    rows, rewards, advantages = rl_rows(groups, truncated=stage.truncated, normalize_std=stage.normalize_std)
    training.updating = True
    update = training.learner.rl_update(rows, **_loss_options(stage))
    await context.push_weights(training.learner.weights())
    step_s = time.perf_counter() - started
    training.train_s += step_s
    values = {
        **batch_metrics(groups, rewards, advantages, context.recovered),
        **{key: value for key, value in update.as_dict().items() if key != "seconds"},
        "rollout_s": rollout_s,
        "update_s": update.seconds,
        "step_s": step_s,
        "train_s": training.train_s,
    }
    context.metrics.append(stage.name, training.step + 1, values)
    _report(context, stage, training, shown, values, update)


def _tasks(context: RunContext, stage: RlStage, step: int) -> list[Task]:
    """The step's tasks: a slice of the stage's stream, so that a resumed run sees what it would have seen."""
    seed = derive_seed(context.recipe.seed, stage.name, "tasks")
    tasks = context.tasks.take("train", seed, stage.tasks_per_step, skip=step * stage.tasks_per_step)
    if len(tasks) < stage.tasks_per_step:
        raise UpswingError(
            f"{stage.name}: the train tasks ran out at step {step}; make the stream endless or stop earlier"
        )
    return tasks


async def _rollout(context: RunContext, stage: RlStage, tasks: Sequence[Task], step: int) -> list[Group]:
    """Sample, score, check and store the step's groups."""
    total = len(tasks) * stage.group_size
    with context.progress.task(f"{stage.name}: rollouts of step {step + 1}", total=total, unit="trajectory") as shown:
        groups = await context.rollouts.groups(
            tasks,
            size=stage.group_size,
            sampling=context.sampling(temperature=stage.temperature),
            seed=derive_seed(context.recipe.seed, stage.name, step),
            on_done=lambda trajectory: shown.advance(1),
        )
    for group in groups:
        validate_group(group)
    context.store.append(stage.name, step + 1, [t for group in groups for t in group.trajectories])
    return groups


def _loss_options(stage: RlStage) -> dict[str, Any]:
    return {
        "temperature": stage.temperature,
        "clip_low": stage.clip_low,
        "clip_high": stage.clip_high,
        "dual_clip": stage.dual_clip,
        "aggregation": stage.aggregation,
        "norm_length": stage.norm_length,
        "kl_coef": stage.kl_coef,
        "kl_estimator": stage.kl_estimator or "k2",
        "minibatches": stage.minibatches,
        "updates_per_batch": stage.updates_per_batch,
        "old_logprobs": stage.old_logprobs or "recompute",
    }


def _report(
    context: RunContext,
    stage: RlStage,
    training: _Training,
    shown: TaskProgress,
    values: dict[str, Any],
    update: UpdateMetrics,
) -> None:
    shown.update(
        training.step + 1,
        reward=round(values["reward"], 3),
        entropy=round(values["entropy"], 3),
        zero_variance=round(values["zero_variance_frac"], 2),
        calls=round(values["tool_calls"], 2),
    )
    if update.num_nonfinite:
        context.warn(
            "update skipped",
            evidence=f"the gradient of {update.num_nonfinite} update(s) was not finite",
            remedy="Lower the learning rate if it happens again.",
            stage=stage.name,
            step=training.step + 1,
        )
    rules = stage.early_warning
    trouble = early_warning(values, rules.truncated_frac, context.recipe.limits.turn_tokens)
    training.bad_steps = (
        training.bad_steps + 1 if trouble and training.bad_steps == training.step else training.bad_steps
    )
    if trouble and training.bad_steps == rules.steps == training.step + 1:
        title, evidence, remedy = trouble
        context.warn(title, evidence=evidence, remedy=remedy, stage=stage.name, step=training.step + 1)
        if rules.stop:
            raise UpswingError(f"{stage.name}: {title}: {evidence}. {remedy}")


async def _after_step(context: RunContext, stage: RlStage, training: _Training) -> None:
    if stage.save_every and training.step % stage.save_every == 0:
        _save(context, stage, training)
    await _evaluate(context, stage, training)


async def _evaluate(context: RunContext, stage: RlStage, training: _Training) -> None:
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


def _start(context: RunContext, stage: RlStage, index: int) -> _Training:
    """A fresh learner, or the one of the newest whole checkpoint, with what came after it forgotten."""
    source = context.recipe.source_of(index, stage.from_)
    learner = Learner(
        context.source_model(source),
        lr=stage.lr,
        weight_decay=stage.weight_decay,
        grad_clip=stage.grad_clip,
        schedule=Schedule(kind=stage.schedule, warmup=stage.warmup_steps, total=stage.steps),
        max_tokens_per_pack=stage.max_tokens_per_pack,
        compute_dtype=context.compute_dtype,
        ref_model=context.source_model(source) if stage.kl_coef else None,
    )
    training = _Training(learner=learner, folder=context.out / "checkpoints" / stage.name)
    newest = max(training.folder.glob("step-??????"), default=None)
    if newest is not None:
        learner.load(newest)
        training.step = training.saved = int(newest.name.removeprefix("step-"))
        rows = [row for row in context.metrics.read(stage.name) if "train_s" in row and row["step"] <= training.step]
        training.train_s = float(rows[-1]["train_s"]) if rows else 0.0
        context.note(f"{stage.name}: resumed after step {training.step}")
    context.metrics.truncate_after(stage.name, training.step if newest else -1)
    context.store.discard_after(stage.name, training.step)
    return training


def _save(context: RunContext, stage: RlStage, training: _Training) -> None:
    """Save the state after the last finished step; older checkpoints beyond `keep_checkpoints` go."""
    if training.step == training.saved:
        return
    training.learner.save(training.folder / MODEL_OF_STEP.format(training.step), tokenizer=context.loaded.tokenizer)
    training.saved = training.step
    for old in sorted(training.folder.glob("step-??????"))[: -stage.keep_checkpoints]:
        shutil.rmtree(old)
