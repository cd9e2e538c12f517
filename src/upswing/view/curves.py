"""Which series of `metrics.jsonl` become which figure.

Known signals get a figure with a name and a unit; every other number that a stage logs is still shown, folded away.
Evaluation points are keys that start with `eval_`, logged at the step of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from upswing.view.charts import Point, Series, line_chart
from upswing.view.html import Html, h, join

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Curve:
    """A figure: its lines are (name in the legend, metric names of which the first logged one is drawn)."""

    title: str
    unit: str
    lines: tuple[tuple[str, tuple[str, ...]], ...]


def _one(title: str, unit: str, *names: str) -> Curve:
    return Curve(title, unit, ((title.lower(), names),))


CURVES = (
    Curve("Reward", "reward", (("training", ("reward",)), ("evaluation, greedy", ("eval_reward",)))),
    Curve(
        "Held-out match",
        "share of questions",
        (
            ("strict", ("eval_strict_match",)),
            ("normalised", ("eval_exact_match", "eval_normalised_match")),
            ("F1", ("eval_f1",)),
            ("format valid", ("eval_format",)),
        ),
    ),
    Curve(
        "Match in training",
        "share of trajectories",
        (
            ("strict", ("score_strict_match", "strict_match")),
            ("normalised", ("score_exact_match", "exact_match")),
            ("F1", ("score_f1", "f1")),
            ("format valid", ("score_format", "format")),
        ),
    ),
    Curve("Loss", "loss", (("training", ("loss",)), ("validation", ("validation_loss", "val_loss", "eval_loss")))),
    _one("Entropy", "nats a token", "entropy"),
    _one("Length", "sampled tokens a trajectory", "sampled_tokens"),
    Curve("Turns and tool calls", "a trajectory", (("tool calls", ("tool_calls",)), ("turns", ("turns",)))),
    Curve(
        "Groups without a spread",
        "share of groups",
        (
            ("zero variance", ("zero_variance_frac",)),
            ("too easy", ("too_easy_frac",)),
            ("too hard", ("too_hard_frac",)),
        ),
    ),
    Curve("KL", "nats a token", (("to the reference", ("kl",)), ("of this update", ("kl_old",)))),
    _one("Engine/learner mismatch", "nats a token", "mismatch_k3", "mismatch_kl", "mismatch_abs"),
    _one("Gradient norm", "before clipping", "grad_norm"),
    Curve(
        "Clipped ratios", "share of tokens", (("at the top", ("clipped_high",)), ("at the bottom", ("clipped_low",)))
    ),
    Curve("Recovery", "share of failed firsts", (("training", ("recovery",)), ("evaluation", ("eval_recovery",)))),
    Curve(
        "Trouble",
        "share",
        (
            ("truncated", ("truncated_frac",)),
            ("invalid calls", ("invalid_call_frac",)),
            ("repeated calls", ("duplicate_call_frac",)),
        ),
    ),
    _one("Learning rate", "", "lr"),
)


def render(rows: Sequence[Row]) -> Html:
    """A block of figures for every stage, in the order in which they ran."""
    stages: dict[str, list[Row]] = {}
    for row in rows:
        if isinstance(row.get("step"), int | float):
            stages.setdefault(str(row.get("stage", "run")), []).append(row)
    return join(_stage(name, found) for name, found in stages.items())


def _stage(name: str, rows: Sequence[Row]) -> Html:
    used: set[str] = set()
    figures = []
    for curve in CURVES:
        drawn = [(label, _first_logged(rows, names)) for label, names in curve.lines]
        lines = [_series(rows, label, key) for label, key in drawn if key]
        figures.append(line_chart(curve.title, lines, y_label=curve.unit))
        used |= {key for _, key in drawn if key}
    rest = [key for key in dict.fromkeys(key for row in rows for key in row) if key not in used | _OWN_KEYS]
    others = [figure for key in rest if (figure := line_chart(key, [_series(rows, key, key)]))]
    figures = [figure for figure in figures if figure]
    if not figures and not others:
        return Html("")
    folded = h("summary", f"More signals of {name} ({len(others)})")
    more = h("details", folded, h("div", *others, class_="grid2"), class_="more") if others else None
    return h("div", h("h3", f"Stage {name}"), h("div", *figures, class_="grid2"), more, class_="stage")


_OWN_KEYS = {"stage", "step", "time"}


def _first_logged(rows: Sequence[Row], names: Sequence[str]) -> str | None:
    return next((name for name in names if any(name in row for row in rows)), None)


def _series(rows: Sequence[Row], label: str, key: str) -> Series:
    found = points(rows, key)
    return Series(label, found, dots=key.startswith("eval_") or len(found) <= 12)


def points(rows: Sequence[Row], key: str) -> tuple[Point, ...]:
    """(step, value) of one metric by rising step; a logged null is a gap, and of a repeated step the last counts."""
    found: dict[float, float | None] = {}
    for row in rows:
        if key in row:
            value = row[key]
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            found[float(row["step"])] = float(value) if is_number else None
    return tuple(sorted(found.items()))
