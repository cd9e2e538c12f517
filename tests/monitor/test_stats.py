"""Robust statistics against brute force and textbook values."""

from __future__ import annotations

import math
import statistics
from itertools import combinations

import numpy as np
import pytest

from upswing.monitor import stats


@pytest.mark.parametrize("count", [1, 2, 3, 8, 9])
def test_median_mad_and_rolling_median_are_those_of_the_standard_library(count: int):
    values = np.random.default_rng(count).normal(size=count)
    middle = statistics.median(values)
    assert stats.median(values) == pytest.approx(middle)
    assert stats.mad(values) == pytest.approx(statistics.median(abs(v - middle) for v in values))
    expected = [statistics.median(values[max(0, i - 3) : i + 1]) for i in range(count)]
    assert stats.rolling_median(values, 4) == pytest.approx(np.array(expected))


def test_nothing_has_no_median():
    assert math.isnan(stats.median(np.array([])))
    assert len(stats.rolling_median(np.array([]), 3)) == 0


def test_step_noise_ignores_trends_and_jumps():
    rng = np.random.default_rng(0)
    values = rng.normal(size=2000) + np.linspace(0, 100, 2000) + np.where(np.arange(2000) > 900, 50, 0)
    assert stats.step_noise(values) == pytest.approx(1, rel=0.1)


def test_trend_of_a_strict_rise_is_the_textbook_value():
    """n = 10 without ties: S = 45, var S = 10 * 9 * 25 / 18 = 125, z = 44 / sqrt(125)."""
    found = stats.trend(np.arange(10) * 2, np.arange(10.0))
    assert found.slope == pytest.approx(0.5)
    assert found.p == pytest.approx(math.erfc(44 / math.sqrt(125) / math.sqrt(2)))


def test_trend_with_ties_and_gaps_by_brute_force():
    steps, values = np.array([1, 2, 5, 9, 10, 20]), np.array([2.0, 2.0, 1.0, 4.0, 4.0, 4.0])
    pairs = list(combinations(range(6), 2))
    slopes = [(values[j] - values[i]) / (steps[j] - steps[i]) for i, j in pairs]
    score = sum(math.copysign(1, values[j] - values[i]) for i, j in pairs if values[i] != values[j])
    variance = (6 * 5 * 17 - 2 * 1 * 9 - 3 * 2 * 11) / 18
    found = stats.trend(steps, values)
    assert found.slope == pytest.approx(statistics.median(slopes))
    assert found.p == pytest.approx(math.erfc((abs(score) - 1) / math.sqrt(variance) / math.sqrt(2)))


def test_no_trend_in_a_constant_or_in_two_values():
    assert stats.trend(np.arange(20), np.ones(20)) == (0.0, 1.0)
    assert stats.trend(np.arange(2), np.arange(2.0)).p == 1.0


def test_trend_p_is_uniform_in_noise():
    rng = np.random.default_rng(1)
    low = [stats.trend(np.arange(15), rng.normal(size=15)).p < 0.1 for _ in range(400)]
    assert 0.06 < np.mean(low) < 0.14


@pytest.mark.parametrize("seed", range(5))
def test_change_point_is_the_best_split(seed: int):
    rng = np.random.default_rng(seed)
    values = rng.normal(size=30) + np.where(np.arange(30) >= 12, 4.0, 0.0)

    def cost(split: int) -> float:
        parts = (values[:split], values[split:])
        return float(sum(np.abs(part - np.median(part)).sum() for part in parts))

    assert stats.change_point(values) == min(range(3, 28), key=cost)
    assert abs((stats.change_point(values) or 0) - 12) <= 1


def test_no_change_point_in_noise_constants_or_short_series():
    rng = np.random.default_rng(2)
    found = [stats.change_point(rng.normal(size=30)) is not None for _ in range(100)]
    assert np.mean(found) <= 0.06
    assert stats.change_point(np.ones(20)) is None
    assert stats.change_point(np.arange(5.0)) is None
