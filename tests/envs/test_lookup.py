"""The lookup environment: its splits are disjoint, its expert always finds the value, and guessing doesn't."""

from __future__ import annotations

import random
from itertools import islice

import pytest

from upswing.envs import environment_factory
from upswing.envs.base import SPLITS, AssistantMessage
from upswing.envs.lookup import Lookup
from upswing.errors import ConfigError
from upswing.trajectory.types import Message, StopReason, Task


async def play(env: Lookup, task: Task, noise_seed: int = 0) -> tuple[str | None, list[str]]:
    expert = env.expert(task, random.Random(noise_seed))
    observation = await env.reset(task, 0)
    messages = list(observation.messages)
    said: list[str] = []
    while not observation.done:
        said.append(expert(tuple(messages)))
        messages.append(Message(role="assistant", content=said[-1]))
        observation = await env.step(AssistantMessage(content=said[-1]))
        messages.extend(observation.messages)
    return observation.answer, said


def test_splits_are_disjoint_and_streams_repeat_only_when_exhausted() -> None:
    env = Lookup()
    ids = {split: [task.id for task in islice(env.tasks(split, 3), 400)] for split in SPLITS}
    assert not set(ids["train"]) & set(ids["dev"]) | set(ids["train"]) & set(ids["test"])
    assert not set(ids["dev"]) & set(ids["test"])
    plain = [name for name in ids["train"] if "--" in name]
    assert len(plain) == len(set(plain))
    assert ids["train"] == [task.id for task in islice(env.tasks("train", 3), 400)]
    assert ids["train"] != [task.id for task in islice(env.tasks("train", 4), 400)]


@pytest.mark.parametrize("noise", [0.0, 1.0])
async def test_the_expert_finds_the_value_also_after_a_wrong_key(noise: float) -> None:
    env = Lookup(expert_noise=noise)
    for number, task in enumerate(islice(env.tasks("dev", 0), 50)):
        answer, said = await play(env, task, number)
        assert answer == task.gold[0]
        assert len(said) == int(task.tags["hops"]) + 1 + (noise == 1.0)


async def test_an_answer_without_asking_is_accepted_as_an_answer_only() -> None:
    env = Lookup()
    task = next(env.tasks("train", 0))
    await env.reset(task, 0)
    observation = await env.step(AssistantMessage(content="<answer>?</answer>"))
    assert observation.stop_reason is StopReason.ANSWERED and observation.answer not in task.gold


def test_bad_options_and_splits_are_named() -> None:
    with pytest.raises(ConfigError, match="expert_noise: got 2"):
        Lookup(expert_noise=2)
    with pytest.raises(ConfigError, match="did you mean 'train'"):
        Lookup().tasks("trian")
    with pytest.raises(ConfigError, match="alias_frac"):
        environment_factory("lookup", {"alias_fraction": 0.1})
