"""Judges that compare: both orders, and ranks by Bradley-Terry against a maximum likelihood found by brute force."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.verify.test_judge import serve  # noqa: F401  (a fixture)

from upswing.errors import ConfigError
from upswing.verify import verifier_from
from upswing.verify.pairwise import Pairwise, VersusReference, bradley_terry, rounds


def options(server, **more):
    return {"url": server.url, "model": "m", "criteria": "The higher number.", "concurrency": 32, **more}


def honest(asked):
    """Prefers the higher number; texts without one lose."""
    a, b = (float(asked.part(name)) for name in ("answer_a", "answer_b"))
    return asked.verdict(winner="A" if a > b else "B" if b > a else "tie")


def first(asked):
    return asked.verdict(winner="A")


def last(asked):
    return asked.verdict(winner="B")


def lenient_second(asked):
    """Sees no difference when the higher number stands second."""
    return asked.verdict(winner="A" if float(asked.part("answer_a")) > float(asked.part("answer_b")) else "tie")


# -- against the reference --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("behave", "more", "answer", "value", "apart"),
    [
        (honest, {}, "4", 1.0, 0.0),
        (honest, {}, "2", 0.0, 0.0),
        (honest, {}, "3.0", 0.5, 0.0),
        (first, {}, "4", 0.5, 1.0),
        (last, {}, "4", 0.5, 1.0),
        (first, {"inconsistent": "unscored"}, "4", None, None),
        (lenient_second, {}, "4", 0.75, 0.5),
        (lenient_second, {"inconsistent": "unscored"}, "2", 0.25, 0.5),
        (lambda asked: "no idea", {}, "4", None, None),
    ],
)
async def test_the_mean_of_both_orders(serve, episode, behave, more, answer, value, apart):  # noqa: F811
    server = serve(behave)
    score = await VersusReference(**options(server, **more))(episode(answer, gold=("3", "5")))
    assert score.value == value and score.components == {"injection_suspected": 0.0, "disagreement": apart}
    assert (value is None) == bool(score.reason)
    assert {asked.part("answer_a") for asked in server.asked} == {answer, "3"}


async def test_what_needs_no_judge(serve, episode):  # noqa: F811
    server = serve(first)
    versus = VersusReference(**options(server))
    cases = (("3", ("3",)), (None, ("3",)), ("3", ()))
    values = [(await versus(episode(answer, gold=gold))).value for answer, gold in cases]
    assert values == [0.5, 0.0, None] and not server.asked


# -- ranks ------------------------------------------------------------------------------------------------------------


def likelihood(theta, games):
    """log P(games | theta) and of one drawn game of each against strength 0. theta: [..., G]."""
    total = (-0.5 * np.logaddexp(0, -theta) - 0.5 * np.logaddexp(0, theta)).sum(-1)
    for (i, j), share in games.items():
        ahead = theta[..., i] - theta[..., j]
        total = total - share * np.logaddexp(0, -ahead) - (1 - share) * np.logaddexp(0, ahead)
    return total


def brute_force(games, size):
    """The best of a grid, which then shrinks around it."""
    centre, width = np.zeros(size), 4.0
    steps = np.array(list(itertools.product(np.linspace(-1, 1, 7 if size < 5 else 5), repeat=size)))
    while width > 1e-9:
        grid = centre + width * steps
        centre = grid[np.argmax(likelihood(grid, games))]
        width *= 0.8
    return centre


@pytest.mark.parametrize(
    ("games", "size"),
    [
        ({(0, 1): 1.0}, 2),
        ({(0, 1): 1.0, (1, 2): 1.0, (0, 2): 1.0}, 3),
        ({(0, 1): 1.0, (1, 2): 1.0, (2, 0): 1.0}, 3),
        ({(0, 1): 0.5, (1, 2): 0.75, (0, 2): 0.0}, 3),
        ({(0, 1): 1.0, (2, 3): 0.5, (1, 2): 0.25, (0, 3): 1.0}, 4),
        ({(0, 1): 1.0}, 3),
        ({}, 2),
    ],
)
def test_strengths_are_the_maximum_of_the_likelihood(games, size):
    # The likelihood is flat at its top: half of float64's digits are all that a search for it can find.
    assert bradley_terry(games, size) == pytest.approx(brute_force(games, size), abs=2e-7)


@settings(max_examples=60)
@given(st.data())
def test_no_change_of_a_strength_makes_the_games_likelier(data):
    size = data.draw(st.integers(1, 12))
    pairs = list(itertools.combinations(range(size), 2))
    shares = st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0])
    games = {pair: data.draw(shares) for pair in pairs if data.draw(st.booleans())}
    found = bradley_terry(games, size)
    nearby = found + 1e-3 * np.concatenate([np.eye(size), -np.eye(size)])
    assert np.all(likelihood(nearby, games) < likelihood(found, games))


@pytest.mark.parametrize("size", range(10))
@pytest.mark.parametrize("count", [2, 3, 4, 9])
def test_rounds_of_a_tournament(size, count):
    pairs = list(rounds(size, count))
    assert len({frozenset(pair) for pair in pairs}) == len(pairs) and all(a != b for a, b in pairs)
    played = [sum(i in pair for pair in pairs) for i in range(size)]
    assert all(min(count, size - 1) - size % 2 <= number <= count for number in played)
    assert count < size or len(pairs) == math.comb(size, 2)
    reached = {0}
    for _ in range(size):
        reached |= {i for pair in pairs if reached & set(pair) for i in pair}
    assert size == 0 or reached == set(range(size))


async def ranked(server, episode, answers, **more):
    scores = await Pairwise(**options(server, **more)).score_group([episode(answer) for answer in answers])
    return [score.value for score in scores], scores


async def test_a_full_tournament_ranks_as_the_judge_does(serve, episode):  # noqa: F811
    server = serve(honest)
    values, scores = await ranked(server, episode, ["3", "1", "4", "1.5", "9"], comparisons_per_trajectory=4)
    assert np.argsort(values).tolist() == [1, 3, 0, 2, 4] and np.mean(values) == pytest.approx(0.5)
    assert len(server.asked) == 2 * math.comb(5, 2) and all(0 < value < 1 for value in values)
    theta = brute_force(dict.fromkeys(itertools.combinations(range(5), 2), 1.0), 5)  # of the best to the worst
    by_hand = [np.mean([1 / (1 + np.exp(theta[j] - theta[i])) for j in range(5) if j != i]) for i in range(5)]
    assert sorted(values, reverse=True) == pytest.approx(by_hand, abs=1e-6)
    assert scores[0].components == {"comparisons": 4.0, "disagreement": 0.0, "injection_suspected": 0.0}


async def test_a_budget_of_comparisons_still_ranks(serve, episode):  # noqa: F811
    server = serve(honest)
    values, _ = await ranked(server, episode, list(map(str, range(16))), comparisons_per_trajectory=4)
    assert len(server.asked) == 2 * 16 * 4 / 2 and np.corrcoef(values, range(16))[0, 1] > 0.85
    assert np.mean(values) == pytest.approx(0.5)


@pytest.mark.parametrize("biased", [first, last])
async def test_a_judge_that_goes_by_position_ranks_nobody(serve, episode, biased):  # noqa: F811
    values, scores = await ranked(serve(biased), episode, ["3", "1", "4"])
    assert values == [0.5] * 3 and scores[0].components["disagreement"] == 1.0
    values, scores = await ranked(serve(biased), episode, ["3", "1", "4"], inconsistent="unscored")
    assert values == [None] * 3 and "0 of 2 comparisons could be judged: the judge prefers another" in scores[0].reason


async def test_who_could_not_be_compared_is_not_scored_and_the_others_are(serve, episode):  # noqa: F811
    def behave(asked):
        return "I won't read that." if "\n-7\n" in asked.user else honest(asked)

    values, scores = await ranked(serve(behave), episode, ["3", "-7", "4", "1"])
    assert values[1] is None and "0 of 3 comparisons could be judged: no verdict" in scores[1].reason
    others = [values[i] for i in (3, 0, 2)]
    assert others == sorted(others) and np.mean(others) == pytest.approx(0.5)
    assert [score.components["comparisons"] for score in scores] == [2.0, 0.0, 2.0, 2.0]


async def test_answers_that_need_no_judge(serve, episode):  # noqa: F811
    server = serve(first)
    for answers, wanted in (
        ([None, "3", None], [0.0, 0.5, 0.0]),
        ([None, None], [0.0, 0.0]),
        (["3", "3", "3"], [0.5] * 3),
        (["3"], [None]),
        ([], []),
    ):
        values, _ = await ranked(server, episode, answers)
        assert values == wanted
    assert not server.asked


async def test_no_answer_is_zero_beside_those_that_are_ranked(serve, episode):  # noqa: F811
    values, _ = await ranked(serve(honest), episode, ["3", None, "4"])
    assert values[1] == 0.0 and 0 < values[0] < 0.5 < values[2] < 1 and values[0] + values[2] == pytest.approx(1)


async def test_without_a_group_there_is_no_rank(serve, episode):  # noqa: F811
    score = await verifier_from("pairwise", options(serve(first)))(episode())
    assert score.value is None and "group" in score.reason


def test_one_comparison_each_would_connect_nobody():
    args = {"url": "http://host/v1", "model": "m", "criteria": "Right."}
    with pytest.raises(ConfigError, match="comparisons_per_trajectory: got 1; allowed: greater than or equal to 2"):
        verifier_from("pairwise", {**args, "comparisons_per_trajectory": 1})
    with pytest.raises(ConfigError, match="did you mean 'half'"):
        verifier_from("pairwise", {**args, "inconsistent": "hal"})
