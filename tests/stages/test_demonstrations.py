"""What demonstrations are made of."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from upswing.errors import ConfigError
from upswing.monitor.progress import Progress
from upswing.recipe import Recipe, recipe_from
from upswing.stages import runner
from upswing.stages.runner import run_recipe
from upswing.stages.sft import _demonstrations
from upswing.trajectory.store import TrajectoryStore
from upswing.trajectory.types import Trajectory
from upswing.world import preflight


def recipe(env: Any = "lookup", **stage: Any) -> Recipe:
    sft = {
        "stage": "sft",
        "demonstrations": 12,
        "validation_demonstrations": 4,
        "graduation": {"enabled": False},
        "eval_every": 0,
        **stage,
    }
    return recipe_from({"name": "demos", "model": "tiny", "env": env, "verifiers": ["strict_match"], "stages": [sft]})


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_demonstrations_may_be_of_other_tasks_than_the_runs(tmp_path: Path, share: float) -> None:
    """env_args were once looked at when playing only, so that another mix of tasks had no effect and nobody said so."""
    run_recipe(recipe(task_args={"alias_frac": share}), tmp_path, log=Progress(quiet=True))
    hops = [stored.trajectory.task.tags["hops"] for stored in TrajectoryStore(tmp_path / "trajectories").read("sft")]
    assert len(hops) == 16 and set(hops) == {"2" if share else "1"}


def test_task_args_leave_the_runs_own_tasks_alone() -> None:
    world = preflight(recipe("geo_search", task_args={"kinds": ["order"]}))
    tasks = world.tasks("train", 0)
    assert "order" not in {next(tasks).tags["kind"] for _ in range(50)}


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"env_args": {"kinds": ["count"]}}, ["stages.0.env_args.kinds: got ['count']", "stages.0.task_args"]),
        ({"task_args": {"expert_noise": 0.5}}, ["stages.0.task_args.expert_noise: got 0.5", "stages.0.env_args"]),
        ({"task_args": {"kinds": ["cuont"]}}, ["did you mean 'count'"]),
        ({"task_args": {"kinds": ["three_hop"], "max_searches": 1}}, ["no three_hop question"]),
    ],
)
def test_arguments_without_effect_and_wrong_ones_are_refused(keys: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        preflight(recipe("geo_search", **keys))
    assert all(word in str(refused.value) for word in words), refused.value


def test_a_dataset_is_its_own_choice_of_tasks(tmp_path: Path) -> None:
    rows = tmp_path / "t.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"value of {k}", "answer": "1"}) + "\n" for k in "abc"))
    data = {**recipe(task_args={"alias_frac": 0.0}).to_dict(), "dataset": str(rows)}
    with pytest.raises(ConfigError, match=r"task_args: got alias_frac without effect: tasks are the dataset's rows"):
        preflight(recipe_from(data))


def demonstrated(out: Path, **limits: int) -> list[Trajectory]:
    """Demonstrations of one and two turns' searches, without the training."""
    one = recipe(task_args={"alias_frac": 0.3})
    one = recipe_from({**one.to_dict(), "limits": limits})
    context = runner._context(one, out, runner.check(one), Progress(quiet=True))
    training, validation = asyncio.run(_demonstrations(context, one.stages[0]))  # type: ignore[arg-type]
    assert (len(training), len(validation)) == (12, 4)
    return [*training, *validation]


def test_demonstrations_that_the_agent_would_be_cut_in_are_left_out_and_counted(tmp_path: Path) -> None:
    """RL's limits cut a longer play, so it can't be learned."""
    totals = [len(play.branches[-1]) for play in demonstrated(tmp_path / "all")]
    short = sorted(set(totals))[-2]  # only the longest are beyond
    kept = demonstrated(tmp_path / "some", context_tokens=short, turn_tokens=short)
    assert max(len(play.branches[-1]) for play in kept) == short < max(totals)
    assert len({play.task.id for play in kept}) == 16
    said = (tmp_path / "some" / "events.log").read_text()
    assert "16 demonstrations kept, 0 rejected below 1, " in said
    assert "left out as longer than limits.turn_tokens or context_tokens" in said
    assert "left out" not in (tmp_path / "all" / "events.log").read_text()


@pytest.mark.parametrize("limits", [{"turn_tokens": 3}, {"turn_tokens": 8, "context_tokens": 20}])
def test_demonstrations_that_are_mostly_too_long_are_refused(tmp_path: Path, limits: dict[str, int]) -> None:
    words = (
        r"stages.sft.demonstrations: 16 of 16 are longer .* \(turn_tokens \d+, context_tokens \d+\): up to \d+ tokens"
    )
    with pytest.raises(ConfigError, match=words):
        demonstrated(tmp_path, **limits)
