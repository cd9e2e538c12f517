"""The built-in environments as a whole: what an expert, a random policy and an idle one score, and the splits."""

from __future__ import annotations

import asyncio
import random
import re
from dataclasses import replace
from itertools import islice

import pytest

from upswing.envs import AssistantMessage, environment_factory
from upswing.envs.base import SPLITS
from upswing.envs.generated import GeneratedEnv, split_of
from upswing.envs.wordle import words
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

    def act(messages):
        schema = rng.choice(list(env._tools.values()))
        words = "".join(c if c.isalnum() else " " for c in messages[-1].content).split() or ["x"]
        if rng.random() < 0.3:
            return env.say(rng.choice(words))
        values = [*words, "north", "crane"]
        return env.call(schema.name, **{each.name: rng.choice(values) for each in schema.parameters})

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
    assert all(re.fullmatch(rf"{name}-[0-9a-f]{{16}}", one) for one in ids["train"])


def test_the_shops_splits_differ_in_more_than_the_price():
    make = environment_factory("web_shop")
    asked = {s: {re.sub(r"\d+", "", t.messages[0].content) for t in islice(make().tasks(s, 0), 300)} for s in SPLITS}
    assert not asked["train"] & (asked["dev"] | asked["test"]) and not asked["dev"] & asked["test"]


def test_two_wordings_of_a_sum_are_two_tasks_of_one_split():
    found: dict[str, set[tuple[str, str]]] = {}
    for split in SPLITS:
        for task in islice(environment_factory("calculator", {"num_terms": 2, "max_number": 9})().tasks(split, 0), 300):
            found.setdefault(task.data["expression"], set()).add((task.id, task.split))
    several = [each for each in found.values() if len(each) > 1]
    assert len(several) > 20 and all(len({split for _, split in each}) == 1 for each in several)


EVERYBODY = ("mira", "kofi", "lena", "hugo", "tara", "jun", "olga", "femi", "rosa", "nils")
CONSTANT = {
    "customer_service": [
        *({"email": f"{name}@example.com"} for name in EVERYBODY),
        "I can't: it is shipped, or older than 30 days.",
        *(" ".join(map(str, range(low, low + 50))) for low in range(10, 400, 50)),
    ],
    "sql": ["0"],
    "memory": ["red"] * 3,
    "wordle": [{"word": word} for word in ("raise", "count", "plumb", "digit", "shaky", "fever")],
}


@pytest.mark.parametrize("name", list(CONSTANT))
def test_a_constant_script_hardly_ever_wins(name: str):
    def script(env, task, i):
        tool = next(iter(env._tools))
        lines = iter(CONSTANT[name])

        def act(messages):
            line = next(lines, CONSTANT[name][-1])
            return env.say(line) if isinstance(line, str) else env.call(tool, **line)

        return act

    assert sum(map(score, run_of(name, 200, script))) <= 10


@pytest.mark.parametrize("kind", ["num_orders", "products"])
def test_a_task_is_played_as_it_was_made_whatever_the_options_are_now(kind: str):
    name, was, now = {"num_orders": ("sql", 5, 40), "products": ("web_shop", 20, 900)}[kind]
    tasks = list(islice(environment_factory(name, {kind: was})().tasks("train", 0), 5))
    env = environment_factory(name, {kind: now})()
    for task in tasks:
        assert score(asyncio.run(played(env, task, env.expert(task, random.Random(0))))) == 1


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("memory", {"sessions": 10, "facts": 5}),
        ("grid", {"size": 5}),
        ("grid", {"size": 14}),
        ("grid", {"size": 8, "view": 1}),
        ("wordle", {"guesses": 20}),
        ("web_shop", {"products": 20}),
        ("web_shop", {"products": 1000}),
    ],
)
def test_every_size_can_be_won_within_the_turns_it_is_given(name: str, args):
    assert all(score(t) == 1 for t in run_of(name, 12 if name == "grid" else 60, expert, **args))


def turns_of(name: str, task_data, *turns) -> Trajectory:
    """Plays turns of lists of calls, each (tool, arguments), or texts, on a task with this data."""
    env = environment_factory(name)()
    task = replace(next(env.tasks("train", 0)), data={"start_state": {}, **task_data})

    def written(turn) -> str:
        return turn if isinstance(turn, str) else "".join(env.call(tool, **given) for tool, given in turn)

    said = iter(turns)
    return asyncio.run(played(env, task, lambda messages: written(next(said, "<answer></answer>"))))


def test_calls_after_the_end_of_the_episode_do_nothing():
    secret, other = words()[:2]
    solved = {"word": secret, "final_state": {"solved": True, "guesses": 1}}
    seen = turns_of("wordle", solved, [("guess", {"word": secret}), ("guess", {"word": other})])
    assert score(seen) == 1 and [r.ok for r in seen.tool_records] == [True, False]
    assert "the episode is over" in seen.tool_records[1].result


def test_one_step_a_turn():
    rows = ["A..G#", "#####", "#####", "#####", "#####"]
    seen = turns_of("grid", {"rows": rows, "final_state": {"at_goal": True}}, [("move", {"direction": "east"})] * 3)
    assert score(seen) == 0 and [r.ok for r in seen.tool_records] == [True, False, False]
    assert score(
        turns_of("grid", {"rows": rows, "final_state": {"at_goal": True}}, *[[("move", {"direction": "east"})]] * 3)
    )


def test_what_was_bought_does_not_change_afterwards():
    env = environment_factory("web_shop")()
    task = next(t for t in env.tasks("train", 0) if "colour" in t.data["wanted"]["options"])
    policy = env.expert(task, random.Random(0))

    def greedy(messages):
        text = policy(messages)
        return text + "".join(
            env.call("click", button=c) for c in ("red", "teal", "amber", "white", "black", "navy")
        ) * ("buy" in text)

    assert score(asyncio.run(played(env, task, greedy))) == 1


def test_a_grid_seen_in_part_is_still_walked_to_the_goal():
    seen = run_of("grid", 30, expert, view=2, max_turns=120)
    assert all(score(t) == 1 for t in seen)
    assert max(t.num_turns for t in seen) > 12  # long episodes: that is what it is for
