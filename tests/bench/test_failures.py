"""The failure lab breaks what it says, measures twins as it measures their modes, and takes no chance for harm."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.stages.test_algorithms import recipe, run

from upswing.stages.context import RunContext

SPEC = importlib.util.spec_from_file_location("bench_lab", Path(__file__).parents[2] / "bench" / "failures.py")
assert SPEC is not None and SPEC.loader is not None
lab = importlib.util.module_from_spec(SPEC)
sys.modules["bench_lab"] = lab
SPEC.loader.exec_module(lab)


def test_a_broken_engine_samples_with_other_weights_than_the_learners(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, same = RunContext.push_weights, dict[int, bool]()

    async def push(self: RunContext, weights: Any) -> int:
        version = await whole(self, weights)
        own = dict(self.engine.model.named_parameters(remove_duplicate=False))  # type: ignore[union-attr]
        same[version] = all(torch.equal(own[name].detach(), value.detach()) for name, value in weights.items())
        return version

    monkeypatch.setattr(RunContext, "push_weights", push)
    with lab.broken_engine(2):
        run(recipe({"steps": 3, "tasks_per_step": 2}), tmp_path / "run")
    assert same == {1: True, 2: True, 3: False, 4: False}


def stored(out: Path, name: str, **values: Any) -> Any:
    """A finished run of the lab with these series, judged."""
    folder = out / name
    folder.mkdir(parents=True)
    rows = [{"stage": "rl", "step": step + 1, **{key: one[step] for key, one in values.items()}} for step in range(20)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    verifiers = "verifiers: [{name: strict_match, weight: 1.0}]"
    (folder / "recipe.yaml").write_text(f"{verifiers}\nstages: [{{stage: rl, name: rl, eval_tasks: 64}}]\n")
    (folder / "done.json").write_text('{"stopped": "", "seconds": 1.0}')
    arm, mode = name.split("/")
    return lab.judged(lab.Job(arm=arm, mode=mode, seed=0, recipe="x", success=lab.mode_of(mode).success), folder)


def test_overfitting_is_compared_with_the_held_out_success_of_its_twin(tmp_path: Path) -> None:
    trained, held, low = [0.2] * 20, [0.9] * 20, [0.45] * 20
    counts = {"num_trajectories": [64] * 20, "num_errored": [16] * 20}
    twin = stored(tmp_path, "healthy/healthy", score_strict_match=trained, eval_strict_match=held, **counts)
    one = stored(tmp_path, "plain/overfitting", score_strict_match=trained, eval_strict_match=low, **counts)
    (found,) = lab.outcomes_of([twin, one])
    assert found.kept == pytest.approx(0.5) and found.lags == 1
    assert (twin.attempts, one.attempts) == (48, 64)


def test_chance_at_low_success_is_no_harm_and_a_collapse_is() -> None:
    rng, harmed = np.random.default_rng(0), 0

    def smooth(*values: float) -> Any:
        return lab.smooth([(step, rng.binomial(64, value) / 64) for step, value in enumerate(values, 1)])

    whole = {"skip": 4, "count": 320}
    for _ in range(200):
        flat, twin = smooth(*[0.24] * 60), smooth(*[0.24] * 60)
        harmed += lab.lost_at(flat, **whole) is not None or lab.lags_at(flat, twin, **whole) is not None
    assert harmed <= 10
    assert sum(lab.lost_at(smooth(*[0.24] * 60)) is not None for _ in range(200)) > 60
    lost = [lab.lost_at(smooth(*[0.5] * 20, *[0.1] * 20), **whole) for _ in range(50)]
    assert all(step is not None and 21 <= step <= 25 for step in lost)
    assert lab.lost_at(lab.smooth([(1, 0.9), *((step, 0.5) for step in range(2, 21))]), skip=4) == 6
