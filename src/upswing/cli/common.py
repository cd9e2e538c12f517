"""What the verbs share: exit codes and one-line errors."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from upswing.errors import ConfigError, UpswingError, nearest
from upswing.recipe import Recipe, load_recipe

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes to the recipe, such as rl.lr=1e-5.")
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Only warnings and tables.")]
Split = Annotated[str, typer.Option(help="Split of the tasks: train, dev or test.")]
Host = Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0: all.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")]
UnsafeLocal = Annotated[
    bool, typer.Option("--unsafe-local", help="Run what code and shell run without isolation, as yourself.")
]
_RUN_PROGRAMS = ("code", "shell")
"""Environments and verifiers with an option `unsafe_local`."""


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


user_command = one_line_errors()
"""Decorator of a verb: its errors are one line."""


def listen(host: str, port: int, path: str) -> Callable[..., None]:
    """What serves an app there, until it is interrupted, and says where: (app, more options of uvicorn).

    Raises ConfigError.
    """
    try:
        import uvicorn
    except ImportError:
        raise ConfigError("serving needs uvicorn; install it with: pip install 'upswing[serve]'") from None
    try:
        listening = socket.create_server((host, port), backlog=2048)
    except OSError as problem:
        why = problem.strerror or problem
        raise ConfigError(f"can't listen at {host}:{port} ({why}); choose another --port") from None

    def serve(app: Any, **more: Any) -> None:
        typer.echo(f"http://{host}:{listening.getsockname()[1]}{path}")
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=3, **more)
        uvicorn.Server(config).run(sockets=[listening])

    return serve


def is_run_folder(path: Path) -> bool:
    return (path / "recipe.yaml").is_file()


def check_run_folder(run: Path) -> None:
    """Raise ConfigError when `run` isn't one, naming one that is called nearly so."""
    if not is_run_folder(run):
        known = [str(path.parent) for path in run.parent.glob("*/recipe.yaml")] if run.parent.is_dir() else []
        close = nearest(str(run), known)
        hint = f"; did you mean '{close}'?" if close else ""
        raise ConfigError(f"'{run}' isn't a run folder (no recipe.yaml in it){hint}")


def recipe_of(recipe: Path, overrides: list[str] | None, *, unsafe_local: bool = False) -> Recipe:
    """A recipe with its overrides. Raises ConfigError, also when `unsafe_local` has nothing to act on."""
    found = load_recipe(recipe, overrides or [])
    if not unsafe_local:
        return found
    parts = {"env": found.env.name, **{f"verifiers.{i}": one.name for i, one in enumerate(found.verifiers)}}
    more = [f"{key}.args.unsafe_local=true" for key, name in parts.items() if name in _RUN_PROGRAMS]
    if not more:
        raise ConfigError(f"--unsafe-local changes nothing here: nothing in '{recipe}' runs programs (code, shell)")
    return load_recipe(recipe, [*(overrides or []), *more])
