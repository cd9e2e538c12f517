"""The adapters in Upswing's own loop: one outcome each, rewarded, and nothing broken scored 0."""

from __future__ import annotations

import asyncio
import random
from itertools import islice
from typing import Any

import pytest
from tests.envs.test_adapters_gymnasium import OWN as GYMNASIUM
from tests.envs.test_adapters_trl import OWN as TRL
from tests.envs.test_adapters_verifiers import OWN as VERIFIERS

from upswing.engine.base import Sampling
from upswing.engine.scripted import ScriptedEngine
from upswing.envs import environment_factory
from upswing.envs.adapters import env_reward
from upswing.models.tiny import tiny_tokenizer
from upswing.rollout.collect import Rollouts
from upswing.rollout.limits import Limits
from upswing.trajectory.render import ChatRenderer
from upswing.trajectory.types import Message, Outcome, Task
from upswing.verify import Rubric

CALL = '<tool_call>{"name": "counting_add", "arguments": {"times": 1}}</tool_call>'
START = Task(id="t", messages=(Message(role="user", content="Reach 42."),), data={"start": 40})
CASES: dict[str, tuple[str, dict[str, Any], list[str], tuple[Any, Any]]] = {
    # name: (environment, args, what the agent says, (outcome, reward))
    "gymnasium cut": ("gymnasium", {"id": "{gymnasium}:Echo"}, ["<act>x</act>"] * 3, (Outcome.TRUNCATED, -0.75)),
    "gymnasium broken": (
        "gymnasium", {"id": "{gymnasium}:Echo", "kwargs": {"breaks": True}}, ["<act>x</act>"], (Outcome.ERRORED, None),
    ),
    "trl": (
        "trl", {"factory": "{trl}:Scored", "protocol": "python"}, ["add(number=2)", "Done"], (Outcome.COMPLETED, 0.42),
    ),
    "trl broken": (
        "trl", {"factory": "{trl}:Adder", "rewards": "{trl}:breaks"}, ["Done"], (Outcome.ERRORED, None),
    ),
    "verifiers": ("verifiers", {"taskset": "{verifiers}:Counts"}, [CALL, "Done"], (Outcome.COMPLETED, 1.01)),
    "verifiers broken": ("verifiers", {"taskset": "{verifiers}:BrokenSums"}, ["2"], (Outcome.ERRORED, None)),
    "verifiers out of context": (
        "verifiers", {"taskset": "{verifiers}:Counts", "max_turns": 99}, [CALL] * 99, (Outcome.TRUNCATED, None),
    ),
}  # fmt: skip


def rollouts(make_env: Any, rubric: Any, script: list[str], **limits: Any) -> Rollouts:
    tokenizer = tiny_tokenizer()
    renderer = ChatRenderer(tokenizer)
    end = renderer.end_of_turn_id()
    given = {"turn_tokens": 400, "context_tokens": 1500, **limits}
    return Rollouts(
        make_env=make_env, rubric=rubric, renderer=renderer, end_tokens=(end,), limits=Limits(**given),
        engine=ScriptedEngine(script, tokenizer=tokenizer, end_token=end), max_retries=0,
    )  # fmt: skip


@pytest.mark.parametrize("case", CASES)
async def test_every_play_has_one_outcome_and_no_fault_is_a_zero(case, tmp_path):
    sources = {"gymnasium": GYMNASIUM, "trl": TRL, "verifiers": VERIFIERS}
    paths = {name: tmp_path / f"own_{name}.py" for name in sources}
    for name, path in paths.items():
        path.write_text(sources[name])
    env, args, said, (outcome, reward) = CASES[case]
    filled = {key: value.format(**paths) if isinstance(value, str) else value for key, value in args.items()}
    splits = {"splits": {"train": {}}} if env == "verifiers" else {}
    make = environment_factory(env, {**filled, **splits})
    task = START if env == "trl" else next(make().tasks("train"))
    if env == "verifiers" and "Counts" in args["taskset"]:
        task = next(t for t in make().tasks("train") if t.data["row"]["step"] == 1)
    parts = rollouts(make, Rubric([("env_reward", env_reward, 1.0)]), said)
    [group] = await parts.groups([task], size=1, sampling=Sampling(), seed=0)
    (found,) = group.trajectories
    assert found.outcome is outcome, found.error
    assert found.reward == (None if reward is None else pytest.approx(reward))
    if outcome is Outcome.TRUNCATED and reward is None:
        assert found.score is not None and "before its environment" in found.score.reason
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == 1  # no game goes on


async def test_reasoning_gym_demonstrates_and_learns_from_the_same_scorer():
    from upswing.envs.adapters.reasoning_gym import Scorer

    make = environment_factory("reasoning_gym", {"tasks": ["leg_counting", "count_bits"]})
    rubric = Rubric([("reasoning_gym", Scorer(), 1.0)])
    tasks = list(islice(make().tasks("train"), 3))
    parts = rollouts(make, rubric, ["<answer>no</answer>"])
    kept, rejected = await parts.demonstrations(iter(tasks), count=3, seed=0, min_reward=1.0)
    assert [one.reward for one in kept] == [1.0] * 3 and not rejected
    [group] = await parts.groups(tasks[:1], size=1, sampling=Sampling(), seed=random.randrange(9))
    assert group.trajectories[0].reward == 0.0
