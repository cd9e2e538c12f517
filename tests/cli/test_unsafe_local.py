"""`--unsafe-local` reaches whatever runs programs, and is refused where nothing does."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from upswing.cli.common import recipe_of
from upswing.cli.main import app
from upswing.errors import ConfigError


def recipe(folder: Path, env: str, verifier: str) -> Path:
    path = folder / "r.yaml"
    path.write_text(
        f"name: r\nmodel: tiny\nenv: {env}\nverifiers: [f1, {verifier}]\n"
        "stages: [{stage: rl, steps: 1, eval_every: 0}]\n"
    )
    return path


def test_it_reaches_environment_and_verifier(tmp_path: Path) -> None:
    found = recipe_of(recipe(tmp_path, "code", "code"), [], unsafe_local=True)
    assert found.env.args["unsafe_local"] is True
    assert [one.args.get("unsafe_local") for one in found.verifiers] == [None, True]
    assert "unsafe_local" not in recipe_of(tmp_path / "r.yaml", []).env.args


def test_where_nothing_runs_programs_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--unsafe-local changes nothing here"):
        recipe_of(recipe(tmp_path, "lookup", "strict_match"), [], unsafe_local=True)


@pytest.mark.parametrize("verb", ["run", "eval", "play", "audit"])
def test_every_verb_that_plays_has_it(verb: str) -> None:
    assert "--unsafe-local" in CliRunner().invoke(app, [verb, "--help"]).output
