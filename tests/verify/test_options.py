"""Options by their hints: what recipes give verifiers and environments is checked when they are made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import pytest
from pydantic import Field

from upswing.envs import ToolEnv
from upswing.errors import ConfigError
from upswing.verify import verifier_from
from upswing.verify.options import REQUIRED, Count, Options, Share, options_of


@pytest.mark.parametrize(
    ("name", "args", "words"),
    [
        ("length_penalty", {}, "needs the argument 'free'"),
        ("length_penalty", {"free": 5, "limit": 5}, "limit: got 5; allowed: above free (5)"),
        ("call_penalty", {"free": 0.5, "limit": 5}, "free: got 0.5; allowed: a valid integer"),
        ("repetition_penalty", {"ngram": 0}, "ngram: got 0"),
        ("tool_calls", {"low": 3, "high": -3}, "high: got -3"),
        ("tool_calls", {"partial": "yes"}, "partial: got 'yes'"),
        ("state", {"ignore": "orders"}, "ignore: got 'orders'; allowed: a list"),
        ("retrieval_hit", {"tools": [1]}, "tools.0: got 1"),
        ("regex", {"pattern": "("}, "pattern: got '(', no regular expression"),
        ("regex", {"timeout_s": 0}, "timeout_s: got 0"),
        ("json_schema", {"schema": {"type": "objekt"}}, "schema: no JSON schema"),
        ("json_schema", {"schema": 3}, "no JSON schema"),
        ("choice", {"answer_in": "last"}, "answer_in: got 'last'"),
        ("numeric", {"tolerance": -1}, "tolerance: got -1"),
        ("numeric", {"tolerance": float("nan")}, "tolerance: got nan"),
        ("numeric", {"relative": float("inf")}, "relative: got inf"),
        ("numeric", {"tolerance": True}, "tolerance: got True"),
        ("numeric", {"tolerance": "1"}, "tolerance: got '1'"),
        ("numeric", {"decimal": ";"}, "decimal: got ';'; allowed: ., ,"),
        ("numeric", {"answer_in": "box"}, "got 'box'; allowed: whole, boxed, tag; did you mean 'boxed'?"),
        ("numeric", {"units": {"mile": "m"}}, "units.mile: got 'm'"),
        ("numeric", {"tolerence": 1}, "no argument 'tolerence'"),
    ],
)
def test_wrong_arguments_are_named_at_load(name, args, words):
    with pytest.raises(ConfigError, match=f"verifier '{name}'") as caught:
        verifier_from(name, args)
    assert words in str(caught.value) and "\n" not in str(caught.value)


class Maze(ToolEnv):
    name = "maze"
    size: Annotated[int, Field(ge=2, le=9)] = REQUIRED
    doors: Sequence[str] = ()
    luck: Share | None = None
    level: Literal["easy", "hard"] = "easy"
    limit: Count = 3
    seen: ClassVar[int] = 0
    _at = 0

    def enough_turns(self) -> int:
        return 2 * self.size


def test_an_environments_hinted_attributes_are_its_options():
    assert {"size", "doors", "level", "max_turns"} < set(options_of(Maze)) and not {"seen", "_at"} & set(
        options_of(Maze)
    )
    made = Maze(size=4, doors=["a"], limit=None)
    assert (made.size, made.doors, made.limit, made.max_turns) == (4, ["a"], 3, 8)
    assert Maze(size=4, max_turns=5).max_turns == 5 and Maze.max_turns == 6


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({}, "environment 'maze' needs the argument 'size'"),
        ({"size": 1}, "environment 'maze': size: got 1; allowed: greater than or equal to 2"),
        ({"size": 2, "luck": True}, "luck: got True"),
        ({"size": 2, "doors": "a"}, "doors: got 'a'; allowed: a list"),
        ({"size": 2, "level": "hart"}, "level: got 'hart'; allowed: easy, hard; did you mean 'hard'?"),
        ({"size": 2, "seen": 3}, "no argument 'seen'"),
        ({"sise": 2}, "no argument 'sise'; allowed: "),
    ],
)
def test_what_is_no_option_or_no_value_of_one_is_said(args, words):
    with pytest.raises(ConfigError) as caught:
        Maze(**args)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_wrong_class_attribute_is_said_too():
    class Wrong(Maze):
        size = 2
        limit = 0

    with pytest.raises(ConfigError, match="limit: got 0"):
        Wrong()


def test_what_is_only_declared_or_not_there_yet_is_the_classes_own_business():
    class Mine(ToolEnv):
        board: list[str]
        left: list[str] = None  # type: ignore[assignment]

    assert Mine().left is None and Mine(left=["a"]).left == ["a"]
    with pytest.raises(ConfigError, match="no argument 'board'"):
        Mine(board=["a"])
    with pytest.raises(ConfigError, match="left: got 3; allowed: a valid list"):
        Mine(left=3)


def test_hints_that_only_a_type_checker_can_read_are_no_options():
    class Mine(ToolEnv):
        board: Unknown = None  # type: ignore[name-defined]  # noqa: F821

    Mine()
    with pytest.raises(ConfigError, match="no argument 'board'"):
        Mine(board=1)


def test_values_stay_what_they_were():
    @dataclass(frozen=True, kw_only=True)
    class Mine(Options):
        share: Share = 1
        texts: Sequence[str] = ()

    given = ["a"]
    assert Mine(texts=given).texts is given and type(Mine().share) is int
