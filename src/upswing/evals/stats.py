"""Intervals and tests for evaluation figures: numpy only, seeded, no hidden state.

Rules, stated once:
- A mean gets a percentile bootstrap interval. With several samples per task the *tasks* are resampled (clusters).
- When every task is alike a bootstrap interval has no width, which would claim certainty. For values of 0 and 1 the
  Wilson interval over the tasks is used instead, so that 0 of 200 still has an upper bound of 1.9 %. Equal values of
  any other kind have no known bound and keep zero width.
- Differences between two checkpoints are always paired by question.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]

_CHUNK_CELLS = 2_000_000
"""Resampled values held at once: 16 MB of float64."""
_EXACT_FLIPS = 14
"""Up to this many non-zero differences, every one of the 2^n sign flips is enumerated."""


@dataclass(frozen=True)
class Interval:
    """A mean with its confidence interval."""

    mean: float
    """NaN when there was nothing to average (`n == 0`)."""
    low: float
    high: float
    n: int
    """How many values were averaged."""


@dataclass(frozen=True)
class PairedResult:
    """`b` against `a` on the same questions."""

    diff: float
    """mean(b) - mean(a): positive when `b` is better."""
    low: float
    high: float
    p: float
    """Two-sided p-value of 'no difference'."""
    n: int
    """Number of pairs."""
    test: str
    """`mcnemar` (both binary, exact) or `sign_flip` (permutation)."""
    only_a: int
    """Pairs where `a` is higher."""
    only_b: int
    """Pairs where `b` is higher."""


def _as_finite(values: Sequence[float] | Float64, name: str) -> Float64:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1:
        raise ValueError(f"{name} has {array.ndim} dimensions; a flat sequence of numbers is needed")
    if not np.isfinite(array).all():
        raise ValueError(f"{name} holds {int((~np.isfinite(array)).sum())} NaN or infinite value(s); leave them out")
    return array


def _is_binary(array: Float64) -> bool:
    return bool(np.isin(array, (0.0, 1.0)).all())


def wilson_interval(successes: float, n: int, level: float = 0.95) -> tuple[float, float]:
    """Wilson score interval of a share; `(0, 1)` when n is 0."""
    if n == 0:
        return 0.0, 1.0
    z2 = NormalDist().inv_cdf(0.5 + level / 2) ** 2
    share = successes / n
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = math.sqrt(z2 * (share * (1 - share) / n + z2 / (4 * n * n))) / (1 + z2 / n)
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == n else min(1.0, centre + half)
    return low, high


def _cluster_totals(array: Float64, clusters: Sequence[Hashable] | None) -> tuple[Float64, Float64]:
    """Sum and count of every cluster, in order of first appearance; each value is its own cluster without names."""
    if clusters is None:
        return array, np.ones_like(array)
    if len(clusters) != len(array):
        raise ValueError(f"{len(clusters)} cluster names for {len(array)} values; one each is needed")
    index: dict[Hashable, int] = {}
    codes = np.array([index.setdefault(name, len(index)) for name in clusters], dtype=np.int64)
    return np.bincount(codes, weights=array).astype(np.float64), np.bincount(codes).astype(np.float64)


def _percentiles(
    sums: Float64, counts: Float64, level: float, resamples: int, rng: np.random.Generator
) -> tuple[float, float]:
    """Ends of the middle `level` of the means of `resamples` draws of whole clusters with replacement."""
    num = len(sums)
    if (counts == 1).all() and _is_binary(sums):  # resampling n zeros and ones is exactly a binomial draw
        means = rng.binomial(num, sums.mean(), size=resamples) / num
    else:
        means, rows = np.empty(resamples), max(1, _CHUNK_CELLS // num)
        for start in range(0, resamples, rows):
            pick = rng.integers(num, size=(min(rows, resamples - start), num))
            means[start : start + rows] = sums[pick].sum(axis=1) / counts[pick].sum(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def bootstrap_mean_ci(
    values: Sequence[float] | Float64,
    level: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
    clusters: Sequence[Hashable] | None = None,
) -> Interval:
    """Mean of all values with a percentile bootstrap interval; NaNs and `n == 0` for no values.

    `values`: [n] finite numbers; NaN, something that could not be scored, raises ValueError. `clusters`: [n] task ids;
    given, whole tasks are resampled, since samples of one task aren't independent.
    """
    array = _as_finite(values, "values")
    if not 0 < level < 1:
        raise ValueError(f"level is {level}; it must lie between 0 and 1, such as 0.95")
    if len(array) == 0:
        return Interval(math.nan, math.nan, math.nan, 0)
    sums, counts = _cluster_totals(array, clusters)
    mean = float(array.mean())
    if np.ptp(sums / counts) == 0:
        # One task's samples may all be alike by chance, so the number of tasks is what counts as evidence.
        low, high = wilson_interval(mean * len(sums), len(sums), level) if _is_binary(array) else (mean, mean)
    else:
        low, high = _percentiles(sums, counts, level, resamples, np.random.default_rng(seed))
    return Interval(mean, low, high, len(array))


def _mcnemar_p(only_a: int, only_b: int) -> float:
    """Exact two-sided McNemar: a fair coin over the pairs that differ."""
    num = only_a + only_b
    tail = sum(math.comb(num, k) for k in range(min(only_a, only_b) + 1))
    return min(1.0, float(2 * tail / 2**num))


def _sign_flip_p(diffs: Float64, resamples: int, rng: np.random.Generator) -> float:
    """Two-sided permutation test that the sign of every difference is arbitrary; exact for few differences."""
    diffs = diffs[diffs != 0]
    num = len(diffs)
    if num == 0:
        return 1.0
    # The tolerance keeps permutations that equal the observed sum, but for rounding, on the extreme side.
    observed = abs(diffs.sum()) - 1e-9 * np.abs(diffs).sum()
    if num <= _EXACT_FLIPS:
        signs = 1.0 - 2.0 * ((np.arange(2**num)[:, None] >> np.arange(num)) & 1)
        return float((np.abs(signs @ diffs) >= observed).mean())
    hits = 0
    rows = max(1, _CHUNK_CELLS // num)
    for start in range(0, resamples, rows):
        signs = rng.integers(2, size=(min(rows, resamples - start), num)) * 2.0 - 1.0
        hits += int((np.abs(signs @ diffs) >= observed).sum())
    return (hits + 1) / (resamples + 1)


def _diff_interval(diffs: Float64, level: float, resamples: int, rng: np.random.Generator) -> tuple[float, float]:
    """Bootstrap interval of the mean difference; Wilson bounds on wins and losses where it would have no width."""
    if np.ptp(diffs) > 0:
        return _percentiles(diffs, np.ones_like(diffs), level, resamples, rng)
    if not np.isin(diffs, (-1.0, 0.0, 1.0)).all():
        return float(diffs[0]), float(diffs[0])
    wins = wilson_interval(int((diffs > 0).sum()), len(diffs), level)
    losses = wilson_interval(int((diffs < 0).sum()), len(diffs), level)
    return max(-1.0, wins[0] - losses[1]), min(1.0, wins[1] - losses[0])


def paired_test(
    a: Sequence[float] | Float64,
    b: Sequence[float] | Float64,
    level: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> PairedResult:
    """Is `b` better than `a` on the same questions? [n] each, in the same order.

    Exact McNemar when both are 0/1, else a paired sign-flip permutation test. Raises ValueError for other lengths, no
    pairs, and NaN.
    """
    left, right = _as_finite(a, "a"), _as_finite(b, "b")
    if len(left) != len(right) or len(left) == 0:
        raise ValueError(f"a has {len(left)} values and b {len(right)}; the same questions, at least one, are needed")
    rng = np.random.default_rng(seed)
    diffs = right - left
    only_a, only_b = int((diffs < 0).sum()), int((diffs > 0).sum())
    low, high = _diff_interval(diffs, level, resamples, rng)
    binary = _is_binary(left) and _is_binary(right)
    p = _mcnemar_p(only_a, only_b) if binary else _sign_flip_p(diffs, resamples, rng)
    test = "mcnemar" if binary else "sign_flip"
    return PairedResult(float(diffs.mean()), low, high, p, len(diffs), test, only_a, only_b)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased chance that at least one of k samples succeeds, from c successes among n."""
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"n={n}, c={c}, k={k}: needed are 0 <= c <= n and 1 <= k <= n (at least k samples a task)")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def pass_hat_k(n: int, c: int, k: int) -> float:
    """Unbiased chance that all of k samples succeed (pass^k), from c successes among n: that none of them fails."""
    return 1.0 - pass_at_k(n, n - c, k)
