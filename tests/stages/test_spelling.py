"""Names that demonstrations write with other tokens than they were read in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from upswing.stages import sft
from upswing.stages.spelling import LEAST, respelt
from upswing.trajectory.types import Branch

from .test_demonstrations import demonstrated

Piece = tuple[str, bool]


def branch(pieces: list[Piece], ids: dict[str, int]) -> Branch:
    count = len(pieces)
    return Branch(
        tokens=np.array([ids.setdefault(text, len(ids)) for text, _ in pieces], np.int32),
        sampled=np.array([mine for _, mine in pieces]),
        engine_logprobs=np.full(count, np.nan, np.float32),
        policy_version=np.full(count, -1, np.int32),
        turn=np.zeros(count, np.int16),
    )


ASKED = [("Which", False), (" borders", False), (" Norway", False), ("?", False), ("<search>", True)]
SPELT = [("Nor", True), ("way", True), (" borders", True)]
COPIED = [(" Norway", True), (" borders", True)]


def said(*turns: list[Piece], times: int = LEAST) -> str:
    ids: dict[str, int] = {}
    branches = [branch([*ASKED, *turn], ids) for turn in turns for _ in range(times)]
    texts = {number: text for text, number in ids.items()}
    return respelt(branches, lambda tokens: "".join(texts[token] for token in tokens))


def test_names_behind_a_tag_are_said_with_both_ways_of_writing_them() -> None:
    assert said(SPELT).startswith("100% of the names") and "' Norway' is read, 'Nor|way' written" in said(SPELT)
    assert said(SPELT, COPIED).startswith("50% ")


@pytest.mark.parametrize(
    "turns",
    [
        [COPIED],
        [[("Nor", False), ("way", False), (":", False), *SPELT]],  # a result spelt it just so
        [SPELT, COPIED, COPIED, COPIED, COPIED],  # one in five
        [[(" Sweden", True)]],  # nothing is repeated
        [[(" bor", True), ("ders", True)]],  # no name
        [[]],
    ],
)
def test_copies_token_by_token_are_silent(turns: list[list[Piece]]) -> None:
    assert said(*turns) == ""


def test_a_token_is_decoded_once() -> None:
    ids: dict[str, int] = {}
    branches = [branch([*ASKED, *SPELT], ids)] * 3
    asked = list[int]()
    respelt(branches, lambda tokens: asked.extend(tokens) or "x")  # type: ignore[func-returns-value]
    assert sorted(asked) == sorted(ids.values())


def test_sft_says_it_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sft, "respelt", lambda branches, decode: f"{len(branches)} of them")
    demonstrated(tmp_path)
    assert "sft: 16 of them. A small model then learns to spell" in (tmp_path / "events.log").read_text()


def test_a_few_demonstrations_say_nothing() -> None:
    assert said(SPELT, times=LEAST - 1) == ""
    assert respelt([], lambda tokens: "") == ""
