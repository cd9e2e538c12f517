"""Reasoning Gym's tasks through Upswing: the same entries, the same scores, no question in two splits."""

import asyncio
import random
from ast import literal_eval
from itertools import islice

import numpy as np
import pytest
from reasoning_gym.factory import DATASETS, create_dataset

from upswing.envs import AssistantMessage, environment_factory
from upswing.envs.adapters.reasoning_gym import Scorer, scored
from upswing.errors import ConfigError
from upswing.trajectory.types import StopReason
from upswing.verify import verifier_from

# No answer of theirs is known to be right: rush_hour and boxnet keep none, rubiks_cube's scorer needs none.
WITHOUT_ORACLE = {"boxnet", "rush_hour"}
NAMES = sorted(set(DATASETS) - {"composite"})
SCORER = Scorer()


def make(tasks, **args):
    return environment_factory("reasoning_gym", {"tasks": tasks, **args})()


def judged(answer, gold, data, scorer=SCORER):
    return asyncio.run(scorer(answer, gold, data))


def score(task, answer):
    return judged(answer, task.gold, task.data)


async def expert_answer(env, task):
    """What the expert's turn is read as."""
    await env.reset(task, 0)
    text = env.expert(task, random.Random(0))(task.messages)
    seen = await env.step(AssistantMessage(content=text))
    return seen.answer


async def test_every_task_accepts_its_own_answer_and_no_empty_one():
    """All of them, as the agent's answer travels: written by the expert, read by the protocol, judged by
    what runs in the worker (which starts once in the tests below: the library takes seconds to import)."""
    refused, paid = set(), set()
    env = make("all")
    for name in NAMES:
        task = make([name]).draw(random.Random(name))
        assert task.tags == {"kind": name} and task.messages[0].content
        answer = await expert_answer(env, task)
        if scored(answer or "", name, task.data["config"], task.data["entry"]) != 1:
            refused.add(name)
        if any([await SCORER(said, task.gold, task.data) for said in (None, "", " \n")]):
            paid.add(name)
    assert refused == WITHOUT_ORACLE and not paid
    assert len(NAMES) > 100


@pytest.mark.parametrize(
    ("name", "answers"),
    [
        ("leg_counting", ["{gold}", "{gold} legs", "0", "-1"]),
        ("countdown", ["{gold}", "1 + 1", "x", "(1, 2)", "1/0"]),
        ("number_sorting", ["{gold}", "['1']", "[]", "not a list"]),
        ("spiral_matrix", ["{gold}", "1 2 3"]),
        ("simple_integration", ["{gold}", "x**2", "sin(x) + C", "x +"]),
        ("polynomial_multiplication", ["{gold}", "x", "3.5e1*x"]),
        ("prime_factorization", ["{gold}", "two"]),
    ],
)
def test_the_worker_gives_the_library_s_own_score(name, answers):
    task = make([name]).draw(random.Random(4))
    entry = literal_eval(task.data["entry"])
    dataset = create_dataset(name, seed=0, size=1)
    for answer in answers:
        text = answer.format(gold=task.gold[0])
        try:
            expected = dataset.score_answer(text, entry)
        except ValueError:
            expected = 0.0  # its scorer trips over the answer: refused, and no way to go unjudged
        assert score(task, text) == pytest.approx(expected), text


@pytest.mark.parametrize(
    ("name", "attack"),
    [
        ("spiral_matrix", "[open({path!r}, 'w').close()]"),
        ("string_insertion", "[__import__('pathlib').Path({path!r}).touch()]"),
        ("binary_matrix", "[[open({path!r}, 'w')]]"),
        ("n_queens", "[open({path!r}, 'w')]"),
        ("countdown", "open({path!r}, 'w')"),
        ("puzzle24", "exec(\"open({path!r}, 'w')\")"),
        ("simple_integration", "(x).__class__.__base__.__subclasses__()"),
        ("polynomial_multiplication", "__import__('os').system('touch ' + {path!r})"),
    ],
)
def test_what_an_answer_says_is_never_run(name, attack, tmp_path):
    path = tmp_path / "proof"
    found = score(make([name]).draw(random.Random(1)), attack.format(path=str(path)))
    assert not path.exists() and isinstance(found, float) and found <= 0.05


def test_an_answer_that_takes_for_ever_is_wrong():
    task = make(["countdown"]).draw(random.Random(0))
    found = judged("9**9**9**9**9", task.gold, task.data, Scorer(timeout_s=1.0))
    assert getattr(found, "value", found) == 0.0


def test_no_question_is_in_two_splits_and_seeds_repeat():
    names = ["coin_flip", "count_bits", "list_functions", "pool_matrix"]
    state = random.getstate(), np.random.get_state()[1].tolist()
    asked = {split: {t.messages[0].content for t in islice(make(names).tasks(split, 3), 150)} for split in
             ("train", "dev", "test")}  # fmt: skip
    assert not asked["train"] & asked["dev"] and not asked["dev"] & asked["test"] and not asked["train"] & asked["test"]
    assert len(asked["dev"]) == 150  # nothing is asked twice
    ids = [[t.id for t in islice(make(names).tasks("train", seed), 30)] for seed in (3, 3, 4)]
    assert ids[0] == ids[1] != ids[2]
    assert state == (random.getstate(), np.random.get_state()[1].tolist())


def test_a_task_with_few_questions_ends_where_it_is_measured():
    config = {"coin_flip": {"config": {"min_trials": 3, "max_trials": 4}}}
    found = [task.messages[0].content for task in make(config).tasks("dev")]
    assert len(found) == len(set(found)) < 20
    assert len(list(islice(make(config).tasks("train"), 200))) == 200


def test_weights_and_configurations_count():
    tasks = {"leg_counting": {"weight": 3}, "chain_sum": {"config": {"min_terms": 2, "max_terms": 2}}}
    kinds = [task.tags["kind"] for task in islice(make(tasks).tasks("train"), 400)]
    assert 0.68 < kinds.count("leg_counting") / 400 < 0.82
    chains = (task for task in make(tasks).tasks("train") if task.tags["kind"] == "chain_sum")
    assert all(literal_eval(task.data["entry"])["metadata"]["num_terms"] == 2 for task in islice(chains, 20))


@pytest.mark.parametrize(
    ("tasks", "words"),
    [
        (["leg_countin"], ["'leg_countin'", "did you mean 'leg_counting'"]),
        ("leg_counting", ["'all'"]),
        ([], ["'all'"]),
        ({"leg_counting": {"wait": 1}}, ["wait: there is no such key; allowed: weight, config"]),
        ({"leg_counting": {"weight": 0}}, ["weight: got 0"]),
        ({"chain_sum": {"config": {"max_term": 3}}}, ["did you mean 'max_terms'", "min_terms"]),
        ({"chain_sum": {"config": {"min_terms": 9, "max_terms": 2}}}, ["chain_sum", "AssertionError"]),
    ],
)
def test_what_can_not_work_is_said_at_once(tasks, words):
    with pytest.raises(ConfigError) as caught:
        make(tasks)
    assert all(word in str(caught.value) for word in words), caught.value


async def test_it_is_a_verifier_and_the_answer_stands_in_its_tag():
    env = make(["leg_counting"])
    task = next(env.tasks("train"))
    opening = await env.reset(task, 0)
    assert "<answer>" in opening.messages[0].content and opening.messages[1].content == task.messages[0].content
    seen = await env.step(AssistantMessage(content=f"It is <answer> {task.gold[0]} </answer>"))
    assert seen.done and seen.stop_reason is StopReason.ANSWERED and seen.answer == task.gold[0]
    bare = make(["leg_counting"])
    await bare.reset(task, 0)
    cut = await bare.step(AssistantMessage(content=task.gold[0]))
    assert cut.done and cut.answer is None and cut.stop_reason is StopReason.MAX_TURNS
    assert verifier_from("upswing.envs.adapters.reasoning_gym:Scorer", {"timeout_s": 3}).fields == (
        "answer",
        "gold",
        "data",
    )


def entry_of(name, **parts):
    return {"kind": name, "config": {}, "entry": repr(parts)}


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("3*7", True),
        ("7 * 3", True),
        ("21", False),  # each number as often as it is given: none left out,
        ("3*7+0", False),  # none added,
        ("7*3*1", False),
        ("3*3*7/3", False),  # none twice
        ("__import__('os').system('true')", False),
        ("(3,7)", False),
        ("3*7; 3*7", False),
    ],
)
def test_countdown_takes_the_numbers_given_as_often_as_they_are_given(answer, right):
    data = entry_of("countdown", question="?", answer="3*7", metadata={"numbers": [3, 7], "target": 21})
    found = judged(answer, ("3*7",), data)
    assert isinstance(found, float) and (found == 1.0) is right and (right or found <= 0.05)


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("['-92.85', '61.5', '71.08']", True),
        ("['-92.85', '61.5', '75']", False),
        ("['61.5', '71.08', '-92.85']", False),
        ("['-92.85', '61.5']", False),
        ("{'a': 1}", False),
        ("[None]", False),
        ("['x', 'y', 'z']", False),
    ],
)
def test_sorting_asks_for_no_rounding_and_survives_any_answer(answer, right):
    gold = "['-92.85', '61.5', '71.08']"
    metadata = {"original_numbers": ["61.5", "71.08", "-92.85"], "direction": "ascending", "sorted_numbers": []}
    data = entry_of("number_sorting", question="?", answer=gold, metadata=metadata)
    assert judged(answer, (gold,), data) == float(right)
