"""What the README shows works as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import upswing
from upswing.monitor.progress import Progress

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_example_is_the_one_that_is_tested_and_short() -> None:
    [shown] = re.findall(r"<!-- example:start -->\n```python\n(.*?)\n```", README, re.DOTALL)
    assert shown == (ROOT / "tests" / "envs" / "own_example.py").read_text(encoding="utf-8").strip()
    assert len([line for line in shown.splitlines() if line.strip()]) < 30


def test_the_example_trains_from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [shown] = re.findall(r"<!-- example:start -->\n```python\n(.*?)\n```", README, re.DOTALL)
    [recipe] = re.findall(r"```yaml\n(# dice.yaml.*?)\n```", README, re.DOTALL)
    (tmp_path / "dice.py").write_text(shown, encoding="utf-8")
    (tmp_path / "dice.yaml").write_text(recipe, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    changes = ["model=tiny", "rl.steps=1", "rl.tasks_per_step=2", "rl.group_size=2", "limits.turn_tokens=16"]
    result = upswing.run_recipe(upswing.load_recipe("dice.yaml", changes), Path("runs/dice"), log=Progress(quiet=True))
    assert result.report.is_file()
    assert (tmp_path / "runs" / "dice" / "checkpoints" / "rl" / "final" / "config.json").is_file()


def test_every_recipe_and_document_named_is_there() -> None:
    for path in set(re.findall(r"(?:recipes|docs|bench)/[\w.]+\.(?:yaml|md|py)", README)):
        assert (ROOT / path).is_file(), path


def test_every_key_changed_on_a_command_line_exists() -> None:
    for recipe, changes in re.findall(r"upswing run (recipes/\w+\.yaml)((?: [\w.]+=\S+)*)", README):
        upswing.load_recipe(ROOT / recipe, changes.split())
