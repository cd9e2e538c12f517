"""The built-in environments as a whole: what an expert, a random policy and an idle one score, and the splits."""

from __future__ import annotations

import asyncio
import random
from itertools import islice

import pytest

from upswing.envs import AssistantMessage, environment_factory
from upswing.envs.generated import GeneratedEnv, split_of
from upswing.trajectory.types import Outcome, StopReason, Trajectory
from upswing.verify.actions import State
from upswing.verify.qa import strict_match

NAMES = ("calculator", "customer_service", "grid", "memory", "sql", "web_shop", "wordle")
NOISY = {name: {"expert_noise": 0.5} for name in NAMES}


async def played(env: GeneratedEnv, task, speak) -> Trajectory:
    seen = await env.reset(task, 0)
    messages, records, turns = list(seen.messages), [], 0
    while not seen.done:
        text = speak(tuple(messages))
        turns += 1
        seen = await env.step(AssistantMessage(content=text))
        records += seen.tool_records
        messages = [*([] if seen.rewrite else messages), *seen.messages]
    state = dict(env.state())
    env.close()
    return Trajectory(
        id="t", task=task, branches=(), messages=tuple(messages), outcome=Outcome.COMPLETED,
        stop_reason=seen.stop_reason or StopReason.ANSWERED, answer=seen.answer, tool_records=tuple(records),
        num_turns=turns, state=state,
    )  # fmt: skip


def score(trajectory: Trajectory) -> float:
    """By the final state where the task has one, else by the answer."""
    if "final_state" in trajectory.task.data:
        judged = State()(trajectory.state, trajectory.task.data)
        assert judged.value is not None and judged.components.get("passes_idle") == 0
        return judged.value
    found = strict_match(trajectory.answer, trajectory.task.gold)
    assert found is not None
    return found


def run_of(name: str, count: int, speaker, split: str = "train", **args) -> list[Trajectory]:
    make = environment_factory(name, args)

    async def all_played() -> list[Trajectory]:
        tasks = list(islice(make().tasks(split, 1), count))
        envs = [make() for _ in tasks]
        jobs = [played(env, task, speaker(env, task, i)) for i, (env, task) in enumerate(zip(envs, tasks, strict=True))]
        return [await job for job in jobs]

    return asyncio.run(all_played())


def expert(env, task, i):
    return env.expert(task, random.Random(i))


def random_policy(env, task, i):
    """Calls a tool with what it finds in the question, or answers with a word of it."""
    rng = random.Random(i)
    schema = next(iter(env._tools.values()))
    parameter = schema.parameters[0].name

    def act(messages):
        words = "".join(c if c.isalnum() else " " for c in messages[-1].content).split() or ["x"]
        if rng.random() < 0.3:
            return env.say(rng.choice(words))
        return env.call(schema.name, **{parameter: rng.choice([*words, "north", "crane"])})

    return act


@pytest.mark.parametrize("name", NAMES)
def test_the_expert_succeeds_and_a_random_policy_fails(name: str):
    assert all(score(t) == 1 for t in run_of(name, 30, expert))
    assert sum(map(score, run_of(name, 30, random_policy))) <= 2
    assert sum(map(score, run_of(name, 20, lambda env, task, i: lambda messages: env.say("")))) == 0


@pytest.mark.parametrize("name", NAMES)
def test_a_careless_expert_recovers(name: str):
    played_ = run_of(name, 30, expert, **NOISY[name])
    assert sum(map(score, played_)) >= 24
    if name in ("calculator", "sql"):  # the others' slips cost turns, not errors
        recovered = [environment_factory(name)().recovered(t) for t in played_]
        assert None in recovered and True in recovered and False not in recovered


@pytest.mark.parametrize("name", NAMES)
def test_tasks_are_the_same_for_a_seed_and_disjoint_across_splits(name: str):
    make = environment_factory(name)
    ids = {split: [t.id for t in islice(make().tasks(split, 3), 60)] for split in ("train", "dev", "test")}
    assert ids["train"] == [t.id for t in islice(make().tasks("train", 3), 60)]
    assert ids["train"] != [t.id for t in islice(make().tasks("train", 4), 60)]
    assert not set(ids["train"]) & set(ids["dev"]) and not set(ids["dev"]) & set(ids["test"])
    assert {split_of(str(i)) for i in range(50)} == {"train", "dev", "test"}


def test_a_grid_seen_in_part_is_still_walked_to_the_goal():
    seen = run_of("grid", 30, expert, view=2, max_turns=120)
    assert all(score(t) == 1 for t in seen)
    assert max(t.num_turns for t in seen) > 12  # long episodes: that is what it is for
