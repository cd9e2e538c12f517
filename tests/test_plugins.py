"""What a user names is found, or the line says what is there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from upswing.errors import ConfigError
from upswing.plugins import load_object

BUILTIN = {"task": "upswing.trajectory.types:Task", "score": "upswing.trajectory.types:Score"}


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], str]:
    monkeypatch.chdir(tmp_path)

    def writer(name: str, text: str) -> str:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return name

    return writer


def refusal(spec: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_object(spec, "verifier", BUILTIN)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_built_in_names():
    from upswing.trajectory.types import Task

    assert load_object("task", "verifier", BUILTIN) is Task


def test_unknown_names_list_what_there_is():
    assert "unknown verifier 'tsk'; did you mean 'task'? (allowed: score, task, or an import path" in refusal("tsk")


def test_a_file_is_loaded_once_and_keeps_the_identity_of_its_classes(write: Callable[[str, str], str]):
    write("sub/env_a.py", "from dataclasses import dataclass\n@dataclass\nclass Mine:\n    x: 'int' = 3\n")
    found = load_object("sub/env_a.py:Mine", "verifier", {})
    assert found().x == 3
    assert load_object("./sub/env_a.py:Mine", "verifier", {}) is found


def test_two_files_of_the_same_name_stay_apart(write: Callable[[str, str], str]):
    write("one/v.py", "def f(): return 1")
    write("two/v.py", "def f(): return 2")
    assert [load_object(f"{folder}/v.py:f", "verifier", {})() for folder in ("one", "two")] == [1, 2]


def test_a_package_in_the_current_directory_is_found(write: Callable[[str, str], str]):
    write("pkg_here_7/__init__.py", "")
    write("pkg_here_7/mod.py", "class Outer:\n    @staticmethod\n    def inner(): return 5")
    assert load_object("pkg_here_7.mod:Outer.inner", "verifier", {})() == 5


def test_installed_modules_are_found():
    assert load_object("json:dumps", "verifier", {})([1]) == "[1]"


def test_entry_points_are_names(write: Callable[[str, str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write("ext_pkg_7.py", "def check(): return 9")
    write("ext_pkg_7-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: ext-pkg-7\nVersion: 1.0\n")
    write(
        "ext_pkg_7-1.0.dist-info/entry_points.txt", "[upswing.verifier]\nfancy = ext_pkg_7:check\nbad = ext_pkg_7:no\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_object("fancy", "verifier", BUILTIN)() == 9
    assert "did you mean 'fancy'?" in refusal("fancyy")
    assert "verifier 'bad': its entry point ext_pkg_7:no failed: AttributeError" in refusal("bad")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("there.py:Chek", ["has no 'Chek'; did you mean 'Check'?", "(there: Check)"]),
        ("ther.py:Check", ["file 'ther.py' not found; did you mean 'there.py'?"]),
        ("broken.py:f", ["importing broken.py failed: NameError: name 'nope' is not defined (line 2)"]),
        ("syntax.py:f", ["SyntaxError", "line 1"]),
        ("needs.py:f", ["ModuleNotFoundError: No module named 'not_there_7'", "(line 1)"]),
        ("not_there_7.x:f", ["no module 'not_there_7' here or installed"]),
        ("os:path", ["that is a module"]),
        (":f", ["expected my_pkg.module:Name"]),
        ("mod:", ["expected my_pkg.module:Name"]),
    ],
)
def test_what_is_wrong_is_said_in_one_line(write: Callable[[str, str], str], spec: str, words: list[str]):
    write("there.py", "import json\nclass Check: pass\n_hidden = 1\n")
    write("broken.py", "x = 1\nnope\n")
    write("syntax.py", "def f(:\n")
    write("needs.py", "import not_there_7\n")
    message = refusal(spec)
    for word in words:
        assert word in message
