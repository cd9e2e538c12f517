"""The store: exact round trips, valid JSON for any tool, whole files or none."""

from __future__ import annotations

import gzip
import json
import os
from dataclasses import fields, replace
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from upswing.errors import ConfigError, InvalidTrajectory
from upswing.trajectory import store as store_module
from upswing.trajectory.store import TrajectoryStore
from upswing.trajectory.types import Branch, DriftEvent, Message, Score, Task, ToolCall, ToolRecord

from .test_validate import FIRST, FORK, SECOND, branch, trajectory

FULL = trajectory(
    FIRST,
    SECOND,
    task=Task(
        id="t",
        messages=(Message(role="system", content="s"), Message(role="user", content="où \ud800 \u2028")),
        gold=("a", "b"),
        data={"default": None, "enum": ["x", None], "nested": {"a": {"default": None}}},
        tags={"hops": "2"},
        env="geo",
        split="dev",
    ),
    messages=(Message(role="tool", content="r", name="search"),),
    tool_records=(
        ToolRecord(call=ToolCall(name="f", arguments={"q": None, "k": 3}, id="c"), result="r", ok=False, turn=0),
    ),
    score=Score(value=None, components={"em": None, "f1": 0.1}, reason="why"),
    drift=(FORK, DriftEvent(kind="retokenised", turn=0, forked=False, detail="d")),
    state={"env_reward": 0.25},
    timing={"engine_s": 1.5},
    seed=7,
    answer="",
)


def same(left, right) -> bool:
    """Equality of trajectories, arrays compared by dtype and by bits (NaN equal to NaN)."""
    for field in fields(left):
        if field.name == "branches":
            continue
        if getattr(left, field.name) != getattr(right, field.name):
            return False
    pairs = zip(left.branches, right.branches, strict=True)
    arrays = [(getattr(a, item.name), getattr(b, item.name)) for a, b in pairs for item in fields(Branch)]
    return all(a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind == "f") for a, b in arrays)


def test_round_trip_is_exact(tmp_path):
    store = TrajectoryStore(tmp_path / "trajectories")
    store.append("rl", 3, [FULL, trajectory()])
    first, second = store.read("rl", 3)
    assert (first.stage, first.step) == ("rl", 3)
    assert same(first.trajectory, FULL) and same(second.trajectory, trajectory())
    assert first.trajectory.score == FULL.score and type(first.trajectory.outcome) is type(FULL.outcome)


def test_every_trajectory_keeps_its_own_task(tmp_path):
    """Those of one task share what is written of it."""
    tasks = [Task(id=name, messages=FULL.task.messages, data={"n": n}) for n, name in enumerate("aab")]
    kept = [replace(FULL, id=f"t{n}", task=tasks[n % 3]) for n in range(6)]
    store = TrajectoryStore(tmp_path)
    store.append("rl", 1, kept)
    assert [found.trajectory.task for found in store.read()] == [one.task for one in kept]
    broken = replace(FULL, task=replace(FULL.task, data={"x": {1}}))
    with pytest.raises(ConfigError, match=r"trajectory\.task\.data\.x is a set"):
        store.append("rl", 2, [FULL, broken])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_branch_survives(tmp_path_factory, data):
    length = data.draw(st.integers(0, 12))

    def draw(elements, dtype):
        return np.array(data.draw(st.lists(elements, min_size=length, max_size=length)), dtype=dtype)

    stored = Branch(
        tokens=draw(st.integers(0, 2**31 - 1), np.int32),
        sampled=draw(st.booleans(), np.bool_),
        engine_logprobs=draw(st.floats(width=32), np.float32),
        policy_version=draw(st.sampled_from([-1, 0, 2**31 - 1]), np.int32),
        turn=draw(st.sampled_from([-(2**15), 0, 2**15 - 1]), np.int16),
    )
    store = TrajectoryStore(tmp_path_factory.mktemp("store"))
    store.append("sft", 0, [trajectory(stored)])
    (back,) = store.read()
    assert same(back.trajectory, trajectory(stored))


def test_files_are_plain_json_with_nulls_kept(tmp_path):
    """TPL-03: real nulls survive and no other row's fields appear; NaN is null, which every JSON reader knows."""
    path = TrajectoryStore(tmp_path).append("rl", 0, [FULL, trajectory()])
    lines = gzip.decompress(path.read_bytes()).decode("ascii").splitlines()

    def refuse(constant):
        raise AssertionError(f"{constant} isn't JSON")

    first, second = (json.loads(line, parse_constant=refuse)["trajectory"] for line in lines)
    assert first["task"]["data"] == {"default": None, "enum": ["x", None], "nested": {"a": {"default": None}}}
    assert first["tool_records"][0]["call"]["arguments"] == {"q": None, "k": 3}
    assert second["task"]["data"] == {}
    assert first["branches"][0]["engine_logprobs"] == [None, None, -0.5, -0.5, None, None]
    assert first["branches"][0]["sampled"] == [[0, 2], [1, 2], [0, 2]]


def test_appending_a_step_again_replaces_it(tmp_path):
    store = TrajectoryStore(tmp_path)
    store.append("rl", 1, [trajectory(), trajectory(id="t2")])
    store.append("rl", 1, [trajectory(id="t3")])
    assert [stored.trajectory.id for stored in store.read()] == ["t3"]


def test_read_selects_and_orders(tmp_path):
    store = TrajectoryStore(tmp_path)
    for stage, step in [("rl", 10), ("sft", 0), ("rl", 9), ("rl-000009", 1)]:
        store.append(stage, step, [trajectory(id=f"{stage}/{step}")])
    assert [item.trajectory.id for item in store.read()] == ["rl/9", "rl/10", "rl-000009/1", "sft/0"]
    assert [item.step for item in store.read("rl")] == [9, 10]
    assert [item.stage for item in store.read(step=0)] == ["sft"]
    assert list(TrajectoryStore(tmp_path / "none").read()) == []


def test_discard_after_removes_later_steps_of_that_stage_only(tmp_path):
    store = TrajectoryStore(tmp_path)
    for stage, step in [("rl", 0), ("rl", 1), ("rl", 2), ("sft", 5)]:
        store.append(stage, step, [trajectory()])
    assert store.discard_after("rl", 0) == 2
    assert [(item.stage, item.step) for item in store.read()] == [("rl", 0), ("sft", 5)]


def test_a_kill_before_the_rename_leaves_the_old_file(tmp_path, monkeypatch):
    store = TrajectoryStore(tmp_path)
    store.append("rl", 0, [trajectory(id="old")])

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(store_module.os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        store.append("rl", 0, [trajectory(id="new")])
    monkeypatch.undo()
    assert len(os.listdir(tmp_path)) == 2
    assert [item.trajectory.id for item in store.read()] == ["old"]
    store.append("rl", 0, [trajectory(id="newer")])
    assert [item.trajectory.id for item in store.read()] == ["newer"] and len(os.listdir(tmp_path)) == 1


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (
            {"a": [1, {2, 3}]},
            r"trajectory 't1' can't be stored: trajectory.state.a\[1\] is a set; use JSON values only",
        ),
        ({1: "x"}, "trajectory.state has the key 1 of type int"),
    ],
)
def test_what_json_cannot_hold_is_refused_before_anything_is_written(tmp_path, state, message):
    store = TrajectoryStore(tmp_path)
    with pytest.raises(ConfigError, match=message):
        store.append("rl", 0, [trajectory(), trajectory(state=state)])
    assert os.listdir(tmp_path) == []


def test_mappings_and_numbers_of_other_kinds_are_stored_plainly(tmp_path):
    store = TrajectoryStore(tmp_path)
    state = MappingProxyType({"a": np.float32(0.5), "b": np.int64(3), "c": (1, 2), "d": float("nan"), "e": np.bool_(1)})
    store.append("rl", 0, [trajectory(state=state)])
    (stored,) = store.read()
    assert stored.trajectory.state == {"a": 0.5, "b": 3, "c": [1, 2], "d": None, "e": True}


def test_wrong_types_names_and_damage_are_refused(tmp_path):
    store = TrajectoryStore(tmp_path)
    with pytest.raises(InvalidTrajectory, match="tokens is int64"):
        store.append("rl", 0, [trajectory(replace(branch(), tokens=branch().tokens.astype(np.int64)))])
    with pytest.raises(ConfigError, match=r"stage name '\.\./x' can't be a file name"):
        store.append("../x", 0, [])
    with pytest.raises(ConfigError, match="step -1 is negative"):
        store.append("rl", -1, [])
    path = store.append("rl", 0, [FULL])
    whole = path.read_bytes()
    for torn in (b"", whole[:5], whole[:-20], whole[:-1], whole[:40] + b"x" + whole[41:], gzip.compress(b"[]\n")):
        path.write_bytes(torn)
        with pytest.raises(ConfigError, match=r"rl-000000\.jsonl\.gz is damaged"):
            list(store.read())
    store.append("rl", 0, [FULL])
    assert same(next(store.read()).trajectory, FULL)
