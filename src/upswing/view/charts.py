"""Figures as inline SVG: line charts of series and the strict/normalised figure. Readable without scripts."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from upswing.view.html import Html, h, join, table
from upswing.view.text import number

WIDTH, HEIGHT = 520, 230
LEFT, RIGHT, TOP, BOTTOM = 64, WIDTH - 14, 12, HEIGHT - 40
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


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """Maps [low, high] to SVG units."""
    return lambda value: round(start + (value - low) / ((high - low) or 1.0) * (end - start), 1)


def _legend(keys: Iterable[tuple[str, str]]) -> Html:
    """A box of (CSS class of the mark, text)."""
    return h("div", *(h("span", h("i", class_=f"key {c}"), text, class_="entry") for c, text in keys), class_="legend")


def line_chart(title: str, series: Sequence[Series], y_label: str = "", meaning: str = "") -> Html:
    """Values over steps: axes, legend, hover data and a table of the points. Empty when no series has a point."""
    drawn = [line for line in series if any(y is not None for _, y in line.points)]
    if not drawn:
        return Html("")
    xs = sorted({x for line in drawn for x, _ in line.points})
    columns = {line.name: list(map(dict(line.points).get, xs)) for line in drawn}
    x_ends = (xs[0] - 0.5, xs[-1] + 0.5) if len(xs) == 1 else (xs[0], xs[-1])
    y_ends = _range([y for column in columns.values() for y in column if y is not None])
    to_x, to_y = _scale(*x_ends, LEFT, RIGHT), _scale(*y_ends, BOTTOM, TOP)
    x_ticks = [x for x in ticks(*x_ends, most=6) if x_ends[0] <= x <= x_ends[1]]
    if all(x.is_integer() for x in xs):
        x_ticks = [x for x in x_ticks if x.is_integer()]
    y_ticks = [y for y in ticks(*y_ends) if y_ends[0] <= y <= y_ends[1]]
    hover = {
        "label": X_LABEL,
        "x": xs,
        "px": list(map(to_x, xs)),
        "series": [
            {"name": name, "y": column, "py": [None if y is None else to_y(y) for y in column]}
            for name, column in columns.items()
        ],
        "top": TOP,
        "bottom": BOTTOM,
    }
    svg = h(
        "svg",
        _axes([(x, to_x(x)) for x in x_ticks], [(y, to_y(y)) for y in y_ticks], y_label),
        *(_line(line, to_x, to_y, index) for index, line in enumerate(drawn)),
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        class_="chart",
        role="img",
        tabindex="0",
        aria_label=_spoken(title, drawn),
        data_chart=json.dumps(hover),
    )
    legend = _legend((f"s{i}", line.name) for i, line in enumerate(drawn)) if len(drawn) > 1 else None
    caption = h("figcaption", title, h("p", meaning, class_="muted") if meaning else None)
    return h("figure", caption, legend, svg, _data_table(xs, columns), class_="card")


def _axes(x_ticks: Sequence[tuple[float, float]], y_ticks: Sequence[tuple[float, float]], y_label: str) -> Html:
    """Grid, numbers and names; `*_ticks` are (value, SVG position)."""
    middle = (TOP + BOTTOM) / 2
    parts = [
        h("line", x1=LEFT, x2=RIGHT, y1=BOTTOM, y2=BOTTOM, class_="axis"),
        h("text", X_LABEL, x=(LEFT + RIGHT) / 2, y=HEIGHT - 6, class_="label mid"),
        h("text", y_label, x=12, y=middle, transform=f"rotate(-90 12 {middle})", class_="label mid"),
    ]
    for value, y in y_ticks:
        parts.append(h("line", x1=LEFT, x2=RIGHT, y1=y, y2=y, class_="grid"))
        parts.append(h("text", f"{value:,.6g}", x=LEFT - 6, y=y + 3.5, class_="tick end"))
    parts += [h("text", f"{value:,.6g}", x=x, y=BOTTOM + 15, class_="tick mid") for value, x in x_ticks]
    return join(parts)


def _line(line: Series, to_x: Callable[[float], float], to_y: Callable[[float], float], index: int) -> Html:
    parts = []
    for known, points in groupby(line.points, key=lambda point: point[1] is not None):
        if known:
            run = [(to_x(x), to_y(y)) for x, y in points if y is not None]
            parts.append(h("polyline", points=" ".join(f"{x},{y}" for x, y in run), class_=f"line s{index}"))
            if line.dots or len(run) == 1:
                parts.extend(h("circle", cx=x, cy=y, r=3.2, class_=f"dot s{index}") for x, y in run)
    return join(parts)


def _spoken(title: str, series: Sequence[Series]) -> str:
    parts = []
    for line in series:
        known = [(x, y) for x, y in line.points if y is not None]
        (x0, y0), (x1, y1) = known[0], known[-1]
        parts.append(f"{line.name} from {number(y0)} at {X_LABEL} {number(x0)} to {number(y1)} at {number(x1)}")
    return f"{title}: {'; '.join(parts)}. Arrow keys read the points."


def _data_table(xs: Sequence[float], columns: Mapping[str, Sequence[float | None]]) -> Html:
    stride = math.ceil(len(xs) / MAX_TABLE_ROWS)
    rows = (map(number, row) for row in list(zip(xs, *columns.values(), strict=True))[::stride])
    note = f"Data (every {stride}th point)" if stride > 1 else "Data"
    return h("details", h("summary", note), table([X_LABEL, *columns], rows, class_="data"), class_="points")


def match_figure(rows: Sequence[tuple[str, Mapping[str, float], float | None]]) -> Html:
    """Strict match with its interval beside the normalised one; a wide gap is what reward hacking looks like.

    A row: name, interval of the strict match (`mean`, `low`, `high`), mean of the normalised one if known.
    """
    row_height, left, right, width = 34, 130, 670, 760
    height = 16 + row_height * len(rows) + 36
    to_x = _scale(0, 1, left, right)
    parts = [h("text", "share of questions", x=(left + right) / 2, y=height - 4, class_="label mid")]
    for share in (0, 0.25, 0.5, 0.75, 1):
        parts.append(h("line", x1=to_x(share), x2=to_x(share), y1=8, y2=height - 36, class_="grid"))
        parts.append(h("text", f"{100 * share:.0f} %", x=to_x(share), y=height - 20, class_="tick mid"))
    spoken = []
    for index, (label, strict, lenient) in enumerate(rows):
        y, x = 8 + row_height * (index + 0.5), to_x(strict["mean"])
        said = "unknown"
        parts.append(h("text", label, x=left - 12, y=y + 4, class_="name end"))
        parts.append(h("line", x1=to_x(strict["low"]), x2=to_x(strict["high"]), y1=y, y2=y, class_="interval"))
        if lenient is not None:
            end, said = to_x(lenient), f"{100 * lenient:.1f} percent"
            diamond = f"{end},{y - 5} {end + 5},{y} {end},{y + 5} {end - 5},{y}"
            parts.append(h("line", x1=x, x2=end, y1=y, y2=y, class_="gap"))
            parts.append(h("polygon", points=diamond, class_="lenient"))
            parts.append(h("text", f"gap {100 * (lenient - strict['mean']):.1f}", x=right + 12, y=y + 4, class_="tick"))
        parts.append(h("circle", cx=x, cy=y, r=5, class_="strict"))
        spoken.append(f"{label}: strict {100 * strict['mean']:.1f} percent, normalised {said}")
    label = "; ".join(spoken)
    svg = h("svg", *parts, viewBox=f"0 0 {width} {height}", class_="match", role="img", aria_label=label)
    forgiven = "normalised match (case, articles and punctuation ignored)"
    keys = [("strict", "strict match, with 95 % interval"), ("lenient", forgiven)]
    return h("figure", h("figcaption", "Strict and normalised match"), _legend(keys), svg, class_="card wide")
