"""`upswing rescore RUN`: judge a run's stored trajectories anew, without sampling anything."""

from __future__ import annotations

import asyncio
import json
import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from upswing.cli.common import Quiet, check_run_folder, user_command
from upswing.errors import ConfigError, did_you_mean
from upswing.recipe import DistillStage, RlStage, load_recipe

if TYPE_CHECKING:
    from rich.table import Table

    from upswing.trajectory.store import StoredTrajectory
    from upswing.trajectory.types import Score
    from upswing.verify import Rubric

_AT_ONCE = 64


@user_command
def rescore_command(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Changes to the verifiers, such as verifiers.0.name=f1."),
    ] = None,
    recipe: Annotated[Path | None, typer.Option(help="Take this recipe's verifiers, not the run's own.")] = None,
    stage: Annotated[list[str] | None, typer.Option(help="Only this stage; may be repeated.")] = None,
    examples: Annotated[int, typer.Option(min=0, help="How many of the largest changes to show.")] = 5,
    out: Annotated[Path | None, typer.Option(help="Write every changed trajectory to this JSON Lines file.")] = None,
    quiet: Quiet = False,
) -> None:
    """Judge a run's stored trajectories with changed verifiers, and show what would have changed.

    Nothing is sampled, and nothing in the run folder is written.
    """
    check_run_folder(run)
    foreign = [item for item in overrides or [] if not item.startswith("verifiers")]
    if foreign:
        raise ConfigError(f"'{foreign[0]}' changes nothing here: only verifiers can be changed")
    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        raise ConfigError(f"--out: '{out}' is a folder" if out.is_dir() else f"--out: no folder '{out.parent}'")
    config, played = load_recipe(recipe or run, overrides or []), load_recipe(run)
    from upswing.monitor.progress import Progress
    from upswing.trajectory.store import TrajectoryStore
    from upswing.verify import rubric_from

    store, log = TrajectoryStore(run / "trajectories"), Progress(quiet=quiet)
    stages = list(dict.fromkeys(name for name, _, _ in store.shards()))
    if not stages:
        raise ConfigError(f"'{run}' has no stored trajectories")
    for name in stage or []:
        if name not in stages:
            raise ConfigError(f"--stage: no trajectories of '{name}'{did_you_mean(name, stages)} ({', '.join(stages)})")
    stored = (one for name in stage or stages for one in store.read(name))
    log.note(f"judging what {', '.join(stage or stages)} stored with {', '.join(v.name for v in config.verifiers)}")
    by_step = {one.name for one in played.stages if isinstance(one, RlStage | DistillStage)}
    rows = asyncio.run(_judged(stored, rubric_from(config.verifiers), by_step, config.limits.scoring_timeout_s))
    log.table(_summary(rows))
    changed = sorted((row for row in rows if row.changed), key=lambda row: -abs(row.rise))
    if changed and examples:
        log.table(_examples(changed[:examples]))
    if out is not None:
        out.write_text("".join(json.dumps(asdict(row)) + "\n" for row in changed), encoding="utf-8")


@dataclass(frozen=True)
class _Row:
    """One trajectory, judged then and now; None: it had, or has, no score."""

    stage: str
    step: int
    id: str
    task: str
    answer: str | None
    gold: tuple[str, ...]
    before: float | None
    after: float | None
    components: Mapping[str, float | None]
    reason: str

    @property
    def changed(self) -> bool:
        if self.before is None or self.after is None:
            return self.before is not self.after
        return not math.isclose(self.before, self.after, rel_tol=1e-9, abs_tol=1e-12)

    @property
    def rise(self) -> float:
        """After - before; infinite to or from "could not score", which is more than anything."""
        return math.inf if self.before is None or self.after is None else self.after - self.before


async def _judged(
    stored: Iterator[StoredTrajectory], rubric: Rubric, by_step: Collection[str], timeout_s: float
) -> list[_Row]:
    """`by_step`: stages whose step s, stored as s + 1, is judged with the weights that the rubric has then."""
    from upswing.rollout.collect import judge, judge_group

    async def one(group: Sequence[StoredTrajectory]) -> list[_Row]:
        first, played = group[0], [item.trajectory for item in group]
        rubric_then = rubric.at(max(0, first.step - 1)) if first.stage in by_step else rubric
        alone = await asyncio.gather(*(judge(then, rubric_then, timeout_s) for then in played))
        scored = [replace(then, score=score) for then, score in zip(played, alone, strict=True)]
        judged = await judge_group(scored, rubric_then, timeout_s)
        return [_row(item, now.score) for item, now in zip(group, judged, strict=True)]

    rows: list[_Row] = []
    for batch in _batches(stored):
        rows += [row for found in await asyncio.gather(*map(one, batch)) for row in found]
    return rows


def _row(item: StoredTrajectory, now: Score | None) -> _Row:
    then = item.trajectory
    return _Row(
        stage=item.stage,
        step=item.step,
        id=then.id,
        task=then.task.id,
        answer=then.answer,
        gold=then.task.gold,
        before=then.reward,
        after=None if now is None else now.value,
        components={} if now is None else dict(now.components),
        reason="" if now is None else now.reason,
    )


def _batches(stored: Iterator[StoredTrajectory]) -> Iterator[list[list[StoredTrajectory]]]:
    """Whole groups, which stand together in the store, some at once: a run may hold more than memory does."""
    batch: list[list[StoredTrajectory]] = []
    for _, group in groupby(stored, lambda x: (x.stage, x.step, group_of(x.trajectory.id, x.trajectory.task.id))):
        batch.append(list(group))
        if sum(map(len, batch)) >= _AT_ONCE:
            yield batch
            batch = []
    if batch:
        yield batch


def group_of(trajectory: str, task: str) -> str:
    """What the ids of a group share: of task/seed/row-place all but the place; a batch may hold a task twice."""
    group, _, place = trajectory.rpartition("-")
    return task if not group or "/" in place else group


def _summary(rows: Sequence[_Row]) -> Table:
    """A row a stage: mean reward then and now, how many rose, fell or can't be scored, and how many groups of one task
    hold different rewards: the ones that RL learns from."""
    from rich.table import Table

    table = Table("stage", "trajectories", "reward", "now", "rose", "fell", "not scored", "now", "mixed groups", "now")
    by_stage: dict[str, list[_Row]] = defaultdict(list)
    for row in rows:
        by_stage[row.stage].append(row)
    for name, held in by_stage.items():
        before, after = [row.before for row in held], [row.after for row in held]
        rises = [row.rise for row in held if row.changed and row.rise < math.inf]
        counts = (
            sum(rise > 0 for rise in rises),
            sum(rise < 0 for rise in rises),
            before.count(None),
            after.count(None),
            *(_num_mixed(held, values) for values in (before, after)),
        )
        table.add_row(name, str(len(held)), _mean(before), _mean(after), *map(str, counts))
    return table


def _mean(values: Sequence[float | None]) -> str:
    found = [value for value in values if value is not None]
    return f"{sum(found) / len(found):.4f}" if found else "-"


def _num_mixed(rows: Sequence[_Row], values: Sequence[float | None]) -> int:
    """How many groups hold different rewards."""
    groups: dict[tuple[int, str], set[float]] = defaultdict(set)
    for row, value in zip(rows, values, strict=True):
        if value is not None:
            groups[row.step, group_of(row.id, row.task)].add(value)
    return sum(len(found) > 1 for found in groups.values())


def _examples(rows: Sequence[_Row]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table("trajectory", "answer", "gold", "reward", "now", "why", title="largest changes")
    for row in rows:
        place, golds = f"{row.stage} {row.step}: {row.id}", " | ".join(row.gold)
        cells = (place, repr(row.answer)[:60], golds[:60], _shown(row.before), _shown(row.after), row.reason)
        table.add_row(*map(Text, cells))
    return table


def _shown(value: float | None) -> str:
    return "not scored" if value is None else f"{value:g}"
