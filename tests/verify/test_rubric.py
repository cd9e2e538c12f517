"""Weighted sums."""

import asyncio
import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from upswing.errors import ConfigError
from upswing.trajectory.types import Score, Task
from upswing.verify import Rubric, rubric_from, strict_match
from upswing.verify.qa import exact_match, f1
from upswing.verify.rubric import variance_shares


def broken(answer):
    raise ValueError("boom")


async def test_the_weighted_sum(episode):
    rubric = Rubric([("strict", strict_match, 1.0), ("f1", f1, 0.5), ("turns", lambda num_turns: num_turns, 0.0)])
    score = await rubric.score(episode("city Paris"))
    assert score.value == pytest.approx(0.5 * 2 / 3)
    assert score.components == {"strict": 0.0, "f1": pytest.approx(2 / 3), "turns": 2.0}


async def test_a_needed_component_that_can_not_score_leaves_no_score(episode):
    score = await Rubric([("strict", strict_match, 1.0), ("broken", broken, 0.1)]).score(episode())
    assert score.value is None and score.components == {"strict": 1.0, "broken": None}
    assert "broken: ValueError: boom" in score.reason


async def test_a_reported_component_may_fail(episode):
    score = await Rubric([("strict", strict_match, 1.0), ("broken", broken, 0.0)]).score(episode())
    assert score.value == 1.0 and score.components["broken"] is None and "boom" in score.reason


async def test_verifiers_that_wait_do_so_side_by_side_and_every_score_keeps_its_name(episode):
    met = asyncio.Barrier(2)

    async def meets(answer):
        await met.wait()
        return 0.25

    async def meets_too(answer):
        await met.wait()
        return 0.5

    rubric = Rubric([("a", meets, 1.0), ("strict", strict_match, 1.0), ("b", meets_too, 1.0), ("f1", f1, 0.0)])
    score = await asyncio.wait_for(rubric.score(episode()), 5)
    assert list(score.components.items()) == [("a", 0.25), ("strict", 1.0), ("b", 0.5), ("f1", 1.0)]
    assert [verifier.at_once for _, verifier, _ in rubric.items] == [False, True, False, True]


async def test_components_of_components(episode):
    def judge(answer):
        return Score(value=0.5, components={"style": 0.25})

    score = await Rubric([("judge", judge, -2.0)]).score(episode())
    assert score.value == -1.0 and score.components == {"judge": 0.5, "judge.style": 0.25}


@pytest.mark.parametrize(
    ("items", "word"),
    [
        ([("a", f1, 1.0), ("a", exact_match, 1.0)], "'a'"),
        ([("a", f1, 0.0)], "weight"),
        ([], "weight"),
        ([("a", f1, float("nan"))], "'a'"),
        ([("a", lambda anwser: 1, 1.0)], "'anwser'"),
    ],
)
def test_rubrics_that_can_not_be_a_reward(items, word):
    with pytest.raises(ConfigError, match=word):
        Rubric(items)


async def test_from_a_recipe(episode):
    specs = [
        SimpleNamespace(name="strict_match", weight=1.0, args={}),
        SimpleNamespace(name="exact_match", weight=0.0, args={}),
    ]
    score = await rubric_from(specs).score(episode("paris"))
    assert score.value == 0.0 and score.components == {"strict_match": 0.0, "exact_match": 1.0}
    with pytest.raises(ConfigError, match="'case'"):
        rubric_from([SimpleNamespace(name="f1", weight=1.0, args={"case": True})])


async def test_a_component_that_is_no_number_is_none_and_the_score_stands(episode):
    def parts(answer):
        return Score(value=0.5, components={"x": float("nan"), "y": 1.0})

    score = await Rubric([("mine", parts, 2.0)]).score(episode())
    assert score.value == 1.0 and score.components == {"mine": 0.5, "mine.x": None, "mine.y": 1.0}


def constant(value):
    return lambda answer: value


@pytest.mark.parametrize(
    ("correct", "gate", "value"),
    [
        (1.0, 1.0, 2.0),
        (1.0, 0.0, 0.0),
        (0.0, 1.0, 0.0),
        (1.0, 0.5, 1.0),
        (-1.0, 0.0, -2.0),  # a failed gate is no way out of a penalty
        (-1.0, 0.5, -2.0),
        (None, 0.0, None),
        (1.0, None, None),
        (1.0, 1.5, None),
        (1.0, -0.5, None),
    ],
)
async def test_a_gate_multiplies_the_reward(episode, correct, gate, value):
    items = [("correct", constant(correct), 2.0), ("formatted", constant(gate), 0.0), ("seen", constant(7), 0.0)]
    score = await Rubric(items, gates=["formatted"]).score(episode())
    assert score.value == value
    assert score.components["correct"] == correct and score.components["formatted"] == gate
    assert score.components.get("correct.gated") == (None if value is None else value / 2)
    assert "seen.gated" not in score.components and (value is None) == bool(score.reason)


@given(
    st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), min_size=1, max_size=4),
    st.lists(st.floats(0, 1), max_size=2),
    st.integers(0, 12),
)
def test_the_reward_is_always_what_its_components_and_weights_say(parts, gates, step):
    """So that estimators that normalise each component by itself (GDPO) see the gates, and the weights of the step."""
    import asyncio

    items = [(f"v{i}", constant(score), weight) for i, (score, weight) in enumerate(parts)] + [("one", constant(1), 1)]
    named = {f"g{i}": value for i, value in enumerate(gates)}
    rubric = Rubric(
        [*items, *((name, constant(value), 0) for name, value in named.items())], gates=named, ramps={"one": (0.5, 10)}
    ).at(step)
    from upswing.trajectory.types import Outcome, StopReason
    from upswing.verify import Episode

    task = Task(id="t", messages=())
    end = {"outcome": Outcome.COMPLETED, "stop_reason": StopReason.ANSWERED}
    score = asyncio.run(
        rubric.score(
            Episode(task=task, messages=(), answer="", gold=(), data={}, tool_records=(), state={}, num_turns=1, **end)
        )
    )
    told = sum(weight * score.components[name] for name, weight in rubric.weights.items())
    shares = [s * w for s, w in parts] + [0.5 + 0.5 * min(step / 10, 1)]
    wanted = sum(share * (math.prod(gates) if share > 0 else 1) for share in shares)
    assert score.value == pytest.approx(told) == pytest.approx(wanted)


async def test_a_failed_gate_raises_no_reward_whatever_signs_it_is_made_of(episode):
    """Scores and weights below 0: a penalty is one either way."""
    items = [("a", constant(3), 1.0), ("b", constant(-3), 0.5), ("c", constant(2), -1.0), ("g", constant(0.5), 0.0)]
    score = await Rubric(items, gates=["g"]).score(episode())
    assert score.value == 1.5 - 1.5 - 2.0
    assert [score.components[f"{name}.gated"] for name in "abc"] == [1.5, -3.0, 2.0]


async def test_a_weight_that_changes_over_steps(episode):
    rubric = Rubric([("a", constant(1), 3.0), ("b", constant(1), 0.0)], ramps={"a": (1.0, 4)})
    values = [(await rubric.at(step).score(episode())).value for step in (0, 1, 2, 4, 100)]
    assert values == [1.0, 1.5, 2.0, 3.0, 3.0]
    assert (await rubric.score(episode())).value == 3.0 and rubric.at(1).weights == {"a": 1.5}
    assert rubric.at(0).at(4).weights == {"a": 1.0}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gates": ["strct"]}, "no verifier is called 'strct'; did you mean 'strict'"),
        ({"gates": ["strict"]}, "'strict' is a gate"),
        ({"ramps": {"f1": (math.inf, 3)}}, "'f1': weight must be a finite number"),
        ({"ramps": {"f1": (0.0, 0)}}, "'f1': its weight must change over at least 1 step"),
        ({"ramps": {"f1": (0.0, 2), "strict": (0.0, 2)}}, "no verifier has a weight other than 0 at step 0"),
    ],
)
def test_gates_and_ramps_that_can_not_be(options, words):
    with pytest.raises(ConfigError) as caught:
        Rubric([("strict", strict_match, 1.0), ("f1", f1, 1.0)], **options)
    assert words in str(caught.value)


async def test_gates_and_ramps_from_a_recipe(episode):
    specs = [
        SimpleNamespace(name="strict_match", weight=1.0, args={}, weight_from=0.5, weight_steps=2),
        SimpleNamespace(name="format", weight=1.0, args={}, gate=True),
    ]
    rubric = rubric_from(specs)
    assert (await rubric.score(episode())).value == 1.0 and (await rubric.at(1).score(episode())).value == 0.75
    assert (await rubric.score(episode(state={"invalid_calls": 1}))).value == 0.0
    assert rubric.weights == {"strict_match.gated": 1.0}


@given(
    st.lists(st.lists(st.floats(-10, 10), min_size=3, max_size=3), max_size=12),
    st.lists(st.floats(-3, 3), min_size=3, max_size=3),
)
def test_shares_of_the_variance_are_covariances_and_sum_to_one(rows, weights):
    named = dict(zip("abc", weights, strict=True))
    shares = variance_shares([dict(zip("abc", row, strict=True)) for row in rows], named)
    parts = np.array(rows, dtype=np.float64).reshape(-1, 3) * np.array(weights)
    reward = parts.sum(axis=1)
    if len(rows) < 2 or reward.var() <= 1e-6 * max(1.0, np.max(reward**2)):
        assert len(rows) > 1 or all(map(math.isnan, shares.values()))
        return
    wanted = [np.cov(parts[:, i], reward, bias=True)[0, 1] / reward.var() for i in range(3)]
    assert list(shares.values()) == pytest.approx(wanted, abs=1e-6) and sum(shares.values()) == pytest.approx(1)


def test_shares_by_hand():
    """x + 2 y over 0 1 0 1 and 0 0 1 1: 1/4 and 4/4 of 5/4. Unscored rows are left out; no variance, no share."""
    rows = [{"x": 0.0, "y": 0.0}, {"x": 1.0, "y": 0.0}, {"x": 0.0, "y": 1.0}, {"x": 1.0, "y": 1.0}]
    weights = {"x": 1.0, "y": 2.0}
    assert variance_shares([*rows, {"x": 5.0, "y": None}], weights) == pytest.approx({"x": 0.2, "y": 0.8})
    assert all(map(math.isnan, variance_shares([{"x": 0.1, "y": 0.2}] * 7, weights).values()))
    assert variance_shares(rows, {}) == {}
