"""The table in docs/engine.md says what the code says."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from upswing.engine.base import NEEDED, Capabilities
from upswing.engine.openai import OpenAIEngine
from upswing.engine.sglang import SglangEngine
from upswing.engine.torch import TorchEngine
from upswing.engine.vllm import VllmEngine

PAGE = (Path(__file__).parents[2] / "docs/engine.md").read_text(encoding="utf-8")
ENGINES = {
    "torch": TorchEngine.capabilities,
    "vllm": VllmEngine.best,
    "sglang": SglangEngine.best,
    "openai": OpenAIEngine.best,
}


def test_the_table_has_every_capability_of_every_engine() -> None:
    (head, *rows) = [
        [cell.strip(" `*") for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("|")
    ][: 2 + len(fields(Capabilities))]
    assert head[1:] == list(ENGINES)
    told = {cells[0]: cells[1:] for cells in rows[1:]}
    code = {
        field.name: ["yes" if getattr(one, field.name) else "no" for one in ENGINES.values()]
        for field in fields(Capabilities)
    }
    assert told == code


def test_what_training_needs_is_marked() -> None:
    assert set(re.findall(r"^\| \*\*`(\w+)`\*\*", PAGE, re.M)) == set(NEEDED)


@pytest.mark.parametrize("name", NEEDED)
def test_each_is_missed_by_name(name: str) -> None:
    assert Capabilities(**{name: False}).missing() == (name,)
    assert Capabilities(prefix_cache=False, cancel=False, seeds=False).missing() == ()
