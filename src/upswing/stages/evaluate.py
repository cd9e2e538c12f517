"""The `eval` stage, and the same measurement inside other stages."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from upswing.evals.best_of import best_of
from upswing.evals.summary import EvalSummary, missing_rewards, result_entry, results_table, summarize
from upswing.learn.reward_model import score_steps, score_trajectories
from upswing.recipe import EvalStage
from upswing.seeding import derive_seed
from upswing.stages.context import RunContext
from upswing.stages.examples import publish_examples
from upswing.trajectory.types import Task, Trajectory
from upswing.view.report import write_results
from upswing.view.run_folder import RESULTS, read_json

SUCCESS = "strict_match"


async def measure(
    context: RunContext, tasks: Sequence[Task], *, label: str, temperature: float, samples: int, seed: int
) -> tuple[EvalSummary, list[Trajectory]]:
    """Play the tasks with the engine's current weights. `temperature` 0 is greedy."""
    with context.progress.task(label, total=len(tasks) * samples, unit="trajectory") as shown:
        groups = await context.rollouts.groups(
            tasks,
            size=samples,
            sampling=context.sampling(temperature=temperature),
            seed=seed,
            on_done=lambda trajectory: shown.advance(1),
        )
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        summary = summarize(trajectories, recovered=context.recovered, success=SUCCESS)
        shown.update(reward=round(summary.reward.mean, 3))
    if missing := missing_rewards(summary):
        context.progress.warn(f"{label}: {missing}")
        context.metrics.event(f"{label}: {missing}")
    return summary, trajectories


async def run_eval(context: RunContext, stage: EvalStage, index: int) -> dict[str, Any]:
    """Measure every checkpoint of `of` on the same questions, each compared with the one before it."""
    tasks = context.tasks.take(stage.split, derive_seed(context.recipe.seed, stage.split, stage.seed), stage.tasks)
    if len(tasks) < stage.tasks:
        context.warn(
            "fewer questions than asked for",
            evidence=f"split '{stage.split}' has {len(tasks)} tasks, the recipe asks for {stage.tasks}",
            remedy="Intervals will be wider; add tasks or ask for fewer.",
            stage=stage.name,
            step=0,
        )
    entries: list[dict[str, Any]] = []
    played: dict[str, list[Trajectory]] = {}
    previous: tuple[str, EvalSummary] | None = None
    for number, reference in enumerate(stage.of):
        source = context.recipe.source_of(index, reference)
        started = time.perf_counter()
        if context.engine.capabilities.weight_updates:  # else the server's own are measured, and there are no others
            await context.push_weights(context.source_weights(source))
        summary, trajectories = await measure(
            context,
            tasks,
            label=f"{stage.name}: {source}",
            temperature=0.0 if stage.greedy else float(stage.temperature or 1.0),
            samples=stage.samples,
            seed=stage.seed,
        )
        context.store.append(stage.name, number, trajectories)
        entries.append(
            result_entry(
                source,
                stage.name,
                summary,
                split=stage.split,
                mode="greedy" if stage.greedy else "sampled",
                previous=previous[1] if previous else None,
                previous_label=previous[0] if previous else "",
                metric=SUCCESS,
                wall_s=round(time.perf_counter() - started, 1),
                **_best_of(context, stage, source, summary, trajectories),
            )
        )
        previous = (source, summary)
        played[source] = trajectories
    # A repeated stage replaces its own entries.
    kept = [entry for entry in (read_json(context.out / RESULTS) or []) if entry["stage"] != stage.name]
    write_results(context.out, [*kept, *entries])
    context.progress.table(results_table(entries, title=f"{stage.name}: {stage.split}, {stage.tasks} tasks"))
    publish_examples(context, stage.name, played)
    return {}


def _best_of(
    context: RunContext, stage: EvalStage, label: str, summary: EvalSummary, trajectories: Sequence[Trajectory]
) -> dict[str, Any]:
    """What the stage's reward model chooses among n samples, for results.json; empty unless it is asked to."""
    if stage.best_of is None or stage.reward_model is None:
        return {}
    model, scores = context.reward_model(stage.reward_model), list[float | None]()
    if stage.choose_by == "last":
        scores = score_trajectories(model, trajectories)
    else:
        for chances in score_steps(model, trajectories):
            found = float((np.min if stage.choose_by == "min" else np.prod)(chances[1:])) if len(chances) > 1 else None
            scores.append(None if found is None or math.isnan(found) else found)
    figures = best_of(summary.records, scores, stage.best_of, SUCCESS)
    said = [f"{words} {figures[key]:.3f}" for key, words in (("pass_1", "pass@1"), ("pass_n", f"pass@{stage.best_of}"))
            if figures[key] is not None]  # fmt: skip
    best = figures["best"]["mean"]
    context.note(
        f"{stage.name}: {label}: best of {stage.best_of} by {stage.reward_model} "
        f"{'not measured' if best is None else f'{best:.3f}'} ({', '.join(said)}; {figures['tasks']} tasks)"
    )
    return {"best_of": {"reward_model": stage.reward_model, "choose_by": stage.choose_by, **figures}}
