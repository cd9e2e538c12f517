"""`upswing plan`: the simulator's table, and costs taken from a run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from upswing.cli.main import app
from upswing.cli.plan import assumed, fitted, measured
from upswing.errors import ConfigError
from upswing.recipe import recipe_from
from upswing.rollout.scheduler import Pace
from upswing.rollout.simulate import Layout, simulate
from upswing.trajectory.store import TrajectoryStore
from upswing.trajectory.types import Branch, Message, Outcome, StopReason, Task, Trajectory


def a_run(folder: Path, stage: dict[str, object] | None = None, **sections: object) -> Path:
    """A run whose rollouts took 12 s and whose updates 4 s: two turns, 10 and 20 tokens sampled after 30 and 5 new."""
    rl = {"stage": "rl", "steps": 2, "tasks_per_step": 2, "group_size": 2, "eval_every": 0, **(stage or {})}
    recipe = recipe_from(
        {
            "name": "r",
            "model": "tiny",
            "env": "lookup",
            "verifiers": ["strict_match"],
            "stages": [rl],
            **sections,
        }
    )
    folder.mkdir()
    (folder / "recipe.yaml").write_text(recipe.dump())
    rows = [{"stage": "rl", "step": i, "rollout_s": 12.0, "update_s": 4.0, "sync_s": 0.5} for i in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sampled = np.array([False] * 30 + [True] * 10 + [False] * 5 + [True] * 20)
    branch = Branch(
        tokens=np.ones(65, np.int32),
        sampled=sampled,
        engine_logprobs=np.where(sampled, -1.0, np.nan).astype(np.float32),
        policy_version=np.where(sampled, 1, -1).astype(np.int32),
        turn=np.array([0] * 40 + [1] * 25, np.int16),
    )
    question = (Message(role="user", content="q"),)
    one = Trajectory(
        id="t",
        task=Task(id="t", messages=question),
        branches=(branch,),
        messages=question,
        outcome=Outcome.COMPLETED,
        stop_reason=StopReason.ANSWERED,
        num_turns=2,
        timing={"env_s": 3.0},
    )
    TrajectoryStore(folder / "trajectories").append("rl", 1, [one])
    return folder


@pytest.mark.parametrize(
    ("sections", "layout"),
    [
        ({}, Layout(engines=1, learners=1, slots=32)),
        (
            {"engine": {"max_slots": 1}, "cluster": {"kind": "ray", "engines": 2, "learners": 3}},
            Layout(engines=2, learners=3, slots=1),
        ),
    ],
)
def test_costs_are_fitted_to_what_the_run_took_where_it_ran(
    tmp_path: Path, sections: dict[str, object], layout: Layout
) -> None:
    fit = measured(a_run(tmp_path / "run", **sections))
    assert (fit.batch, fit.group, fit.slots) == (2, 2, layout.slots)
    found = simulate(plays=fit.plays, pace=Pace(batch=2), group_size=2, costs=fit.costs, layout=layout, steps=6)
    assert found.wait_s == pytest.approx(12.0, rel=0.01)
    assert found.update_s == pytest.approx(4.0)
    assert found.step_s == pytest.approx(16.5, rel=0.01)


@pytest.mark.parametrize(("key", "value"), [("max_staleness", 1), ("oversample", 1), ("dynamic_sampling", 3)])
def test_a_run_whose_rollouts_were_not_one_whole_batch_is_refused(tmp_path: Path, key: str, value: int) -> None:
    with pytest.raises(ConfigError, match=rf"rl\.{key} is {value}; allowed: a run with {key} (0|null)"):
        measured(a_run(tmp_path / "run", {key: value}))


def test_a_run_can_be_planned_for_more_devices(tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["plan", str(a_run(tmp_path / "run")), "--devices", "4", "--steps", "6"])
    assert found.exit_code == 0, found.output
    assert "synchronous" in found.output and "one step off" in found.output


def test_without_a_run_the_model_and_the_device_say_what_it_costs() -> None:
    found = CliRunner().invoke(app, ["plan", "--devices", "4", "--batch", "4", "--steps", "6"])
    assert found.exit_code == 0, found.output
    assert "asynchronous, 2" in found.output


def test_an_engine_has_as_many_devices_as_its_memory_takes() -> None:
    # 8e11 bytes of weights in 72e9 a device: 12; a learner of 16 bytes a parameter: 89
    assert fitted(105, 4e11, 0.0, 80) == (16, 89)
    large = ["plan", "--parameters", "4e11", "--steps", "3", "--batch", "2", "--devices"]
    found = CliRunner().invoke(app, [*large, "64"])
    assert found.exit_code == 2 and "--devices: got 64; allowed: 105 or more" in found.output
    found = CliRunner().invoke(app, [*large, "128"])
    assert found.exit_code == 0 and "devices of an engine: 16; of the learner: 89 or more" in found.output
    alone, shared = assumed(4e11, 3e12, 9e14, 2.0), assumed(4e11, 3e12, 9e14, 2.0, engine_devices=16)
    for key in ("step_s", "row_s", "prefill_token_s", "cache_token_s"):
        assert getattr(shared, key) == pytest.approx(getattr(alone, key) / 16)
    assert shared.train_token_s == alone.train_token_s


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["plan", str(tmp_path)])
    assert found.exit_code == 2 and "isn't a run folder" in found.output


@pytest.mark.parametrize(("option", "value"), [("--turn-spread", "50"), ("--bandwidth", "inf"), ("--flops", "nan")])
def test_numbers_without_an_end_are_refused(option: str, value: str) -> None:
    found = CliRunner().invoke(app, ["plan", option, value])
    assert found.exit_code == 2 and f"Invalid value for '{option}'" in found.output
