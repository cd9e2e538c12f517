"""A stage's past as series: what detectors read, whether the rows come from a run in progress, a stored one or
another framework's log."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from upswing.trajectory.types import Trajectory

SUCCESS = "strict_match"
"""The score that is success wherever it is measured."""
Trajectories = Callable[[int], Sequence[Trajectory]]
"""Step -> the trajectories that it learned from; none where they are not known."""
_SPREADS = frozenset({"informative_frac", "zero_variance_frac", "too_easy_frac", "too_hard_frac", "group_reward_std"})
_JUDGED_BY_REWARD = frozenset({"kl", "reward_std", "reward_length_corr", "effective_frac"})


def unheard(kind: str, *, grouped: bool) -> frozenset[str]:
    """Signals without a meaning for a kind of stage: its groups' spread where it isn't `grouped`, so that nothing is
    learned from it; of a `distill` stage also the KL, which is to the teacher and to fall from wherever it is."""
    if kind == "distill":
        return _SPREADS | _JUDGED_BY_REWARD
    return frozenset() if grouped else _SPREADS


class History:
    """Step rows of one stage, oldest first, as float64 series over S steps.

    Rows without any training signal (held-out evaluations share the file) are merged into the step they belong to.
    `facts` are the stage's resolved keys (`group_size`, `kl_coef`, ...) and `turn_tokens`, `max_turns`, `weights` (of
    the rubric, by name), `tools` (how many the agent has); empty for logs that don't tell. Nothing is invented: what
    no row has is missing, and a detector that needs it is skipped.
    """

    def __init__(
        self,
        stage: str,
        rows: Sequence[Mapping[str, Any]],
        *,
        facts: Mapping[str, Any] | None = None,
        trajectories: Trajectories | None = None,
    ) -> None:
        self.stage, self.facts = stage, dict(facts or {})
        self.trajectories: Trajectories = trajectories or (lambda step: ())
        self._steps: list[int] = []
        self._columns: dict[str, array[float]] = {}
        for row in rows:
            self.add(row)

    def add(self, row: Mapping[str, Any]) -> None:
        """One more row; numbers of a step that is there already are replaced."""
        step = int(row["step"])
        at = bisect_left(self._steps, step)
        if at == len(self._steps) or self._steps[at] != step:
            self._steps.insert(at, step)
            for column in self._columns.values():
                column.insert(at, math.nan)
        for name, value in row.items():
            number = type(value) is float or (isinstance(value, int | float) and not isinstance(value, bool))
            if number and name not in ("step", "time"):
                if name not in self._columns:
                    self._columns[name] = array("d", [math.nan]) * len(self._steps)
                self._columns[name][at] = float(value)

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def steps_S(self) -> np.ndarray:
        """int64 [S]."""
        return np.array(self._steps, dtype=np.int64)

    @property
    def step(self) -> int:
        """The newest; -1 when there is none."""
        return self._steps[-1] if self._steps else -1

    @property
    def names(self) -> tuple[str, ...]:
        """Every signal that some row has as a number."""
        return tuple(self._columns)

    def series(self, name: str) -> np.ndarray:
        """float64 [S]; NaN where a step lacks it."""
        column = self._columns.get(name)
        return np.full(len(self._steps), math.nan) if column is None else np.array(column, dtype=np.float64)

    @property
    def paid(self) -> dict[str, float]:
        """Score -> its weight in success: `strict_match` alone if it is measured, in the reward or not; else those that
        make the reward and were ever positive (others are penalties, whatever the sign of their weight). Empty: success
        is the reward itself."""
        if self.has(f"score_{SUCCESS}"):
            return {SUCCESS: 1.0}
        weights = {} if self.facts.get("reward_model") else self.facts.get("weights") or {}
        best = {name: np.nanmax(self.series(f"score_{name}"), initial=0.0) for name in weights}
        return {name: float(weight) for name, weight in weights.items() if weight > 0 and best[name] > 0}

    def success(self, prefix: str = "score_") -> np.ndarray:
        """float64 [S]: what must not get worse, of the training tasks or (`eval_`) of held-out ones; the one measure of
        detectors, of the best checkpoint and of what a rollback goes back from. NaN where a step lacks it."""
        parts = [weight * self.series(prefix + name) for name, weight in self.paid.items()]
        values_S = np.asarray(np.sum(parts, axis=0)) if parts else np.full(len(self), math.nan)
        known = bool(np.isfinite(values_S).any())
        return values_S if known else self.series("eval_reward" if prefix == "eval_" else "reward")

    def has(self, name: str) -> bool:
        """Whether any step has it as a finite number."""
        return bool(np.isfinite(self.series(name)).any())

    def known(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(steps, values) of the steps that have it, both [K]."""
        values_S = self.series(name)
        there_S = np.isfinite(values_S)
        return self.steps_S[there_S], values_S[there_S]
