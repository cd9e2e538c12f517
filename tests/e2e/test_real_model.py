"""The demo recipe on the real 135M model, with as little of everything as still goes through every stage."""

from __future__ import annotations

from pathlib import Path

import pytest

from upswing.errors import ModelNotFound
from upswing.models.resolve import resolve_model
from upswing.monitor.metrics import MetricsLog
from upswing.monitor.progress import Progress
from upswing.recipe import load_recipe
from upswing.stages.runner import run_recipe
from upswing.trajectory.store import TrajectoryStore

RECIPES = Path(__file__).parents[2] / "recipes"
LITTLE = [
    "env.args.kinds=[one_hop]",
    "sft.demonstrations=16",
    "sft.validation_demonstrations=2",
    "sft.graduation.enabled=false",
    "rl.steps=1",
    "rl.tasks_per_step=2",
    "rl.group_size=4",
    "test.tasks=8",
    "test.of=[base,rl]",
]


@pytest.mark.real
def test_the_demo_recipe_goes_through(tmp_path: Path) -> None:
    try:
        resolve_model("smollm2-135m")
    except ModelNotFound as error:
        pytest.skip(str(error))
    result = run_recipe(load_recipe(RECIPES / "demo.yaml", LITTLE), tmp_path / "run", log=Progress(quiet=True))
    base, trained = (entry["summary"] for entry in result.results)
    assert base["components"]["format"]["mean"] == 0.0, "the base model doesn't know the protocol"
    assert trained["num_counted"] == 8 and not trained["num_unscored"]
    losses = [row["loss"] for row in MetricsLog(result.out).read("sft") if "loss" in row]
    assert losses[-1] < losses[0]
    [step] = [row for row in MetricsLog(result.out).read("rl") if "train_s" in row]
    if step["zero_variance_frac"] < 1:
        # Engine and learner run the same modelling code: what was sampled with is what is trained on.
        assert step["mismatch_max"] < 1e-3
    stored = [one.trajectory for one in TrajectoryStore(result.out / "trajectories").read(stage="rl")]
    assert len(stored) == 8
