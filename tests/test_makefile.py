"""What `make` installs for the demo is what the demo needs, and tests add the rest."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MODULES = {
    "math-verify": "math_verify", "reasoning-gym": "reasoning_gym", "langchain-openai": "langchain_openai",
    "pytest-asyncio": "pytest_asyncio", "pytest-timeout": "pytest_timeout", "import-linter": "importlinter",
}  # fmt: skip

CHECK = """
import sys
sys.modules.update(dict.fromkeys(sys.argv[1].split(",")))  # None: as if it weren't installed
from upswing.recipe import load_recipe
from upswing.world import preflight
world = preflight(load_recipe("recipes/demo.yaml"))
next(iter(world.tasks("train", 0)))
from upswing.monitor.progress import Progress
from upswing.stages import runner
from upswing.view import report
"""


def commands(target: str) -> list[str]:
    """What `make target` does in a fresh clone."""
    if shutil.which("make") is None:
        pytest.skip("there is no make")
    done = subprocess.run(["make", "-n", "-B", target], cwd=ROOT, capture_output=True, text=True, check=True)
    return [line for line in done.stdout.splitlines() if "pip install" in line or "/bin/" in line]


def extras(lines: list[str]) -> list[set[str]]:
    return [set(found.split(",")) for line in lines for found in re.findall(r"-e '\.\[(.*?)\]'", line)]


def test_the_demo_installs_only_what_it_needs() -> None:
    assert extras(commands("demo")) == extras(commands("setup")) == [{"search"}]


@pytest.mark.parametrize("target", ["test", "check"])
def test_tests_and_checks_add_what_developing_needs(target: str) -> None:
    assert extras(commands(target)) == [{"search"}, {"search", "lora", "dev"}]


def test_the_demo_runs_without_the_other_extras() -> None:
    names = {re.split(r"[\[>=<]", one)[0] for extra, all in PROJECT["optional-dependencies"].items() for one in all
             if extra != "search"} - {"upswing"}  # fmt: skip
    absent = [MODULES.get(name, name) for name in names if name not in ("types-PyYAML", "httpx", "psutil")]
    command = [sys.executable, "-c", CHECK, ",".join(absent)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
