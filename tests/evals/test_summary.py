"""Summaries of hand-made trajectories, with the figures worked out by hand."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from upswing.evals.stats import paired_test
from upswing.evals.summary import compare, missing_rewards, result_entry, results_table, summarize
from upswing.trajectory.types import (
    Branch,
    Outcome,
    Score,
    StopReason,
    Task,
    ToolCall,
    ToolRecord,
    Trajectory,
)


def make(task_id="q1", strict=1.0, *, outcome=Outcome.COMPLETED, sampled=3, calls=(), score=True, name="0", **tags):
    mask = np.array([False, False] + [True] * sampled)
    branch = Branch(
        tokens=np.arange(len(mask), dtype=np.int32),
        sampled=mask,
        engine_logprobs=np.where(mask, -0.5, np.nan).astype(np.float32),
        policy_version=np.where(mask, 1, -1).astype(np.int32),
        turn=np.zeros(len(mask), np.int16),
    )
    records = tuple(
        ToolRecord(call=ToolCall(name="search", arguments={"query": query}), result="", ok=ok, turn=0)
        for query, ok in calls
    )
    lenient = None if strict is None else max(strict, 0.5)
    return Trajectory(
        id=f"{task_id}/{name}",
        task=Task(id=task_id, messages=(), tags=tags),
        branches=(branch,),
        messages=(),
        outcome=outcome,
        stop_reason=StopReason.ERROR if outcome == Outcome.ERRORED else StopReason.ANSWERED,
        tool_records=records,
        num_turns=2,
        score=Score(value=strict, components={"strict_match": strict, "f1": lenient}) if score else None,
    )


def test_why_rewards_are_missing_is_counted_and_told():
    broken = [
        replace(make("a", score=False, outcome=Outcome.ERRORED), error=f"OSError: disk\n{i // 2}") for i in range(3)
    ]
    timed = replace(make("b", score=False, outcome=Outcome.CANCELLED), stop_reason=StopReason.CANCELLED)
    unsure = [replace(make(f"c{i}"), score=Score(value=math.nan, reason=f"rule {i}")) for i in range(2)]
    found = summarize([make("d"), *broken, timed, *unsure])
    assert found.problems == {"OSError: disk 0": 2, "OSError: disk 1": 1, "cancelled": 1, "rule 0": 1, "rule 1": 1}
    said = missing_rewards(found)
    assert said.startswith("6 of 7 trajectories have no reward: 2 times OSError: disk 0; 1 times OSError: disk 1; ")
    assert said.endswith("; and other reasons")
    assert missing_rewards(summarize([make("d")])) == ""


def test_errored_is_counted_and_never_zero():
    found = summarize([make("a"), make("b"), make("c", score=False, outcome=Outcome.ERRORED)])
    assert found.reward.mean == 1.0 and found.reward.n == 2
    assert (found.num_trajectories, found.num_counted, found.outcomes) == (3, 2, {"completed": 2, "errored": 1})
    assert found.stop_reasons == {"answered": 2, "error": 1}


def test_an_errored_trajectory_that_carries_a_score_still_does_not_count():
    found = summarize(
        [make("a", 1.0), make("b", 0.0, outcome=Outcome.ERRORED), make("c", 0.0, outcome=Outcome.CANCELLED)]
    )
    assert (found.reward.mean, found.reward.n) == (1.0, 1)


def test_what_could_not_be_scored_leaves_the_mean_and_is_counted():
    found = summarize([make("a", 1.0), make("b", 0.0), make("c", None)])
    assert (found.reward.mean, found.reward.n, found.num_unscored) == (0.5, 2, 1)
    assert (found.components["strict_match"].n, found.components["f1"].mean) == (2, 0.75)


def test_nan_score_is_could_not_score():
    found = summarize([make("a", 1.0), make("b", math.nan)])
    assert found.reward.n == 1 and found.num_unscored == 1


def test_a_component_that_only_some_have_is_averaged_over_those():
    first = make("a", 1.0)
    other = Trajectory(**{**vars(make("b", 0.0)), "score": Score(value=0.0, components={"format": 1.0})})
    found = summarize([first, other])
    assert (found.components["format"].mean, found.components["format"].n) == (1.0, 1)
    assert found.components["strict_match"].n == 1


def test_lengths_with_truncation():
    """Lengths 5, 8, 8 with the 8s cut: mean 7, min 5, max 8, truncated 2/3, mean of finished 5."""
    cut = Outcome.TRUNCATED
    found = summarize([make("a", sampled=5), make("b", sampled=8, outcome=cut), make("c", sampled=8, outcome=cut)])
    assert found.costs["sampled_tokens"].mean == 7
    assert (found.sampled_tokens_min, found.sampled_tokens_max, found.sampled_tokens_completed) == (5, 8, 5)
    assert found.truncated_frac == pytest.approx(2 / 3)


def test_tool_calls_invalid_and_repeated():
    calls = [("paris", True), ("paris", True), ("lyon", False), ("paris", True)]
    found = summarize([make("a", calls=calls), make("b")])
    assert found.costs["tool_calls"].mean == 2.0
    assert found.costs["invalid_calls"].mean == 0.5
    assert found.costs["duplicate_calls"].mean == 1.0
    assert (found.invalid_call_frac, found.duplicate_call_frac) == (0.25, 0.5)
    assert math.isnan(summarize([make("a")]).invalid_call_frac)


def test_by_tag_splits_every_tag():
    found = summarize([make("a", 1.0, hops="1", kind="count"), make("b", 0.0, hops="2"), make("c", 1.0, hops="2")])
    assert found.by_tag["hops"]["1"]["strict_match"].mean == 1.0
    assert found.by_tag["hops"]["2"]["strict_match"].mean == 0.5
    assert list(found.by_tag["kind"]) == ["count"]


def test_pass_figures_and_mixed_share_with_several_samples():
    outcomes = {"a": [1, 1, 0, 0], "b": [0, 0, 0, 0], "c": [1, 1, 1, 1]}
    found = summarize([make(t, float(s), name=str(i)) for t, row in outcomes.items() for i, s in enumerate(row)])
    assert list(found.pass_at_k) == [1, 2, 4]
    assert found.pass_at_k[1] == pytest.approx(0.5)
    assert found.pass_at_k[2] == pytest.approx((5 / 6 + 0 + 1) / 3)
    assert found.pass_hat_k[2] == pytest.approx((1 / 6 + 0 + 1) / 3)
    assert found.mixed_frac == pytest.approx(1 / 3)
    assert summarize([make("a")]).pass_at_k == {}


def test_a_full_reward_of_rounded_weights_is_a_success():
    full = 0.7 * 1.0 + 0.2 * 1.0 + 0.1 * 1.0
    assert full < 1.0
    made = [make("a", name=str(i)) for i in range(2)]
    found = summarize([Trajectory(**{**vars(t), "score": Score(value=full, components={})}) for t in made])
    assert found.pass_hat_k == {1: 1.0, 2: 1.0}


def test_intervals_resample_tasks_when_there_are_several_samples():
    many = [make(str(t), float(t % 2), name=str(i)) for t in range(20) for i in range(6)]
    single = [make(str(t), float(t % 2)) for t in range(20)]
    wide, base = summarize(many).reward, summarize(single).reward
    assert wide.high - wide.low == pytest.approx(base.high - base.low, rel=0.15)


def test_recovery_is_over_those_that_had_something_to_recover_from():
    answers = {"a": True, "b": False, "c": None}
    found = summarize([make(t) for t in answers], recovered=lambda trajectory: answers[trajectory.task.id])
    assert (found.recovery.mean, found.recovery.n) == (0.5, 2)
    assert summarize([make("a")]).recovery.n == 0


def test_empty_and_all_errored_make_no_numbers_up():
    for trajectories in ([], [make(outcome=Outcome.ERRORED, score=False)]):
        found = summarize(trajectories)
        assert math.isnan(found.reward.mean) and math.isnan(found.truncated_frac)
        json.dumps(found.to_dict(), allow_nan=False)


def test_json_has_every_figure_and_null_for_what_is_unknown():
    found = summarize(
        [make("a", hops="1", calls=[("x", True)]), make("b", None), make("c", 0.0, outcome=Outcome.ERRORED)],
        recovered=lambda trajectory: True,
    )
    again = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert again["reward"] == {"mean": 1.0, "low": found.reward.low, "high": 1.0, "n": 1}
    assert again["by_tag"]["hops"]["1"]["f1"]["n"] == 1 and again["mixed_frac"] is None
    assert [record["outcome"] for record in again["records"]] == ["completed", "completed", "errored"]


def test_compare_pairs_by_task_id_not_by_position():
    before = summarize([make("a", 0.0), make("b", 1.0), make("c", 0.0), make("only before", 1.0)])
    after = summarize([make("c", 1.0), make("b", 1.0), make("a", 1.0)])
    assert compare(before, after) == paired_test([0, 1, 0], [1, 1, 1])


def test_compare_leaves_out_what_either_side_could_not_score():
    before = summarize([make("a", 0.0), make("b", None), make("c", 0.0, outcome=Outcome.ERRORED)])
    after = summarize([make("a", 1.0), make("b", 1.0), make("c", 1.0)])
    assert compare(before, after).n == 1


def test_compare_averages_samples_of_a_task_first():
    before = summarize([make("a", 0.0, name="0"), make("a", 1.0, name="1"), make("b", 0.0)])
    after = summarize([make("a", 1.0), make("b", 0.0)])
    found = compare(before, after)
    assert (found.n, found.diff, found.test) == (2, 0.25, "sign_flip")


def test_compare_names_the_nearest_metric():
    found = summarize([make("a")])
    with pytest.raises(ValueError, match="did you mean 'strict_match'"):
        compare(found, found, metric="strict_mach")
    with pytest.raises(ValueError, match="same questions"):
        compare(found, summarize([make("z")]))


def test_an_evaluation_without_any_score_is_compared_with_nothing():
    """A base model may break every episode; that must not cost the stage."""
    broken = summarize([make("a", outcome=Outcome.ERRORED, score=False)])
    entries = [
        result_entry("base [x]", "eval", broken),
        result_entry("RL", "eval", summarize([make("a")]), previous=broken, previous_label="base"),
        result_entry("again", "eval", broken, previous=summarize([make("a")]), previous_label="RL"),
    ]
    assert [entry["paired"] for entry in entries] == [None, None, None]
    console = Console(width=240, record=True, file=io.StringIO())
    console.print(results_table(entries))
    text = console.export_text()
    assert "nan" not in text and "base [x]" in text and "100.0 % [20.7, 100.0]" in text


def test_final_table_shows_shares_intervals_and_the_test():
    before = summarize([make(str(i), 0.0) for i in range(12)])
    after = summarize([make(str(i), 1.0) for i in range(12)] + [make("x", outcome=Outcome.ERRORED, score=False)])
    entries = [
        result_entry("base", "base", before),
        result_entry("RL", "rl", after, previous=before, previous_label="base", wall_s=3.0),
    ]
    json.dumps(entries, allow_nan=False)
    console = Console(width=240, record=True, file=io.StringIO())
    console.print(results_table(entries))
    text = console.export_text()
    assert "100.0 % [75.8, 100.0]" in text
    assert "+100.0 points vs base" in text and "< 0.001" in text
    assert entries[1]["paired"]["p"] == pytest.approx(2 / 2**12)
    assert entries[1]["wall_s"] == 3.0


def test_best_of_n_is_a_column_of_the_table():
    few = summarize([make("a"), make("b", 0.0)])
    best = {"n": 4, "best": {"mean": 0.875, "low": 0.75, "high": 1.0}}
    entries = [result_entry("base", "eval", few), result_entry("RL", "eval", few, best_of=best)]
    console = Console(width=240, record=True, file=io.StringIO())
    console.print(results_table(entries))
    lines = console.export_text().splitlines()
    assert any("best of 4" in line for line in lines)
    assert [("87.5 % [75.0, 100.0]" in line) for line in lines if "base" in line or "RL" in line] == [False, True]
