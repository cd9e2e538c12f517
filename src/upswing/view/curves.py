"""Which series of `metrics.jsonl` become which figure.

Known signals (`curves.yaml`) get a figure with a name, a unit and what it says; every other number that a stage logs
is still shown, folded away. Evaluation points are keys that start with `eval_`, logged at the step of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

import yaml

from upswing.view.charts import Point, Series, line_chart
from upswing.view.html import Html, h, join

Row = Mapping[str, Any]


def render(rows: Sequence[Row]) -> Html:
    """A block of figures for every stage, in the order in which they ran."""
    stages: dict[str, list[Row]] = {}
    for row in rows:
        if _number(row.get("step")) is not None:
            stages.setdefault(str(row.get("stage", "run")), []).append(row)
    return join(_stage(name, found) for name, found in stages.items())


def _stage(name: str, rows: Sequence[Row]) -> Html:
    known, rest = [], dict.fromkeys(key for row in rows for key in row if key not in ("stage", "step", "time"))
    for curve in yaml.safe_load(resources.files("upswing.view").joinpath("curves.yaml").read_text(encoding="utf-8")):
        series = [_series(rows, *line) for line in curve["lines"].items()]
        known.append(line_chart(curve["title"], series, curve["unit"], curve["meaning"]))
        for key in curve["lines"].values():
            rest.pop(key, None)
    others = [chart for key in rest if (chart := line_chart(key, [_series(rows, key, key)]))]
    if not any(known) and not others:
        return Html("")
    folded = h("summary", f"More signals of {name} ({len(others)})")
    more = h("details", folded, h("div", *others, class_="grid2"), class_="more") if others else None
    return h("div", h("h3", f"Stage {name}"), h("div", *known, class_="grid2"), more, class_="stage")


def _series(rows: Sequence[Row], label: str, key: str) -> Series:
    found = points(rows, key)
    return Series(label, found, dots=key.startswith("eval_") or len(found) <= 12)


def points(rows: Sequence[Row], key: str) -> tuple[Point, ...]:
    """(step, value) of one metric by rising step; a logged null is a gap, and of a repeated step the last counts."""
    return tuple(sorted({float(row["step"]): _number(row[key]) for row in rows if key in row}.items()))


def _number(value: Any) -> float | None:
    """What can be drawn; None for NaN, for text, and for a size that would leave the figure no scale."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e100:
        return None
    return float(value) if abs(value) > 1e-100 else 0.0
