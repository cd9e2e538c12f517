"""Sampling that goes on during updates: bounded staleness, exact versions, no task lost or learned from twice."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from upswing.engine.weights import compute_dtype
from upswing.envs.base import AssistantMessage, Observation
from upswing.errors import ConfigError
from upswing.learn.learner import Learner
from upswing.learn.options import RLOptions
from upswing.models.load import load_model
from upswing.recipe import Recipe, recipe_from
from upswing.stages import context
from upswing.stages.rl_metrics import age
from upswing.trajectory.store import TrajectoryStore
from upswing.trajectory.types import Group
from upswing.view.run_folder import read_json_lines

from .test_algorithms import TwoTurns, recipe, run, weights
from .test_rl_edges import extra_of, killed_at_step_1


class SlowTools(TwoTurns):
    """Waits as long as its task says, so that groups overtake each other."""

    async def step(self, message: AssistantMessage) -> Observation:
        await asyncio.sleep(random.Random(self.task_id).choice((0.0, 0.02, 0.6)))
        return super().step(message)

    def reset(self, task: Any, seed: int) -> Any:
        self.task_id = task.id
        return super().reset(task, seed)


def slow(rl: dict[str, Any]) -> Recipe:
    one = recipe({"tasks_per_step": 2, "group_size": 2, "save_every": 1, "keep_checkpoints": 20, **rl})
    return recipe_from({**one.to_dict(), "env": "tests.stages.test_async:SlowTools"})


def learned(out: Path) -> list[tuple[int, Any]]:
    """(step, trajectory) of every trajectory that was learned from."""
    return [(stored.step, stored.trajectory) for stored in TrajectoryStore(out / "trajectories").read("rl")]


@pytest.mark.skipif(compute_dtype(torch.device("cpu")) != torch.float32, reason="the engine computes in bf16 here")
@pytest.mark.parametrize("rl", [{}, {"max_staleness": 1}, {"lora": {"r": 4}}])
def test_learner_and_engine_hold_the_weights_once_where_they_may(
    rl: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is learned is the same to the last bit."""
    shared: list[bool] = []
    own = context.share_memory

    def watched(*models: Any) -> bool:
        shared.append(own(*models))
        return shared[-1]

    monkeypatch.setattr(context, "share_memory", watched)
    rows = run(slow({"steps": 2, **rl}), tmp_path / "once")
    assert shared == {0: [True], 1: []}.get(rl.get("max_staleness", 0)) or (rl.get("lora") and shared == [False])
    assert all((row["sync_gb"] == 0) == (not rl) for row in rows)
    monkeypatch.setattr(context, "share_memory", lambda *_: False)
    run(slow({"steps": 2, **rl}), tmp_path / "twice")
    if "max_staleness" not in rl:  # there the clock decides what is sampled when
        once, twice = weights(tmp_path / "once"), weights(tmp_path / "twice")
        assert all(torch.equal(once[name], twice[name]) for name in twice)


@pytest.mark.parametrize("minibatches", [1, 2])
def test_tokens_are_no_older_than_allowed_and_their_versions_are_exact(minibatches: int, tmp_path: Path) -> None:
    """ASYNC-03: a version is a step's push of the weights, however many updates the step has."""
    rows = run(slow({"steps": 8, "max_staleness": 2, "minibatches": minibatches}), tmp_path / "run")
    for row in rows:  # a minibatch without a group that has a spread is none, and how many have one is chance
        assert row.get("num_steps", 0) == min(minibatches, round(2 * row["informative_frac"]))
    held = sum(p.numel() for p in load_model("tiny").model.parameters()) * compute_dtype(torch.device("cpu")).itemsize
    assert [row["sync_gb"] for row in rows] == pytest.approx([held / 1e9] * 8), "each step's weights go once"
    assert all(row["staleness_max"] <= 2 for row in rows)
    assert any(row["staleness_max"] > 0 for row in rows), "nothing was sampled ahead"
    for row in rows:
        shares = [value for key, value in row.items() if key.startswith("staleness_") and key.endswith("_frac")]
        assert sum(shares) == pytest.approx(1.0)
    # The first weights have version 1 or later, one more with every step.
    first = min(int(b.policy_version[b.sampled].min()) for _, t in learned(tmp_path / "run") for b in t.branches)
    ages = [first + step - 1 - b.policy_version[b.sampled] for step, t in learned(tmp_path / "run") for b in t.branches]
    assert np.concatenate(ages).min() >= 0 and np.concatenate(ages).max() <= 2
    tasks = Counter(t.task.id for _, t in learned(tmp_path / "run"))
    assert set(tasks.values()) == {2}, "a task was learned from twice"


def test_stale_groups_are_played_again_and_tasks_that_take_long_are_learned_from(tmp_path: Path) -> None:
    rows = run(slow({"steps": 14, "max_staleness": 1}), tmp_path / "run")
    assert sum(row["num_requeued"] for row in rows) > 0 and sum(row["num_dropped"] for row in rows) == 0
    tasks = Counter(t.task.id for _, t in learned(tmp_path / "run"))
    assert set(tasks.values()) == {2} and all(row["staleness_max"] <= 1 for row in rows)
    long = {f"train{n}" for n in range(20) if random.Random(f"train{n}").choice((0.0, 0.02, 0.6)) == 0.6}
    assert len(long & tasks.keys()) >= len(long) - 4, "those still in play at the end"


@pytest.mark.parametrize("stale", ["requeue", "drop"])
def test_a_task_that_is_always_too_old_is_named_and_one_that_is_given_up_is_forgotten(
    stale: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: Counter[str] = Counter()

    def wrong(group: Group, now: int) -> int:
        tries[group.task.id] += 1
        return 9 if group.task.id == "train1" and tries["train1"] <= 4 else age(group, now)

    monkeypatch.setattr("upswing.stages.rl.age", wrong)
    keys = {"steps": 5, "tasks_per_step": 2, "group_size": 2, "save_every": 1, "max_staleness": 1, "stale": stale}
    rows = run(recipe(keys), tmp_path)
    findings = read_json_lines(tmp_path / "findings.jsonl")
    found = [row for row in findings if row["title"] == "a task is never new enough"]
    extra = extra_of(tmp_path / "checkpoints/rl/step-000005")
    still_open = {number for number, *_ in extra["scheduler"]["open"]}
    assert {number for number, _ in extra["sampler"]["places"]} <= still_open
    if stale == "drop":
        assert sum(row["num_dropped"] for row in rows) > 0 and tries["train1"] == 1 and not found
    else:
        assert tries["train1"] > 4 and len(found) == 1
        assert "task 'train1' was too old 4 times: its tokens are of versions " in found[0]["evidence"]


def test_a_trajectory_can_span_versions(tmp_path: Path) -> None:
    run(slow({"steps": 10, "max_staleness": 3}), tmp_path / "run")
    spans = [len(np.unique(b.policy_version[b.sampled])) for _, t in learned(tmp_path / "run") for b in t.branches]
    assert max(spans) > 1


def test_without_staleness_a_run_is_the_same_every_time_and_after_a_kill(tmp_path: Path) -> None:
    one = slow({"steps": 3, "max_staleness": 0})
    rows = run(one, tmp_path / "whole")
    assert "staleness" not in rows[0]
    again = run(one, killed_at_step_1(tmp_path / "whole", tmp_path / "killed"), resume=True)
    assert [row["reward"] for row in again] == [row["reward"] for row in rows]
    assert [t.task.id for _, t in learned(tmp_path / "whole")] == [f"train{i // 2}" for i in range(12)]
    for name, tensor in weights(tmp_path / "whole").items():
        assert np.array_equal(weights(tmp_path / "killed")[name], tensor), name


def test_a_killed_asynchronous_run_loses_no_task_and_learns_from_none_twice(tmp_path: Path) -> None:
    one = slow({"steps": 5, "max_staleness": 2})
    run(one, tmp_path / "whole")
    out = killed_at_step_1(tmp_path / "whole", tmp_path / "killed")
    for late in ("step-000004", "step-000005"):
        if (out / "checkpoints/rl" / late).exists():
            for path in (out / "checkpoints/rl" / late).iterdir():
                path.unlink()
            (out / "checkpoints/rl" / late).rmdir()
    run(one, out, resume=True)
    tasks = Counter(t.task.id for _, t in learned(out))
    assert set(tasks.values()) == {2} and len(tasks) == 10
    state = extra_of(out / "checkpoints/rl/step-000005")["scheduler"]
    still_open = {f"train{number}" for number, *_ in state["open"]}
    assert {f"train{number}" for number in range(state["next"])} == set(tasks) | still_open


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_an_interrupt_during_an_update_comes_after_it_and_loses_no_step(tmp_path, monkeypatch, max_staleness) -> None:
    one, real, updates = slow({"steps": 5, "max_staleness": max_staleness, "save_every": 100}), Learner.rl_update, []

    def interrupted(self: Learner, *args: Any, **kwargs: Any) -> Any:
        updates.append(self)
        if len(updates) == 2:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Learner, "rl_update", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            run(one, tmp_path / "run")
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(updates) == 2
    assert [path.name for path in (tmp_path / "run/checkpoints/rl").glob("step-*")] == ["step-000002"]
    run(one, tmp_path / "run", resume=True)
    assert len(updates) == 5
    tasks = Counter(t.task.id for _, t in learned(tmp_path / "run"))
    assert set(tasks.values()) == {2} and len(tasks) == 10


def test_oversampling_cancels_the_last_and_plays_their_tasks_later(tmp_path: Path) -> None:
    rows = run(slow({"steps": 6, "oversample": 1}), tmp_path / "run")
    assert sum(row["num_cancelled"] for row in rows) > 0
    assert all(row["staleness_max"] == 0 for row in rows)
    tasks = Counter(t.task.id for _, t in learned(tmp_path / "run"))
    assert set(tasks.values()) == {2} and len(tasks) == 12


def test_staleness_brings_its_correction() -> None:
    stage: Any = slow({"max_staleness": 1}).stages[0]
    assert (stage.stale, stage.correction, stage.old_logprobs) == ("requeue", "tis", None)
    stage = slow({"max_staleness": 1, "minibatches": 2}).stages[0]
    assert (stage.correction, RLOptions.of(stage).old_logprobs) == ("tis", "recompute")
    stage = slow({"max_staleness": 1, "correction": "icepop"}).stages[0]
    assert stage.correction == "icepop"
    one = slow({"max_staleness": 1, "correction": "none"})
    stage = one.stages[0]
    assert stage.correction is None and RLOptions.of(stage).correction is None
    assert stage.changed({"lr": 1e-4}).correction is None and recipe_from(one.to_dict()) == one
    assert slow({"max_staleness": 1, "correction": None}).stages[0].correction == "tis"  # null: the default
    stage = slow({"max_staleness": 1, "minibatches": 2, "old_logprobs": "engine"}).stages[0]
    stale = slow({"max_staleness": 1, "old_logprobs": "engine"}).stages[0]  # not 1 in the only update either
    assert stale.clip_low == 0.2 and not RLOptions.of(stale).on_policy and recipe_from(slow({}).to_dict()) == slow({})
    assert stage.changed({"minibatches": 1}).old_logprobs == "engine"
    assert stage.correction is None  # the policy ratio itself is over the sampler's log-probs


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"stale": "drop"}, "stale: got 'drop' without effect"),
        ({"old_logprobs": "engine"}, "old_logprobs: got 'engine' without effect, as a batch has one update"),
        (
            {"max_staleness": 1, "old_logprobs": "engine", "algorithm": "rloo"},
            "old_logprobs: got 'engine' without effect, as a batch has one update",
        ),
        ({"max_staleness": 1, "oversample": 2}, "oversample: got 2 without effect"),
        ({"max_staleness": -1}, "max_staleness"),
    ],
)
def test_what_has_no_effect_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        slow(keys)
