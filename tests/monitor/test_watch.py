"""A watch tells each finding once, when it begins, worsens and ends, and knows after a resume what it knew before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.monitor.series import FACTS, run

from upswing.monitor.detectors import MODES
from upswing.monitor.findings import Finding, Judgement, Severity
from upswing.monitor.history import History
from upswing.monitor.watch import CALM, Watch
from upswing.trajectory.types import Message, Outcome, Score, StopReason, Task, ToolCall, ToolRecord, Trajectory


def scripted(script: str) -> Watch:
    """A watch whose one detector says by step: `.` ok, `i` info, `w` warning, `c` critical."""
    severities: dict[str, Severity] = {"i": "info", "w": "warning", "c": "critical"}

    def judge(history: History) -> list[Judgement]:
        severity = severities.get(script[history.step])
        if severity is None:
            return [Judgement(mode="m", status="ok")]
        texts: dict[str, Any] = {"evidence": (), "causes": (), "remedies": ()}
        where: dict[str, Any] = {"stage": "rl", "step": history.step, "since": 0}
        finding = Finding(mode="m", title="M", severity=severity, **where, **texts)
        return [Judgement(mode="m", status="finding", finding=finding)]

    return Watch("rl", judge=judge)


@pytest.mark.parametrize(
    ("script", "news"),
    [
        ("....", {}),
        ("..www", {2: "began"}),
        (".iiwwccc", {1: "began", 3: "worse", 5: "worse"}),
        (".cwcwc", {1: "began"}),
        (".w.w..w", {1: "began"}),
        (".w......w", {1: "began", 1 + CALM: "ended", 8: "began"}),
    ],
)
def test_news_come_once(script: str, news: dict[int, str]):
    watch = scripted(script)
    seen = {step: one.kind for step in range(len(script)) for one in watch.observe({"step": step}).news}
    assert seen == news


def test_an_evaluation_row_of_the_same_step_is_no_news():
    watch = scripted(".w")
    watch.observe({"step": 1})
    assert watch.observe({"step": 1, "eval_reward": 0.5}).news == ()


def test_summary_covers_the_course():
    watch = scripted(".iwc......")
    watch.replay({"step": step} for step in range(10))
    (row,) = watch.summary
    assert (row.worst, row.found, row.ended, row.status) == ("critical", 1, 3 + CALM, "ok")
    assert row.finding is not None
    assert row.finding.severity == "critical"


def test_a_replayed_watch_goes_on_as_if_it_had_never_stopped():
    rows, _ = run("saturates", 0, steps=45, fault="entropy_collapse")
    whole, resumed = Watch("rl", FACTS), Watch("rl", FACTS)
    for row in rows[:30]:
        whole.observe(row)
    resumed.replay(rows[:30])
    assert [whole.observe(row) for row in rows[30:]] == [resumed.observe(row) for row in rows[30:]]
    assert whole.summary == resumed.summary
    assert tuple(row.mode for row in whole.summary) == MODES


def attempt(name: str, reward: float, strict: float, repeats: int) -> Trajectory:
    call = ToolCall(name="search", arguments={"q": "x"})
    return Trajectory(
        id=name,
        task=Task(id="t", messages=(Message(role="user", content="?"),)),
        branches=(),
        messages=(),
        outcome=Outcome.COMPLETED,
        stop_reason=StopReason.ANSWERED,
        tool_records=tuple(ToolRecord(call=call, result="", ok=True, turn=i) for i in range(repeats)),
        score=Score(value=reward, components={"answer": reward, "strict": strict}),
    )


@pytest.mark.parametrize(("mode", "shown"), [("reward_hacking", ("fooled",)), ("repeated_calls", ("loop", "twice"))])
def test_findings_name_the_trajectories_that_show_it(mode: str, shown: tuple[str, ...]):
    batch = [attempt("fine", 1, 1, 1), attempt("fooled", 1, 0, 1), attempt("twice", 0, 0, 2), attempt("loop", 0, 0, 5)]
    rows, _ = run("saturates", 1, steps=45, batch=128, fault=mode)
    asked: list[int] = []

    def trajectories(step: int) -> list[Trajectory]:
        asked.append(step)
        return batch

    watch = Watch("rl", FACTS, trajectories)
    watch.replay(rows[:10])
    assert not asked
    watch.replay(rows[10:])
    found = {one.mode: one.finding for one in watch.judgements}
    finding = found[mode]
    assert finding is not None
    assert finding.trajectories == shown
    assert max(asked) == rows[-1]["step"]
    assert Finding.from_row(finding.row()) == finding
    assert np.isfinite(finding.since)
