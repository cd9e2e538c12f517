"""`upswing eval` and `upswing report`: which checkpoints they mean, and what they refuse."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from upswing.cli.eval import checkpoints_of
from upswing.cli.main import app
from upswing.errors import ConfigError
from upswing.recipe import load_recipe


@pytest.fixture
def run(echo: Path) -> Path:
    """A run folder whose sft stage has finished and whose rl stage hasn't."""
    folder = echo.parent / "runs" / "one"
    (folder / "checkpoints" / "sft" / "final").mkdir(parents=True)
    (folder / "recipe.yaml").write_text(load_recipe(echo).dump())
    return folder


def upswing(*args: str | Path) -> Result:
    return CliRunner().invoke(app, list(map(str, args)))


def assert_refused(result: Result, *words: str) -> None:
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr


def test_the_last_finished_stage_is_meant_unless_others_are_named(run: Path):
    recipe = load_recipe(run)
    assert checkpoints_of(run, recipe, []) == {"sft": str(run / "checkpoints" / "sft" / "final")}
    assert checkpoints_of(run, recipe, ["base", "sft"])["base"] == "tiny"
    with pytest.raises(ConfigError, match=r"'rl' of .* hasn't finished yet"):
        checkpoints_of(run, recipe, ["rl"])
    with pytest.raises(ConfigError, match="did you mean 'sft'"):
        checkpoints_of(run, recipe, ["stf"])


def test_a_run_without_checkpoints_is_its_base_model(run: Path):
    (run / "checkpoints" / "sft" / "final").rmdir()
    assert checkpoints_of(run, load_recipe(run), []) == {"base": "tiny"}


def test_what_eval_refuses(run: Path, echo: Path):
    assert_refused(upswing("eval", "tiny"), "--recipe is needed", "upswing eval tiny --recipe recipes/demo.yaml")
    assert_refused(upswing("eval", "nothere"), "'nothere' is no run folder", "no model 'nothere'", "allowed: a folder")
    assert_refused(upswing("eval", "runs/noe"), "'runs/noe' is no run folder", "did you mean 'runs/one'?")
    assert_refused(upswing("eval", "tinny", "--recipe", echo), "no model 'tinny'", "did you mean 'tiny'?")
    assert_refused(upswing("eval", "tiny", "--recipe", echo, "--stage", "sft"), "--stage needs a run folder")
    assert_refused(upswing("eval", run, "--samples", "4"), "greedy samples are all alike")
    assert_refused(upswing("eval", run, "--split", "tset"), "did you mean 'test'?")
    assert_refused(upswing("eval", run, "--split", "test"), "no test tasks")
    assert_refused(upswing("eval", run, "--tasks", "0"), "allowed: 1 and more")
    assert_refused(upswing("eval", run, "--out", "no/where.json"), "no folder 'no'")
    assert_refused(upswing("eval", run, "--out", run), "is a folder")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("env.args.broken=true", "4 of 4 trajectories have no reward: 4 times OSError: the disk is gone"),
        ("verifiers=[echo_env.py:unable]", "2 of 2 trajectories have no reward: 2 times unable: "),
    ],
)
def test_an_evaluation_of_which_nothing_could_be_scored_says_why_and_fails(
    echo: Path, change: str, why: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "1000")
    module = Path("echo_env.py")
    module.write_text(module.read_text() + "\n\ndef unable(messages):\n    raise ZeroDivisionError('no oracle')\n")
    result = upswing("eval", "tiny", "--recipe", echo, change, "--tasks", "2", "--out", "found.json")
    assert result.exit_code == 1, result.output
    assert result.stderr.startswith(f"error: tiny: {why}") and result.stderr.count("\n") == 1
    assert why in result.stdout and '"problems": {' in Path("found.json").read_text()


def test_report_is_written_for_a_run_folder_and_refused_elsewhere(run: Path):
    result = upswing("report", run)
    assert result.exit_code == 0
    page = Path(result.stdout.strip())
    assert page == run / "report.html" and "<html" in page.read_text()
    assert_refused(upswing("report", run.parent / "won"), f"did you mean '{run}'?")
