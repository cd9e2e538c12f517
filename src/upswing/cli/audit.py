"""`upswing audit RECIPE`: attack a reward before training on it."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from upswing.cli.common import EXIT_FAILED, Overrides, Quiet, Split, UnsafeLocal, recipe_of, user_command
from upswing.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from upswing.audit import AuditReport, Verdict


@user_command
def audit_command(
    recipe: Annotated[Path, typer.Argument(help="A recipe or run folder.")],
    overrides: Overrides = None,
    tasks: Annotated[int, typer.Option(min=1, help="Number of tasks.")] = 50,
    split: Split = "train",
    seed: Annotated[int, typer.Option(help="Seed of the task stream.")] = 0,
    max_false_accept: Annotated[float, typer.Option(help="Wrong answers accepted: at most this share.")] = 0.005,
    max_false_reject: Annotated[float, typer.Option(help="Right answers refused: at most this share.")] = 0.01,
    show: Annotated[int, typer.Option(min=0, help="How many offending inputs to show.")] = 10,
    quiet: Quiet = False,
    unsafe_local: UnsafeLocal = False,
) -> None:
    """Attack a recipe's reward: what it wrongly accepts, wrongly refuses, and what it forgives.

    Exits with 1 when a rate is above its threshold.
    """
    config = recipe_of(recipe, overrides, unsafe_local=unsafe_local)
    from upswing.audit import audit
    from upswing.cli.play import find_tasks
    from upswing.monitor.progress import Progress
    from upswing.world import build_world

    world, log = build_world(config), Progress(quiet=quiet)
    found = find_tasks(world, config, split, seed, tasks)
    report = asyncio.run(audit(world, found, seed=seed))
    if not report.verdicts:
        task, why = next(iter(report.untested.items()))
        raise ConfigError(f"no task's right play is accepted, so nothing can be attacked; task '{task}': {why}")
    log.table(_table(report))
    offending = [v for v in report.verdicts if v.attack.wanted != ("accepted" if v.accepted else "refused")]
    offending = [v for v in offending if v.attack.wanted != "reported"]
    if offending and show:
        log.table(_examples(offending[:show]))
    attacked = {v.task_id for v in report.verdicts}
    for task, why in list(report.untested.items())[:show]:
        log.warn(f"task '{task}' could not be attacked{'' if task not in attacked else ' in all ways'}: {why}")
    accept, reject = report.false_accept, report.false_reject
    if math.isnan(accept):
        raise ConfigError(
            "nothing could be tried that must be refused: the tasks have no accepted answer and no program as answer, "
            "their data no final_state, calls or evidence, and they are done in one turn; give them one of these"
        )
    log.note(f"{len(found)} tasks, {len(report.untested)} not or not fully tested")
    if report.refused:
        log.note(f"{len(report.refused)} whose expert earned nothing at first: careless on purpose, or is it refused?")
    log.note(f"{accept:.2%} of wrong answers accepted, {reject:.2%} of right ones refused")
    if not (accept <= max_false_accept and reject <= max_false_reject):
        raise typer.Exit(EXIT_FAILED)


def _table(report: AuditReport) -> Table:
    """A row an attack: those to refuse, those to accept, then the choices."""
    from rich.table import Table

    table = Table("attack", "should be", "tried", "accepted", "not scored")
    order = {"refused": 0, "accepted": 1, "reported": 2}
    for (wanted, name), verdicts in sorted(report.by_attack().items(), key=lambda item: order[item[0][0]]):
        accepted = sum(v.accepted for v in verdicts)
        unscored = sum(v.value is None for v in verdicts)
        share = f"{accepted} ({accepted / len(verdicts):.0%})"
        table.add_row(name, {"reported": "a choice"}.get(wanted, wanted), str(len(verdicts)), share, str(unscored))
    return table


def _examples(verdicts: list[Verdict]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table("task", "attack", "said", "score", "why", title="wrongly judged")
    for verdict in verdicts:
        value = "not scored" if verdict.value is None else f"{verdict.value:g}"
        said = " | ".join(verdict.attack.turns) or verdict.attack.text
        cells = (verdict.task_id, verdict.attack.name, repr(said)[:100], value, verdict.reason)
        table.add_row(*map(Text, cells))
    return table
