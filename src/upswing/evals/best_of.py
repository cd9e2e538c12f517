"""Best of n: how often what a score chooses among n samples of a task is solved. Chance makes it pass@1, a perfect
choice pass@n."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from upswing.evals.stats import bootstrap_mean_ci, pass_at_k
from upswing.evals.summary import EvalRecord
from upswing.view.run_folder import json_safe


def best_of_n(scores: Sequence[float], solved: Sequence[float], n: int) -> float:
    """The mean of `solved` over what scores highest in every set of n of the samples, ties drawn by lot: exact.

    Raises ValueError for n out of 1..samples and for scores that aren't finite.
    """
    scores_M, solved_M = np.asarray(scores, np.float64), np.asarray(solved, np.float64)
    if not 1 <= n <= len(scores_M) or not np.isfinite(scores_M).all():
        raise ValueError(f"n={n} of {len(scores_M)} samples; needed are 1 <= n <= samples, and finite scores")
    total, below = 0.0, 0
    for score in np.unique(scores_M):
        tied = scores_M == score
        up_to = below + int(tied.sum())
        sets = math.comb(up_to, n) - math.comb(below, n)  # in which this is the highest score
        total += float(solved_M[tied].mean()) * (sets / math.comb(len(scores_M), n))
        below = up_to
    return total


def best_of(
    records: Sequence[EvalRecord], scores: Sequence[float | None], n: int, success: str = "strict_match"
) -> dict[str, Any]:
    """`best` of n with its interval, `pass_1` and `pass_n` of the same samples, as JSON.

    Solved is a reward (or the component `success`) of 1. Samples without one or without a score are left out, as are
    the tasks that then have fewer than n.
    """
    tasks: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for record, score in zip(records, scores, strict=True):
        value = record.components.get(success, record.reward)
        if value is not None and score is not None and record.counted:
            tasks[record.task_id].append((score, float(value >= 1 - 1e-9)))
    full = [tuple(zip(*found, strict=True)) for found in tasks.values() if len(found) >= n]
    counts = [(len(solved), int(sum(solved))) for _, solved in full]
    figures = {
        "n": n,
        "tasks": len(full),
        "tasks_left_out": len({record.task_id for record in records}) - len(full),
        "best": asdict(bootstrap_mean_ci([best_of_n(found, solved, n) for found, solved in full])),
        "pass_1": bootstrap_mean_ci([won / size for size, won in counts]).mean,
        "pass_n": bootstrap_mean_ci([pass_at_k(size, won, n) for size, won in counts]).mean,
    }
    return dict(json_safe(figures))
