"""`upswing eval RUN_OR_MODEL`: measure a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from upswing.cli.common import is_run_folder, preflight, user_command
from upswing.errors import ConfigError, did_you_mean
from upswing.recipe import EvalStage, Recipe, load_recipe, recipe_from


@user_command
def eval_command(
    target: Annotated[str, typer.Argument(metavar="RUN_OR_MODEL", help="A run folder, a checkpoint, or a model.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes to the recipe, such as env.args.k=1.")
    ] = None,
    recipe: Annotated[Path | None, typer.Option(help="The recipe; by default that of the run folder.")] = None,
    stage: Annotated[
        list[str] | None, typer.Option(help="Of a run: base or stages to measure (repeatable). Default: the last.")
    ] = None,
    split: Annotated[str, typer.Option(help="Split of the tasks: train, dev or test.")] = "dev",
    tasks: Annotated[int, typer.Option(help="Number of tasks.")] = 200,
    greedy: Annotated[bool, typer.Option("--greedy/--sampled", help="Take the likeliest token, or sample.")] = True,
    samples: Annotated[int, typer.Option(help="Samples a task, with --sampled.")] = 1,
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature, with --sampled.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the tasks and of the sampling.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Also write the results as JSON to this file.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Only warnings and the table.")] = False,
) -> None:
    """Measure checkpoints on the same tasks: exact match and F1 with intervals, turns, tool calls; paired tests."""
    run = Path(target) if is_run_folder(Path(target)) else None
    if run is None and recipe is None:
        raise ConfigError(f"'{target}' isn't a run folder, so --recipe is needed: it names the environment")
    base = load_recipe(recipe or Path(target), overrides or [])
    settings = {
        "stage": "eval",
        "of": list(stage) if stage else ["previous"],
        "split": split,
        "tasks": tasks,
        "greedy": greedy,
        "samples": samples,
        "temperature": temperature,
        "seed": seed,
    }
    config, measured = with_evaluation(base, settings, run=run, model=target)
    preflight(config)
    from upswing.monitor.progress import Progress
    from upswing.stages.runner import eval_checkpoint

    eval_checkpoint(config, measured, run=run, out=out, log=Progress(quiet=quiet))


def with_evaluation(
    base: Recipe, settings: dict[str, object], *, run: Path | None, model: str
) -> tuple[Recipe, EvalStage]:
    """The recipe with only an evaluation left to do, and that evaluation.

    Of a run, its weight-changing stages stay in front so that their names can be measured; a model is measured as base.
    Raises ConfigError for a wrong setting or an unknown stage.
    """
    kept = [stage for stage in base.stages if not isinstance(stage, EvalStage)] if run else []
    names = ["base", *(stage.name for stage in kept)]
    wanted = settings["of"]
    assert isinstance(wanted, list)
    if run is None:
        if wanted != ["previous"]:
            raise ConfigError(f"--stage needs a run folder, but '{model}' isn't one")
        wanted = ["base"]
    for name in wanted:
        if name not in (*names, "previous"):
            raise ConfigError(
                f"--stage: no '{name}' in this run{did_you_mean(name, names)} (allowed: {', '.join(names)})"
            )
    free = next(name for name in ("eval", *(f"eval-{i}" for i in range(99))) if name not in names)
    data = base.to_dict()
    data["model"] = base.model if run else model
    data["stages"] = [
        *(stage.model_dump(mode="json", by_alias=True) for stage in kept),
        {**settings, "of": wanted, "name": free},
    ]
    config = recipe_from(data, source="eval")
    last = config.stages[-1]
    assert isinstance(last, EvalStage)
    return config, last
