"""Figures as a person reads them, the same in the terminal's tables and in the report. None, NaN: a dash."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

DASH = "–"


def number(value: float | None) -> str:
    """In few characters: `0.417`, `12.5`, `1,204`, `3.1e-05`."""
    if value is None or not math.isfinite(value):
        return DASH
    size = abs(value)
    if size and not 1e-3 <= size < 1e6:
        return f"{value:.2g}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.4g}" if size >= 100 else f"{value:.3g}"


def share(value: float | None) -> str:
    """`83.0 %`."""
    return DASH if value is None or math.isnan(value) else f"{100 * value:.1f} %"


def interval(found: Mapping[str, Any] | None) -> tuple[str, str, str]:
    """Mean, low and high of an interval: `83.0 %, 77.5, 88.0` for what lies in 0..1, else plain numbers."""
    if not found or found.get("mean") is None:
        return DASH, "", ""
    mean, low, high = found["mean"], found["low"], found["high"]
    if low >= 0 and high <= 1:
        return share(mean), f"{100 * low:.1f}", f"{100 * high:.1f}"
    return number(mean), number(low), number(high)


def difference(paired: Mapping[str, Any]) -> tuple[str, str, str]:
    """Difference, low and high of a paired test: `+31.0 points, 25.0, 37.0`; of rewards, which need no scale, plain."""
    diff, low, high = paired["diff"], paired["low"], paired["high"]
    if paired.get("metric") == "reward":
        return f"{diff:+.3g}", number(low), number(high)
    return f"{100 * diff:+.1f} points", f"{100 * low:.1f}", f"{100 * high:.1f}"


def p_value(p: float | None) -> str:
    """`< 0.001`, `= 0.031`."""
    return DASH if p is None or math.isnan(p) else "< 0.001" if p < 0.001 else f"= {p:.3f}"


def readable(name: str) -> str:
    """A component's name."""
    known = {"exact_match": "normalised match", "f1": "F1", "format": "format valid"}
    return known.get(name, name.replace("_", " "))
