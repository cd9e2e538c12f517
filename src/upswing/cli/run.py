"""`upswing run RECIPE`: do all stages of a recipe."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from upswing.cli.common import Overrides, Quiet, UnsafeLocal, is_run_folder, one_line_errors, recipe_of
from upswing.errors import ConfigError
from upswing.models.resolve import resolve_model
from upswing.recipe import Recipe, check_same, load_recipe

if TYPE_CHECKING:
    from upswing.world import World


def run_command(
    recipe: Annotated[Path, typer.Argument(help="A recipe, such as recipes/tiny.yaml; or a run folder with --resume.")],
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Run folder. Default: runs/NAME-DATE-TIME.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out where it stopped.")] = False,
    cluster: Annotated[
        str | None, typer.Option(help="ray: engines, environments and ranks as actors of Ray (cluster.kind).")
    ] = None,
    ray_address: Annotated[
        str | None, typer.Option(help="host:port of a Ray cluster, or auto; default: one is started here.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, print what would be where and the recipe, and stop.")
    ] = False,
    quiet: Quiet = False,
    unsafe_local: UnsafeLocal = False,
) -> None:
    """Run all stages of a recipe. Everything that it does is kept in the run folder."""
    started: list[Path] = []
    several = "MASTER_ADDR" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1  # under torchrun
    with one_line_errors(on_interrupt=lambda: _how_to_resume(started)):
        if several and int(os.environ.get("RANK", "0")) > 0:
            if not dry_run:
                from upswing.learn.sharded import follow

                follow()
            return
        placed = {"kind": cluster or (ray_address and "ray"), "address": ray_address}
        more = [f"cluster.{key}={json.dumps(value)}" for key, value in placed.items() if value]
        check_recipe_path(recipe)
        config = recipe_of(recipe, [*(overrides or []), *more], unsafe_local=unsafe_local)
        resolve_model(config.model, download=False)  # here, before torch takes its seconds
        folder = choose_folder(recipe, config, out, resume)
        from upswing.world import preflight  # with numpy, which --help can do without

        world = preflight(config)
        if dry_run:
            return _show(config, world)
        from upswing.monitor.progress import Progress
        from upswing.stages.runner import run_recipe

        with _new_folder(folder):
            started.append(folder)
            around: AbstractContextManager[None] = nullcontext()
            if several:
                from upswing.learn.sharded import lead

                around = lead()
            with around:
                run_recipe(config, folder, resume=resume, log=Progress(quiet=quiet), world=world)


@contextmanager
def _new_folder(folder: Path) -> Iterator[None]:
    """Make the run folder; it goes again when the recipe is refused before the run began. Raises ConfigError."""
    new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise ConfigError(f"--out: can't make the folder '{folder}' ({problem.strerror})") from None
    try:
        yield
    except ConfigError:
        with suppress(OSError):  # there is something in it: the run had begun
            if new:
                folder.rmdir()
        raise


def _show(recipe: Recipe, world: World) -> None:
    """What would be where, as comments, and the recipe."""
    from upswing.stages.placement import plan
    from upswing.stages.runner import check

    check(recipe, world)
    for line in plan(recipe):
        typer.echo(f"# {line}")
    typer.echo(recipe.dump(), nl=False)


def check_recipe_path(path: Path) -> None:
    """Raises ConfigError for a folder that no run has been in, naming the recipes that it holds."""
    if path.is_dir() and not is_run_folder(path):
        inside = ", ".join(map(str, sorted(path.glob("*.y*ml"))))
        there = f"; recipes in it: {inside}" if inside else ""
        raise ConfigError(f"'{path}' is a folder, but no run folder (no recipe.yaml in it); give a recipe file{there}")


def choose_folder(source: Path, recipe: Recipe, out: Path | None, resume: bool) -> Path:
    """The run folder. Raises ConfigError when it can't be used as asked."""
    if out is None and resume and is_run_folder(source):
        out = source
    if out is None:
        if resume:
            raise ConfigError("--resume needs --out, the run folder to go on with")
        return Path("runs") / f"{recipe.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out '{out}' is a file; give a folder")
    if not out.exists() or not any(out.iterdir()):
        return out  # also with --resume: a run that was stopped before it wrote anything
    if not resume:
        raise ConfigError(f"--out '{out}' isn't empty; add --resume to go on with that run, or choose another folder")
    if not is_run_folder(out):
        raise ConfigError(f"--out '{out}' isn't a run folder (no recipe.yaml in it); choose another folder")
    check_same(load_recipe(out / "recipe.yaml"), recipe, out)
    return out


def _how_to_resume(started: list[Path]) -> str:
    if not started or not is_run_folder(started[0]):
        return "interrupted before the run started"
    return f"interrupted; to go on: upswing run {started[0]} --resume"
