"""`upswing doctor PATH`: what is wrong with a run, or with another framework's log, since when, and what to change."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Any

import typer

from upswing.cli.common import EXIT_FAILED, user_command
from upswing.errors import ConfigError, did_you_mean
from upswing.monitor.findings import SEVERITIES
from upswing.view.run_folder import METRICS, RECIPE, read_json, read_json_lines

if TYPE_CHECKING:
    from upswing.monitor.doctor import Examination, StageLog
    from upswing.monitor.findings import Finding
    from upswing.trajectory.types import Trajectory

POLL_S = 2.0
MAX_FILLED = 50
JUDGED_STAGES = ("rl", "distill")
WIDTH = 110


@user_command
def doctor_command(
    path: Annotated[Path, typer.Argument(help="A run folder, or another framework's log (docs/doctor.md).")],
    stage: Annotated[str | None, typer.Option(help="Only this stage of a run. Default: every RL stage.")] = None,
    fail_on: Annotated[
        str | None,
        typer.Option(metavar="SEVERITY", help="Exit with 1 at a finding of it or above: info, warning, critical."),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write the report, with charts, to this file too.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
    follow: Annotated[bool, typer.Option("--follow", help="Go on while the run does; print what is new.")] = False,
) -> None:
    """Diagnose a finished or running run, or a log of TRL, verl, SkyRL, OpenRLHF, W&B or TensorBoard.

    Modes that lack a signal are skipped, never called healthy.
    """
    if fail_on is not None and fail_on not in SEVERITIES:
        allowed = ", ".join(SEVERITIES)
        raise ConfigError(f"--fail-on: got '{fail_on}'; allowed: {allowed}{did_you_mean(fail_on, SEVERITIES)}")
    if html is not None and (html.is_dir() or not html.parent.is_dir()):
        raise ConfigError(f"--html: '{html}' is a folder" if html.is_dir() else f"--html: no folder '{html.parent}'")
    if follow and as_json:
        raise ConfigError("--follow prints text as it comes; leave --json out")
    from upswing.monitor.doctor import Examination, report, series

    run = run_folder_of(path)
    if run is None and (follow or stage):
        raise ConfigError(f"{'--follow' if follow else '--stage'} is for run folders, and '{path}' isn't one")
    examinations = [Examination(log) for log in (foreign_log(path) if run is None else stage_logs(run, stage, follow))]
    if follow and run is not None:
        _follow(run, examinations)
    for one in examinations:
        one.advance()
    found = report(str(path), examinations)
    if html is not None:
        from upswing.view.doctor import write_doctor_page

        cited = [dict.fromkeys(name for f in part["findings"] for name in f["signals"]) for part in found["stages"]]
        write_doctor_page(
            html, found, [series(one, list(names)) for one, names in zip(examinations, cited, strict=True)]
        )
    typer.echo(json.dumps(found, ensure_ascii=False) if as_json else "\n".join(text_of(found)))
    if fail_on and found["worst"] and SEVERITIES.index(found["worst"]) >= SEVERITIES.index(fail_on):
        raise typer.Exit(EXIT_FAILED)


# -- what is read -----------------------------------------------------------------------------------------------------


def run_folder_of(path: Path) -> Path | None:
    """The Upswing run folder that `path`, also its metrics file, means; None when it is something else."""
    folder = path if path.is_dir() else path.parent
    if folder != path and not (path.is_file() and path.name == METRICS):
        return None
    rows = read_json_lines(folder / METRICS)
    if (folder / RECIPE).is_file() or any("stage" in row and "step" in row for row in rows[:1]):
        return folder
    return None


def foreign_log(path: Path) -> list[StageLog]:
    from upswing.monitor.doctor import StageLog
    from upswing.monitor.foreign import read_foreign

    log = read_foreign(path)
    return [StageLog(stage="rl", rows=log.rows, foreign=log)]


def stage_logs(run: Path, wanted: str | None, waiting: bool = False) -> list[StageLog]:
    """The stages to judge, with their facts from the recipe. `waiting`: also those without rows yet.

    Raises ConfigError when there is none.
    """
    from upswing.monitor.doctor import StageLog, stored
    from upswing.monitor.history import unheard
    from upswing.recipe.rl import GROUPED

    recipe = _recipe(run)
    rows = rows_by_stage(run)
    kinds = {part["name"]: part.get("stage") for part in recipe.get("stages", ())}
    planned = [name for name, kind in kinds.items() if kind in JUDGED_STAGES] or list(rows)
    names = [wanted] if wanted else [name for name in planned if waiting or name in rows]
    if wanted and wanted not in rows and not (waiting and wanted in kinds):
        has = ", ".join(rows) or "no stage yet"
        raise ConfigError(f"--stage: no metrics of '{wanted}' in '{run}'{did_you_mean(wanted, rows)} (it has {has})")
    if not names:
        raise ConfigError(f"'{run}' has no metrics of an RL stage yet (it has {', '.join(rows) or 'none at all'})")
    logs = []
    for name in names:
        facts, trajectories = facts_of(recipe, name), stored(run, name)
        full, note = (rows.get(name, []), "") if waiting else filled(rows[name], trajectories)
        logs.append(
            StageLog(
                stage=name,
                rows=full,
                facts=facts,
                trajectories=trajectories,
                note=note,
                unheard=unheard(facts.get("stage", "rl"), grouped=facts.get("advantage", "group") in GROUPED),
            )
        )
    return logs


def filled(
    rows: Sequence[Mapping[str, Any]], trajectories: Callable[[int], Sequence[Trajectory]]
) -> tuple[list[Mapping[str, Any]], str]:
    """Rows written before Upswing measured the text of a batch, with what the stored trajectories of MAX_FILLED of
    them, evenly spread and the newest included, tell; and a note that says so."""
    bare = [place for place, row in enumerate(rows) if "sampled_tokens" in row and "repetition" not in row]
    stride = max(1, math.ceil(len(bare) / MAX_FILLED))
    found = {place: played for place in bare[::-stride] if (played := trajectories(rows[place]["step"]))}
    if not found:
        return list(rows), ""
    from upswing.cli.rescore import group_of
    from upswing.stages.rl_metrics import batch_metrics
    from upswing.trajectory.types import Group

    full = list(rows)
    for place, played in found.items():
        parts = groupby(played, key=lambda one: group_of(one.id, one.task.id))
        groups = [Group(task=part[0].task, trajectories=part) for part in (tuple(members) for _, members in parts)]
        values = batch_metrics(groups, [math.nan if one.reward is None else one.reward for one in played])
        full[place] = {**values, **{key: value for key, value in rows[place].items() if value is not None}}
    return full, f"signals that its metrics lack were computed from the stored trajectories of {len(found)} steps"


def rows_by_stage(run: Path) -> dict[str, list[dict[str, Any]]]:
    """Whole lines of the metrics file, in the order written."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in read_json_lines(run / METRICS):
        if isinstance(row.get("step"), int):
            found.setdefault(str(row.get("stage")), []).append(row)
    return found


def _recipe(run: Path) -> dict[str, Any]:
    """The run's resolved recipe as plain data: every key is there, and files that it names may be gone."""
    from upswing.recipe.yaml_reader import parse_yaml

    path = run / RECIPE
    found = parse_yaml(path.read_text(encoding="utf-8"), str(path)) if path.is_file() else {}
    return found if isinstance(found, dict) else {}


def facts_of(recipe: Mapping[str, Any], stage: str) -> dict[str, Any]:
    """What detectors want to know: the stage's keys, the limits beside them, the weights that make the reward."""
    from upswing.verify.rubric import GATED

    stages: list[dict[str, Any]] = recipe.get("stages") or []
    keys = next((part for part in stages if part.get("name") == stage), {})
    verifiers = recipe.get("verifiers") or ()
    end = GATED if any(one.get("gate") for one in verifiers) else ""
    paid = [one for one in verifiers if one.get("weight", 1.0) and not one.get("gate")]
    weights = {one["name"].rpartition(":")[2] + end: one.get("weight", 1.0) for one in paid}
    turns = ((recipe.get("env") or {}).get("args") or {}).get("max_turns")
    return {**(recipe.get("limits") or {}), **({"max_turns": turns} if turns else {}), **keys, "weights": weights}


def _follow(run: Path, examinations: Sequence[Examination]) -> None:
    """Judge whatever comes until all stages are done or the user has seen enough."""
    typer.echo(f"following {run}; the report comes when it is done, or at Ctrl-C", err=True)
    try:
        while True:
            done = read_json(run / "state.json") or {}  # before the rows: what was written last is still read
            rows = rows_by_stage(run)
            for one in examinations:
                for news in one.advance(rows.get(one.log.stage, [])):
                    typer.echo(f"{one.log.stage} step {news.step}: {news.kind}: {_headline(news.finding)}")
            if all(done.get("stages", {}).get(one.log.stage, {}).get("done") for one in examinations):
                return
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        typer.echo("", err=True)


# -- what is printed --------------------------------------------------------------------------------------------------


def _headline(finding: Finding) -> str:
    evidence = "; ".join(finding.evidence)
    return f"{finding.severity.upper()} {finding.title} [{finding.mode}], since step {finding.since}: {evidence}"


def text_of(found: Mapping[str, Any]) -> Iterator[str]:
    """The report for a terminal."""
    yield f"{found['source']}: {found['verdict']}"
    for part in found["stages"]:
        yield ""
        yield from _about(part)
        for finding in part["findings"]:
            yield ""
            yield from _finding(finding, foreign="format" in part)
        yield ""
        for status, words in (("ok", "ok"), ("warming_up", "too few steps yet")):
            if part[status]:
                yield _wrapped(f"{words}: {', '.join(part[status])}", "  ")
        headings = {
            "partly": "ok by what there is; not judged without:",
            "skipped": "skipped, for want of these signals:",
        }
        for status, words in headings.items():
            if part[status]:
                yield words
                yield from (
                    _wrapped(f"  {mode}: {', '.join(missing)}", "    ") for mode, missing in part[status].items()
                )


def _about(part: Mapping[str, Any]) -> Iterator[str]:
    span = f"{part['steps']} steps ({part['first_step']} to {part['last_step']})" if part["steps"] else "no steps yet"
    if "format" not in part:
        yield f"stage {part['stage']}: {span}"
    else:
        yield from _read(part, span)
    yield from (_wrapped(f"note: {note}", "  ") for note in part["notes"])


def _read(part: Mapping[str, Any], span: str) -> Iterator[str]:
    yield f"{part['format']}, keys as in {part['framework']}: {span}"
    yield _wrapped("used: " + ", ".join(f"{', '.join(keys)} ({name})" for name, keys in part["used"].items()), "  ")
    if part["ignored"]:
        yield _wrapped("ignored: " + ", ".join(part["ignored"]), "  ")


def _finding(finding: Mapping[str, Any], foreign: bool) -> Iterator[str]:
    yield f"{finding['severity'].upper()} {finding['title']} [{finding['mode']}]"
    yield f"  since step {finding['since']}, found at step {finding['step']}"
    yield from (_wrapped(f"  - {text}", "    ") for text in finding["evidence"])
    if finding["trajectories"]:
        yield _wrapped(f"  trajectories: {', '.join(finding['trajectories'])}", "    ")
        yield from (f"    | {line}" for line in finding["shown"])
    if finding["causes"]:
        yield "  likely causes, the likeliest first:"
        yield from (_wrapped(f"    {place}. {text}", "       ") for place, text in enumerate(finding["causes"], 1))
    if finding["remedies"]:
        yield "  what to do, the best first:"
    for remedy in finding["remedies"]:
        yield _wrapped(f"    - {remedy['text']}", "      ")
        if remedy["overrides"]:
            where = "in an Upswing recipe" if foreign else "upswing run RECIPE"
            yield f"      {where}: {remedy['overrides']}"


def _wrapped(text: str, indent: str) -> str:
    return fill(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
