"""Chooses the trajectories that the report shows: the same questions before and after, and a recovery."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from upswing.trajectory.types import Trajectory
from upswing.view.examples import example_entry, example_from, write_examples
from upswing.view.run_folder import EXAMPLES, read_json

if TYPE_CHECKING:
    from upswing.stages.context import RunContext

NUM_GAINED = 2


def publish_examples(context: RunContext, stage: str, played: Mapping[str, list[Trajectory]]) -> None:
    """Put a stage's examples into examples.json, from what each checkpoint did on the same tasks (`played`: label ->
    trajectories); those of other stages stay."""
    others = [e for e in read_json(context.out / EXAMPLES) or [] if e["trajectories"][0]["stage"] != stage]
    by_task = {label: {t.task.id: t for t in reversed(ts)} for label, ts in played.items()}
    labels = list(by_task)
    decode = context.rollouts.renderer.decode
    entries = [
        example_entry(
            [
                example_from(tasks[task_id], decode=decode, label=label, stage=stage)
                for label, tasks in by_task.items()
                if task_id in tasks
            ],
            task_id=task_id,
            title=title,
            kind=kind,
        )
        for title, kind, task_id in _chosen(context, by_task[labels[0]], by_task[labels[-1]])
    ]
    write_examples(context.out, [*entries, *others])


def _chosen(
    context: RunContext, first: Mapping[str, Trajectory], last: Mapping[str, Trajectory]
) -> list[tuple[str, str, str]]:
    """(title, kind, task id): a recovery, questions won since the first checkpoint, and one that is still lost."""
    recovered = [i for i, t in last.items() if _won(t) and _first_missed(context, t)]
    gained = [i for i, t in last.items() if _won(t) and i in first and not _won(first[i]) and i not in recovered[:1]]
    lost = [i for i, t in last.items() if not _won(t)]
    chosen = {
        ("The first search misses; the agent searches differently and recovers", "recovery"): recovered[:1],
        ("Wrong before, right after", "before_after"): gained[:NUM_GAINED],
        ("Still wrong", "before_after"): lost[:1],
    }
    return [(*words, i) for words, found in chosen.items() for i in found]


def _first_missed(context: RunContext, trajectory: Trajectory) -> bool:
    """Whether it recovered, and from its first call: had that been the only one, it would not have."""
    if context.recovered is None or not context.recovered(trajectory):
        return False
    first = [record for record in trajectory.tool_records if record.call.name][:1]
    return context.recovered(replace(trajectory, tool_records=tuple(first))) is False


def _won(trajectory: Trajectory) -> bool:
    return trajectory.reward is not None and trajectory.reward >= 1.0 - 1e-9
