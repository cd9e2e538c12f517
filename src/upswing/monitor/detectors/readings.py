"""What detectors read off a history: levels at the start and now with their noise, onsets, and what success did."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from upswing.monitor.history import SUCCESS, History
from upswing.monitor.stats import MEDIAN_ERROR, Trend, change_point, median, rolling_median, step_noise, trend
from upswing.trajectory.types import Trajectory

LEVEL, NOW, WIDE = 5, 3, 7
"""Steps that a median is over: of a level, of what changes now, and of what scatters; fewer in a short run."""
WINDOW = 60
"""Newest values that noise is read from, and change points from two thirds as many: bounds the cost of a call."""
FRESH = 15
"""A signal that no step of the newest so many had counts as missing now; evaluations are rarer and exempt."""
OF_GROUPS = ("zero_variance_frac", "too_easy_frac", "too_hard_frac", "informative_frac", "same_first_turn_frac")
SURE = 3.5
"""Standard errors of a change that is no noise, in a run of hundreds of steps with dozens of signals."""


class Missing(Exception):
    """A detector can't judge: these inputs are absent or mean nothing here."""

    def __init__(self, *names: str) -> None:
        self.names = names


class Shift(NamedTuple):
    """From a signal's level at the start to that of now; NaN without the signal, so that every test fails."""

    start: float
    now: float
    z: float
    """Change / its standard error."""

    @property
    def diff(self) -> float:
        return self.now - self.start

    @property
    def ratio(self) -> float:
        """now / start; NaN for a start of 0."""
        return self.now / self.start if self.start else math.nan


@dataclass(frozen=True, kw_only=True)
class Known:
    """The steps that have a signal, and its values, both [K]."""

    steps: np.ndarray
    values: np.ndarray


class Readings:
    """Cached views of one history, as it is now."""

    def __init__(self, history: History) -> None:
        self.history, self.facts = history, history.facts
        self._known: dict[str, Known] = {}
        self._shift: dict[tuple[str, int], Shift] = {}
        self._noise: dict[str, float] = {}
        self._steps_S = history.steps_S

    def known(self, name: str) -> Known:
        """Of a signal, of `success` (`eval_success`: on held-out tasks), or of `mi_share`: of the information about the
        task that a first turn can have."""
        if name not in self._known:
            derived: dict[str, Callable[[], np.ndarray]] = {
                "success": self.history.success,
                "eval_success": lambda: self.history.success("eval_"),
                "mi_share": self._mi_share,
            }
            values_S = derived[name]() if name in derived else self.history.series(name)
            there_S = np.isfinite(values_S)
            if not name.startswith("eval_") and not there_S[-FRESH:].any():
                there_S[:] = False
            self._known[name] = Known(steps=self._steps_S[there_S], values=values_S[there_S])
        return self._known[name]

    def _mi_share(self) -> np.ndarray:
        """[S]: mi_first_turn / ln(mi_pairs), its bound, which moves with how many pairs a step could afford."""
        pairs_S = self.history.series("mi_pairs")
        return self.history.series("mi_first_turn") / np.log(np.where(pairs_S > 1, pairs_S, np.nan))

    def has(self, name: str) -> bool:
        return len(self.known(name).values) > 0

    def now(self, name: str, count: int = LEVEL) -> float:
        """Median of the newest values; NaN without any."""
        values = self.known(name).values
        return median(values[-count:])

    def mean(self, name: str, count: int) -> float:
        values = self.known(name).values
        return float(values[-count:].mean()) if len(values) else math.nan

    def setting(self, key: str, otherwise: float) -> float:
        """A number of the stage as it is now: what a safeguard has made of it, or else the recipe's."""
        return self.now(f"set_{key}", 1) if self.has(f"set_{key}") else fact(self.facts, key, otherwise)

    @cached_property
    def num_trajectories(self) -> float:
        """A step; NaN when neither rows nor facts tell."""
        planned = self.facts.get("tasks_per_step", math.nan) * self.facts.get("group_size", math.nan)
        return self.now("num_trajectories") if self.has("num_trajectories") else float(planned)

    def noise(self, name: str) -> float:
        """Standard deviation of one step's value about its level: as measured, but for rewards and shares at least that
        of a mean over as many trajectories, groups, rows or pairs as there are (32 binary rewards: 0.09)."""
        if name not in self._noise:
            self._noise[name] = self._step_noise(name)
        return self._noise[name]

    def _step_noise(self, name: str) -> float:
        values = self.known(name).values[-WINDOW:]
        level = median(values)
        floor, count = 0.02 * abs(level), self.num_trajectories
        if name == "success" and SUCCESS in self.history.paid:
            name = f"score_{SUCCESS}"
        if name in ("reward", "success") and self.has("reward_std") and count > 0:
            floor = self.now("reward_std", WINDOW) / math.sqrt(count)
        elif name.startswith("eval_"):
            floor = 0.5 / math.sqrt(fact(self.facts, "eval_tasks", 64))
        elif name.endswith("_frac") or name.startswith("score_") or name == "mi_retrieval":
            count = self._behind(name, count if count > 0 else 64.0)
            edge = min(0.5, 1 / count)
            share = min(max(level, edge), 1 - edge)
            floor = math.sqrt(max(0.0, share * (1 - share)) / count)
        elif name == "mi_share":
            floor = 0.5 / math.sqrt(self.now("mi_pairs"))
        return max(step_noise(values), floor, 1e-9)

    def _behind(self, name: str, trajectories: float) -> float:
        """How many things a share is of: groups, the probe's rows (`stages/probe.py`) or pairs, or trajectories."""
        if name in OF_GROUPS:
            return max(1.0, trajectories / fact(self.facts, "group_size", 8))
        if name == "displaced_frac":
            probed = self.known("num_probed_good").values[-WINDOW:]
            probed = probed[probed > 0]  # in the other steps there is no such share
            return median(probed) if len(probed) else max(4.0, trajectories / 16)
        return self.now("mi_pairs") if name == "mi_retrieval" and self.has("mi_pairs") else trajectories

    def shift(self, name: str, newest: int = NOW) -> Shift:
        """From the median of the first values to that of the newest; at most a third of the run each."""
        if (name, newest) not in self._shift:
            values = self.known(name).values
            first, last = (min(count, max(1, len(values) // 3)) for count in (LEVEL, newest))
            start, now, z = median(values[:first]), median(values[-last:]), math.nan
            if len(values) > 1:
                z = (now - start) / self._error(name, first, last)
            self._shift[name, newest] = Shift(start, now, z)
        return self._shift[name, newest]

    def drift(self, name: str, newest: int = NOW, *, recent: bool = False) -> Shift:
        """As `shift`, by means: for what has no outliers, as shares, or where these count. From the first ten values or
        fewer, or the `recent` ten before the newest; the start is NaN without any before these."""
        values = self.known(name).values
        before = values[: max(0, len(values) - newest)]
        first = before[-10:] if recent else before[:10]
        if not len(first):
            return Shift(math.nan, float(values.mean()) if len(values) else math.nan, math.nan)
        start, now = float(first.mean()), float(values[-newest:].mean())
        return Shift(start, now, (now - start) / (self.noise(name) * math.sqrt(1 / len(first) + 1 / newest)))

    def _error(self, name: str, first: int, second: int) -> float:
        """Standard error of the difference of two medians over so many steps."""
        return MEDIAN_ERROR * self.noise(name) * math.sqrt(1 / first + 1 / second)

    def rose(self, name: str, by: float, z: float = SURE, newest: int = NOW) -> bool:
        """Whether it is surely higher than at the start, by at least `by`."""
        shift = self.shift(name, newest)
        return shift.diff >= by and shift.z >= z

    def fell(self, name: str, by: float, z: float = SURE, newest: int = NOW) -> bool:
        shift = self.shift(name, newest)
        return -shift.diff >= by and -shift.z >= z

    def trend(self, name: str, count: int = 20) -> Trend:
        """Over the newest `count` values."""
        known = self.known(name)
        return trend(known.steps[-count:], known.values[-count:])

    def onset(self, name: str, level: float, sign: int) -> int:
        """The step from which the signal has been beyond `level` (above: sign 1, below: -1) for good, or a significant
        change point before that. A rolling median of three, so that one outlier neither starts nor ends it."""
        known = self.known(name)
        smooth = rolling_median(known.values, 3)
        inside = np.flatnonzero(sign * (smooth - level) <= 0)
        at = min(int(inside[-1]) + (len(smooth) < 3), len(smooth) - 1) if len(inside) else 0
        offset = max(0, len(smooth) - WINDOW * 2 // 3)
        split = change_point(known.values[offset:])
        if split is not None:
            before, after = median(known.values[offset : offset + split]), median(known.values[offset + split :])
            if sign * (after - before) > 0 and sign * (after - level) > 0:
                at = min(at, offset + split)
        return int(known.steps[at])

    def left(self, name: str, sign: int) -> int:
        """The step from which the signal has left its level at the start for good."""
        return self.onset(name, self.shift(name).start + sign * 2 * self.noise(name), sign)

    @cached_property
    def ceiling(self) -> float:
        """The best success that there is: the positive weights, or 1 for rewards up to 1; NaN when unknown."""
        paid = self.history.paid
        total = float(sum(weight for weight in (paid or self.facts.get("weights") or {}).values() if weight > 0))
        if (self.facts.get("reward_model") and not paid) or not self.has("success"):
            return math.nan
        best = float(self.known("success").values.max())
        return total if total and best <= 1.001 * total else 1.0 if best <= 1.001 else math.nan

    @cached_property
    def gained(self) -> float:
        """Share of what was to be gained at the start, up to the ceiling, that is gained now, one standard error more
        than measured; NaN when unknown."""
        success = self.shift("success", WIDE)
        room = self.ceiling - success.start
        return (success.diff + self._error("success", LEVEL, WIDE)) / room if room > 0.02 else math.nan

    @cached_property
    def solved(self) -> bool:
        """The tasks are mostly solved: what else falls is then a matter of success."""
        if self.now("success") >= 0.9 * self.ceiling:
            return True
        return self.now("too_easy_frac") >= 0.5 and not self.now("too_hard_frac") > 0.15

    def paid(self, since: int) -> bool:
        """Whether success is surely higher now than before `since`."""
        known = self.known("success")
        before = known.values[known.steps < since][-LEVEL:]
        before = before if len(before) else known.values[:1]
        now = known.values[-LEVEL:]
        if not len(now):
            return False
        z = (median(now) - median(before)) / self._error("success", len(before), len(now))
        return z >= 2

    def helpless(self, since: int) -> bool:
        """Tasks aren't solved, and nothing was gained since that step."""
        return not self.solved and not self.paid(since)

    @cached_property
    def dropped(self) -> bool:
        """Success has surely lost at least a tenth of its peak."""
        values = self.known("success").values
        if len(values) < 6:
            return False
        smooth = rolling_median(values, LEVEL)[2:]
        fall = float(smooth.max() - smooth[-1])
        return fall >= 0.1 * abs(float(smooth.max())) and fall / self._error("success", LEVEL, LEVEL) >= 3

    def examples(
        self, key: Callable[[Trajectory], float], where: Callable[[Trajectory], bool] = lambda t: True
    ) -> tuple[str, ...]:
        """Ids of the up to three trajectories of the newest step that has any with the largest `key` among `where`."""
        for step in self.history.steps_S[-3:][::-1]:
            if found := [t for t in self.history.trajectories(int(step)) if where(t)]:
                return tuple(t.id for t in sorted(found, key=key, reverse=True)[:3])
        return ()


def ranked(causes: Iterable[tuple[float, str]]) -> tuple[str, ...]:
    """Hypotheses by weight, the heaviest first; those without weight (0, NaN) are left out."""
    return tuple(text for weight, text in sorted(causes, key=lambda cause: -cause[0]) if weight > 0)


def wrong(trajectory: Trajectory) -> bool:
    return trajectory.reward is not None and trajectory.reward <= 0


def right(trajectory: Trajectory) -> bool:
    return trajectory.reward is not None and trajectory.reward > 0


def told(what: str, shift: Shift, limit: str = "", unit: str = "") -> str:
    """`entropy 0.04 nats, 0.61 at the start (limit: 30 % of it)`."""
    text = f"{what} {shift.now:.3g}{unit}, {shift.start:.3g} at the start"
    return f"{text} (limit: {limit})" if limit else text


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def fact(facts: dict[str, Any], key: str, otherwise: float) -> float:
    """A number of the stage; `otherwise` where it is null or not known."""
    value = facts.get(key)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else otherwise
