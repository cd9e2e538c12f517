"""What the verbs share: exit codes, one-line errors, and the checks before a model loads."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import typer

from upswing.errors import ConfigError, UpswingError
from upswing.recipe import EvalStage, Recipe, RlStage, SftStage

if TYPE_CHECKING:  # both import numpy, which --help can do without
    from upswing.envs.base import Environment
    from upswing.trajectory.types import Task

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130

Command = TypeVar("Command", bound=Callable[..., Any])


def fail(message: str, code: int) -> NoReturn:
    """Print one line to standard error and end with `code`."""
    sys.stdout.flush()
    typer.echo(f"error: {' '.join(message.split())}", err=True)
    raise typer.Exit(code)


@contextmanager
def one_line_errors(on_interrupt: Callable[[], str] = lambda: "interrupted") -> Iterator[None]:
    """What the user can cause ends with one line and an exit code; a bug in Upswing keeps its traceback."""
    try:
        yield
    except ConfigError as problem:
        fail(str(problem), EXIT_BAD_INPUT)
    except UpswingError as problem:
        fail(f"{type(problem).__name__}: {problem}", EXIT_FAILED)
    except KeyboardInterrupt:
        sys.stdout.flush()
        typer.echo(on_interrupt(), err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None


def user_command(command: Command) -> Command:
    """A verb whose errors are one line."""

    @functools.wraps(command)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        with one_line_errors():
            return command(*args, **kwargs)

    return guarded  # type: ignore[return-value]


@dataclass(frozen=True, kw_only=True)
class World:
    """Where a recipe's tasks are played and scored: everything of it but the model."""

    make_env: Callable[[], Environment]
    rubric: Any
    """`upswing.verify.Rubric`: `async score(episode) -> Score`."""
    tasks: Callable[[str, int], Iterator[Task]]
    """`tasks(split, seed)`: a stream, the same for the same seed."""


def build_world(recipe: Recipe) -> World:
    """Make the environment, rubric and tasks of a recipe. Raises ConfigError."""
    from upswing.envs import environment_factory
    from upswing.verify import rubric_from

    make_env = environment_factory(recipe.env.name, recipe.env.args)
    rubric = rubric_from(recipe.verifiers)
    if recipe.dataset is not None:
        from upswing.dataset import Dataset

        return World(make_env=make_env, rubric=rubric, tasks=Dataset(recipe.dataset, recipe.env.name).tasks)
    return World(make_env=make_env, rubric=rubric, tasks=make_env().tasks)


def preflight(recipe: Recipe) -> World:
    """Everything that can be found wrong without a model: environment, verifiers, and tasks of each split that a stage
    needs. Raises ConfigError."""
    world = build_world(recipe)
    first: dict[str, Task] = {}
    for index, stage in enumerate(recipe.stages):
        for split in splits_of(stage):
            if split not in first:
                first[split] = _first_task(world, recipe, split, f"stages.{index}")
        if isinstance(stage, SftStage):
            _check_expert(world, recipe, first["train"], f"stages.{index}")
    return world


def splits_of(stage: SftStage | RlStage | EvalStage) -> tuple[str, ...]:
    """The splits that a stage takes tasks of."""
    if isinstance(stage, EvalStage):
        return (stage.split,)
    if isinstance(stage, RlStage) and stage.eval_every:
        return ("train", "dev")
    return ("train",)


def _first_task(world: World, recipe: Recipe, split: str, where: str) -> Task:
    try:
        found = list(itertools.islice(world.tasks(split, recipe.seed), 1))
    except NotImplementedError as problem:
        raise ConfigError(f"env: {problem} (dataset.train: path of a JSON Lines file)") from None
    if not found:
        raise ConfigError(f"{where}: environment '{recipe.env.name}' has no {split} tasks")
    return found[0]


def _check_expert(world: World, recipe: Recipe, task: Task, where: str) -> None:
    import random

    try:
        world.make_env().expert(task, random.Random(0))
    except NotImplementedError:
        raise ConfigError(
            f"{where}: sft needs demonstrations, but environment '{recipe.env.name}' has no scripted expert; "
            "give it an expert(task, rng) method, or leave the sft stage out"
        ) from None


def is_run_folder(path: Path) -> bool:
    return (path / "recipe.yaml").is_file()
