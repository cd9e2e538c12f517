"""A run whose chat template would drop the results of its tools doesn't begin."""

from __future__ import annotations

from pathlib import Path

import pytest

from upswing.envs.lookup import Lookup
from upswing.errors import ConfigError
from upswing.models import tiny
from upswing.monitor.progress import Progress
from upswing.recipe import recipe_from
from upswing.stages.runner import eval_checkpoint, run_recipe

TEMPLATES = Path(__file__).parents[1] / "templates"
TEXT = {
    "name": "t",
    "model": "tiny",
    "env": "lookup",
    "verifiers": ["strict_match"],
    "limits": {"turn_tokens": 16, "context_tokens": 512},
    "stages": [{"stage": "eval", "tasks": 2}],
}


def test_nothing_is_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny, "CHAT_TEMPLATE", (TEMPLATES / "zephyr.jinja").read_text())
    asked, tasks = [], Lookup.tasks
    monkeypatch.setattr(Lookup, "tasks", lambda self, *of: asked.append(of) or tasks(self, *of))
    recipe, log = recipe_from(TEXT), Progress(quiet=True)
    with pytest.raises(ConfigError, match="leaves out what 'tool' messages say; set chat_template"):
        run_recipe(recipe, tmp_path / "run", log=log)
    assert not list((tmp_path / "run").rglob("*")), "the remedy can be tried in the same folder"
    assert len(asked) == 1, "a task that was looked at is at hand: it may have been dear"
    with pytest.raises(ConfigError, match="leaves out what 'tool' messages say"):
        eval_checkpoint(recipe, "tiny", split="test", tasks=2, greedy=True, samples=1, log=log)
