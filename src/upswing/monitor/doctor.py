"""Judging a whole log after the fact, step by step as a watch would have while it was written, and the report of it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from upswing.errors import ConfigError
from upswing.monitor.detectors import DETECTORS, judge
from upswing.monitor.findings import SEVERITIES, Finding, Judgement, worst
from upswing.monitor.foreign import ForeignLog
from upswing.monitor.history import History
from upswing.monitor.watch import ModeSummary, News, Watch
from upswing.trajectory.types import Trajectory
from upswing.view.health import overrides

MAX_PREFIXES = 100
"""At how many steps, evenly spread, a finished log is judged; the last is one of them."""
MAX_POINTS = 400
RECENT = 12
"""Steps looked through for a cited trajectory."""

Judge = Callable[[History], list[Judgement]]


@dataclass(frozen=True, kw_only=True)
class StageLog:
    """Rows of one stage, oldest first, and what is known about it."""

    stage: str
    rows: Sequence[Mapping[str, Any]]
    facts: Mapping[str, Any] = field(default_factory=dict)
    trajectories: Callable[[int], Sequence[Trajectory]] = lambda step: ()
    note: str = ""
    """What else was done to read it."""
    unheard: frozenset[str] = frozenset()
    """Signals that mean nothing for this stage."""
    foreign: ForeignLog | None = None


def stored(run: Path, stage: str) -> Callable[[int], Sequence[Trajectory]]:
    """A stage's stored trajectories by step, read when asked for; a damaged or missing file gives none."""
    from upswing.trajectory.store import TrajectoryStore

    store = TrajectoryStore(run / "trajectories")

    @lru_cache(maxsize=RECENT)
    def read(step: int) -> Sequence[Trajectory]:
        try:
            return tuple(one.trajectory for one in store.read(stage, step))
        except (ConfigError, OSError):
            return ()

    return read


class Examination:
    """One stage's verdicts so far, as a watch would have given them while the log was written."""

    def __init__(self, log: StageLog, judge: Judge = judge) -> None:
        self.log, self._judge = log, judge
        self._start()

    def _start(self) -> None:
        self._read, self._watch = 0, Watch(self.log.stage, self.log.facts, judge=self._judge)

    @property
    def history(self) -> History:
        return self._watch.history

    def advance(self, rows: Sequence[Mapping[str, Any]] | None = None) -> list[News]:
        """Judge what wasn't yet, of `rows` when the log has grown; -> what began, became worse or is over."""
        if rows is not None:
            rewritten = list(self.log.rows[: self._read]) != list(rows[: self._read])  # the run was killed and resumed
            self.log = replace(self.log, rows=rows)
            if rewritten:
                self._start()
        fresh = self.log.rows[self._read :]
        self._read = len(self.log.rows)
        whole = [i for i, row in enumerate(fresh) if i + 1 == len(fresh) or fresh[i + 1]["step"] != row["step"]]
        spread = np.linspace(0, len(whole) - 1, min(len(whole), MAX_PREFIXES)).round().astype(int)
        judged = {whole[i] for i in spread.tolist()}
        news: list[News] = []
        for place, row in enumerate(fresh):
            heard = {key: value for key, value in row.items() if key not in self.log.unheard}
            if place in judged:
                # Examples are looked up, which takes long, for the last verdict alone.
                self.history.trajectories = self.log.trajectories if place + 1 == len(fresh) else lambda step: ()
                news += self._watch.observe(heard).news
            else:
                self.history.add(heard)
        return news

    @property
    def judgements(self) -> list[Judgement]:
        """Of every mode. A finding has the step at which it was first made, and is kept when it is over."""
        return [self._judgement(summary) for summary in self._watch.summary]

    def _judgement(self, summary: ModeSummary) -> Judgement:
        last, first, since = summary.finding, summary.found, summary.since
        if last is None or first is None or since is None or summary.worst is None:
            return Judgement(mode=summary.mode, status=summary.status, missing=summary.missing)
        found = replace(last, step=first, since=since, severity=summary.worst)
        if summary.status != "finding":
            over = f"last seen at step {last.step}; no longer at step {self.history.step}"
            found = replace(found, evidence=(*last.evidence, over), trajectories=self._examples(last))
        return Judgement(mode=summary.mode, status="finding", finding=found)

    def _examples(self, last: Finding) -> tuple[str, ...]:
        """Trajectories of a finding that is over."""
        rows = [row for row in self.log.rows if row["step"] <= last.step]
        then = History(self.log.stage, rows, facts=self.log.facts, trajectories=self.log.trajectories)
        return next((j.finding.trajectories for j in self._judge(then) if j.mode == last.mode and j.finding), ())


# -- the report -------------------------------------------------------------------------------------------------------


def report(source: str, examinations: Sequence[Examination]) -> dict[str, Any]:
    """Everything as plain JSON data, for text, HTML and other tools."""
    judgements = [judgement for one in examinations for judgement in one.judgements]
    return {
        "source": source,
        "verdict": verdict(judgements),
        "worst": worst(judgements),
        "stages": [_stage_report(one) for one in examinations],
    }


def verdict(judgements: Sequence[Judgement]) -> str:
    """`2 findings: 1 critical, 1 warning; 11 ok; 6 skipped`."""
    found = Counter(j.finding.severity for j in judgements if j.finding is not None)
    total = sum(found.values())
    each = ", ".join(f"{found[severity]} {severity}" for severity in reversed(SEVERITIES) if found[severity])
    count = Counter(judgement.status for judgement in judgements)
    parts = [f"{total or 'no'} finding{'s' * (total != 1)}" + (f": {each}" if total else ""), f"{count['ok']} ok"]
    parts += [f"{count['warming_up']} with too few steps"] if count["warming_up"] else []
    return "; ".join([*parts, f"{count['skipped']} skipped"])


def _stage_report(one: Examination) -> dict[str, Any]:
    order = {severity: place for place, severity in enumerate(reversed(SEVERITIES))}
    findings = sorted((j.finding for j in one.judgements if j.finding), key=lambda f: (order[f.severity], f.since))
    foreign, steps = one.log.foreign, one.history.steps_S
    notes = [one.log.note] if one.log.note else []
    read: dict[str, Any] = {"notes": notes}
    if foreign is not None:
        read = {
            "format": foreign.kind,
            "framework": foreign.framework,
            "used": {signal: list(keys) for signal, keys in foreign.used.items()},
            "ignored": list(foreign.ignored),
            "notes": [*notes, *foreign.notes],
        }
    return {
        "stage": one.log.stage,
        "steps": len(steps),
        "first_step": int(steps[0]) if len(steps) else None,
        "last_step": int(steps[-1]) if len(steps) else None,
        **read,
        "findings": [_finding_report(finding, one) for finding in findings],
        **{status: [j.mode for j in one.judgements if j.status == status] for status in ("ok", "warming_up")},
        "partly": {j.mode: list(j.missing) for j in one.judgements if j.status == "ok" and j.missing},
        "skipped": {j.mode: list(j.missing) for j in one.judgements if j.status == "skipped"},
    }


def _finding_report(finding: Finding, one: Examination) -> dict[str, Any]:
    row: dict[str, Any] = json.loads(json.dumps(finding.row(), default=str))
    for remedy in row["remedies"]:
        remedy["overrides"] = overrides(remedy["change"], finding.stage)
    words = set(re.findall(r"\w+", " ".join(finding.evidence)))
    needed = next((d.needs for d in DETECTORS if d.mode == finding.mode), ())
    words |= {name for need in needed for name in ((need,) if isinstance(need, str) else need)}
    row["signals"] = [name for name in one.history.names if name in words]
    row["shown"] = _first_lines(finding, one)
    return row


def _first_lines(finding: Finding, one: Examination, most: int = 6) -> list[str]:
    """How the first cited trajectory that is stored goes on after its task."""
    steps = one.history.steps_S[::-1]
    near = [*steps[:RECENT].tolist(), *steps[steps <= finding.step][:RECENT].tolist()]
    for step in near if finding.trajectories else ():
        for played in one.log.trajectories(step):
            if played.id in finding.trajectories:
                return list(_lines(played))[:most]
    return []


def _lines(played: Trajectory) -> Iterator[str]:
    for message in played.messages[len(played.task.messages) :]:
        text = " ".join("".join(c if c.isprintable() else " " for c in message.content).split())
        yield f"{message.role}: {text[:160]}{'...' if len(text) > 160 else ''}"


def series(one: Examination, names: Sequence[str]) -> dict[str, tuple[tuple[float, float | None], ...]]:
    """(step, value) of signals, thinned to MAX_POINTS."""
    points = {}
    for name in names:
        steps_K, values_K = one.history.known(name)
        stride = max(1, -(-len(steps_K) // MAX_POINTS))
        points[name] = tuple(zip(steps_K[::stride].astype(float).tolist(), values_K[::stride].tolist(), strict=True))
    return points
