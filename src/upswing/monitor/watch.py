"""Watching a run: every step judged, and what is new since the step before, so that a finding is told once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from upswing.monitor.detectors import DETECTORS, judge
from upswing.monitor.findings import SEVERITIES, Finding, Judgement, Severity, Status
from upswing.monitor.history import History, Trajectories

CALM = 5
"""Steps without a finding after which it has ended; a shorter gap is noise and goes untold."""


@dataclass(frozen=True, kw_only=True)
class News:
    """What became of one finding."""

    kind: Literal["began", "worse", "ended"]
    finding: Finding
    """As it is now; of an ended one, as it was last."""
    step: int


@dataclass(frozen=True, kw_only=True)
class Observed:
    """A step's verdict."""

    judgements: tuple[Judgement, ...]
    news: tuple[News, ...]


@dataclass(frozen=True, kw_only=True)
class ModeSummary:
    """What a run's report says of one mode."""

    mode: str
    title: str
    status: Status
    """Now."""
    missing: tuple[str, ...]
    worst: Severity | None
    """Over the whole run; None: never found."""
    found: int | None
    """The step at which it was found first, and `since` when it had begun by then."""
    since: int | None
    ended: int | None
    """The step at which it was last noted to have ended; None while it is on, or when it never was."""
    finding: Finding | None
    """The last one."""


@dataclass(kw_only=True)
class _Course:
    """One mode's course."""

    on: bool = False
    told: Severity | None = None
    """The severest that was told since it began."""
    last: Finding | None = None
    first: Finding | None = None
    worst: Severity | None = None
    ended: int | None = None


class Watch:
    """Follows one stage. All it knows comes from the rows: a resumed run replays the stored ones (`replay`) and goes on
    as if it had never stopped."""

    def __init__(
        self,
        stage: str,
        facts: Mapping[str, Any] | None = None,
        trajectories: Trajectories | None = None,
        *,
        judge: Callable[[History], list[Judgement]] = judge,
    ) -> None:
        self.history = History(stage, (), facts=facts, trajectories=trajectories)
        self.judgements: tuple[Judgement, ...] = ()
        self._judge, self._courses = judge, dict[str, _Course]()

    def observe(self, row: Mapping[str, Any]) -> Observed:
        """Take one more row, a step's or an evaluation's, and judge all that is known."""
        self.history.add(row)
        self.judgements = tuple(self._judge(self.history))
        news = [one for judgement in self.judgements if (one := self._follow(judgement)) is not None]
        return Observed(judgements=self.judgements, news=tuple(news))

    def replay(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Take stored rows, in the order they were written; their news is old."""
        for row in rows:
            self.observe(row)

    def _follow(self, judgement: Judgement) -> News | None:
        course = self._courses.setdefault(judgement.mode, _Course())
        finding, step = judgement.finding, self.history.step
        if finding is None:
            if course.on and course.last is not None and step - course.last.step >= CALM:
                course.on, course.told, course.ended = False, None, step
                return News(kind="ended", finding=course.last, step=step)
            return None
        began = not course.on
        course.on, course.last, course.first, course.ended = True, finding, course.first or finding, None
        if not began and course.told is not None and _level(finding.severity) <= _level(course.told):
            return None
        course.told = finding.severity
        if course.worst is None or _level(finding.severity) > _level(course.worst):
            course.worst = finding.severity
        return News(kind="began" if began else "worse", finding=finding, step=step)

    @property
    def summary(self) -> list[ModeSummary]:
        """Every mode, whether judged or not, in the table's order."""
        titles = {detector.mode: detector.title for detector in DETECTORS}
        pairs = ((judgement, self._courses[judgement.mode]) for judgement in self.judgements)
        return [
            ModeSummary(
                mode=judgement.mode,
                title=titles.get(judgement.mode) or (course.last.title if course.last else judgement.mode),
                status=judgement.status,
                missing=judgement.missing,
                worst=course.worst,
                found=None if course.first is None else course.first.step,
                since=None if course.first is None else course.first.since,
                ended=course.ended,
                finding=course.last,
            )
            for judgement, course in pairs
        ]


def _level(severity: Severity) -> int:
    return SEVERITIES.index(severity)
