"""`upswing report RUN`: build report.html anew from what a run folder holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from upswing.cli.common import is_run_folder, user_command
from upswing.errors import ConfigError, nearest


@user_command
def report_command(run: Annotated[Path, typer.Argument(help="A run folder.")]) -> None:
    """Build report.html anew from a run folder, also while the run goes on."""
    if not is_run_folder(run):
        known = [str(path.parent) for path in run.parent.glob("*/recipe.yaml")] if run.parent.is_dir() else []
        close = nearest(str(run), known)
        hint = f"; did you mean '{close}'?" if close else ""
        raise ConfigError(f"'{run}' isn't a run folder (no recipe.yaml in it){hint}")
    from upswing.view.report import write_report

    typer.echo(str(write_report(run)))
