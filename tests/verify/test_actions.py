"""What an agent did: calls, evidence, state, cost. ToolRL's values are worked out by hand from its paper's formula."""

import itertools
import random

import pytest

from upswing.evals.summary import summarize
from upswing.trajectory.types import Message, Outcome, Score, StopReason, Task, ToolCall, ToolRecord, Trajectory
from upswing.verify import verifier_from
from upswing.verify.actions import best_matching


def record(name, arguments, result="", ok=True):
    return ToolRecord(call=ToolCall(name=name, arguments=arguments), result=result, ok=ok, turn=0)


async def judged(name, args, episode):
    return (await verifier_from(name, args)(episode)).value


F = [{"name": "f", "arguments": {"a": 1, "b": 2}}]
FG = [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]
NESTED = [{"name": "f", "arguments": {"a": 1}}, {"name": "f", "arguments": {"a": 1, "b": 2}}]
TWICE = [{"name": "f", "arguments": {"a": 1}}, {"name": "f", "arguments": {"a": 1, "b": 2}}]


@pytest.mark.parametrize(
    ("wanted", "made", "reward"),
    [
        # names 1, parameter names 1, values 2: 4 of 1 + 1 + 2; reward 6 * share - 3
        (F, [("f", {"a": 1, "b": 2})], 3.0),
        (F, [("f", {"b": 2, "a": 1.0})], 3.0),
        (F, [("f", {"a": 1, "b": 3})], 1.5),
        (F, [("f", {"a": 1})], 6 * 2.5 / 4 - 3),
        (F, [("f", {"a": 1, "b": 2, "c": 3})], 6 * (1 + 2 / 3 + 2) / 4 - 3),
        (F, [("g", {"a": 1, "b": 2})], -3.0),
        (F, [("f", {"a": 1, "b": 2})] * 2, 6 * (1 / 2 + 3) / 4 - 3),
        (F, [("f", {"a": 9, "b": 9}), ("f", {"a": 1, "b": 2})], 6 * (1 / 2 + 3) / 4 - 3),
        (F, [], -3.0),
        (F, [("", {})], -3.0),  # a turn that could not be read
        (F, [("f", {"a": 1, "b": 2}), ("", {})], -3.0),
        # the best is 1 + (1 + 1) + (1 + 0) = 4
        (FG, [("g", {}), ("f", {"a": 1})], 3.0),
        (FG, [("f", {"a": 1})], 6 * (1 / 2 + 2) / 4 - 3),
        (FG, [("g", {"x": 1}), ("f", {"a": 2})], 6 * (1 + 1 + 0) / 4 - 3),
        (TWICE, [("f", {"a": 1, "b": 2}), ("f", {"a": 1})], 3.0),
        # the first one wanted would take the first one made, 1.5 + 0.5; the best is 1 + 3 of 1 + 2 + 3
        (NESTED, [("f", {"a": 1, "b": 2}), ("f", {"a": 9})], 6 * (1 + 1 + 3) / 6 - 3),
        ([], [], 3.0),
        ([], [("f", {})], -3.0),
    ],
)
async def test_toolrl(episode, wanted, made, reward):
    records = tuple(record(*call) for call in made)
    assert await judged("tool_calls", {}, episode(data={"calls": wanted}, tool_records=records)) == pytest.approx(
        reward
    )
    exact = await judged("tool_calls", {"partial": False}, episode(data={"calls": wanted}, tool_records=records))
    assert exact == (reward == 3.0)
    scaled = {"low": 0.0, "high": 1.0}
    share = await judged("tool_calls", scaled, episode(data={"calls": wanted}, tool_records=records))
    assert share == pytest.approx((reward + 3) / 6)


def test_calls_are_matched_for_the_highest_total():
    """Against every way to match them; as few and as many as the other side, ties and zeros included."""
    rng = random.Random(0)
    for _ in range(300):
        rows, columns = rng.randint(0, 5), rng.randint(0, 5)
        worth = [[rng.choice([0.0, 0.5, 1.0, rng.random() * 3]) for _ in range(columns)] for _ in range(rows)]
        padded = [[*row, *[0.0] * rows] for row in worth]
        ways = itertools.permutations(range(columns + rows), rows)
        best = max(sum(row[i] for row, i in zip(padded, way, strict=True)) for way in ways)
        assert best_matching(worth) == pytest.approx(best)


async def test_many_calls_are_matched_in_no_time(episode):
    wanted = [{"name": "f", "arguments": {"n": n}} for n in range(40)]
    records = tuple(record("f", {"n": n}) for n in reversed(range(400)))
    exact = {"partial": False}
    assert await judged("tool_calls", exact, episode(data={"calls": wanted}, tool_records=records[-40:])) == 1
    share = await judged("tool_calls", {"low": 0, "high": 1}, episode(data={"calls": wanted}, tool_records=records))
    assert share == pytest.approx((40 / 400 + 80) / 81)


@pytest.mark.parametrize(
    ("arguments", "right"),
    [
        ({"w": 7, "nums": [1.0, 2.0]}, 1),
        ({"w": 70, "nums": [1.0, 2.0]}, 0),
        ({"w": 7, "nums": [1, 2]}, 1),
        ({"w": 7, "nums": [1.0, 2.0], "unit": "m"}, 1),  # the default, written out
        ({"w": 7, "nums": [1.0, 2.0], "unit": "km"}, 0),
        ({"w": 7, "nums": [1.0, 2.0], "zzz": 1}, 0),
        ({"nums": [1.0, 2.0], "w": 7}, 1),
        ({"w": True, "nums": [1.0, 2.0]}, 0),
        ({"w": "7", "nums": [1.0, 2.0]}, 0),
        ({"w": 7, "nums": [2.0, 1.0]}, 0),
        ({"w": 7}, 0),
    ],
)
async def test_arguments_are_strict_both_ways_with_defaults(episode, arguments, right):
    wanted = [{"name": "f", "arguments": {"w": 7, "nums": [1.0, 2.0]}, "defaults": {"unit": "m"}}]
    one = episode(data={"calls": wanted}, tool_records=(record("f", arguments),))
    assert await judged("tool_calls", {"partial": False}, one) == right
    spelled = [{"name": "f", "arguments": {"w": 7, "nums": [1, 2], "unit": "m"}, "defaults": {"unit": "m"}}]
    one = episode(data={"calls": spelled}, tool_records=(record("f", arguments),))
    assert await judged("tool_calls", {"partial": False}, one) == right


START = {"orders": {"7": {"status": "open", "at": 1}}, "stock": [1, 2]}
DONE = {"orders": {"7": {"status": "closed", "at": 9}}, "stock": [1, 2]}


@pytest.mark.parametrize(
    ("state", "args", "score"),
    [
        (DONE, {}, 1),
        ({**DONE, "tool_calls": 3}, {}, 1),  # the environment's own counter
        (START, {}, 0),
        (START, {"partial": True}, 0.5),
        ({"orders": {**DONE["orders"], "8": {}}, "stock": [1, 2]}, {}, 0),  # an order too many
        ({"orders": {"7": {"status": "closed", "at": 5}}, "stock": [1, 2]}, {}, 0),
        ({"orders": {"7": {"status": "closed", "at": 5}}, "stock": [1, 2]}, {"ignore": ["orders.*.at"]}, 1),
        ({"orders": {"7": {"status": "closed"}}, "stock": [1, 2]}, {"ignore": ["orders.*.at"]}, 1),
        ({"orders": DONE["orders"], "stock": [1, 3]}, {"ignore": ["stock.1"]}, 1),
        ({"orders": DONE["orders"]}, {}, 0),
        ({"orders": DONE["orders"], "stock": [True, 2]}, {}, 0),
        ({}, {}, None),
        (DONE, {"ignore": ["orders", "stock"]}, None),
    ],
)
async def test_the_final_state(episode, state, args, score):
    assert await judged("state", args, episode(state=state, data={"final_state": DONE})) == score


async def test_a_task_that_doing_nothing_passes_is_marked(episode):
    """Refuse the request: the right end is the start, so an agent that says nothing and stops scores 1."""
    idle = episode(None, state=START, data={"final_state": START, "start_state": START})
    score = await verifier_from("state")(idle)
    assert score.value == 1 and score.components == {"passes_idle": 1.0}
    score = await verifier_from("state")(episode(state=START, data={"final_state": DONE, "start_state": START}))
    assert score.value == 0 and score.components == {"passes_idle": 0.0}


@pytest.mark.parametrize(
    ("records", "args", "score"),
    [
        ([record("search", {"query": "capital"}, "The  capital is\nParis (doc_1).")], {}, 1),
        ([record("search", {"query": "capital"}, "... paris ..."), record("read", {}, "see doc_1")], {}, 1),
        ([record("search", {"query": "capital"}, "Paris")], {}, 0.5),
        ([record("search", {"query": "x"}, "Parisian, doc_12")], {}, 0),
        ([record("search", {"query": "Paris doc_1"}, "nothing found for Paris doc_1")], {}, 0),  # echoed
        ([record("search", {"query": "Paris"}, "Paris: see doc_1")], {}, 0.5),
        ([record("remember", {"text": "Paris"}, "ok"), record("recall", {"key": "capital"}, "Paris doc_1")], {}, 0.5),
        ([record("search", {"query": "x"}, "Paris doc_1", ok=False)], {}, 0),
        ([record("shell", {"run": "x"}, "Paris doc_1")], {"tools": ["search"]}, 0),
        ([], {}, 0),
    ],
)
async def test_evidence_counts_where_a_tool_brought_it(episode, records, args, score):
    """That the agent says 'Paris' itself is worth nothing."""
    data = {"evidence": ["Paris", "doc_1"]}
    said = (Message(role="assistant", content="Paris doc_1"),)
    one = episode("Paris doc_1", messages=said, data=data, tool_records=tuple(records))
    assert await judged("retrieval_hit", args, one) == score


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("tool_calls", {}),
        ("tool_calls", {"calls": "f"}),
        ("tool_calls", {"calls": ""}),
        ("tool_calls", {"calls": ["f"]}),
        ("state", {}),
        ("state", {"final_state": {}}),
        ("retrieval_hit", {}),
        ("retrieval_hit", {"evidence": []}),
        ("retrieval_hit", {"evidence": [" "]}),
        ("countdown", {}),
        ("regex", {}),
        ("json_schema", {}),
    ],
)
async def test_without_gold_there_is_no_score_but_a_reason(episode, name, data):
    score = await verifier_from(name)(episode(data=data, state={"x": 1}))
    assert score.value is None and "data" in score.reason


def spoken(*texts):
    return (Message(role="user", content="x" * 1000), *(Message(role="assistant", content=text) for text in texts))


@pytest.mark.parametrize(("written", "score"), [(0, 0), (50, 0), (60, -0.2), (100, -1), (1000, -1)])
async def test_length_falls_in_a_straight_line(episode, written, score):
    """DAPO's soft punishment with a longest answer of 100 and a cache of 50: (50 - L) / 50 between 50 and 100."""
    one = episode(messages=spoken("x" * written), num_turns=1)
    assert await judged("length_penalty", {"free": 50, "limit": 100}, one) == pytest.approx(score)
    example = episode(messages=spoken("an example of the prompt's", "x" * written), num_turns=1)
    assert await judged("length_penalty", {"free": 50, "limit": 100}, example) == pytest.approx(score)
    task = Task(id="t", messages=spoken("an example of the task's"))  # its conversation was rewritten twice
    rewritten = episode(task=task, messages=spoken("an example of the task's", "x" * written), num_turns=3)
    assert await judged("length_penalty", {"free": 50, "limit": 100}, rewritten) == pytest.approx(score)


@pytest.mark.parametrize(
    ("texts", "ngram", "score"),
    [
        (["a b c d"], 2, 0),  # ab bc cd
        (["a b A b"], 2, -1 / 3),  # ab ba ab
        (["x x x x x"], 2, -3 / 4),
        (["a b", "a b"], 2, -1 / 2),  # an n-gram never spans two turns
        (["a b c"], 4, 0),
        ([], 2, 0),
    ],
)
async def test_repeated_ngrams(episode, texts, ngram, score):
    one = episode(messages=spoken(*texts), num_turns=len(texts))
    assert await judged("repetition_penalty", {"ngram": ngram}, one) == pytest.approx(score)


@pytest.mark.parametrize(("calls", "score"), [(0, 0), (2, 0), (3, -0.5), (4, -1), (9, -1)])
async def test_calls_cost(episode, calls, score):
    one = episode(tool_records=(record("f", {}),) * calls)
    assert await judged("call_penalty", {"free": 2, "limit": 4}, one) == score


@pytest.mark.parametrize("order", [[1, 1, 0, 0, 1], [0, 1, 1, 1, 0]])
def test_every_row_counts_once_in_an_evaluation(order):
    """Neither the last batch alone nor the mean of batches' means; rows that failed are told apart."""
    ends = {"branches": (), "messages": (), "stop_reason": StopReason.ANSWERED}
    rows = [
        Trajectory(id=str(i), task=Task(id=str(i), messages=()), outcome=outcome, score=score, **ends)
        for i, (outcome, score) in enumerate(
            [(Outcome.COMPLETED, Score(value=float(one))) for one in order]
            + [(Outcome.ERRORED, None), (Outcome.COMPLETED, Score(value=None))]
        )
    ]
    found = summarize(rows, resamples=10)
    assert found.reward.mean == pytest.approx(0.6) and (found.num_unscored, found.outcomes["errored"]) == (1, 1)
