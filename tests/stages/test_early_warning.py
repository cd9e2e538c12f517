"""CFG-03: a run in which nothing can be learned says so loudly within its first steps, and stops if it is asked to."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from upswing.errors import UpswingError
from upswing.monitor.metrics import MetricsLog
from upswing.monitor.progress import Progress
from upswing.recipe import Recipe, recipe_from
from upswing.stages.runner import run_recipe
from upswing.view.run_folder import read_json_lines


def never(answer: str | None) -> float:
    return 0.0


def recipe(env: str, stop: bool, algorithm: str) -> Recipe:
    """Five steps of an untrained model, which does not come to an end within 16 tokens."""
    rl = {"stage": "rl", "algorithm": algorithm, "steps": 5, "tasks_per_step": 2, "group_size": 2, "eval_every": 0}
    return recipe_from(
        {
            "name": "cut",
            "model": "tiny",
            "env": env,
            "verifiers": ["tests.stages.test_early_warning:never"],
            "engine": {"max_slots": 8, "max_context": 128},
            "limits": {"turn_tokens": 16, "context_tokens": 128},
            "stages": [{**rl, "early_warning": {"stop": stop}}],
        }
    )


CUT, FLAT, EQUAL = "every trajectory is cut", "no group has a reward spread", "all rewards are equal"


@pytest.mark.parametrize(
    ("stop", "algorithm", "title"),
    [
        *((stop, "grpo", title) for stop in (False, True) for title in (CUT, FLAT)),
        *((True, algorithm, EQUAL) for algorithm in ("reinforce", "reinforce++", "remax", "ppo")),
    ],
)
def test_it_is_said_once_within_the_first_steps(
    stop: bool, algorithm: str, title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = title == CUT
    env = "lookup"
    if not cut:  # half of all tokens end a turn, and the second turn the episode
        env = "tests.stages.test_algorithms:TwoTurns"
        monkeypatch.setattr("upswing.models.load.stop_token_ids", lambda model, tokenizer: tuple(range(2, 900, 2)))
    heard = io.StringIO()
    log = Progress(Console(file=heard, width=400), quiet=True, json_lines=False)
    try:
        run_recipe(recipe(env, stop, algorithm), tmp_path, log=log)
    except UpswingError as error:
        assert stop and (not cut or "limits.turn_tokens (now 16)" in str(error))
    else:
        assert not stop
    rows = [row for row in MetricsLog(tmp_path).read("rl") if "reward" in row]
    assert len(rows) == (3 if stop else 5)
    assert all((row["truncated_frac"] == 1) is cut and row["zero_variance_frac"] == 1 for row in rows[:3])
    found = [row for row in read_json_lines(tmp_path / "findings.jsonl") if row["title"] == title]
    assert [(row["stage"], row["step"]) for row in found] == [("rl", 3)]
    assert heard.getvalue().count(f"{title}: ") == 1
