"""A stage's past as series: what detectors read, whether the rows come from a run in progress, a stored one or
another framework's log."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from upswing.trajectory.types import Trajectory

Trajectories = Callable[[int], Sequence[Trajectory]]
"""Step -> the trajectories that it learned from; none where they are not known."""


class History:
    """Step rows of one stage, oldest first, as float64 series over S steps.

    Rows without any training signal (held-out evaluations share the file) are merged into the step they belong to.
    `facts` are the stage's resolved keys (`group_size`, `kl_coef`, ...) and `turn_tokens`, `max_turns`; empty for logs
    that don't tell. Nothing is invented: what no row has is missing, and a detector that needs it is skipped.
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
        merged: dict[int, dict[str, Any]] = {}
        for row in rows:
            merged.setdefault(int(row["step"]), {}).update({k: v for k, v in row.items() if k not in ("stage", "time")})
        self._rows = [merged[step] for step in sorted(merged)]
        self.steps_S = np.array(sorted(merged), dtype=np.int64)
        self.trajectories: Trajectories = trajectories or (lambda step: ())

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def step(self) -> int:
        """The newest; -1 when there is none."""
        return int(self.steps_S[-1]) if len(self.steps_S) else -1

    @property
    def names(self) -> tuple[str, ...]:
        """Every signal that some row has as a number."""
        return tuple(dict.fromkeys(k for row in self._rows for k, v in row.items() if k != "step" and _is_number(v)))

    def series(self, name: str) -> np.ndarray:
        """float64 [S]; NaN where a step lacks it."""
        return np.array([float(v) if _is_number(v := row.get(name)) else math.nan for row in self._rows])

    def has(self, name: str) -> bool:
        """Whether any step has it as a finite number."""
        return bool(np.isfinite(self.series(name)).any())

    def known(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(steps, values) of the steps that have it, both [K]."""
        values_S = self.series(name)
        there_S = np.isfinite(values_S)
        return self.steps_S[there_S], values_S[there_S]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
