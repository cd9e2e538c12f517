"""`upswing check RECIPE`: can RL work here? Measured before anything is trained, with advice."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from upswing.cli.common import EXIT_FAILED, Overrides, Quiet, UnsafeLocal, is_run_folder, recipe_of, user_command
from upswing.errors import ConfigError
from upswing.models.resolve import resolve_model
from upswing.recipe import Recipe, RlStage

if TYPE_CHECKING:
    from rich.table import Table

    from upswing.monitor.findings import Finding
    from upswing.monitor.progress import Progress
    from upswing.preflight.advice import Advice, Measured
    from upswing.world import World


@user_command
def check_command(
    recipe: Annotated[Path, typer.Argument(help="A recipe, or a run folder whose checkpoint RL starts from.")],
    overrides: Overrides = None,
    tasks: Annotated[int, typer.Option(min=2, help="Train tasks to audit and to play.")] = 16,
    samples: Annotated[
        int | None, typer.Option(min=2, help="Samples of each. Default: the stage's group_size.")
    ] = None,
    max_hours: Annotated[float, typer.Option(min=0, help="How long the stage may take.")] = 24.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
    quiet: Quiet = False,
    unsafe_local: UnsafeLocal = False,
) -> None:
    """Is the reward clean, can RL learn from this model and these tasks, is there enough compute? Then advice.

    Exits with 1 when the advice is against it or a finding is critical.
    """
    config = recipe_of(recipe, overrides, unsafe_local=unsafe_local)
    stage, model, known = start_of(recipe, config)
    resolve_model(model, download=False)  # here, before torch takes its seconds
    from upswing.world import preflight

    world = preflight(config)
    from rich.console import Console

    from upswing.monitor.progress import Progress
    from upswing.preflight.advice import advise, measured_findings
    from upswing.preflight.checks import option_findings

    log = Progress(Console(stderr=True), quiet=True) if as_json else Progress(quiet=quiet)
    told: list[Finding] = []
    _tell(told, option_findings(config, stage), log)
    known = _audited(config, stage, world, tasks, known, log)
    # The models that judge come from earlier stages; the rubric stands for them here.
    alone = stage.model_copy(update={"from_": "base", "reward_model": None, "process_reward": None})
    config = config.model_copy(update={"stages": (alone,)})
    known, findings = _measured(config, alone, model, tasks, samples or max(2, stage.group_size), known, log)
    _tell(told, findings + measured_findings(known, config, stage), log)
    advice = advise(known, max_hours=max_hours)
    good = advice.ok and all(finding.severity != "critical" for finding in told)
    if as_json:
        from upswing.view.run_folder import json_safe

        found = {"ok": good, "advice": asdict(advice), "model": model, "measured": asdict(known)}
        typer.echo(json.dumps(json_safe({**found, "findings": [finding.row() for finding in told]})))
    else:
        log.table(_table(known, model, advice))
    if not good:
        raise typer.Exit(EXIT_FAILED)


def start_of(source: Path, recipe: Recipe) -> tuple[RlStage, str, Measured]:
    """The first rl stage, the model that it starts from (the base model where the stage before it hasn't finished), and
    which of the two that is. Raises ConfigError without an rl stage."""
    for index, stage in enumerate(recipe.stages):
        if isinstance(stage, RlStage):
            from upswing.preflight.advice import Measured

            before = recipe.source_of(index, stage.from_)
            folder = source / "checkpoints" / before / "final"
            if is_run_folder(source) and folder.is_dir():
                return stage, str(folder), Measured()
            return stage, recipe.model, Measured(base=before == "base", pending="" if before == "base" else before)
    raise ConfigError(f"'{source}' has no rl stage, only {', '.join(stage.stage for stage in recipe.stages)}")


def _tell(told: list[Finding], findings: list[Finding], log: Progress) -> None:
    """Say those that weren't said, with the overrides that end them."""
    from upswing.view.health import overrides

    for finding in findings:
        if finding not in told:
            told.append(finding)
            (remedy,) = finding.remedies
            change = overrides(remedy.change, finding.stage)
            log.warn(f"{finding.title} ({finding.severity}): {finding.evidence[0]}. {remedy.text} {change}".rstrip())


def _audited(recipe: Recipe, stage: RlStage, world: World, count: int, known: Measured, log: Progress) -> Measured:
    """With the audit's rates on tasks that the stage begins with; NaN, and why, where nothing could be attacked."""
    from upswing.audit import audit
    from upswing.cli.play import find_tasks
    from upswing.seeding import derive_seed

    tasks = find_tasks(world, recipe, "train", derive_seed(recipe.seed, stage.name, "tasks"), count)
    report = asyncio.run(audit(world, tasks, seed=recipe.seed))
    if report.why_not:
        log.warn(f"the reward was not audited: {report.why_not}")
    return replace(known, **report.rates)


def _measured(
    recipe: Recipe, stage: RlStage, model: str, count: int, samples: int, known: Measured, log: Progress
) -> tuple[Measured, list[Finding]]:
    """With what the model does and costs."""
    from upswing.stages.preflight import take_stock
    from upswing.stages.runner import with_model

    return with_model(recipe, model, log, lambda context: take_stock(context, stage, count, samples, known))


def _table(known: Measured, model: str, advice: Advice) -> Table:
    from rich.markup import escape
    from rich.table import Table

    from upswing.preflight.advice import ROWS, shown

    table = Table("", "measured", "wanted", "why this much", title=escape(f"before RL: {model}"))
    for name, attribute, wanted, source in ROWS:
        found: Any = getattr(known, attribute)
        text = f"{found:.1%}" if "%" in wanted and not math.isnan(found) else shown(found)
        if text != "-":
            table.add_row(name.replace("@k", f"@{known.samples}"), escape(text), wanted, source)
    table.add_section()
    table.add_row("advice", advice.kind, escape(advice.why), advice.remedy)
    return table
