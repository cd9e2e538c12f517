"""Chooses the trajectories that the report shows: the same questions before and after, and a recovery."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from upswing.trajectory.types import Trajectory
from upswing.view.report import example_from
from upswing.view.run_folder import EXAMPLES, replace_file

if TYPE_CHECKING:
    from upswing.stages.context import RunContext

NUM_EXAMPLES = 4


def write_examples(context: RunContext, played: dict[str, list[Trajectory]]) -> None:
    """Write examples.json from what each checkpoint did on the same tasks (`played`: label -> trajectories)."""
    by_task = {label: {t.task.id: t for t in reversed(ts)} for label, ts in played.items()}
    labels = list(by_task)
    first, last = by_task[labels[0]], by_task[labels[-1]]
    chosen: list[tuple[str, str]] = []
    recovery = _find(last.values(), lambda t: _won(t) and _recovered(context, t))
    if recovery:
        chosen.append(("The first search fails, the agent searches differently and recovers", recovery.task.id))
    gained = [i for i, t in last.items() if _won(t) and i in first and not _won(first[i])]
    chosen += [("Wrong before, right after", i) for i in gained if recovery is None or i != recovery.task.id]
    lost = [i for i, t in last.items() if not _won(t)]
    chosen = chosen[: NUM_EXAMPLES - 1] + [("Still wrong", i) for i in lost[:1]]
    decode = context.rollouts.renderer.decode
    examples: list[dict[str, Any]] = [
        {
            "title": title,
            "task_id": task_id,
            "trajectories": [
                example_from(tasks[task_id], decode=decode, label=label)
                for label, tasks in by_task.items()
                if task_id in tasks
            ],
        }
        for title, task_id in chosen
    ]
    replace_file(context.out / EXAMPLES, json.dumps(examples, ensure_ascii=False))


def _won(trajectory: Trajectory) -> bool:
    return trajectory.reward is not None and trajectory.reward >= 1.0


def _recovered(context: RunContext, trajectory: Trajectory) -> bool:
    return context.recovered is not None and context.recovered(trajectory) is True


def _find(trajectories: Iterable[Trajectory], wanted: Callable[[Trajectory], bool]) -> Trajectory | None:
    return next((t for t in trajectories if wanted(t)), None)
