"""`upswing doctor --html`: the doctor's report as one self-contained page with charts of the signals that it cites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from upswing.view.charts import Point, Series, line_chart
from upswing.view.html import Html, h, table
from upswing.view.page import page
from upswing.view.run_folder import replace_file

CHIPS = {"critical": "bad", "warning": "warn", "info": ""}


def write_doctor_page(path: Path, found: Mapping[str, Any], series: Sequence[Mapping[str, tuple[Point, ...]]]) -> None:
    """`found` as `monitor.doctor.report` makes it; `series`: for each of its stages, signal -> (step, value)."""
    parts = [_stage(part, points) for part, points in zip(found["stages"], series, strict=True)]
    title = f"Doctor: {found['source']}"
    replace_file(path, page(title, h("h1", title), h("p", found["verdict"]), *parts))


def _stage(part: Mapping[str, Any], points: Mapping[str, tuple[Point, ...]]) -> Html:
    about = f"{part['steps']} steps" + (f", {part['first_step']} to {part['last_step']}" if part["steps"] else "")
    rows = [("ok", ", ".join(part["ok"])), ("too few steps yet", ", ".join(part["warming_up"]))]
    rows += [(f"skipped: {mode}", f"needs {', '.join(missing)}") for mode, missing in part["skipped"].items()]
    modes = table(["Failure modes", ""], [row for row in rows if row[1]], class_="text")
    findings = [_finding(finding, points) for finding in part["findings"]]
    read = _read(part) if "format" in part else None
    return h(
        "section",
        h("h2", f"Stage {part['stage']}"),
        *(h("p", line, class_="muted") for line in (about, *part["notes"])),
        *findings,
        h("div", modes, class_="card"),
        read,
    )


def _finding(finding: Mapping[str, Any], points: Mapping[str, tuple[Point, ...]]) -> Html:
    chip = h("span", finding["severity"], class_=f"chip {CHIPS[finding['severity']]}")
    when = f"{finding['mode']}, since step {finding['since']}, found at step {finding['step']}"
    shown = h("pre", "\n".join(finding["shown"]), tabindex="0") if finding["shown"] else None
    cited = f"Trajectories: {', '.join(finding['trajectories'])}" if finding["trajectories"] else None
    remedies = (
        h("li", remedy["text"], h("pre", remedy["overrides"]) if remedy["overrides"] else None)
        for remedy in finding["remedies"]
    )
    charts = (line_chart(name, [Series(name, points[name])]) for name in finding["signals"] if name in points)
    return h(
        "div",
        h("h3", chip, " ", finding["title"], h("small", when)),
        h("ul", *(h("li", text) for text in finding["evidence"])),
        h("p", cited, class_="muted") if cited else None,
        shown,
        h("h3", "Likely causes"),
        h("ol", *(h("li", text) for text in finding["causes"])),
        h("h3", "What to do"),
        h("ol", *remedies),
        h("div", *charts, class_="grid2"),
        class_="card verdict bad" if finding["severity"] == "critical" else "card verdict",
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
