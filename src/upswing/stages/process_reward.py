"""Labels for outcome and process reward models: whether a trajectory succeeds, and from after each of its turns how
often the policy does (Math-Shepherd, arXiv 2312.08935: Monte-Carlo roll-outs, no annotator).

Step 0 is before the first turn, step t + 1 after turn t, as in `learn.reward_model.step_rows`. The trajectories are in
the store as the stage's step 0, their roll-outs as its steps from 1 on, CHUNK trajectories each; labels are read off
them, so that a killed stage plays again only what wasn't stored.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from upswing.errors import UpswingError
from upswing.learn.reward_model import step_rows
from upswing.learn.rows import TrainRow
from upswing.recipe.reward_model import RewardModelStage
from upswing.rollout.replay import ReplayDiffers, go_on
from upswing.seeding import derive_seed
from upswing.stages.context import RunContext
from upswing.stages.evaluate import SUCCESS
from upswing.stages.pairs import samples
from upswing.stages.rows import UNSCORED, reward_of
from upswing.trajectory.types import Trajectory

CHUNK = 32
"""Trajectories whose roll-outs are stored together."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Labelled:
    """A trajectory's rows, with its labels as their `returns`."""

    rows: tuple[TrainRow, ...]
    prompt: bytes
    """The task: those of one are held out together."""


def succeeded(trajectory: Trajectory) -> float:
    """1 or 0, as pass@k counts; NaN where that can't be said: errored, cancelled, unscored, out of time."""
    if math.isnan(reward_of(trajectory, "as_is")) or trajectory.score is None:
        return UNSCORED
    value = trajectory.score.components.get(SUCCESS, trajectory.score.value)
    return UNSCORED if value is None else float(value >= 1 - 1e-9)


async def collect_labelled(
    context: RunContext, stage: RewardModelStage, weights: Mapping[str, torch.Tensor]
) -> list[Labelled]:
    """The stage's samples that could be judged, with `labels: process` rolled out again from after each turn.

    Raises UpswingError where all labels are alike, and where the environment can't be brought back to a prefix.
    """
    judged = {t.id: (t, succeeded(t)) for t in await samples(context, stage, weights)}
    known = {name: (t, won) for name, (t, won) in judged.items() if not math.isnan(won)}
    labels: dict[str, dict[int, float]] = {name: {t.num_turns: won} for name, (t, won) in known.items()}
    if stage.labels == "process":
        sources = [t for t, _ in known.values()]
        found = await _rolled_out(context, stage, weights, sources)
        for source in sources:  # a task's samples are roll-outs from before the first turn
            found[f"{_group_of(source.id)}@0"].append(known[source.id][1])
        for source in sources:
            for step in range(source.num_turns):
                outcomes = found[f"{source.id}@{step}" if step else f"{_group_of(source.id)}@0"]
                if outcomes:
                    share = sum(outcomes) / len(outcomes)
                    labels[source.id][step] = float(share > 0) if stage.hard_labels else share
    every = [label for of_one in labels.values() for label in of_one.values()]
    labelled = f"{len(every)} labels of {len(known)} trajectories, mean {sum(every) / max(1, len(every)):.3f}"
    context.note(f"{stage.name}: {labelled}; {len(judged) - len(known)} trajectories could not be judged")
    if len(set(every)) < 2:
        why = f"all {len(every)} labels are alike ({every[0] if every else 'none'})"
        how = "raise temperature or tasks, or start from a model that solves some tasks"
        raise UpswingError(f"{stage.name}: nothing to learn: {why}; {how}")
    groups = {task: number for number, task in enumerate(dict.fromkeys(t.task.id for t, _ in known.values()))}
    rows = {name: tuple(step_rows(t, labels[name], group=groups[t.task.id])) for name, (t, _) in known.items()}
    return [Labelled(rows=rows[name], prompt=t.task.id.encode()) for name, (t, _) in known.items()]


def _group_of(trajectory_id: str) -> str:
    return trajectory_id.rpartition("-")[0]


async def _rolled_out(
    context: RunContext, stage: RewardModelStage, weights: Mapping[str, torch.Tensor], sources: Sequence[Trajectory]
) -> defaultdict[str, list[float]]:
    """`trajectory@step` -> which of its roll-outs succeeded, those left out that can't be judged."""
    chunks = {1 + start // CHUNK: sources[start : start + CHUNK] for start in range(0, len(sources), CHUNK)}
    stored = {step for _, step, _ in context.store.shards(stage.name)}
    missing = {number: chunk for number, chunk in chunks.items() if number not in stored}
    if missing:
        await context.push_weights(weights)
        await _play(context, stage, missing)
    found: defaultdict[str, list[float]] = defaultdict(list)
    differing: list[str] = []
    count = unjudged = 0
    for played in (one.trajectory for one in context.store.read(stage.name) if one.step):
        won = succeeded(played)
        count, unjudged = count + 1, unjudged + math.isnan(won)
        differing += [played.error] if played.error and played.error.startswith(ReplayDiffers.__name__) else []
        if not math.isnan(won):
            found[_group_of(played.id)].append(won)
    if differing:
        evidence = f"{len(differing)} of {count} couldn't be brought back to where they start"
        evidence += f"; the first: {differing[0]}"
        remedy = "Labels need an environment that answers the same turns alike for the same task and seed."
        if 2 * len(differing) > count:
            raise UpswingError(f"{stage.name}: roll-outs: {evidence}. {remedy} Use labels: outcome")
        context.warn("roll-outs left out", evidence=evidence, remedy=remedy, stage=stage.name, step=0)
    if unjudged:
        if unjudged == count:
            raise UpswingError(f"{stage.name}: none of the {count} roll-outs could be judged, so no turn has a label")
        context.note(f"{stage.name}: {unjudged} of {count} roll-outs could not be judged and count for nothing")
    return found


async def _play(context: RunContext, stage: RewardModelStage, chunks: Mapping[int, Sequence[Trajectory]]) -> None:
    """Roll out from after each turn but the last, and store every chunk once it is whole."""
    assert stage.rollouts_per_step is not None and stage.temperature is not None
    sampling = context.sampling(temperature=stage.temperature)
    gate = asyncio.Semaphore(context.rollouts.max_concurrent)
    total = sum(t.num_turns - 1 for chunk in chunks.values() for t in chunk) * stage.rollouts_per_step
    with context.progress.task(f"{stage.name}: roll-outs", total=total, unit="trajectory") as shown:

        async def one(source: Trajectory, step: int, index: int) -> Trajectory:
            name = f"{source.id}@{step}-{index}"
            seed = derive_seed(derive_seed(context.recipe.seed, stage.name, source.id), step, index)
            async with gate:
                played = await go_on(context.rollouts, source, step, trajectory_id=name, sampling=sampling, seed=seed)
            shown.advance(1)
            return played

        each = range(stage.rollouts_per_step)
        for number, chunk in chunks.items():
            wanted = [(t, step, index) for t in chunk for step in range(1, t.num_turns) for index in each]
            async with asyncio.TaskGroup() as group:
                jobs = [group.create_task(one(*which)) for which in wanted]
            context.store.append(stage.name, number, [job.result() for job in jobs])
