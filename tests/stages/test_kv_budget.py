"""A run whose cached keys and values have a budget: how many play at once, what its metrics show, a wrong budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from upswing.engine.torch import TorchEngine
from upswing.errors import ConfigError
from upswing.monitor.progress import Progress
from upswing.recipe import Recipe, recipe_from
from upswing.rollout.collect import Rollouts
from upswing.stages import runner

from .test_algorithms import recipe, run

TOKEN_GB = 2 * 2 * 2 * 16 * 4 / 1e9
"""Of the tiny model in float32: keys and values, 2 layers, 2 key heads of size 16, 4 bytes."""


def budgeted(tokens: int | None, steps: int = 1, **limits: int) -> Recipe:
    plain = recipe({"steps": steps}).to_dict()
    memory = {"kv_memory_gb": None if tokens is None else tokens * TOKEN_GB, "dtype": "float32"}
    return recipe_from({**plain, "engine": {**plain["engine"], **memory}, "limits": {**plain["limits"], **limits}})


@pytest.mark.parametrize(("tokens", "at_once"), [(None, 16), (128, 1), (383, 2), (384, 3), (128 * 40, 16)])
def test_no_more_play_at_once_than_fit(tmp_path: Path, tokens: int | None, at_once: int) -> None:
    """Waiting for memory would count towards a turn's time limit."""
    one = budgeted(tokens)
    context = runner._context(one, tmp_path, runner.check(one), Progress(quiet=True))
    assert context.rollouts.max_concurrent == at_once


def test_a_refused_budget_leaves_a_folder_for_the_corrected_one(tmp_path: Path) -> None:
    for tokens in (1, 127):  # found by the engine, found by the runner
        with pytest.raises(ConfigError, match="kv_memory_gb"):
            run(budgeted(tokens), tmp_path / "run")
        assert not any((tmp_path / "run").iterdir())
    (row,) = run(budgeted(128 * 16), tmp_path / "run")
    assert (row["preemptions"], row["evictions"]) == (0, 0)
    assert "preemptions" not in run(budgeted(None), tmp_path / "other")[0]


def test_metrics_tell_what_each_step_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engines: list[TorchEngine] = []

    def crowded(**options: Any) -> Rollouts:
        engines.append(options["engine"])
        return Rollouts(**{**options, "max_concurrent": 16})

    monkeypatch.setattr(runner, "Rollouts", crowded)
    rows = run(budgeted(200, steps=2, turn_tokens=60), tmp_path / "run")
    for key in ("preemptions", "evictions"):
        assert sum(row[key] for row in rows) > 0  # which step has them is a matter of timing
        assert sum(row[key] for row in rows) == getattr(engines[0].stats, key)
