"""Where an answer is read from: never from reasoning, never one of several that differ."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upswing.verify import verifier_from
from upswing.verify.text import read_answer, same_value


@pytest.mark.parametrize(
    ("place", "text", "read"),
    [
        ("whole", "  Paris\n", "Paris"),
        ("whole", "<think>Lima</think> Paris", "Paris"),
        ("whole", "Lima</think>Paris", "Paris"),  # the template opened it in the prompt
        ("whole", "<think>Lima</think>x</think>Paris", "Paris"),
        ("whole", "<think>so 8", None),
        ("whole", "done</think><think>so 8", None),
        ("whole", " ", None),
        ("whole", None, None),
        ("tag", "<think>maybe <answer>8</answer></think><answer>9</answer>", "9"),
        ("tag", "<think>so <answer>8</answer>", None),
        ("tag", "I do not know", None),
        ("tag", "<answer>A</answer> <answer>B</answer>", None),
        ("tag", "<answer>B</answer> <answer>B</answer>", None),
        ("tag", "<answer><answer>B</answer>", None),
        ("tag", "<answer>B", None),
        ("tag", "</answer>B<answer>", None),
        ("tag", "So <answer> B </answer>.", "B"),
        ("boxed", r"So \boxed{9}.", "9"),
        ("boxed", r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        ("boxed", r"\boxed{\{1,2\}}", r"\{1,2\}"),
        ("boxed", r"\boxed{\}}", r"\}"),
        ("boxed", r"\boxed {7}", "7"),
        ("boxed", r"\fbox{42}", "42"),
        ("boxed", r"\boxed{9} or \boxed{9}", "9"),
        ("boxed", r"\boxed{9} or \boxed{8}", None),
        ("boxed", r"So \boxed{9}. Final: \boxed{", None),
        ("boxed", r"\boxed{9} \boxed{}", None),
        ("boxed", r"\boxed{}", None),
        ("boxed", r"\boxed 9", None),
        ("boxed", r"\boxedx{9}", None),
        ("boxed", r"<think>\boxed{9}</think> I give up", None),
        ("boxed", "I mention 9 somewhere but give no final answer", None),
        ("boxed", r"\boxed{\boxed{9}}", r"\boxed{9}"),
    ],
)
def test_the_answer_is_read_where_the_protocol_says(place, text, read):
    assert read_answer(text, place) == read


@given(st.text(alphabet=r"\boxed{}<think>/answer ") | st.text(), st.sampled_from(["whole", "boxed", "tag"]))
def test_reading_never_fails_and_reads_nothing_but_what_was_written(text, place):
    read = read_answer(text, place)
    assert read is None or (read in text and read == read.strip())


def test_reading_is_linear():
    assert read_answer(r"\boxed{" * 50_000, "boxed") is None


@pytest.mark.parametrize(
    ("completion", "gold", "score"),
    [("<answer>Paris</answer>", "Paris", 1), ("<answer>Paris</answer>", "Lima", 0), ("I do not know", "Lima", 0)],
)
async def test_an_answer_in_the_prompt_is_nobodys(episode, completion, gold, score):
    """The prompt has `<answer> Lima </answer>` as its example; only what the agent said last is read."""
    said = verifier_from("choice", {"answer_in": "tag"})
    data = {"choices": ["Lima", "Paris"], "example": "<answer> Lima </answer>"}
    assert (await said(episode(completion, (gold,), data=data))).value == score


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (1, 1.0, True),
        (1, True, False),
        (0, False, False),
        (True, True, True),
        ([1.0, 2.0], [1, 2], True),
        ([1, 2], [2, 1], False),
        ((1, 2), [1, 2], True),
        ({"a": {"b": [1]}}, {"a": {"b": [True]}}, False),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True),
        ({"a": 1}, {"a": 1, "b": None}, False),
        (float("nan"), float("nan"), False),
        ("1", 1, False),
        (None, False, False),
    ],
)
def test_values_are_equal_as_json_means_it(a, b, same):
    assert same_value(a, b) is same and same_value(b, a) is same
