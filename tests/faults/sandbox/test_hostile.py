"""Every hostile program: contained, not passed, and without a trace in the next check."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from upswing.verify.sandbox import Sandbox, SandboxLimits

from .harness import Canaries, faults_of
from .programs import PROGRAMS, Hostile, table

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def canaries() -> Iterator[Canaries]:
    with Canaries() as made:
        yield made


@pytest.fixture(scope="module")
def sandbox(canaries: Canaries) -> Sandbox:
    return Sandbox()


@pytest.mark.parametrize("program", PROGRAMS, ids=[f"{one.kind}: {one.name}" for one in PROGRAMS])
async def test_a_hostile_program_is_contained(program: Hostile, sandbox: Sandbox, canaries: Canaries):
    assert await faults_of(sandbox, canaries, program) == []


async def test_the_canaries_would_tell(canaries: Canaries):
    """Without isolation the same program gets through, so the tests above can fail."""
    local = Sandbox(unsafe_local=True)
    attack = next(one for one in PROGRAMS if one.name == "the canary file")
    code = attack.code.replace("lambda: write(FILE), ", "")
    result = await local.run_python(canaries.prologue + code, limits=SandboxLimits(wall_s=5))
    assert b"ESCAPED" in result.stdout and canaries.secret.encode() in result.stdout
    await local.close()


def test_there_are_enough_of_them():
    assert len({one.name for one in PROGRAMS}) == len(PROGRAMS) >= 60


def test_the_table_in_the_docs_is_this_one():
    """On arm64 without two of its rows."""
    told = (ROOT / "docs" / "sandbox.md").read_text().splitlines()
    assert set(table().splitlines()) <= set(told)
    assert sum(line.endswith(" |") for line in told[told.index("## The hostile programs") :]) <= len(PROGRAMS) + 4
