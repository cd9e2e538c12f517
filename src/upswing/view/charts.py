"""Figures as inline SVG: line charts of series and the strict/normalised figure. Readable without scripts."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from upswing.view.html import Html, h, join, table
from upswing.view.text import number

WIDTH, HEIGHT = 520, 230
LEFT, RIGHT, TOP, BOTTOM = 64, 14, 12, 40
MAX_TABLE_ROWS = 200
X_LABEL = "step"

Point = tuple[float, float | None]


@dataclass(frozen=True)
class Series:
    """One line. `points` are (x, y) by rising x; y None is a gap."""

    name: str
    points: tuple[Point, ...]
    dots: bool = False
    """Mark every point, for sparse series such as evaluations."""


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers that cover [low, high]: at most `most` + 2 of them."""
    raw = (high - low) / most
    if raw <= 0:
        return [low]
    power = 10.0 ** math.floor(math.log10(raw))
    step = next((factor * power for factor in (1, 2, 2.5, 5) if factor * power >= raw), 10 * power)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    digits = 2 - math.floor(math.log10(step))
    return [round(index * step, digits) for index in range(first, last + 1)]


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Limits with air around them; from 0 when that isn't far away."""
    low, high = min(values), max(values)
    if low == high:
        pad = abs(low) * 0.1 or 1.0
        return (0.0 if low == 0 else low - pad), high + pad
    if low > 0 and low < 0.5 * high:
        low = 0.0
    marks = ticks(low, high)
    return min(marks[0], low), max(marks[-1], high)


@dataclass(frozen=True)
class _Frame:
    """Maps data to SVG units."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        span = (self.x_high - self.x_low) or 1.0
        return round(LEFT + (value - self.x_low) / span * (WIDTH - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        span = (self.y_high - self.y_low) or 1.0
        return round(HEIGHT - BOTTOM - (value - self.y_low) / span * (HEIGHT - TOP - BOTTOM), 1)


def line_chart(title: str, series: Sequence[Series], y_label: str = "", meaning: str = "") -> Html:
    """Values over steps: axes, legend, hover data and a table of the points. Empty when no series has a point."""
    drawn = [line for line in series if any(y is not None for _, y in line.points)]
    if not drawn:
        return Html("")
    xs = [x for line in drawn for x, _ in line.points]
    ys = [y for line in drawn for _, y in line.points if y is not None]
    x_low, x_high = (min(xs) - 0.5, max(xs) + 0.5) if min(xs) == max(xs) else (min(xs), max(xs))
    frame = _Frame(x_low, x_high, *_range(ys))
    svg = h(
        "svg",
        _axes(frame, y_label, whole_x=all(float(x).is_integer() for x in xs)),
        *(_line(line, frame, index) for index, line in enumerate(drawn)),
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        class_="chart",
        role="img",
        tabindex="0",
        aria_label=_spoken(title, drawn),
        data_chart=json.dumps(_hover_data(drawn, frame)),
    )
    legend = None
    if len(drawn) > 1:
        keys = (h("span", h("i", class_=f"key s{i}"), line.name, class_="entry") for i, line in enumerate(drawn))
        legend = h("div", *keys, class_="legend")
    caption = h("figcaption", title, h("p", meaning, class_="muted") if meaning else None)
    return h("figure", caption, legend, svg, _data_table(drawn), class_="card")


def _axes(frame: _Frame, y_label: str, whole_x: bool) -> Html:
    parts = []
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    for value in ticks(frame.y_low, frame.y_high):
        if frame.y_low - 1e-9 <= value <= frame.y_high + 1e-9:
            y = frame.y(value)
            parts.append(h("line", x1=LEFT, x2=right, y1=y, y2=y, class_="grid"))
            parts.append(h("text", f"{value:,.6g}", x=LEFT - 6, y=y + 3.5, class_="tick end"))
    for value in ticks(frame.x_low, frame.x_high, most=6):
        if frame.x_low <= value <= frame.x_high and (not whole_x or value.is_integer()):
            parts.append(h("text", f"{value:,.6g}", x=frame.x(value), y=bottom + 15, class_="tick mid"))
    parts.append(h("line", x1=LEFT, x2=right, y1=bottom, y2=bottom, class_="axis"))
    parts.append(h("text", X_LABEL, x=(LEFT + right) / 2, y=HEIGHT - 6, class_="label mid"))
    middle = (TOP + bottom) / 2
    parts.append(h("text", y_label, x=12, y=middle, transform=f"rotate(-90 12 {middle})", class_="label mid"))
    return join(parts)


def _line(line: Series, frame: _Frame, index: int) -> Html:
    runs: list[list[tuple[float, float]]] = [[]]
    for x, y in line.points:
        if y is None:
            runs.append([])
        else:
            runs[-1].append((frame.x(x), frame.y(y)))
    parts = []
    for run in filter(None, runs):
        parts.append(h("polyline", points=" ".join(f"{x},{y}" for x, y in run), class_=f"line s{index}"))
        if line.dots or len(run) == 1:
            parts.extend(h("circle", cx=x, cy=y, r=3.2, class_=f"dot s{index}") for x, y in run)
    return join(parts)


def _hover_data(series: Sequence[Series], frame: _Frame) -> dict[str, object]:
    """What the script needs to find the nearest x and show the values there."""
    xs = sorted({x for line in series for x, _ in line.points})
    return {
        "label": X_LABEL,
        "x": xs,
        "px": [frame.x(x) for x in xs],
        "series": [
            {"name": line.name, "y": ys, "py": [None if y is None else frame.y(y) for y in ys]}
            for line in series
            for ys in [list(map(dict(line.points).get, xs))]
        ],
        "top": TOP,
        "bottom": HEIGHT - BOTTOM,
    }


def _spoken(title: str, series: Sequence[Series]) -> str:
    parts = []
    for line in series:
        known = [(x, y) for x, y in line.points if y is not None]
        (x0, y0), (x1, y1) = known[0], known[-1]
        parts.append(f"{line.name} from {number(y0)} at {X_LABEL} {number(x0)} to {number(y1)} at {number(x1)}")
    return f"{title}: {'; '.join(parts)}. Arrow keys read the points."


def _data_table(series: Sequence[Series]) -> Html:
    xs = sorted({x for line in series for x, _ in line.points})
    stride = math.ceil(len(xs) / MAX_TABLE_ROWS)
    by_x = [dict(line.points) for line in series]
    rows = ([number(x), *(number(values.get(x)) for values in by_x)] for x in xs[::stride])
    note = f"Data (every {stride}th point)" if stride > 1 else "Data"
    columns = [X_LABEL, *(line.name for line in series)]
    return h("details", h("summary", note), table(columns, rows, class_="data"), class_="points")


@dataclass(frozen=True)
class MatchRow:
    """One evaluation in the strict/normalised figure; shares in 0..1."""

    label: str
    strict: float
    strict_low: float
    strict_high: float
    lenient: float | None


def match_figure(rows: Sequence[MatchRow]) -> Html:
    """Strict match with its interval beside the normalised one; a wide gap is what reward hacking looks like."""
    row_height, left, width = 34, 130, 760
    height = 16 + row_height * len(rows) + 36
    right = width - 90

    def x(share: float) -> float:
        return round(left + share * (right - left), 1)

    parts = []
    for share in (0, 0.25, 0.5, 0.75, 1):
        parts.append(h("line", x1=x(share), x2=x(share), y1=8, y2=height - 36, class_="grid"))
        parts.append(h("text", f"{100 * share:.0f} %", x=x(share), y=height - 20, class_="tick mid"))
    parts.append(h("text", "share of questions", x=(left + right) / 2, y=height - 4, class_="label mid"))
    for index, row in enumerate(rows):
        y = 8 + row_height * (index + 0.5)
        parts.append(h("text", row.label, x=left - 12, y=y + 4, class_="name end"))
        parts.append(h("line", x1=x(row.strict_low), x2=x(row.strict_high), y1=y, y2=y, class_="interval"))
        if row.lenient is not None:
            parts.append(h("line", x1=x(row.strict), x2=x(row.lenient), y1=y, y2=y, class_="gap"))
            middle = x(row.lenient)
            diamond = f"{middle},{y - 5} {middle + 5},{y} {middle},{y + 5} {middle - 5},{y}"
            parts.append(h("polygon", points=diamond, class_="lenient"))
            parts.append(h("text", f"gap {100 * (row.lenient - row.strict):.1f}", x=right + 12, y=y + 4, class_="tick"))
        parts.append(h("circle", cx=x(row.strict), cy=y, r=5, class_="strict"))
    spoken = "; ".join(
        f"{row.label}: strict {100 * row.strict:.1f} percent, normalised "
        + ("unknown" if row.lenient is None else f"{100 * row.lenient:.1f} percent")
        for row in rows
    )
    svg = h("svg", *parts, viewBox=f"0 0 {width} {height}", class_="match", role="img", aria_label=spoken)
    keys = {
        "strict": "strict match, with 95 % interval",
        "lenient": "normalised match (case, articles and punctuation ignored)",
    }
    entries = (h("span", h("i", class_=f"key {key}"), text, class_="entry") for key, text in keys.items())
    legend = h("div", *entries, class_="legend")
    return h("figure", h("figcaption", "Strict and normalised match"), legend, svg, class_="card wide")
