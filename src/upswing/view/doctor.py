"""`upswing doctor --html`: the doctor's report as one self-contained page with charts of the signals that it cites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from upswing.view import health
from upswing.view.charts import Point, Series, line_chart
from upswing.view.html import Html, h, table
from upswing.view.page import page
from upswing.view.run_folder import replace_file


def write_doctor_page(path: Path, found: Mapping[str, Any], series: Sequence[Mapping[str, tuple[Point, ...]]]) -> None:
    """`found` as `monitor.doctor.report` makes it; `series`: for each of its stages, signal -> (step, value)."""
    parts = [_stage(part, points) for part, points in zip(found["stages"], series, strict=True)]
    title = f"Doctor: {found['source']}"
    replace_file(path, page(title, h("h1", title), h("p", found["verdict"]), *parts))


def _stage(part: Mapping[str, Any], points: Mapping[str, tuple[Point, ...]]) -> Html:
    about = f"{part['steps']} steps" + (f", {part['first_step']} to {part['last_step']}" if part["steps"] else "")
    rows = [("ok", ", ".join(part["ok"])), ("too few steps yet", ", ".join(part["warming_up"]))]
    rows += [
        (f"ok in part: {mode}", f"not judged without {', '.join(missing)}") for mode, missing in part["partly"].items()
    ]
    rows += [(f"skipped: {mode}", f"needs {', '.join(missing)}") for mode, missing in part["skipped"].items()]
    findings = [{**one, "title": f"{one['title']} [{one['mode']}]"} for one in part["findings"]]
    return h(
        "section",
        h("h2", f"Stage {part['stage']}"),
        *(h("p", line, class_="muted") for line in (about, *part["notes"])),
        health.render(findings) if findings else None,
        h("div", *(line_chart(name, [Series(name, one)]) for name, one in points.items()), class_="grid2"),
        h("div", table(["Failure modes", ""], [row for row in rows if row[1]], class_="text"), class_="card"),
        _read(part) if "format" in part else None,
    )


def _read(part: Mapping[str, Any]) -> Html:
    used = [(name, ", ".join(keys)) for name, keys in part["used"].items()]
    return h(
        "div",
        h("h3", f"Read as {part['format']}, keys as in {part['framework']}"),
        table(["signal", "keys"], used, class_="text"),
        h("p", f"Ignored: {', '.join(part['ignored'])}", class_="muted") if part["ignored"] else None,
        class_="card",
    )
