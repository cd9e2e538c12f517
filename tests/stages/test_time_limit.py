"""A control stage trains for as long as another stage did, by a clock that the test moves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from upswing.monitor.progress import Progress
from upswing.recipe import recipe_from
from upswing.stages.runner import run_recipe
from upswing.view.run_folder import read_json

RL_STEP_S, SFT_UPDATE_S = 3, 1
"""By the clock below: a step of RL looks at it four times, an update of SFT twice."""
RECIPE = {
    "name": "control",
    "model": "tiny",
    "env": "lookup",
    "verifiers": ["strict_match"],
    "engine": {"max_slots": 8, "max_context": 128},
    "limits": {"turn_tokens": 16, "context_tokens": 128},
    "stages": [
        {"stage": "rl", "steps": 2, "tasks_per_step": 2, "group_size": 2, "eval_every": 0, "save_every": 1},
        {
            "stage": "sft",
            "name": "control",
            "from": "base",
            "demonstrations": 4,
            "validation_demonstrations": 0,
            "batch_size": 2,  # two updates an epoch, and one epoch is asked for
            "graduation": {"enabled": False},
            "eval_every": 0,
            "time_limit_as": "rl",
        },
    ],
}


class Clock:
    """Every look at it takes a second; the one numbered `stop` is interrupted."""

    def __init__(self, stop: int | None = None) -> None:
        self.looks, self.stop = 0, stop

    def perf_counter(self) -> float:
        self.looks += 1
        if self.looks == self.stop:
            raise KeyboardInterrupt
        return float(self.looks)


def run(out: Path, monkeypatch: pytest.MonkeyPatch, *, rl: int | None = None, sft: int | None = None) -> Any:
    """Go on with the run -> what state.json says of its stages. `rl`, `sft`: where a stage is interrupted."""
    monkeypatch.setattr("upswing.stages.rl.time", Clock(rl))
    monkeypatch.setattr("upswing.stages.sft.time", Clock(sft))
    try:
        run_recipe(recipe_from(RECIPE), out, resume=True, log=Progress(quiet=True))
    except KeyboardInterrupt:
        assert rl or sft
    else:
        assert not (rl or sft)
    return read_json(out / "state.json")["stages"]


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "checkpoints" / "control" / "final" / "model.safetensors")


def test_the_control_stops_at_the_other_stages_wall_time_also_when_both_were_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(tmp_path / "whole", monkeypatch)
    assert whole["rl"]["train_s"] == 2 * RL_STEP_S
    assert whole["control"]["steps"] == 2 * RL_STEP_S / SFT_UPDATE_S and whole["control"]["train_s"] == 2 * RL_STEP_S
    out = tmp_path / "stopped"
    assert not run(out, monkeypatch, rl=6)["rl"]["done"]  # in its second step
    stages = run(out, monkeypatch, sft=5)  # in its third update
    assert stages["rl"]["train_s"] == 2 * RL_STEP_S and not stages["control"]["done"]
    stages = run(out, monkeypatch)
    assert stages["control"]["steps"] == whole["control"]["steps"]
    assert all(torch.equal(tensor, weights(out)[name]) for name, tensor in weights(tmp_path / "whole").items())
