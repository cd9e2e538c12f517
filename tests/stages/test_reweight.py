"""The safeguard `reweight`: a blamed part of the reward is measured on, but counts no more in this stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from upswing.monitor.metrics import MetricsLog
from upswing.stages import guard
from upswing.verify.rubric import Rubric

from .test_algorithms import even, length, recipe, run
from .test_safeguards import Scripted, findings, killed_after, same

RL = {"stage": "rl", "lr": 1e-3, "eval_every": 0, "tasks_per_step": 2, "group_size": 2, "save_every": 1}
SIDE = {"name": "tests.stages.test_algorithms:length", "weight": -0.5}


def parts(rows: list[dict[str, Any]]) -> list[bool]:
    """Whether the lengths are in the reward, step by step."""
    whole = [row["score_even"] - 0.5 * row["score_length"] for row in rows]
    assert all(row["score_length"] > 0 for row in rows)
    assert all(row["reward"] == pytest.approx(row["score_even"]) or row["reward"] == pytest.approx(one)
               for row, one in zip(rows, whole, strict=True))  # fmt: skip
    return [row["reward"] == pytest.approx(one) for row, one in zip(rows, whole, strict=True)]


def test_a_penalty_leaves_the_reward_also_after_a_kill_and_is_back_in_the_next_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "Watch", Scripted)
    monkeypatch.setattr(Scripted, "script", {1: (("tool_call_collapse", "warning"),), 2: ()})
    first = {**RL, "name": "first", "steps": 3, "safeguards": ["reweight"]}
    one = recipe({**RL, "steps": 1}, first, verifiers=["tests.stages.test_algorithms:even", SIDE])
    run(one, tmp_path / "whole")
    alone = recipe({**first, "name": "rl"}, verifiers=["tests.stages.test_algorithms:even", SIDE])
    assert parts(run(alone, tmp_path / "alone")) == [True, False, False]
    rows = MetricsLog(tmp_path / "whole").read("rl")
    assert parts([row for row in rows if "reward" in row]) == [True], "the next stage has the recipe's reward"
    action = next(row for row in findings(tmp_path / "alone") if row.get("kind") == "action")
    assert action["changes"] == {"unpaid": [[], ["length"]]}
    assert "unpaid none -&gt; length" in (tmp_path / "alone/report.html").read_text()
    out = killed_after(tmp_path / "alone", tmp_path / "killed", 2)
    assert parts(run(alone, out, resume=True)) == [True, False, False] and same(tmp_path / "alone", out)


def test_a_weight_that_changes_over_steps_is_gone_at_all_of_them() -> None:
    one = Rubric([("a", even, 1.0), ("side", length, -1.0)], ramps={"side": (-2.0, 10)})
    without = one.without(["side"])
    assert [without.at(step).weights for step in (0, 5, 20)] == [{"a": 1.0}] * 3
    assert [name for name, *_ in without.items] == ["a", "side"] and one.at(0).weights == {"a": 1.0, "side": -2.0}
    assert one.without([]) is one
