"""`upswing run`: what it passes on, what it refuses, and how it ends. The stages themselves are tested end to end."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from upswing.cli.main import app
from upswing.errors import EnvironmentBroken, ModelNotFound
from upswing.recipe import Recipe, load_recipe
from upswing.stages.runner import check


@dataclass
class Runs:
    """Stands for `upswing.stages.runner`: it keeps the calls, and leaves a run folder as a real run does."""

    calls: list[tuple[Recipe, Path, bool]] = field(default_factory=list)
    ends_with: BaseException | None = None

    def run_recipe(
        self, recipe: Recipe, out: Path, *, resume: bool = False, log: Any = None, world: Any = None
    ) -> None:
        assert [task.id for task in world.sampled["train"]] == ["train-0", "train-1", "train-2"], "handed on"
        self.calls.append((recipe, out, resume))
        out.mkdir(parents=True, exist_ok=True)
        (out / "recipe.yaml").write_text(recipe.dump())
        if self.ends_with is not None:
            raise self.ends_with


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    made = Runs()
    module = ModuleType("upswing.stages.runner")
    module.run_recipe = made.run_recipe  # type: ignore[attr-defined]
    module.check = check  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "upswing.stages.runner", module)
    return made


def upswing(*args: str | Path) -> Result:
    return CliRunner().invoke(app, ["run", *map(str, args)])


def loading(command: list[str], *modules: str) -> subprocess.CompletedProcess[str]:
    """A process that at its end prints which of the modules were loaded."""
    code = (
        "import sys; from upswing.cli.main import main; sys.argv = ['upswing', *sys.argv[1:]]\n"
        f"try: main()\nfinally: print([m for m in {modules} if m in sys.modules])"
    )
    return subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True)


def assert_refused(result: Result, *words: str) -> None:
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr


def test_the_resolved_recipe_reaches_the_runner(echo: Path, runs: Runs):
    assert upswing(echo, "rl.steps=5", "--out", "here", "seed=3").exit_code == 0
    recipe, out, resume = runs.calls[0]
    assert recipe == load_recipe(echo, ["rl.steps=5", "seed=3"])
    assert (out, resume) == (Path("here"), False)


def test_the_default_folder_is_named_after_recipe_and_time(echo: Path, runs: Runs):
    assert upswing(echo).exit_code == 0
    out = runs.calls[0][1]
    assert out.parent == Path("runs") and out.name.startswith(f"echo-{time.strftime('%Y')}")


@pytest.mark.parametrize("override", ["rl.lrr=1", "env.args.wrod=x", "verifiers=[exact_mach]", "model="])
def test_bad_input_is_one_line_and_exit_code_2_before_anything_runs(echo: Path, runs: Runs, override: str):
    assert_refused(upswing(echo, override, "--out", "o"))
    assert not runs.calls and not Path("o").exists()


def test_a_missing_recipe_is_named_with_the_nearest(echo: Path, runs: Runs):
    assert_refused(upswing("ecko.yaml"), "did you mean 'echo.yaml'?")


def test_a_folder_that_is_no_run_is_refused_with_the_recipes_in_it(echo: Path, runs: Runs):
    Path("empty").mkdir()
    assert_refused(
        upswing("empty"), "'empty' is a folder, but no run folder (no recipe.yaml in it); give a recipe file"
    )
    assert_refused(upswing("."), "recipes in it: echo.yaml")


def test_a_recipe_that_is_refused_later_leaves_no_folder(echo: Path, runs: Runs, monkeypatch: pytest.MonkeyPatch):
    def refuse(recipe: Recipe, out: Path, **options: Any) -> None:
        raise ModelNotFound("not on the hub")

    monkeypatch.setattr(sys.modules["upswing.stages.runner"], "run_recipe", refuse)
    Path("mine").mkdir()
    assert_refused(upswing(echo, "--out", "o"), "not on the hub")
    assert_refused(upswing(echo, "--out", "mine"), "not on the hub")
    assert not Path("o").exists() and Path("mine").is_dir()


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["run", "echo.yaml", "model=smolm2-135m"], "did you mean 'smollm2-135m'?"),
        (["run", "echo.yaml", "model=./gone"], "no model './gone'"),
        (["run", "echo.yaml", "model=fake.gguf"], "not a readable GGUF file"),
        (["eval", "gone", "--recipe", "echo.yaml"], "no model 'gone'"),
        (["check", "echo.yaml", "model=./gone"], "no model './gone'"),
        (["check", "echo.yaml", "env.args.has_expert=false"], "has no scripted expert"),
    ],
)
def test_a_wrong_model_is_refused_before_torch_is_loaded(echo: Path, command: list[str], words: str):
    Path("fake.gguf").write_text("no model")
    done = loading(command, "torch", "transformers", "huggingface_hub")
    assert (done.returncode, done.stdout) == (2, "[]\n") and words in done.stderr
    assert done.stderr.count("\n") == 1 and not Path("runs").exists()


@pytest.mark.parametrize("command", ["run", "check", "plan"])
def test_a_wrong_recipe_is_refused_before_anything_heavy_is_loaded(echo: Path, command: str):
    Path("wrong").mkdir()
    Path("wrong/recipe.yaml").write_text(echo.read_text() + "sede: 1\n")
    done = loading([command, "wrong"], "torch", "transformers", "numpy", "rich")
    assert (done.returncode, done.stdout) == (2, "[]\n") and "did you mean 'seed'" in done.stderr


def test_a_folder_in_use_is_refused_without_resume(echo: Path, runs: Runs):
    upswing(echo, "--out", "o")
    assert_refused(upswing(echo, "--out", "o"), "isn't empty", "--resume")
    assert_refused(upswing(echo, "--out", echo), "is a file")
    assert_refused(upswing(echo, "--out", f"{echo}/below"), f"can't make the folder '{echo}/below' (Not a directory)")
    assert len(runs.calls) == 1


def test_resume_goes_on_with_the_same_recipe_only(echo: Path, runs: Runs):
    upswing(echo, "--out", "o")
    assert upswing(echo, "--out", "o", "--resume").exit_code == 0
    assert runs.calls[1][2] is True
    assert_refused(
        upswing(echo, "rl.lr=3e-4", "env.args.word=x", "--out", "o", "--resume"),
        "stages.1.lr (2e-05 there, 0.0003 now)",
        "env.args.word (nothing there, x now)",
        "upswing run o --resume",
    )
    assert len(runs.calls) == 2


def test_a_run_folder_can_be_resumed_by_itself(echo: Path, runs: Runs):
    upswing(echo, "seed=4", "--out", "o")
    assert upswing("o", "--resume").exit_code == 0
    assert runs.calls[1] == (runs.calls[0][0], Path("o"), True)


def test_resume_needs_to_know_what(echo: Path, runs: Runs):
    assert_refused(upswing(echo, "--resume"), "--out")
    Path("other").mkdir()
    Path("other/file").touch()
    assert_refused(upswing(echo, "--resume", "--out", "other"), "isn't a run folder")
    assert upswing(echo, "--resume", "--out", "new").exit_code == 0  # stopped before it wrote anything


def test_dry_run_prints_the_recipe_and_runs_nothing(echo: Path, runs: Runs):
    result = upswing(echo, "seed=9", "--out", "o", "--dry-run")
    assert result.exit_code == 0 and not runs.calls and not Path("o").exists()
    Path("printed.yaml").write_text(result.stdout)
    assert load_recipe("printed.yaml") == load_recipe(echo, ["seed=9"])


def test_ctrl_c_says_how_to_go_on(echo: Path, runs: Runs):
    runs.ends_with = KeyboardInterrupt()
    result = upswing(echo, "seed=1", "--out", "o")
    assert result.exit_code == 130
    assert result.stderr == "interrupted; to go on: upswing run o --resume\n"


def test_a_missing_model_is_bad_input_and_other_failures_are_not(echo: Path, runs: Runs):
    runs.ends_with = ModelNotFound("no model 'x';\n did you mean 'tiny'?")
    assert_refused(upswing(echo, "--out", "a"), "error: no model 'x'; did you mean 'tiny'?")
    runs.ends_with = EnvironmentBroken("gone")
    result = upswing(echo, "--out", "b")
    assert (result.exit_code, result.stderr) == (1, "error: EnvironmentBroken: gone\n")


def test_a_bug_keeps_its_traceback(echo: Path, runs: Runs):
    runs.ends_with = ZeroDivisionError("bug")
    assert isinstance(upswing(echo, "--out", "a").exception, ZeroDivisionError)


def test_the_script_is_installed_and_its_help_loads_nothing_heavy():
    done = loading(["--help"], "torch", "transformers", "numpy", "rich")
    assert "Commands:" in done.stdout and done.stdout.strip().endswith("[]")


def test_version_and_unknown_options():
    from upswing import __name__ as package

    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0 and result.stdout.startswith(package)
    assert CliRunner().invoke(app, ["run", "--nope"]).exit_code == 2
    assert CliRunner().invoke(app, ["nope"]).exit_code == 2


def test_dry_run_names_a_model_that_is_not_there(echo: Path, runs: Runs):
    result = upswing(echo, "model=tinny", "--dry-run")
    assert result.exit_code == 2
    assert "did you mean 'tiny'?" in result.output
    assert not runs.calls
