"""The tiny recipe from the command line: all stages, every file of the run folder, and an exact resume after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from upswing.learn.learner import Learner
from upswing.monitor.metrics import MetricsLog
from upswing.monitor.progress import Progress
from upswing.recipe import Recipe, load_recipe
from upswing.stages.runner import run_recipe
from upswing.trajectory.store import TrajectoryStore
from upswing.trajectory.types import Outcome
from upswing.trajectory.validate import validate
from upswing.view.run_folder import read_json

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny.yaml"
SHORT = [
    "sft.demonstrations=16",
    "sft.validation_demonstrations=4",
    "sft.epochs=1",
    "sft.eval_every=0",
    "sft.graduation.tasks=2",
    "sft.graduation.pass_k=2",
    "rl.steps=4",
    "rl.tasks_per_step=2",
    "rl.group_size=4",
    "rl.eval_every=2",
    "rl.eval_tasks=4",
    "rl.save_every=1",
    "test.tasks=8",
]


def short_recipe(*more: str) -> Recipe:
    return load_recipe(RECIPE, [*SHORT, *more])


def weights(run: Path, stage: str) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / stage / "final" / "model.safetensors")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "finished"
    run_recipe(short_recipe(), out, log=Progress(quiet=True))
    return out


def test_the_run_folder_has_everything(finished: Path) -> None:
    for name in ("recipe.yaml", "metrics.jsonl", "events.log", "environment.json", "results.json", "report.html"):
        assert (finished / name).stat().st_size > 0, name
    assert load_recipe(finished / "recipe.yaml") == short_recipe()
    labels = [entry["label"] for entry in read_json(finished / "results.json")]
    assert labels == ["base", "sft", "rl"]
    assert all(weights(finished, stage) for stage in ("sft", "rl"))


def test_every_stored_trajectory_is_valid_and_has_one_outcome(finished: Path) -> None:
    stored = list(TrajectoryStore(finished / "trajectories").read())
    assert {one.stage for one in stored} == {"sft", "rl", "test"}
    for one in stored:
        validate(one.trajectory)
        assert one.trajectory.outcome in (Outcome.COMPLETED, Outcome.TRUNCATED)
    assert len([one for one in stored if one.stage == "rl"]) == 4 * 2 * 4


def test_metrics_cover_every_step(finished: Path) -> None:
    rows = MetricsLog(finished).read("rl")
    trained = [row for row in rows if "train_s" in row]
    assert [row["step"] for row in trained] == [1, 2, 3, 4]
    for key in ("reward", "entropy", "sampled_tokens", "tool_calls", "zero_variance_frac", "score_strict_match", "lr"):
        assert key in trained[-1], key
    assert [row["step"] for row in rows if "eval_reward" in row] == [0, 2, 4]


def test_the_same_seed_gives_the_same_weights_and_another_seed_does_not(finished: Path, tmp_path: Path) -> None:
    run_recipe(short_recipe("rl.eval_every=0"), tmp_path / "again", log=Progress(quiet=True))
    first, again = weights(finished, "sft"), weights(tmp_path / "again", "sft")
    assert all(torch.equal(first[name], again[name]) for name in first)
    run_recipe(short_recipe("rl.eval_every=0", "seed=1"), tmp_path / "other", log=Progress(quiet=True))
    other = weights(tmp_path / "other", "sft")
    assert any(not torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGINT])
def test_a_stopped_run_resumes_to_the_same_weights(finished: Path, tmp_path: Path, stop: signal.Signals) -> None:
    out = tmp_path / "run"
    command = [sys.executable, "-m", "upswing.cli.main", "run", str(RECIPE), *SHORT, "--out", str(out)]
    # A job in the background of a shell inherits an ignored SIGINT.
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ}, preexec_fn=heed
    )
    try:
        _wait_for(out / "checkpoints" / "rl" / "step-000002", process)
        process.send_signal(stop)
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode != 0
    if stop is signal.SIGINT:
        assert process.returncode == 130
        assert "--resume" in errors.decode()
    subprocess.run([*command, "--resume"], check=True, capture_output=True, timeout=300)
    expected, resumed = weights(finished, "rl"), weights(out, "rl")
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)
    keys = ("step", "reward", "loss", "entropy", "sampled_tokens")
    series = [
        [[row[k] for k in keys] for row in MetricsLog(run).read("rl") if "train_s" in row] for run in (finished, out)
    ]
    assert json.dumps(series[0]) == json.dumps(series[1])


def test_an_interruption_in_the_middle_of_an_update_saves_nothing_half_done(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Learner.rl_update
    calls = 0

    def interrupted(self: Learner, *args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        result = whole(self, *args, **options)
        if calls == 2:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(Learner, "rl_update", interrupted)
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        run_recipe(short_recipe("rl.save_every=0"), out, log=Progress(quiet=True))
    assert not list((out / "checkpoints" / "rl").glob("step-*"))
    monkeypatch.undo()
    run_recipe(short_recipe("rl.save_every=0"), out, resume=True, log=Progress(quiet=True))
    expected, resumed = weights(finished, "rl"), weights(out, "rl")
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)
    versions = [
        int(branch.policy_version.max())
        for one in TrajectoryStore(out / "trajectories").read(stage="rl")
        for branch in one.trajectory.branches
    ]
    assert min(versions) >= 2, "versions of the interrupted run aren't used again"


def _wait_for(path: Path, process: subprocess.Popen[bytes], seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert process.poll() is None, process.communicate()[1].decode()
        assert time.monotonic() < deadline, f"{path} didn't appear"
        time.sleep(0.02)
