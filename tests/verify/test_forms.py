"""Choices, JSON and patterns."""

import asyncio
import time

import pytest

from upswing.verify import verifier_from


async def judged(name, args, episode):
    return (await verifier_from(name, args)(episode)).value


PETS, SWAPPED = {"choices": ["cat", "dog", "a cat"]}, {"choices": {"A": "B", "B": "A"}}


@pytest.mark.parametrize("data", [{}, PETS])
@pytest.mark.parametrize(
    "answer", ["B", "b", "(B)", "B.", "B)", "**B**", "The answer is B", "Answer: B.", "Option (B)"]
)
async def test_the_right_letter(episode, data, answer):
    assert await judged("choice", {}, episode(answer, ("B",), data=data)) == 1


@pytest.mark.parametrize("answer", ["dog", "Dog.", "B. dog", "(B) dog", "B: Dog", "the answer is dog"])
@pytest.mark.parametrize("gold", ["B", "dog"])
async def test_the_right_text(episode, answer, gold):
    assert await judged("choice", {}, episode(answer, (gold,), data=PETS)) == 1


@pytest.mark.parametrize("data", [{}, PETS])
@pytest.mark.parametrize(
    "answer",
    # В: Cyrillic
    [
        "A",
        "A or B or C",
        "A or B",
        "B or C",
        "A, B",
        "A B",
        "B B",
        "AB",
        "not B",
        "B cat",
        "B, not A",
        "I think B",
        "В",
    ],
)
async def test_anything_else_is_wrong(episode, data, answer):
    assert await judged("choice", {}, episode(answer, ("B",), data=data)) == 0


@pytest.mark.parametrize("answer", ["All of A, B, C", "D", "a cat", "", None, "<think>B</think>"])
async def test_another_choice_or_none_is_wrong(episode, answer):
    assert await judged("choice", {}, episode(answer, ("B",), data=PETS)) == 0


@pytest.mark.parametrize(
    ("choices", "gold", "answer", "score"),
    [
        (["...", "b"], "A", None, 0),
        (["...", "b"], "A", "...", 0),
        (["", "b"], "A", "", 0),
        (["...", "b"], "A", "A", 1),
        ({"1": "cat", "2": "dog"}, "2", "2", 1),
        ({"1": "cat", "2": "dog"}, "2", "(2) dog", 1),
        ({"1": "cat", "2": "dog"}, "2", "1", 0),
        (["1", "2", "3"], "B", "2", 1),
        (["1", "2", "3"], "2", "B", 1),
        (["x", "y"], "x", "X", 1),
        (["x", "y"], "x", "y", 0),
    ],
)
async def test_labels_and_texts_of_any_kind(episode, choices, gold, answer, score):
    assert await judged("choice", {}, episode(answer, (gold,), data={"choices": choices})) == score


async def test_a_letter_is_a_letter_and_a_text_that_starts_with_one_is_a_text(episode):
    assert await judged("choice", {}, episode("B", ("B",), data=SWAPPED)) == 1
    assert await judged("choice", {}, episode("A", ("B",), data=SWAPPED)) == 0
    assert await judged("choice", {}, episode("a cat", ("C",), data=PETS)) == 1
    assert await judged("choice", {}, episode("a cat", ("A",), data=PETS)) == 0


@pytest.mark.parametrize(("gold", "data"), [(("bird",), PETS), (("D",), PETS), ((), PETS), (("dog",), {})])
async def test_a_gold_that_is_no_choice_can_not_be_scored(episode, gold, data):
    assert await judged("choice", {}, episode("B", gold, data=data)) is None


SCHEMA = {
    "type": "object",
    "properties": {"w": {"type": "integer"}, "tag": {"type": "string", "pattern": "^(a+)+$"}},
    "required": ["w"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ('{"w": 7}', 1),
        (' {"w": 7, "tag": "aa"}\n', 1),
        ('{"w": 7.0}', 1),  # an integer, for JSON Schema
        ('{"w": true}', 0),
        ('{"w": "7"}', 0),
        ('{"w": 7, "zzz": 1}', 0),
        ("{}", 0),
        ('{"w": 1, "w": 7}', 0),
        ('{"w": 7} {"w": 7}', 0),
        ('```json\n{"w": 7}\n```', 0),
        ("{'w': 7}", 0),
        ('{"w": NaN}', 0),
        ('{"w": 1e999}', 0),
        ("[" * 100_000, 0),
        ('{"w": ' + "9" * 10_000 + "}", 0),
        ("", 0),
        (None, 0),
        ('<think>{"w": 7}</think>', 0),
    ],
)
async def test_json_that_fits_a_schema(episode, answer, score):
    assert await judged("json_schema", {"schema": SCHEMA}, episode(answer)) == score


@pytest.mark.parametrize(
    ("answer", "score"),
    [("0.3", 1), ("0.7", 1), ("3", 1), ("1e2", 1), ("0.35", 0), ('"\\ud800"', 0), ('"\\ud83d\\ude00"', 1)],
)
async def test_decimals_are_exact_and_half_a_character_is_none(episode, answer, score):
    schema = {"type": ["number", "string"], "multipleOf": 0.1}
    assert await judged("json_schema", {"schema": schema}, episode(answer)) == score


async def test_a_schema_comes_from_the_task_or_there_is_no_score(episode):
    assert await judged("json_schema", {}, episode('{"w": 7}', data={"schema": SCHEMA})) == 1
    assert await judged("json_schema", {}, episode('{"w": 7}', data={})) is None
    assert await judged("json_schema", {}, episode('{"w": 7}', data={"schema": {"type": "objekt"}})) is None
    remote = {"$ref": "https://example.com/schema.json"}
    assert await judged("json_schema", {}, episode('{"w": 7}', data={"schema": remote})) is None


@pytest.mark.parametrize(
    ("pattern", "answer", "score"),
    [
        (r"[A-Z]{2}\d+", "AB12", 1),
        (r"[A-Z]{2}\d+", " AB12 ", 1),
        (r"[A-Z]{2}\d+", "AB12x", 0),
        (r"[A-Z]{2}\d+", "my AB12", 0),
        (r"a|ab", "ab", 1),
        (r"a$", "a\nb", 0),
        (r".*", "", 0),  # no answer is no match
        (r".*", None, 0),
    ],
)
async def test_patterns_match_the_whole_answer(episode, pattern, answer, score):
    assert await judged("regex", {"pattern": pattern}, episode(answer)) == score


@pytest.mark.parametrize(
    ("name", "args", "data", "answer"),
    [
        ("regex", {"pattern": "(a+)+b"}, {}, "a" * 60),
        ("regex", {}, {"pattern": "(a|aa)+b"}, "a" * 60),
        ("json_schema", {"schema": SCHEMA}, {}, '{"w": 7, "tag": "' + "a" * 60 + '!"}'),
    ],
)
async def test_endless_backtracking_is_wrong_and_the_next_one_is_judged(episode, name, args, data, answer):
    started = time.perf_counter()
    score = await verifier_from(name, {**args, "timeout_s": 0.3})(episode(answer, data=data))
    assert score.value == 0 and "no verdict within 0.3 s" in score.reason and time.perf_counter() - started < 5
    good = verifier_from("regex", {"pattern": "a+"})
    assert (await good(episode("aaa"))).value == 1


async def test_answers_that_hang_cost_the_others_nothing(episode):
    """Seven that hang need longer than a verifier may take; those that wait behind them are judged all the same."""
    check = verifier_from("regex", {"pattern": "(a+)+b", "timeout_s": 0.2}, timeout_s=0.4)
    answers = ["a" * 60] * 7 + ["ab"] * 3
    scores = await asyncio.gather(*(check(episode(answer)) for answer in answers))
    assert [score.value for score in scores] == [0.0] * 7 + [1.0] * 3


async def test_a_task_without_a_pattern_can_not_be_scored(episode):
    assert await judged("regex", {}, episode("a", data={})) is None
    assert await judged("regex", {}, episode("a", data={"pattern": "("})) is None
