"""The command line, one file a verb. Heavy imports wait for a verb."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from upswing.cli.algorithms import algorithms_command
from upswing.cli.audit import audit_command
from upswing.cli.check import check_command
from upswing.cli.doctor import doctor_command
from upswing.cli.eval import eval_command
from upswing.cli.plan import plan_command
from upswing.cli.play import play_command
from upswing.cli.report import report_command
from upswing.cli.rescore import rescore_command
from upswing.cli.run import run_command
from upswing.cli.serve import serve_command
from upswing.cli.tools import tools_app

app = typer.Typer(
    name="upswing",
    help="Make LLM agents better with reinforcement learning, and keep the training healthy while it does.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_COMMANDS: tuple[Callable[..., None], ...] = (
    run_command, eval_command, check_command, play_command, audit_command, doctor_command, plan_command,
    report_command, rescore_command, algorithms_command, serve_command,
)  # fmt: skip
for _command in _COMMANDS:
    app.command(_command.__name__.removesuffix("_command"))(_command)
app.add_typer(tools_app, name="tools")


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"upswing {version('upswing')}")
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point of the `upswing` script."""
    app()


if __name__ == "__main__":
    main()
