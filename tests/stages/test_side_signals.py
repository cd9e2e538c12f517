"""What a side term of the reward pays for, against plain sums; nothing where there is no side term."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from upswing.evals.summary import EvalRecord
from upswing.stages.side_signals import COUNTS, side_signals


def record(strict: float | None, calls: int = 1, repeats: int = 0, tokens: int = 9) -> EvalRecord:
    plain: dict[str, Any] = {"task_id": "t", "trajectory_id": "t", "outcome": "completed", "stop_reason": "answered"}
    counts = {"tool_calls": calls, "duplicate_calls": repeats, "sampled_tokens": tokens}
    return EvalRecord(**plain, reward=None, components={"strict_match": strict}, tags={}, turns=1, invalid_calls=0,
                      recovered=None, **counts)  # fmt: skip


def batch(seed: int) -> tuple[list[int], list[EvalRecord]]:
    rng, sizes = np.random.default_rng(seed), [8, 5, 1, 8]
    drawn = [(float(rng.random() < 0.4), *rng.integers(0, 5, 2), *rng.integers(5, 60, 1)) for _ in range(sum(sizes))]
    return sizes, [record(strict, *map(int, counts)) for strict, *counts in drawn]


def test_a_price_a_call_or_a_length_goes_with_it_and_weights_of_success_do_not():
    sizes, records = batch(1)
    charged = [2 * (one.components["strict_match"] or 0) - 0.5 * one.tool_calls for one in records]
    found = side_signals(sizes, records, charged)
    assert found["side_calls_corr"] == pytest.approx(-1, abs=0.15) and abs(found["side_length_corr"]) < 0.6
    paid = [(one.components["strict_match"] or 0) + 0.1 * one.sampled_tokens for one in records]
    assert side_signals(sizes, records, paid)["side_length_corr"] > 0.85
    twice = [2.0 * (one.components["strict_match"] or 0) for one in records]
    assert all(math.isnan(value) for value in side_signals(sizes, records, twice).values())


def test_it_is_the_correlation_of_residuals_within_groups():
    sizes, records = batch(2)
    rng = np.random.default_rng(3)
    rewards = rng.normal(size=len(records)).tolist()
    rewards[4] = math.nan
    columns: list[np.ndarray] = []
    ends = np.cumsum([0, *sizes])
    for of in (lambda i: rewards[i], lambda i: records[i].components["strict_match"], lambda i: records[i].tool_calls):
        parts = [[of(i) for i in range(a, b) if i != 4] for a, b in itertools.pairwise(ends)]
        columns.append(np.concatenate([np.array(part, float) - np.mean(part) for part in parts]))
    side = columns[0] - np.polyfit(columns[1], columns[0], 1)[0] * columns[1]
    assert side_signals(sizes, records, rewards)["side_calls_corr"] == pytest.approx(
        np.corrcoef(side, columns[2])[0, 1]
    )


@pytest.mark.parametrize("strict", [None, math.nan])
def test_without_a_measure_of_success_nothing_is_told(strict: float | None):
    sizes, records = [2, 2], [record(strict, calls) for calls in range(4)]
    assert all(math.isnan(value) for value in side_signals(sizes, records, [1.0, 2.0, 3.0, 5.0]).values())
    assert set(side_signals([], [], [])) == set(COUNTS)
