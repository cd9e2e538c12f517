"""A function is checked when it is named, and never turns a failure of its own into a 0."""

import asyncio
import functools
import time

import numpy as np
import pytest

from upswing.errors import ConfigError
from upswing.trajectory.types import Score
from upswing.verify import verifier_from


async def value_of(function, episode, args=None, **options):
    return await verifier_from(function, args, **options)(episode)


async def test_parameters_are_filled_by_name(episode):
    def check(num_turns, answer, gold, data, episode):
        return (num_turns, answer, gold, data["level"], episode.task.id) == (2, "Paris", ("Paris",), 2, "t")

    assert (await value_of(check, episode())).value == 1.0


async def test_async_functions_classes_and_objects(episode):
    async def waiting(answer):
        await asyncio.sleep(0)
        return 0.25

    class Close:
        def __init__(self, within):
            self.within = within

        def __call__(self, answer):
            return len(answer) / self.within

    assert (await value_of(waiting, episode())).value == 0.25
    assert (await value_of(Close, episode(), {"within": 10})).value == 0.5
    assert (await value_of(Close(20), episode())).value == 0.25
    assert (await value_of(functools.partial(lambda answer, k: k, k=0.5), episode())).value == 0.5
    with pytest.raises(ConfigError, match="within"):
        verifier_from(Close, {})


async def test_options_come_from_args(episode):
    def check(answer, bonus, weight=1.0):
        return bonus * weight

    assert (await value_of(check, episode(), {"bonus": 2, "weight": 3})).value == 6.0


@pytest.mark.parametrize(
    ("function", "args", "words"),
    [
        (lambda anwser: 1, {}, ["asks for 'anwser'", "doesn't have; did you mean 'answer'?", "fields: task, messages"]),
        (lambda answer, reference: 1, {}, ["'reference'"]),
        (lambda answer: 1, {"tolerence": 1}, ["'tolerence'"]),
        (lambda answer, tolerance=0: 1, {"tolerence": 1}, ["'tolerence'", "did you mean 'tolerance'"]),
        (lambda answer: 1, {"answer": "x"}, ["'answer'", "filled from the Episode"]),
        (lambda *answer: 1, {}, ["answer"]),
        (3, {}, ["int"]),
    ],
)
def test_what_an_episode_does_not_have_is_said_at_load(function, args, words):
    with pytest.raises(ConfigError) as caught:
        verifier_from(function, args, name="correct")
    text = str(caught.value)
    assert "verifier 'correct'" in text and "\n" not in text
    assert all(word in text for word in words), text


class Judge:
    def __init__(self, file: str, strictness: int = 1) -> None:
        if file != "rules.txt":
            raise OSError(f"no {file}")

    def __call__(self, answer):
        return 1.0


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({}, "needs the argument 'file'"),
        ({"file": "rules.txt", "strictnes": 2}, "no argument 'strictnes'; allowed: file, strictness; did you mean"),
        ({"file": "x"}, "can't be made: OSError: no x"),
    ],
)
def test_a_class_that_can_not_be_made_is_said_at_load(args, words):
    verifier_from(Judge, {"file": "rules.txt"})
    with pytest.raises(ConfigError, match="verifier 'Judge'") as caught:
        verifier_from(Judge, args)
    assert words in str(caught.value)


def test_names_and_paths(tmp_path):
    assert verifier_from("strict_match").name == "strict_match"
    with pytest.raises(ConfigError, match="did you mean 'exact_match'"):
        verifier_from("exact_mach")
    path = tmp_path / "checks.py"
    path.write_text("def mine(answer):\n    return 1\n")
    assert verifier_from(f"{path}:mine").name == "mine"


@pytest.mark.parametrize(
    ("returned", "value"),
    [
        (True, 1.0),
        (False, 0.0),
        (3, 3.0),
        (np.float32(0.5), 0.5),
        (np.bool_(True), 1.0),
        (np.array([0.25]), 0.25),
        (Score(value=0.5, components={"a": 1.0}), 0.5),
        (None, None),
        (float("nan"), None),
        (float("inf"), None),
        (-float("inf"), None),
        (Score(value=float("nan")), None),
        ("1", None),
        ([1], None),
        (np.array([1, 2]), None),
        (1j, None),
        (10**400, None),
    ],
)
async def test_what_counts_as_a_score(episode, returned, value):
    score = await value_of(lambda answer: returned, episode())
    assert score.value == value
    assert (score.value is None) == bool(score.reason)


@pytest.mark.parametrize("error", [ValueError("boom"), SystemExit(1), KeyError("k"), AssertionError("no")])
async def test_a_raising_verifier_has_no_score(episode, error):
    def check(answer):
        raise error

    score = await value_of(check, episode())
    assert score.value is None and type(error).__name__ in score.reason


@pytest.mark.parametrize("kind", ["plain", "async"])
async def test_a_hanging_verifier_has_no_score(episode, kind):
    def plain(answer):
        while True:
            pass

    async def waiting(answer):
        await asyncio.sleep(60)

    started = time.perf_counter()
    score = await value_of(plain if kind == "plain" else waiting, episode(), timeout_s=0.1)
    assert score.value is None and "0.1 s" in score.reason and time.perf_counter() - started < 2


async def test_cancelling_is_not_swallowed(episode):
    async def waiting(answer):
        await asyncio.sleep(60)

    task = asyncio.create_task(value_of(waiting, episode()))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_builtins_score(episode):
    assert (await value_of("strict_match", episode(".Paris"))).value == 0.0
    assert (await value_of("exact_match", episode(".Paris"))).value == 1.0
    assert (await value_of("format", episode())).value == 1.0
    assert (await value_of("f1", episode(None))).value == 0.0
    assert (await value_of("f1", episode(gold=()))).value is None
