"""A whole log judged as it came: first steps kept, findings that are over still told, the newest row not lost."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from upswing.monitor.doctor import MAX_POINTS, MAX_PREFIXES, Examination, StageLog, report, series, verdict
from upswing.monitor.findings import Finding, Judgement, Remedy
from upswing.monitor.history import History
from upswing.trajectory.types import Message, Outcome, StopReason, Task, Trajectory


def judge(history: History) -> list[Judgement]:
    """Entropy below 0.2 is a warning, below 0.1 critical; the other mode never has its signal."""
    low = history.known("entropy")[1][-1] if history.has("entropy") else 1.0
    found = None
    if low < 0.2:
        found = Finding(
            mode="entropy_collapse",
            title="entropy is used up",
            severity="critical" if low < 0.1 else "warning",
            stage=history.stage,
            step=history.step,
            since=history.step - 1,
            evidence=(f"entropy {low:.2g} nats (limit: 0.2)", "success flat"),
            causes=("too high an lr",),
            remedies=(Remedy(text="Less.", change={"lr": 1e-6, "limits.turn_tokens": 64, "loss": "kl_cov"}),),
            trajectories=("b/0",),
        )
    status = "ok" if found is None else "finding"
    return [
        Judgement(mode="entropy_collapse", status=status, finding=found),
        Judgement(mode="echo_trap", status="skipped", missing=("group_reward_std",)),
    ]


def rows(*entropies: float) -> list[dict[str, float]]:
    return [{"step": step, "entropy": value} for step, value in enumerate(entropies, 1)]


def examined(*entropies: float, **more) -> Examination:
    one = Examination(StageLog(stage="rl", rows=rows(*entropies), **more), judge)
    one.advance()
    return one


def finding(one: Examination) -> Finding:
    (found,) = [judgement.finding for judgement in one.judgements if judgement.finding]
    return found


def test_a_finding_keeps_its_first_step_and_becomes_as_severe_as_it_is_now():
    found = finding(examined(0.9, 0.5, 0.15, 0.12, 0.05))
    assert (found.step, found.since, found.severity) == (3, 2, "critical")
    assert found.evidence[0] == "entropy 0.05 nats (limit: 0.2)"


def test_a_finding_that_is_over_is_told_with_its_end():
    found = finding(examined(0.9, 0.15, 0.5, 0.6))
    assert (found.step, found.since) == (2, 1) and found.evidence[-1] == "last seen at step 2; no longer at step 4"
    assert finding(examined(0.9, 0.15, 0.5, 0.15)).evidence[-1] == "success flat"


def test_a_growing_log_tells_only_what_is_new():
    one = Examination(StageLog(stage="rl", rows=[]), judge)
    log = rows(0.9, 0.15, 0.14, 0.05, 0.04)
    told = [[(n.kind, n.finding.severity) for n in one.advance(log[:end])] for end in (0, 1, 2, 2, 3, 4, 5)]
    assert told == [[], [], [("began", "warning")], [], [], [("worse", "critical")], []]
    assert one.judgements == examined(0.9, 0.15, 0.14, 0.05, 0.04).judgements


def test_a_run_that_was_killed_and_resumed_is_judged_anew():
    one, resumed = Examination(StageLog(stage="rl", rows=[]), judge), rows(0.9, 0.8, 0.7)
    one.advance(rows(0.9, 0.15, 0.05, 0.05))
    one.advance(resumed)
    assert one.judgements == examined(0.9, 0.8, 0.7).judgements


def test_an_evaluation_row_of_the_newest_step_counts():
    one = Examination(StageLog(stage="rl", rows=rows(0.9, 0.8)), judge)
    one.advance()
    assert [news.step for news in one.advance([*rows(0.9, 0.8), {"step": 2, "entropy": 0.05}])] == [2]


def test_long_logs_are_judged_at_so_many_steps_the_last_included():
    steps = []

    def counting(history: History) -> list[Judgement]:
        steps.append(history.step)
        return judge(history)

    log = [part for row in rows(*[0.9] * 1005) for part in (row, {"step": row["step"], "eval_reward": 0.5})]
    Examination(StageLog(stage="rl", rows=log), counting).advance()
    assert len(steps) == MAX_PREFIXES == len(set(steps)) and (steps[0], steps[-1]) == (1, 1005)
    assert max(b - a for a, b in pairwise(steps)) <= 12


def test_the_report_is_plain_data_with_overrides_signals_and_lines_of_a_trajectory():
    task = Task(id="b", messages=(Message(role="user", content="Say lima."),))
    said = (
        *task.messages,
        Message(role="assistant", content="la\x1b[31m la\n" * 60),
        Message(role="tool", content="no"),
    )
    played = Trajectory(
        id="b/0", task=task, branches=(), messages=said, outcome=Outcome.COMPLETED, stop_reason=StopReason.ANSWERED
    )
    asked: list[int] = []

    def trajectories(step: int) -> tuple[Trajectory, ...]:
        asked.append(step)
        return (played,) if step == 2 else ()

    one = examined(0.9, 0.5, 0.05, trajectories=trajectories)
    assert not asked, "nothing is read that no finding cites"
    found = json.loads(json.dumps(report("runs/x", [one]), allow_nan=False))
    assert found["worst"] == "critical" and found["verdict"] == "1 finding: 1 critical; 0 ok; 1 skipped"
    (stage,) = found["stages"]
    assert (stage["steps"], stage["first_step"], stage["last_step"]) == (3, 1, 3)
    assert stage["skipped"] == {"echo_trap": ["group_reward_std"]} and stage["ok"] == []
    (row,) = stage["findings"]
    assert row["remedies"][0]["overrides"] == "rl.lr=1e-06 limits.turn_tokens=64 rl.loss=kl_cov"
    assert row["signals"] == ["entropy"] and asked == [3, 2]
    assert (
        len(row["shown"]) == 2
        and row["shown"][0].startswith("assistant: la [31m la la")
        and "\x1b" not in row["shown"][0]
    )
    assert len(row["shown"][0]) < 200 and row["shown"][1] == "tool: no"
    assert Finding.from_row(row).mode == "entropy_collapse"


def test_verdict_in_words():
    warm = Judgement(mode="a", status="warming_up")
    assert verdict([warm]) == "no findings; 0 ok; 1 with too few steps; 0 skipped"
    assert verdict([*examined(0.05).judgements, *examined(0.15).judgements, *examined(0.9).judgements]) == (
        "2 findings: 1 critical, 1 warning; 1 ok; 3 skipped"
    )


def test_series_are_thinned_and_without_gaps():
    one = examined(*[0.9] * 1000)
    points = series(one, ["entropy"])["entropy"]
    assert len(points) <= MAX_POINTS and points[0] == (1, 0.9)
    assert points[1][0] == pytest.approx(4)
