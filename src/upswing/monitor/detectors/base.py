"""A detector: data and a small function from readings to a verdict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from upswing.monitor.detectors.readings import Missing, Readings, ranked
from upswing.monitor.findings import Finding, Judgement, Remedy, Severity
from upswing.monitor.history import History


class Signs(list[str]):
    """Evidence, and when each piece of it began."""

    def __init__(self) -> None:
        super().__init__()
        self._onsets: list[int] = []

    def add(self, since: int, text: str) -> None:
        self._onsets.append(since)
        self.append(text)

    @property
    def since(self) -> int:
        """The earliest step."""
        return min(self._onsets)


@dataclass(frozen=True)
class Verdict:
    """What a detector found; the detector's name and the place are added to make a `Finding`."""

    severity: Severity
    since: int
    evidence: list[str]
    causes: list[tuple[float, str]] = field(default_factory=list)
    """(weight by what the other signals say, hypothesis)."""
    remedies: Sequence[Remedy | None] = ()
    """The best first; None: not applicable to this recipe."""
    examples: tuple[str, ...] = ()


@dataclass(frozen=True)
class Detector:
    """One failure mode."""

    mode: str
    title: str
    needs: tuple[str | tuple[str, ...], ...]
    """Signals; of a tuple one is enough; `score_*` is any of that beginning."""
    warm_up: int
    """Steps with these signals that are needed to tell."""
    find: Callable[[Readings], Verdict | None]
    """None: nothing wrong. May raise `Missing`."""
    partly: tuple[str, ...] = ()
    """Signals without which it judges a part only."""

    def judged(self, readings: Readings) -> Judgement:
        """The mode's status now; a pure function of the history."""
        counts = [self._count(readings, need) for need in self.needs]
        missing = [_said(need) for need, count in zip(self.needs, counts, strict=True) if not count]
        if missing:
            return Judgement(mode=self.mode, status="skipped", missing=tuple(missing))
        if min(counts) < self.warm_up:
            return Judgement(mode=self.mode, status="warming_up")
        try:
            verdict = self.find(readings)
        except Missing as error:
            return Judgement(mode=self.mode, status="skipped", missing=error.names)
        if verdict is None:
            unjudged = tuple(name for name in self.partly if not readings.has(name))
            return Judgement(mode=self.mode, status="ok", missing=unjudged)
        return Judgement(mode=self.mode, status="finding", finding=self._finding(readings.history, verdict))

    def _finding(self, history: History, verdict: Verdict) -> Finding:
        return Finding(
            mode=self.mode,
            title=self.title,
            severity=verdict.severity,
            stage=history.stage,
            step=history.step,
            since=min(verdict.since, history.step),
            evidence=tuple(verdict.evidence),
            causes=ranked(verdict.causes),
            remedies=tuple(remedy for remedy in verdict.remedies if remedy is not None),
            trajectories=verdict.examples,
        )

    @staticmethod
    def _count(readings: Readings, need: str | tuple[str, ...]) -> int:
        """Steps that have it."""
        names = [
            name
            for pattern in ((need,) if isinstance(need, str) else need)
            for name in (
                [n for n in readings.history.names if fnmatchcase(n, pattern)] if "*" in pattern else [pattern]
            )
        ]
        return max((len(readings.known(name).values) for name in names), default=0)


def _said(need: str | tuple[str, ...]) -> str:
    return need if isinstance(need, str) else " or ".join(need)
