"""Scores of short answers against published and hand-worked values."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upswing.trajectory.types import Outcome, ToolCall, ToolRecord
from upswing.verify.qa import exact_match, f1, format_valid, normalize, strict_match


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("The  Eiffel-Tower, in\tParis!", "eiffeltower in paris"),
        ("An apple a day", "apple day"),
        ("Theatre and a", "theatre and"),
        (".be", "be"),
        ("Cafe\u0301", "caf\u00e9"),
        ("a the", ""),
    ],
)
def test_the_squad_normaliser(text, result):
    assert normalize(text) == result


@given(st.text())
def test_normalising_twice_changes_nothing_more_without_articles(text):
    once = normalize(text)
    assert once == " ".join(once.split())


@pytest.mark.parametrize(
    ("answer", "gold", "strict", "exact"),
    [
        ("Paris", ["Paris"], 1, 1),
        (" Paris\n", ["Paris"], 1, 1),
        ("paris", ["Paris"], 0, 1),
        (".be", ["be"], 0, 1),
        (".Paris", ["Paris"], 0, 1),
        ("be", [".be"], 0, 1),
        ("The Hague", ["Hague"], 0, 1),
        ("A or B or C", ["B"], 0, 0),
        ("Lima", ["Paris", "Lima"], 1, 1),
        ("Paris, Lima", ["Paris", "Lima"], 0, 0),
        ("", ["Paris"], 0, 0),
        (None, ["Paris"], 0, 0),
        ("!", ["?"], 0, 0),
        ("?", ["?"], 1, 1),
        ("Zu\u0308rich", ["Z\u00fcrich"], 1, 1),
        ("New  York", ["New York"], 0, 1),
        ("P", "Paris", 0, 0),
        ("Paris", "Paris", 1, 1),
    ],
)
def test_strict_and_normalised_matches(answer, gold, strict, exact):
    assert (strict_match(answer, gold), exact_match(answer, gold)) == (strict, exact)


@pytest.mark.parametrize(
    ("answer", "gold", "value"),
    [
        ("Paris", ["Paris"], 1.0),
        ("the city of Paris", ["Paris"], 0.5),  # precision 1/3, recall 1
        ("Paris Paris", ["Paris"], 2 / 3),
        ("New York City", ["York", "New York"], 0.8),
        ("Lima", ["Paris"], 0.0),
        ("yes it is", ["yes"], 0.0),
        ("no", ["no way"], 0.0),
        ("Yes.", ["yes"], 1.0),
        ("", ["Paris"], 0.0),
        ("the", ["Paris"], 0.0),
        (None, ["Paris"], 0.0),
        ("the", ["an"], 0.0),
    ],
)
def test_token_f1(answer, gold, value):
    assert f1(answer, gold) == pytest.approx(value)


@pytest.mark.parametrize("check", [strict_match, exact_match, f1])
@pytest.mark.parametrize("gold", [[], [""], [" \n"]])
@pytest.mark.parametrize("answer", ["Paris", "", None])
def test_without_an_accepted_answer_there_is_no_score(check, gold, answer):
    assert check(answer, gold) is None


@given(st.text(), st.text())
def test_a_strict_match_is_also_a_lenient_one(answer, gold):
    if strict_match(answer, [gold]) == 1:
        assert exact_match(answer, [gold]) == 1 and f1(answer, [gold]) == 1


def record(ok=True, result=""):
    return ToolRecord(call=ToolCall(name="f"), result=result, ok=ok, turn=0)


@pytest.mark.parametrize(
    ("outcome", "answer", "records", "state", "valid"),
    [
        (Outcome.COMPLETED, "x", [], {}, 1),
        (Outcome.COMPLETED, "x", [record()], {"invalid_calls": 0}, 1),
        (Outcome.COMPLETED, "x", [record(False, "Error: ValueError: boom")], {}, 1),
        (Outcome.COMPLETED, "x", [record(False, "Invalid call: no")], {}, 0),
        (Outcome.COMPLETED, "x", [], {"invalid_calls": 1}, 0),
        (Outcome.COMPLETED, None, [], {}, 0),
        (Outcome.COMPLETED, " ", [], {}, 0),
        (Outcome.TRUNCATED, "x", [], {}, 0),
        (Outcome.TRUNCATED, None, [], {}, 0),
    ],
)
def test_format_validity(outcome, answer, records, state, valid):
    assert format_valid(outcome, answer, records, state) == valid
