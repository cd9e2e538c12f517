"""What a stage's watch is told about it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from upswing.envs.lookup import Lookup
from upswing.stages.guard import Guard

from .test_algorithms import TwoTurns, recipe


@pytest.mark.parametrize(("env", "tools"), [(Lookup(), True), (TwoTurns(), None)])
def test_the_watch_knows_whether_there_are_tools(env: Any, tools: bool | None, tmp_path: Path) -> None:
    """Without that, an agent that never calls one looks like one that has none."""
    one, rubric = recipe({}), SimpleNamespace(weights={"even": 1.0})
    context: Any = SimpleNamespace(recipe=one, make_env=lambda: env, rollouts=SimpleNamespace(rubric=rubric))
    facts = Guard(context, one.stages[0], tmp_path)._watch.history.facts  # type: ignore[arg-type]
    assert facts.get("tools", 0) > 0 if tools else "tools" not in facts
    assert facts["weights"] == {"even": 1.0} and facts["turn_tokens"] == 32
