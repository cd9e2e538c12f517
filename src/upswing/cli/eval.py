"""`upswing eval RUN_OR_MODEL`: measure checkpoints on a recipe's environment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from upswing.cli.common import (
    EXIT_FAILED,
    Overrides,
    Quiet,
    Split,
    UnsafeLocal,
    fail,
    is_run_folder,
    recipe_of,
    user_command,
)
from upswing.errors import ConfigError, ModelNotFound, did_you_mean
from upswing.models.resolve import resolve_model
from upswing.recipe import Recipe, recipe_from
from upswing.recipe.models import NO_POLICY


@user_command
def eval_command(
    target: Annotated[str, typer.Argument(metavar="RUN_OR_MODEL", help="A run folder, a checkpoint, or a model.")],
    overrides: Overrides = None,
    recipe: Annotated[Path | None, typer.Option(help="The recipe; by default that of the run folder.")] = None,
    stage: Annotated[
        list[str] | None,
        typer.Option(help="Of a run: base or a stage; repeat it to compare several. Default: the last that trained."),
    ] = None,
    split: Split = "dev",
    tasks: Annotated[int, typer.Option(help="Number of tasks.")] = 200,
    greedy: Annotated[bool, typer.Option("--greedy/--sampled", help="Take the likeliest token, or sample.")] = True,
    samples: Annotated[int, typer.Option(help="Samples a task, with --sampled.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Also write the results to this JSON file.")] = None,
    quiet: Quiet = False,
    unsafe_local: UnsafeLocal = False,
) -> None:
    """Measure checkpoints on the same tasks: exact match and F1 with intervals, turns, tool calls; paired tests.

    Exit status 1 when nothing could be scored.
    """
    run = Path(target) if is_run_folder(Path(target)) else None
    if run is None:
        _check_model(target, recipe)
    base = recipe_of(recipe or Path(target), overrides, unsafe_local=unsafe_local)
    models = checkpoints_of(run, base, stage or []) if run else {target: target}
    if run is None and stage:
        raise ConfigError(f"--stage needs a run folder, but '{target}' isn't one")
    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        raise ConfigError(f"--out: '{out}' is a folder" if out.is_dir() else f"--out: no folder '{out.parent}'")
    settings: dict[str, Any] = {"split": split, "tasks": tasks, "greedy": greedy, "samples": samples}
    config = recipe_from({**base.to_dict(), "stages": [{"stage": "eval", "of": ["base"], **settings}]}, source="eval")
    from upswing.world import preflight

    preflight(config)
    entries, failed = _measure(config, models, settings, quiet)
    if out is not None:
        out.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    if failed:
        fail("; ".join(failed), EXIT_FAILED)


def _check_model(target: str, recipe: Path | None) -> None:
    """Raises ConfigError for what is neither a run nor a model, before torch takes its seconds, and for a model without
    a recipe."""
    try:
        resolve_model(target, download=False)
    except ModelNotFound as problem:
        folders = (Path(target).parent, Path("runs"))
        near = did_you_mean(target, {str(path.parent) for folder in folders for path in folder.glob("*/recipe.yaml")})
        raise ConfigError(f"'{target}' is no run folder (it has no recipe.yaml), and {problem}{near}") from None
    if recipe is None:
        raise ConfigError(
            f"'{target}' isn't a run folder, so it is taken for a model, and --recipe is needed: it names the "
            f"environment, as in upswing eval {target} --recipe recipes/demo.yaml"
        )


def checkpoints_of(run: Path, recipe: Recipe, wanted: list[str]) -> dict[str, str]:
    """Label and model of each wanted stage of a run, by default of its last finished one.

    Raises ConfigError for an unknown stage and for one that hasn't left its weights yet.
    """
    names = ["base", *(stage.name for stage in recipe.stages if not isinstance(stage, NO_POLICY))]
    folders = {name: run / "checkpoints" / name / "final" for name in names[1:]}
    finished = [name for name, folder in folders.items() if folder.is_dir()]
    found: dict[str, str] = {}
    for name in wanted or (finished or ["base"])[-1:]:
        if name not in names:
            raise ConfigError(
                f"--stage: no '{name}' in this run{did_you_mean(name, names)} (allowed: {', '.join(names)})"
            )
        if name != "base" and name not in finished:
            there = ", ".join(["base", *finished])
            raise ConfigError(f"--stage: '{name}' of '{run}' hasn't finished yet (finished: {there})")
        found[name] = recipe.model if name == "base" else str(folders[name])
    return found


def _measure(
    config: Recipe, models: dict[str, str], settings: dict[str, Any], quiet: bool
) -> tuple[list[dict[str, Any]], list[str]]:
    """Measure each model on the same tasks, and show the table with a paired test against the one before; and say of
    which models nothing could be scored, and why."""
    from upswing.evals.summary import EvalSummary, missing_rewards, result_entry, results_table
    from upswing.monitor.progress import Progress
    from upswing.stages.runner import eval_checkpoint

    log = Progress(quiet=quiet)
    split, mode = settings["split"], "greedy" if settings["greedy"] else "sampled"
    entries, failed = list[dict[str, Any]](), list[str]()
    before: EvalSummary | None = None
    against = ""
    for label, model in models.items():
        summary = eval_checkpoint(config, model, log=log, **settings)
        entry = result_entry(label, "eval", summary, split=split, mode=mode, previous=before, previous_label=against)
        entries.append(entry)
        if not summary.reward.n:
            failed.append(f"{label}: {missing_rewards(summary)}")
        before, against = summary, label
    log.table(results_table(entries, title=f"{split}, {settings['tasks']} tasks"))
    return entries, failed
