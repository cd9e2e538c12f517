"""Robust statistics of short, noisy series. Pure float64; every input is finite values in order, axis K."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

MAD_TO_STD = 1.4826
"""Standard deviation of a Gaussian / its median absolute deviation."""
MEDIAN_ERROR = 1.2533
"""Standard error of a Gaussian sample's median / that of its mean, for large samples: sqrt(pi / 2)."""


class Trend(NamedTuple):
    """A monotone trend."""

    slope: float
    """Theil-Sen: the median of all pairs' slopes, a step."""
    p: float
    """Two-sided Mann-Kendall, with correction for ties and continuity; 1 for fewer than 3 values."""


def median(values_K: np.ndarray) -> float:
    """NaN of nothing. For short series many times as fast as numpy's."""
    ordered, half = np.sort(values_K), len(values_K) // 2
    if not len(ordered):
        return math.nan
    return float(ordered[half]) if len(ordered) % 2 else 0.5 * float(ordered[half - 1] + ordered[half])


def mad(values_K: np.ndarray) -> float:
    """Median absolute deviation; NaN of nothing."""
    return median(np.abs(values_K - median(values_K)))


def step_noise(values_K: np.ndarray) -> float:
    """Standard deviation about the local level, from differences of neighbours, so that trends and jumps don't count.
    0 for fewer than 3 values."""
    return mad(np.diff(values_K)) * MAD_TO_STD / math.sqrt(2) if len(values_K) > 2 else 0.0


def rolling_median(values_K: np.ndarray, window: int) -> np.ndarray:
    """[K]: the median of each value and the up to `window` - 1 before it."""
    head = [median(values_K[: i + 1]) for i in range(min(window - 1, len(values_K)))]
    if len(values_K) < window:
        return np.array(head)
    return np.concatenate([head, np.median(sliding_window_view(values_K, window), axis=1)])


def trend(steps_K: np.ndarray, values_K: np.ndarray) -> Trend:
    """Slope a step and its p value (Theil 1950, Sen 1968; Mann 1945, Kendall 1975). Steps strictly rise."""
    count = len(values_K)
    if count < 3:
        return Trend(0.0, 1.0)
    first, second = np.triu_indices(count, 1)
    rises = values_K[second] - values_K[first]
    slope = median(rises / (steps_K[second] - steps_K[first]))
    score = float(np.sign(rises).sum())
    _, ties = np.unique(values_K, return_counts=True)
    variance = (count * (count - 1) * (2 * count + 5) - float((ties * (ties - 1) * (2 * ties + 5)).sum())) / 18
    if variance <= 0:
        return Trend(slope, 1.0)
    return Trend(slope, _two_sided(max(0.0, abs(score) - 1) / math.sqrt(variance)))


def change_point(values_K: np.ndarray, *, shortest: int = 3, alpha: float = 0.01) -> int | None:
    """Index of the first value after the split that leaves the least absolute deviation about two medians.

    None unless a rank-sum test of the two sides, times the number of splits tried, is below `alpha`.
    """
    count = len(values_K)
    splits = range(shortest, count - shortest + 1)
    if not splits:
        return None
    at = min(splits, key=lambda i: _deviation(values_K[:i]) + _deviation(values_K[i:]))
    left, right = values_K[:at], values_K[at:]
    score = float(np.sign(right[:, None] - left[None, :]).sum()) / 2
    _, ties = np.unique(values_K, return_counts=True)
    tied = float((ties.astype(float) ** 3 - ties).sum()) / (count * (count - 1))
    variance = len(left) * len(right) / 12 * (count + 1 - tied)
    if variance <= 0 or _two_sided(abs(score) / math.sqrt(variance)) * len(splits) >= alpha:
        return None
    return at


def _deviation(values_K: np.ndarray) -> float:
    """Sum of absolute deviations from the median."""
    ordered, half = np.sort(values_K), len(values_K) // 2
    return float(ordered[len(ordered) - half :].sum() - ordered[:half].sum())


def _two_sided(z: float) -> float:
    return math.erfc(z / math.sqrt(2))
