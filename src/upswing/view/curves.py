"""Which series of `metrics.jsonl` become which figure.

Known signals get a figure with a name and a unit; every other number that a stage logs is still shown, folded away.
Evaluation points are keys that start with `eval/` (or `val/`), logged at the step of the checkpoint.
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
    Curve(
        "Reward",
        "reward",
        (("training", ("reward", "reward_mean", "train/reward")), ("evaluation", ("eval/reward", "eval/reward_mean"))),
    ),
    Curve(
        "Held-out match",
        "share of questions",
        (
            ("strict", ("eval/strict_match", "eval/strict_em")),
            ("normalised", ("eval/normalised_match", "eval/normalized_match", "eval/exact_match", "eval/em")),
            ("F1", ("eval/f1",)),
            ("format valid", ("eval/format", "eval/format_valid")),
        ),
    ),
    Curve(
        "Match in training",
        "share of trajectories",
        (
            ("strict", ("strict_match", "strict_em")),
            ("normalised", ("normalised_match", "normalized_match", "exact_match", "em")),
            ("format valid", ("format", "format_valid")),
        ),
    ),
    Curve(
        "Loss",
        "nats a token",
        (
            ("training", ("loss", "train_loss", "sft_loss", "policy_loss")),
            ("validation", ("val_loss", "val/loss", "eval/loss", "validation_loss")),
        ),
    ),
    _one("Entropy", "nats a token", "entropy", "entropy_mean", "policy_entropy"),
    _one(
        "Length", "sampled tokens", "sampled_tokens", "length", "length_mean", "response_length", "sampled_tokens_mean"
    ),
    _one("Tool calls", "a trajectory", "tool_calls", "num_tool_calls", "tool_calls_mean"),
    _one("Zero-variance groups", "share of groups", "zero_variance_frac", "zero_variance_share"),
    _one("KL to the reference", "nats a token", "kl", "ref_kl", "kl_ref", "kl_mean"),
    _one("Engine/learner mismatch", "nats a token", "mismatch_kl", "engine_mismatch", "mismatch", "engine_kl"),
    _one("Gradient norm", "before clipping", "grad_norm", "gradient_norm"),
    _one("Clipped ratios", "share of tokens", "clip_frac", "clipped_frac"),
    _one("Learning rate", "", "lr", "learning_rate"),
)


def render(rows: Sequence[Row]) -> Html:
    """A block of figures for every stage, in the order in which they ran."""
    stages: dict[str, list[Row]] = {}
    for row in rows:
        if isinstance(row.get("step"), int | float):
            stages.setdefault(str(row.get("stage", "run")), []).append(row)
    return join(_stage(name, found) for name, found in stages.items())


def _stage(name: str, rows: Sequence[Row]) -> Html:
    keys = list(dict.fromkeys(key for row in rows for key in row))
    used: set[str] = set()
    figures = []
    for curve in CURVES:
        chosen = [(label, key) for label, names in curve.lines for key in names if key in keys and key not in used]
        first = list(dict(reversed(chosen)).items())[::-1]  # one metric a line: the first name that was logged
        lines = [Series(label, points(rows, key), dots=_is_sparse(key)) for label, key in first]
        figure = line_chart(curve.title, lines, y_label=curve.unit)
        if figure:
            used |= {key for _, key in first}
            figures.append(figure)
    rest = [key for key in keys if key not in used | {"stage", "step", "time"}]
    others = [line_chart(key, [Series(key, points(rows, key), dots=_is_sparse(key))]) for key in rest]
    others = [figure for figure in others if figure]
    if not figures and not others:
        return Html("")
    folded = h("summary", f"{len(others)} more signals of {name}")
    more = h("details", folded, h("div", *others, class_="grid2"), class_="more") if others else None
    return h("div", h("h3", f"Stage {name}"), h("div", *figures, class_="grid2"), more, class_="stage")


def _is_sparse(key: str) -> bool:
    return key.startswith(("eval/", "val/")) or key in ("val_loss", "validation_loss")


def points(rows: Sequence[Row], key: str) -> tuple[Point, ...]:
    """(step, value) of one metric by rising step; a logged null is a gap, and of a repeated step the last counts."""
    found: dict[float, float | None] = {}
    for row in rows:
        if key in row:
            value = row[key]
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            found[float(row["step"])] = float(value) if is_number else None
    return tuple(sorted(found.items()))
