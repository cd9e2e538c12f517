"""`upswing report RUN`: build report.html anew from what a run folder holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from upswing.cli.common import check_run_folder, user_command


@user_command
def report_command(run: Annotated[Path, typer.Argument(help="A run folder.")]) -> None:
    """Build report.html anew from a run folder, also while the run goes on."""
    check_run_folder(run)
    from upswing.view.report import write_report

    typer.echo(str(write_report(run)))
