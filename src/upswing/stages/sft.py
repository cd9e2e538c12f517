"""The `sft` stage: a scripted expert plays the environment, the model learns what it said, until it graduates."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from upswing.errors import ConfigError
from upswing.learn.learner import Learner
from upswing.learn.rows import TrainRow
from upswing.learn.schedule import Schedule
from upswing.learn.sharded import make_learner
from upswing.recipe import SftStage
from upswing.recipe.models import LimitsSection
from upswing.seeding import derive_seed
from upswing.stages.context import FINAL, RunContext
from upswing.stages.graduation import Verdict, examine, flatness
from upswing.stages.rows import sft_rows
from upswing.stages.spelling import REMEDY, respelt
from upswing.trajectory.types import Trajectory
from upswing.world import demonstration_env, demonstration_tasks


@dataclass(kw_only=True)
class _Training:
    """Where a stage is."""

    learner: Learner
    rows: list[TrainRow]
    validation: list[TrainRow]
    limit_s: float | None
    total: int
    """Updates planned; a time limit may end the stage earlier or later."""
    step: int = 0
    losses: list[float] = field(default_factory=list)
    trained_s: float = 0.0
    verdict: Verdict | None = None


async def run_sft(context: RunContext, stage: SftStage, index: int) -> dict[str, Any]:
    """Train and save the final weights -> facts for state.json."""
    # A killed SFT stage starts over: everything in it is derived from the seed, so it ends where it would have ended.
    context.metrics.truncate_after(stage.name, -1)
    kept, validation = await _demonstrations(context, stage)
    per_epoch = -(-len(kept) // stage.batch_size)
    total = per_epoch * stage.epochs
    model = context.adapted(context.source_model(context.recipe.source_of(index, stage.from_)), stage)
    schedule = Schedule(kind=stage.schedule, warmup=int(stage.warmup_frac * total), total=total)
    limit_s = stage.time_limit_s
    if stage.time_limit_as is not None:  # as long as that stage's training was
        limit_s = float(context.state.stages[stage.time_limit_as]["train_s"])
    training = _Training(
        learner=make_learner(model, schedule=schedule, **context.trainer_options(stage)),
        rows=sft_rows(kept),
        validation=sft_rows(validation),
        limit_s=limit_s,
        total=total,
    )
    context.share_memory(training.learner)
    if training.validation and stage.graduation.enabled:
        training.losses.append(training.learner.sft_loss(training.validation))
        context.metrics.append(stage.name, 0, {"validation_loss": training.losses[-1]})
    await _train(context, stage, training)
    folder = context.out / "checkpoints" / stage.name / FINAL
    training.learner.save(folder, tokenizer=context.tokenizer)
    facts: dict[str, Any] = {"steps": training.step, "train_s": round(training.trained_s, 1)}
    if training.verdict:
        facts |= {"graduation": training.verdict.as_dict(), "pace": dict(training.verdict.pace)}
    return facts


async def _demonstrations(context: RunContext, stage: SftStage) -> tuple[list[Trajectory], list[Trajectory]]:
    """(training, validation) trajectories of the expert that reached `min_reward`; both from the train split.

    Left out is what the agent couldn't do within the limits: taught, it would be cut. Raises ConfigError when too few
    are left, or more than half are too long.
    """
    limits, tasks = context.recipe.limits, demonstration_tasks(context.recipe, stage, context.tasks.stream)
    seed = derive_seed(context.recipe.seed, "demonstrations", stage.demonstrations_seed)
    wanted = stage.demonstrations + stage.validation_demonstrations
    stream = iter(tasks("train", seed))
    kept, long, rejected = list[Trajectory](), list[Trajectory](), list[Trajectory]()
    with context.progress.task(f"{stage.name}: demonstrations", total=wanted, unit="demo") as shown:
        while (asked := wanted - len(kept)) and len(long) <= len(kept):
            played, failed = await context.rollouts.demonstrations(
                stream,
                count=asked,
                seed=seed,
                min_reward=stage.min_reward,
                make_env=demonstration_env(context.recipe, stage),
                on_done=lambda trajectory: shown.advance(_fits(trajectory, limits)),
            )
            rejected += failed
            for one in played:
                (kept if _fits(one, limits) else long).append(one)
            if len(played) < asked:  # no more tasks, or too bad an expert
                break
    if len(long) > len(kept):
        turn, total = (max(found) for found in zip(*map(_size, long), strict=True))
        raise ConfigError(
            f"stages.{stage.name}.demonstrations: {len(long)} of {len(long) + len(kept)} are longer than the agent's "
            f"limits (turn_tokens {limits.turn_tokens}, context_tokens {limits.context_tokens}): up to {turn} tokens a "
            f"turn, {total} in all; raise the limits, or shorten the expert's turns"
        )
    if len(kept) < wanted:
        errors = [t.error for t in rejected if t.error]
        broken = f"; {len(errors)} errored, the first with {errors[0]}" if errors else ""
        raise ConfigError(
            f"stages.{stage.name}.demonstrations: asked for {wanted} (validation included), but only {len(kept)} of "
            f"{len(kept) + len(long) + len(rejected)} expert trajectories reached reward {stage.min_reward:g}"
            f"{f' within the limits ({len(long)} are longer)' if long else ''}; lower min_reward or demonstrations, or "
            f"mend the expert{broken}"
        )
    context.store.append(stage.name, 0, kept)
    too_long = f", {len(long)} left out as longer than limits.turn_tokens or context_tokens" if long else ""
    left_out = f"{len(rejected)} rejected below {stage.min_reward:g}{too_long}"
    context.note(f"{stage.name}: {wanted} demonstrations kept, {left_out}")
    looked_at = [branch for play in kept[:200] for branch in play.branches]
    if spelt := respelt(looked_at, context.rollouts.renderer.decode):
        context.note(f"{stage.name}: {spelt}. {REMEDY}")
    return kept[: stage.demonstrations], kept[stage.demonstrations :]


def _size(play: Trajectory) -> tuple[int, int]:
    """Tokens of its longest turn, and of its longest branch."""
    turns = [int(np.bincount(branch.turn[branch.sampled], minlength=1).max()) for branch in play.branches]
    return max(turns, default=0), max(map(len, play.branches), default=0)


def _fits(play: Trajectory, limits: LimitsSection) -> bool:
    turn, total = _size(play)
    return turn <= limits.turn_tokens and total <= limits.context_tokens


def _batches(rows: Sequence[TrainRow], size: int, seed: int) -> Iterator[list[TrainRow]]:
    """Endless batches: each epoch in an order of its own, derived from the seed; the last one may be smaller."""
    epoch = 0
    while True:
        order = list(rows)
        random.Random(derive_seed(seed, "epoch", epoch)).shuffle(order)
        for start in range(0, len(order), size):
            yield order[start : start + size]
        epoch += 1


async def _train(context: RunContext, stage: SftStage, training: _Training) -> None:
    batches = _batches(training.rows, stage.batch_size, derive_seed(context.recipe.seed, stage.name))
    total = training.total if training.limit_s is None else None
    with context.progress.task(stage.name, total=total, unit="update") as shown:
        while not _is_over(training):
            started = time.perf_counter()
            metrics = training.learner.sft_update(next(batches), focal_gamma=stage.focal_gamma)
            training.trained_s += time.perf_counter() - started
            training.step += 1
            context.metrics.append(stage.name, training.step, metrics.as_dict())
            shown.update(training.step, loss=round(metrics.loss, 4), lr=metrics.lr)
            at_end = _is_over(training)
            if at_end or (stage.eval_every and training.step % stage.eval_every == 0):
                await _check(context, stage, training, at_end)
                if training.verdict and training.verdict.graduated and stage.graduation.stop:
                    break
    if training.verdict:
        context.note(f"{stage.name}: after {training.step} updates {training.verdict.words}")


def _is_over(training: _Training) -> bool:
    if training.limit_s is not None:
        return training.trained_s >= training.limit_s
    return training.step >= training.total


async def _check(context: RunContext, stage: SftStage, training: _Training, at_end: bool) -> None:
    """Validation loss; and the graduation check, once the loss is flat or training ends (it costs rollouts)."""
    if training.validation:
        training.losses.append(training.learner.sft_loss(training.validation))
        context.metrics.append(stage.name, training.step, {"validation_loss": training.losses[-1]})
    rules = stage.graduation
    if not rules.enabled or not training.losses:
        return
    flat = flatness(training.losses, rules.flat_tol)
    if flat.passed or at_end:
        await context.push_weights(training.learner.weights())
        training.verdict = await examine(context, rules, stage.name, training.step, flat)
        context.metrics.append(stage.name, training.step, training.verdict.as_dict())
