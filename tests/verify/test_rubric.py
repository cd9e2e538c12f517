"""Weighted sums, and the checks that strictness passes and leniency doesn't."""

from types import SimpleNamespace

import pytest

from upswing.errors import ConfigError
from upswing.trajectory.types import Message, Score, Task
from upswing.verify import Rubric, rubric_from, self_check, strict_match, verifier_from
from upswing.verify.qa import exact_match, f1


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


def tasks(*golds):
    return [
        Task(id=str(i), messages=(Message(role="user", content=f"Which? {i}"),), gold=g) for i, g in enumerate(golds)
    ]


async def test_strict_match_passes_its_self_check():
    report = await self_check(verifier_from("strict_match"), tasks(("Paris", "paris"), (".be",), ("7",)))
    assert report.ok, report.failures
    assert report.by_case()["gold"] == (4, 4)
    assert {"none", "truncated", "empty", "echo", "cut", "dot", "extra", "all_golds", "tags"} <= set(report.by_case())


async def test_the_self_check_shows_how_the_lenient_match_is_hacked():
    report = await self_check(verifier_from("exact_match"), tasks(("Paris",), ("Lima",)))
    assert not report.ok and report.by_case()["dot"] == (2, 2) and report.by_case()["extra"] == (0, 2)


@pytest.mark.parametrize(
    "check",
    [
        lambda answer: 1.0,  # accepts everything
        lambda answer: 0.0,  # accepts nothing
        lambda answer: answer is None,  # rewards doing nothing
        lambda answer, gold: answer is not None and any(g in answer for g in gold),  # substring
        lambda answer, gold: answer is not None and answer != "" and gold[0].startswith(answer),  # prefix
        broken,
    ],
)
async def test_the_self_check_finds_bad_verifiers(check):
    assert not (await self_check(verifier_from(check), tasks(("Paris",), ("Lima",)))).ok


async def test_a_task_without_an_answer_is_found():
    assert not (await self_check(verifier_from("strict_match"), tasks(()))).ok


async def test_a_component_that_is_no_number_is_none_and_the_score_stands(episode):
    def parts(answer):
        return Score(value=0.5, components={"x": float("nan"), "y": 1.0})

    score = await Rubric([("mine", parts, 2.0)]).score(episode())
    assert score.value == 1.0 and score.components == {"mine": 0.5, "mine.x": None, "mine.y": 1.0}
