"""The loop of `rl` and `distill` stages: tasks -> rollout -> verifier -> advantage -> update -> weights."""

from __future__ import annotations

import asyncio
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from upswing.algo.regularise import informative_groups
from upswing.errors import UpswingError
from upswing.learn.critic import Critic
from upswing.learn.learner import Learner
from upswing.learn.metrics import UpdateMetrics
from upswing.monitor.progress import TaskProgress
from upswing.monitor.safeguards import LEFT_OUT, RESETS, Action
from upswing.recipe import RlStage
from upswing.recipe.distill import DistillStage
from upswing.recipe.rl import GROUPED
from upswing.rollout.sampler import Sampler
from upswing.rollout.scheduler import Counts, Pace, Scheduler
from upswing.seeding import derive_seed
from upswing.stages.context import FINAL, RunContext
from upswing.stages.distill import DistillMethod
from upswing.stages.evaluate import SUCCESS, measure
from upswing.stages.guard import Guard
from upswing.stages.policy import PolicyMethod, to_the_end
from upswing.stages.preflight import Played, announce
from upswing.stages.replay import Replays
from upswing.stages.rl_metrics import age, batch_metrics, early_warning, staleness, trouble, versions
from upswing.stages.rows import Batch, make_batch, rewards_of
from upswing.trajectory.types import Group, Score, Task, Trajectory
from upswing.trajectory.validate import validate_group
from upswing.verify.rubric import GATED

MODEL_OF_STEP = "step-{:06d}"
OFTEN = 4
"""So many times too old is a task only where something is wrong."""


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
    guard: Guard
    step: int = 0
    """Finished steps."""
    saved: int = 0
    updating: bool = False
    """From the start of an update until its step counts as finished: not to be saved."""
    bad_steps: int = 0
    """Steps in a row, from the first on, in which nothing could be learned."""
    train_s: float = 0.0
    """Wall time of the finished steps, sampling included, evaluations left out."""
    tasks: Sampler
    taken: list[tuple[int, Group]] = field(default_factory=list)
    """Numbers and groups of this step, whose update isn't finished."""
    gate: asyncio.Semaphore
    scheduler: Scheduler[Group] = field(init=False)
    counts: Counts = field(default_factory=Counts)
    """Groups of the step that were not learned from."""
    shown: TaskProgress | None = None
    """Of the batch that is waited for."""
    replays: Replays = field(init=False)
    stale_times: int = 0
    """The largest number of times that a task was too old which was warned of."""

    def __post_init__(self) -> None:
        self.replays = Replays(warn=self.warn)

    def warn(self, title: str, evidence: str, remedy: str) -> None:
        stage = self.guard.now.name
        self.guard.context.warn(title, evidence=evidence, remedy=remedy, stage=stage, step=self.step + 1)

    def count(self, trajectory: Trajectory) -> None:
        if self.shown is not None:
            self.shown.advance(1)

    @property
    def learner(self) -> Learner:
        return self.method.learner


async def run_rl(context: RunContext, stage: RlStage | DistillStage, index: int) -> dict[str, Any]:
    """Train and save the final weights -> facts for state.json. Goes on from the last checkpoint of a killed run."""
    training = _start(context, stage, index)
    if not _is_paced(stage):
        context.share_memory(training.learner)
    await context.push_weights(training.learner.weights())
    try:
        return await _train(context, stage, training)
    finally:
        await training.scheduler.close()


async def _train(context: RunContext, stage: RlStage | DistillStage, training: _Training) -> dict[str, Any]:
    evaluated = None
    if not any("eval_reward" in row and row["step"] == training.step for row in context.metrics.read(stage.name)):
        evaluated = await _evaluate(context, stage, training)
    if training.step == 0:
        await announce(context, stage, training.learner.model, evaluated)
        if "rollback" in training.guard.names:  # what one before the first checkpoint goes back to
            training.saved = -1
            _save(context, stage, training)
    with context.progress.task(stage.name, total=stage.steps, unit="step", done=training.step) as shown:
        try:
            while not _is_over(stage, training):
                await _step(context, training.guard.now, training, shown)
                training.step += 1
                training.updating = False
                await asyncio.sleep(0)  # here comes what waited for the update's end: an interrupt
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


def _is_paced(stage: RlStage | DistillStage) -> bool:
    """Whether sampling and learning do more than take turns."""
    return isinstance(stage, RlStage) and bool(stage.max_staleness or stage.oversample)


async def _step(context: RunContext, stage: RlStage | DistillStage, training: _Training, shown: TaskProgress) -> None:
    """One step of the loop."""
    started, before = time.perf_counter(), asdict(context.engine.stats)
    groups = await _groups(context, stage, training)
    rollout_s = time.perf_counter() - started
    training.updating = True
    behind = staleness(groups, context.engine.version, training.counts) if _is_paced(stage) else {}
    batch, update, signals = await training.method.learn(groups, training.step)
    learned_s = time.perf_counter() - started
    await to_the_end(context.push_weights(training.learner.weights()))
    step_s = time.perf_counter() - started
    training.train_s += step_s
    found = {} if update is None else update.as_dict()
    lost = {key: getattr(context.engine.stats, key) - before[key] for key in ("preemptions", "evictions")}
    values = {
        **batch_metrics(
            *_measured(stage, training, groups, batch), context.recovered, context.rubric.at(training.step).weights
        ),
        **{key: value for key, value in found.items() if key != "seconds"},
        **signals,
        **behind,
        **training.guard.signals(),
        **(lost if any(lost.values()) or context.recipe.engine.kv_memory_gb is not None else {}),
        "rollout_s": rollout_s,
        "update_s": found.get("seconds", 0.0),
        "sync_s": step_s - learned_s,
        "sync_gb": (context.engine.stats.weight_bytes - before["weight_bytes"]) / 1e9,
        "step_s": step_s,
        "train_s": training.train_s,
    }
    context.metrics.append(stage.name, training.step + 1, values)
    _report(context, stage, training, shown, values)
    training.guard.observe({"step": training.step + 1, **values})
    if (action := training.guard.decide(training.step + 1)) is not None:
        await _carry_out(context, training, action)
    training.scheduler.advance()  # last: after a rollback, what was sampled before it counts as older
    for number, group in training.taken:
        training.tasks.learned(group.task, _success(group, training.guard.paid))
        training.tasks.forget([number])
    training.taken.clear()


def _measured(
    stage: RlStage | DistillStage, training: _Training, groups: Sequence[Group], batch: Batch
) -> tuple[list[Group], list[float]]:
    """All that was played for the step and its rewards: also what dynamic sampling leaves out of `groups`."""
    played = [group for _, group in training.taken]
    if len(played) > len(groups) and isinstance(stage, RlStage):  # never with a reward model: a recipe refuses both
        batch = make_batch(played, truncated=stage.truncated, overlong=stage.overlong)
    return played, batch.rewards_B.tolist()


async def _carry_out(context: RunContext, training: _Training, action: Action) -> None:
    """Do what a safeguard is for. A rollback brings weights back, never steps: tasks go on with the next numbers."""
    method, now = training.method, training.guard.now
    if action.safeguard == "stop":
        raise UpswingError(f"{now.name}: stopped at step {action.step}: {action.why}")
    assert isinstance(method, PolicyMethod) and isinstance(now, RlStage)
    if action.rollback is not None:
        path = training.folder / MODEL_OF_STEP.format(action.rollback)
        method.restore(path, _critic(path))
        await to_the_end(context.push_weights(training.learner.weights()))
    method.change(now)
    if RESETS in action.changes and training.learner.reference is not None:
        training.learner.reference.refresh()
    if LEFT_OUT in action.changes:
        training.tasks.left_out = frozenset(action.changes[LEFT_OUT][1])


async def _groups(context: RunContext, stage: RlStage | DistillStage, training: _Training) -> list[Group]:
    """The step's groups. With dynamic sampling: batches until enough groups have a spread, whole ones kept in order."""
    batches = (stage.dynamic_sampling if isinstance(stage, RlStage) else None) or 1
    weights = context.rubric.at(training.step).weights
    paid = any(name.removesuffix(GATED) == SUCCESS for name in weights)
    played: list[Group] = []
    kept: list[Group] = []
    training.counts = Counts()
    for number in range(batches):
        found = await _take(context, stage, training, more=number > 0)
        played += found
        if isinstance(stage, RlStage) and batches > 1:
            kept += [group for group in found if _is_informative(group, stage.truncated, success=paid)]
        else:
            kept += found
        if len(kept) >= stage.tasks_per_step:
            break
    context.store.append(stage.name, training.step + 1, [t for group in played for t in group.trajectories])
    return kept[: stage.tasks_per_step] or found


async def _take(context: RunContext, stage: RlStage | DistillStage, training: _Training, *, more: bool) -> list[Group]:
    """A batch of groups from those in play."""
    total = stage.tasks_per_step * stage.group_size
    label = f"{stage.name}: rollouts of step {training.step + 1}"
    with context.progress.task(label, total=total, unit="trajectory") as shown:
        training.shown = shown
        taken = await training.scheduler.take(more=more)
        training.shown = None
    training.taken += zip(taken.numbers, taken.groups, strict=True)
    training.counts += taken.counts
    return list(taken.groups)


async def _play(
    context: RunContext, stage: RlStage | DistillStage, training: _Training, number: int, attempt: int
) -> Group:
    """Sample, score and check a group. Its seed is its number's, so that a resumed run samples what it would have."""

    async def play(broken: int) -> Group:
        rollouts = replace(context.rollouts_at(training.scheduler.version), gate=training.gate)
        again = [broken] if broken else []
        (group,) = await rollouts.groups(
            [_task(stage, training.tasks, number)],
            size=stage.group_size,
            sampling=context.sampling(temperature=stage.temperature),
            seed=derive_seed(context.recipe.seed, stage.name, "group", number, attempt, *again),
            on_done=None if broken else training.count,
        )
        return group

    group = await training.replays.group(play)
    validate_group(group, branches=False)  # `play` has looked at those
    return group


def _on_stale(context: RunContext, training: _Training, number: int, group: Group, times: int) -> None:
    """A group was too old, for the `times`-th time: it is given up, or its task is played again."""
    pace = training.scheduler.pace
    if pace.stale == "drop":
        training.tasks.forget([number])
    elif times >= max(OFTEN, 2 * training.stale_times):
        training.stale_times = times
        seen = ", ".join(map(str, sorted(set(versions([group]).tolist()))))
        training.warn(
            "a task is never new enough",
            f"task '{group.task.id}' was too old {times} times: its tokens are of versions {seen}, the engine has "
            f"{context.engine.version}, max_staleness is {pace.max_staleness}",
            "See whether the engine names the version of its weights rightly; else raise max_staleness, or use "
            "stale: keep.",
        )


def _sampler(context: RunContext, stage: RlStage | DistillStage) -> Sampler:
    """Of the stage's tasks."""
    seed = derive_seed(context.recipe.seed, stage.name, "tasks")
    chosen = stage.curriculum if isinstance(stage, RlStage) else None
    options: dict[str, Any] = {} if chosen is None else {"tag": chosen.tag, "floor": chosen.floor}
    return Sampler(stream=lambda: context.tasks.stream("train", seed), seed=seed, **options)


def _task(stage: RlStage | DistillStage, sampler: Sampler, number: int) -> Task:
    """Raises UpswingError when there are not so many, or when they lack what a curriculum looks at."""
    task = sampler.take(number)
    if task is None:
        batch, size = number // stage.tasks_per_step + 1, stage.tasks_per_step
        raise UpswingError(
            f"{stage.name}: the train tasks ran out at batch {batch}, {size} tasks each; make the stream "
            "endless, or use fewer steps"
        )
    if sampler.tag is not None and sampler.tag not in task.tags:
        known = ", ".join(sorted(task.tags)) or "none"
        raise UpswingError(
            f"{stage.name}.curriculum.tag: task '{task.id}' has no tag '{sampler.tag}'; its tags: {known}"
        )
    return task


def _successes(group: Group, paid: Mapping[str, float]) -> list[float]:
    """What each earns of the scores that are success, by their weights; without any, its reward. NaN: unknown."""

    def earned(score: Score) -> float:
        parts = [(weight, score.components.get(name)) for name, weight in paid.items()] or [(1.0, score.value)]
        return sum(w * (math.nan if one is None else one) for w, one in parts) / sum(w for w, _ in parts)

    return [earned(t.score) for t in group.trajectories if t.score is not None]


def _success(group: Group, paid: Mapping[str, float]) -> float | None:
    """How far the task is solved, between 0 and 1; None: nobody could tell."""
    known = [min(1.0, max(0.0, value)) for value in _successes(group, paid) if not math.isnan(value)]
    return sum(known) / len(known) if known else None


def _is_informative(group: Group, truncated: str, *, success: bool) -> bool:
    """Whether its rewards differ; with `success`, which is then part of the reward, that too: a shaped one differs in
    every group."""
    values = [rewards_of(group.trajectories, truncated), *([_successes(group, {SUCCESS: 1.0})] if success else [])]
    found = [torch.tensor(values_B, dtype=torch.float64) for values_B in values]
    return all(bool(informative_groups(one_B, torch.zeros(len(one_B), dtype=torch.long)).any()) for one_B in found)


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
        skipped = f"the gradient of {values['num_nonfinite']:.0f} update(s) was not finite"
        training.warn("update skipped", skipped, "Lower the learning rate if it happens again.")
    rules, broken = stage.early_warning, trouble([t for _, group in training.taken for t in group.trajectories])
    if broken:
        context.note(f"{stage.name} step {training.step + 1}: {broken}")
    spread: Literal["group", "batch"] | None = None
    if isinstance(stage, RlStage):
        spread = "group" if stage.advantage in GROUPED else "batch"
    tokens = context.recipe.limits.turn_tokens
    bad = early_warning(values, rules.truncated_frac, tokens, spread=spread, broken=broken)
    training.bad_steps += bad is not None and training.bad_steps == training.step
    if bad is not None and training.bad_steps == rules.steps == training.step + 1:
        title, evidence, remedy = bad
        training.warn(title, evidence, remedy)
        if rules.stop:
            raise UpswingError(f"{stage.name}: {title}: {evidence}. {remedy}")


async def _after_step(context: RunContext, stage: RlStage | DistillStage, training: _Training) -> None:
    if stage.save_every and training.step % stage.save_every == 0:
        _save(context, stage, training)
    await _evaluate(context, stage, training)


async def _evaluate(context: RunContext, stage: RlStage | DistillStage, training: _Training) -> Played | None:
    """Greedy success on fixed dev tasks -> what was played for it."""
    if not stage.eval_every or training.step % stage.eval_every:
        return None
    tasks = context.tasks.take("dev", derive_seed(context.recipe.seed, "dev", "rl"), stage.eval_tasks)
    label = f"{stage.name}: dev after step {training.step}"
    began = time.perf_counter()
    summary, trajectories = await measure(context, tasks, label=label, temperature=0.0, samples=1, seed=0)
    played = Played(time.perf_counter() - began, trajectories)
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
    training.guard.observe({"step": training.step, **values})
    by_kind = {
        kind: round(row.get(SUCCESS, row["reward"]).mean, 2) for kind, row in summary.by_tag.get("kind", {}).items()
    }
    context.note(f"{label}: {SUCCESS} {strict.mean:.3f} [{strict.low:.3f}, {strict.high:.3f}] {by_kind or ''}")
    return played


# -- checkpoints ------------------------------------------------------------------------------------------------------


def _start(context: RunContext, stage: RlStage | DistillStage, index: int) -> _Training:
    """A fresh learner, or the one of the newest whole checkpoint, with what came after it forgotten."""
    method: Method = (
        PolicyMethod(context, stage, index) if isinstance(stage, RlStage) else DistillMethod(context, stage, index)
    )
    folder = context.out / "checkpoints" / stage.name
    training = _Training(
        method=method,
        folder=folder,
        guard=Guard(context, stage, folder),
        tasks=_sampler(context, stage),
        gate=asyncio.Semaphore(context.rollouts.max_concurrent),
    )
    whole = [path for path in training.folder.glob("step-??????") if method.critic is None or _critic(path).exists()]
    newest = max(whole, default=None)
    if newest is not None:
        method.learner.load(newest)
        if method.critic is not None:
            method.critic.load(_critic(newest))
        training.step = training.saved = int(newest.name.removeprefix("step-"))
        rows = [row for row in context.metrics.read(stage.name) if "train_s" in row and row["step"] <= training.step]
        training.train_s = float(rows[-1]["train_s"]) if rows else 0.0
        if "sampler" in method.learner.extra:
            training.tasks.restore(method.learner.extra["sampler"])
        context.note(f"{stage.name}: resumed after step {training.step}")
    context.metrics.truncate_after(stage.name, training.step if newest else -1)
    context.store.discard_after(stage.name, training.step)
    _resume_guard(training, newest)
    pace = Pace(batch=stage.tasks_per_step)
    if isinstance(stage, RlStage):
        pace = replace(
            pace, max_staleness=stage.max_staleness, stale=stage.stale or "requeue", oversample=stage.oversample
        )
    training.scheduler = Scheduler(
        play=partial(_play, context, stage, training),
        pace=pace,
        staleness=lambda group: age(group, context.engine.version),
        on_stale=partial(_on_stale, context, training),
        version=training.step,
        state_before=method.learner.extra.get("scheduler"),
    )
    return training


def _resume_guard(training: _Training, newest: Path | None) -> None:
    """What the watch knew, and what the safeguards had changed when `newest` was saved."""
    method, saved = training.method, training.learner.extra.get("safeguards")
    training.guard.resume(saved)
    now = training.guard.now
    if newest is None or saved is None or now is training.guard.stage:
        return
    assert isinstance(method, PolicyMethod) and isinstance(now, RlStage)
    method.change(now)
    method.learner.load(newest)  # again: what the change has set anew, a reference too, was adapted since


def _save(context: RunContext, stage: RlStage | DistillStage, training: _Training) -> None:
    """Save the state after the last finished step; older checkpoints beyond `keep_checkpoints` go."""
    if training.step == training.saved:
        return
    path = training.folder / MODEL_OF_STEP.format(training.step)
    training.learner.extra["scheduler"] = training.scheduler.state()  # of which tasks a resumed run goes on with
    training.learner.extra["sampler"] = training.tasks.state()
    if training.guard.names:
        training.learner.extra["safeguards"] = training.guard.past.to_json()
    if training.method.critic is not None:  # first, so that a policy never stands without it
        training.method.critic.save(_critic(path))
    training.learner.save(path, tokenizer=context.tokenizer)
    training.saved = training.step
    best = training.guard.best() if "rollback" in training.guard.names else None
    for old in sorted(training.folder.glob("step-??????"))[: -stage.keep_checkpoints]:
        if best is not None and old.name == MODEL_OF_STEP.format(best):
            continue
        shutil.rmtree(old)
        shutil.rmtree(_critic(old), ignore_errors=True)


def _critic(path: Path) -> Path:
    """Where the critic of a checkpoint is."""
    return path.with_name(f"critic-{path.name}")
