"""The pieces of the report: escaping, ticks, figures and token texts."""

from __future__ import annotations

import itertools
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upswing.trajectory.types import Task
from upswing.view.charts import Series, line_chart, match_figure, ticks
from upswing.view.curves import points
from upswing.view.examples import example_from, token_texts
from upswing.view.html import Html, escape, h
from upswing.view.text import difference, interval, number

from .sample import branch_of, decode, trajectory_of


@given(st.text())
def test_no_text_gets_out_of_an_element_or_an_attribute(text):
    element = h("p", text, title=text)
    assert element.count("<") == 2 and element.count('"') == 2


def test_html_is_not_escaped_twice_and_attributes_follow_their_rules():
    assert h("p", h("b", "a&b"), None, class_="x", hidden=True, id=None, data_x=0) == (
        '<p class="x" hidden data-x="0"><b>a&amp;b</b></p>'
    )
    assert h("line", x1=1) == '<line x1="1"/>' and h("meta", charset="utf-8") == '<meta charset="utf-8">'
    assert escape(Html("<b>")) == "<b>" and escape("a\0b") == "a\ufffdb"


@given(st.lists(st.integers(0, 255), max_size=40))
def test_bytes_that_are_no_text_still_give_every_token_its_place(tokens):
    """A model may sample invalid UTF-8: ASCII stays readable and no token is lost."""
    texts = token_texts(tokens, decode)
    assert len(texts) == len(tokens)
    assert [c for c in "".join(texts) if c.isascii()] == [chr(t) for t in tokens if t < 128]


@given(st.text())
def test_token_texts_never_garble_valid_text(text):
    tokens = list(text.encode("utf-8", "ignore"))
    texts = token_texts(tokens, decode)
    assert "".join(texts) == text.encode("utf-8", "ignore").decode()
    assert len(texts) == len(tokens)


def test_a_character_of_several_tokens_stands_at_its_last():
    assert token_texts(list("aé🙂".encode()), decode) == ["a", "", "é", "", "", "", "🙂"]


def test_a_leading_space_that_a_tokenizer_drops_at_the_start_is_kept():
    """Like SentencePiece: every word begins with a space that decoding strips at the start of the text."""
    words = {1: " the", 2: " end", 3: "ing"}
    assert token_texts([1, 2, 3], lambda ids: "".join(words[i] for i in ids).lstrip()) == ["the", " end", "ing"]


def test_example_from_keeps_the_facts_and_is_json():
    task = Task(id="t", messages=(), gold=("EUR",))
    trajectory = trajectory_of([(False, "q?"), (True, "<answer>é</answer>")], "é", 0.0, [("x", False)], task)
    found = json.loads(json.dumps(example_from(trajectory, decode, "base", "eval"), allow_nan=False))
    (tokens,) = found["branches"]
    branch = branch_of([(False, "q?"), (True, "<answer>é</answer>")])
    assert [t["id"] for t in tokens] == branch.tokens.tolist()
    assert "".join(t["text"] for t in tokens) == "<|im_start|>q?<answer>é</answer><|im_end|>"
    assert [t["sampled"] for t in tokens] == branch.sampled.tolist()
    assert [t["logprob"] is None for t in tokens] == (~branch.sampled).tolist()
    assert (found["label"], found["answer"], found["reward"], found["gold"]) == ("base", "é", 0.0, ["EUR"])
    assert found["tool_records"][0] == {"name": "search", "arguments": {"query": "x", "k": 1}, "result": "…", "ok": False, "turn": 0}  # fmt: skip # noqa: E501


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_ticks_cover_the_range_with_few_round_numbers(low, span):
    high = low + span
    if high <= low:
        return
    found = ticks(low, high)
    assert 2 <= len(found) <= 8
    step = found[1] - found[0]
    assert found[0] <= low + 1e-6 * span and found[-1] >= high - 1e-6 * span
    assert all(b - a == pytest.approx(step, rel=1e-3) for a, b in itertools.pairwise(found))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (float("nan"), "–"),
        (0, "0"),
        (0.41666, "0.417"),
        (1e-5, "1e-05"),
        (1234.5, "1,234"),
        (123.46, "123.5"),
    ],
)
def test_numbers_are_short(value, text):
    assert number(value) == text


def test_a_reward_beyond_a_share_is_no_percentage():
    of_reward = {"diff": 3.0, "low": 2.0, "high": 4.0, "metric": "reward"}
    assert difference(of_reward) == ("+3", "2", "4")
    assert difference({**of_reward, "diff": 0.03, "low": 0.02, "high": 0.04, "metric": "f1"}) == ("+3.0 points", "2.0", "4.0")  # fmt: skip # noqa: E501
    assert interval({"mean": 10.5, "low": 9.5, "high": 11.25}) == ("10.5", "9.5", "11.2")
    assert interval({"mean": 0.5, "low": 0.25, "high": 1.0}) == ("50.0 %", "25.0", "100.0")
    assert interval(None) == interval({"mean": None, "low": None, "high": None, "n": 0}) == ("–", "", "")


def test_a_chart_without_points_is_nothing():
    assert line_chart("x", [Series("a", ((1.0, None),))]) == ""
    assert line_chart("x", []) == ""


@pytest.mark.parametrize(
    "values",
    [
        [(3.0, 0.5)],
        [(1.0, 0.0), (2.0, 0.0)],
        [(1.0, -5.0), (2.0, 1e9)],
        [(0.0, 1e-7), (9.0, 3e-7)],
        [(1.0, -1e99), (2.0, 1e99)],
        [(1.0, 0.0), (2.0, 5e-324)],
        [(1.0, 1.0), (2.0, 1.0 + 2e-16)],
    ],
)
def test_every_point_lies_inside_the_frame(values):
    svg = str(line_chart("x", [Series("a", tuple(values), dots=True)]))
    data = json.loads(escape_back(svg.split('data-chart="')[1].split('"')[0]))
    assert all(50 <= x <= 520 for x in data["px"])
    assert all(data["top"] - 0.1 <= y <= data["bottom"] + 0.1 for y in data["series"][0]["py"])


def escape_back(text: str) -> str:
    return text.replace("&quot;", '"').replace("&amp;", "&")


def test_higher_values_are_drawn_higher_and_later_ones_to_the_right():
    svg = str(line_chart("x", [Series("a", ((1.0, 0.1), (2.0, 0.9)))]))
    (first, second) = (tuple(map(float, pair.split(","))) for pair in svg.split('points="')[1].split('"')[0].split())
    assert second[0] > first[0] and second[1] < first[1]


def test_match_figure_states_the_gap():
    strict = {"mean": 0.162, "low": 0.11, "high": 0.22}
    svg = match_figure([("RL", strict, 0.944), ("base", {"mean": 0.0, "low": 0.0, "high": 0.02}, None)])
    assert "gap 78.2" in svg and "strict 16.2 percent, normalised 94.4 percent" in svg
    assert svg.count("lenient") == 2  # one mark, one legend key: an unknown share isn't drawn


def test_points_take_the_last_of_a_step_and_skip_what_is_no_number():
    rows = [
        {"step": 2, "x": 1},
        {"step": 1, "x": None},
        {"step": 2, "x": 3},
        {"step": 3, "x": True},
        {"step": 4, "y": 1},
        {"step": 5, "x": math.nan},
        {"step": 6, "x": 10**400},
        {"step": 7, "x": -math.inf},
        {"step": 8, "x": 5e-324},
    ]
    found = points(rows, "x")
    assert found == ((1.0, None), (2.0, 3.0), (3.0, None), (5.0, None), (6.0, None), (7.0, None), (8.0, 0.0))
