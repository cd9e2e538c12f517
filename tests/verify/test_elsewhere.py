"""Verifiers of other layers are called by name like the others."""

from __future__ import annotations

import pytest

from upswing.verify.functions import ELSEWHERE, verifier_from


@pytest.mark.parametrize("name", [name for name in ELSEWHERE if name != "trl"])
def test_they_are_found_by_name(name: str) -> None:
    assert verifier_from(name).name == name


def test_trl_reward_functions_are_found_by_name(tmp_path) -> None:
    path = tmp_path / "rewards.py"
    path.write_text("def short(completions, **_):\n    return [float(len(c) < 10) for c in completions]\n")
    assert verifier_from("trl", {"function": f"{path}:short"}).name == "trl"
