"""What the reward has beside success, and what it pays for: seen from the first step, long before anything moves."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from upswing.evals.summary import EvalRecord
from upswing.stages.evaluate import SUCCESS

COUNTS = {"side_calls_corr": "tool_calls", "side_repeats_corr": "duplicate_calls", "side_length_corr": "sampled_tokens"}


def side_signals(sizes: Sequence[int], records: Sequence[EvalRecord], rewards_B: Sequence[float]) -> dict[str, float]:
    """Correlation, within groups, of what success (`strict_match`) doesn't explain of the reward with calls, repeated
    calls and length; -1 to 1. NaN without a `strict_match`, and where success explains all or the other doesn't vary.

    `sizes`: of the groups. `records` and `rewards_B` go over the trajectories of all groups in order.
    """
    success_B = np.array([one.components.get(SUCCESS, math.nan) for one in records], dtype=np.float64)  # None: NaN
    reward_B = np.array(rewards_B, dtype=np.float64)
    known_B = np.isfinite(success_B) & np.isfinite(reward_B)
    group_C = np.repeat(np.arange(len(sizes)), sizes)[known_B]
    reward_C, success_C = (_centred(values_B[known_B], group_C) for values_B in (reward_B, success_B))
    spread = float(success_C @ success_C)
    side_C = reward_C - success_C * (float(reward_C @ success_C) / spread if spread else 0.0)
    size = float(side_C @ side_C)
    found = dict.fromkeys(COUNTS, math.nan)
    if size <= 1e-9 * float(reward_C @ reward_C):
        return found
    for name, key in COUNTS.items():
        count_C = _centred(np.array([getattr(one, key) for one in records], dtype=np.float64)[known_B], group_C)
        if other := float(count_C @ count_C):
            found[name] = float(side_C @ count_C) / math.sqrt(size * other)
    return found


def _centred(values_C: np.ndarray, group_C: np.ndarray) -> np.ndarray:
    """Less their group's mean."""
    if not len(values_C):
        return values_C
    means: np.ndarray = np.bincount(group_C, values_C) / np.maximum(1, np.bincount(group_C))
    less: np.ndarray = values_C - means[group_C]
    return less
