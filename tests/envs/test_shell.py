"""The `shell` environment: every kind of task is won by the expert, and by nothing that leaves other files behind."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import islice
from typing import Any

import pytest

from upswing.audit import audit, scripted_episode
from upswing.envs import AssistantMessage, environment_factory, shell
from upswing.errors import EnvironmentBroken
from upswing.trajectory.types import Task
from upswing.verify import Rubric, verifier_from
from upswing.verify.base import Episode
from upswing.world import World

KINDS = ("rename", "move", "count", "config", "total", "link", "permissions", "extract", "sort", "clean")


@cache
def tasks() -> dict[str, Task]:
    """A task of every kind."""
    found = islice(environment_factory("shell")().tasks("train", 0), 200)
    return {task.data["kind"]: task for task in found}


def scored(chosen: list[Task], speaker: Callable[..., Any], **args: Any) -> list[tuple[float | None, Episode]]:
    make, check = environment_factory("shell", args), verifier_from("state")

    async def play(index: int, task: Task) -> tuple[float | None, Episode]:
        env = make()
        episode = await scripted_episode(env, task, speaker(env, task, random.Random(index)), index)
        score = await check(episode)
        assert score.components["passes_idle"] == 0 and json.dumps(episode.state, allow_nan=False)
        return score.value, episode

    async def all_() -> list[tuple[float | None, Episode]]:
        return await asyncio.gather(*(play(index, task) for index, task in enumerate(chosen)))

    return asyncio.run(all_())


def values(speaker: Callable[..., Any], kinds: tuple[str, ...] = KINDS, **args: Any) -> list[float | None]:
    return [value for value, _ in scored([tasks()[kind] for kind in kinds], speaker, **args)]


def expert(env, task, rng):
    return env.expert(task, rng)


def runs(*commands: str):
    """Runs commands, in which COMMAND is the task's own, then gives the right answer."""

    def speaker(env, task, rng):
        lines = iter([command.replace("COMMAND", task.data["command"]) for command in commands])

        def act(messages):
            command = next(lines, None)
            return env.say(*task.gold or ("done",)) if command is None else env.call("bash", command=command)

        return act

    return speaker


def test_the_expert_does_every_kind_of_task():
    assert set(tasks()) == set(KINDS)
    assert values(expert) == [1.0] * 10
    assert values(expert, ("config", "count"), protocol="tags", expert_noise=1.0) == [1.0, 1.0]


def test_another_way_to_the_same_files_is_right():
    again = "COMMAND; mkdir -p new; touch new/x && rm -r new; true"
    assert values(runs(again), ("rename", "config", "link")) == [1.0] * 3


def test_nothing_else_may_change():
    acts = tuple(kind for kind in KINDS if kind != "count")
    assert values(runs(), acts) == [0.0] * 9  # nothing was done
    assert values(runs("COMMAND", "echo x > extra.txt")) == [0.0] * 10
    assert values(runs("COMMAND; f=$(find . -type f | sort | head -1); chmod u+x $f; echo x >> $f")) == [0.0] * 10
    assert values(runs("COMMAND; ln -s /etc/passwd extra")) == [0.0] * 10
    assert values(runs("rm -rf *")) == [0.0] * 10
    assert values(runs("COMMAND; for f in $(find . -type f); do : > $f$'\\t'x; done")) == [0.0] * 10


def test_what_only_looks_right_is_wrong():
    assert values(runs("rm current; echo -n '-> x' > current"), ("link",)) == [0.0]
    assert values(runs("t=$(ls releases | head -1); rm current; cp -r releases/$t current"), ("link",)) == [0.0]
    assert values(runs("COMMAND > /dev/null; chmod u+x bin/*"), ("permissions",)) == [0.0]
    assert values(runs("echo 'done' > total.txt"), ("total",)) == [0.0]
    assert values(runs("tar -xf backup.tar"), ("extract",)) == [0.0]
    # A tree that nobody can read is the agent's own doing, and 0.
    assert values(runs("COMMAND; mkdir shut; touch shut/x; chmod 000 shut"), ("sort",)) == [0.0]
    assert values(runs("COMMAND; for i in $(seq 3000); do : > file$i; done"), ("sort",)) == [0.0]


def test_files_that_can_not_be_read_at_the_start_are_a_fault(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shell, "_LOOK", ["false"])
    with pytest.raises(EnvironmentBroken, match="can't be read at the start"):
        asyncio.run(environment_factory("shell")().reset(tasks()["sort"], 0))


def test_a_random_policy_fails():
    def random_policy(env, task, rng):
        def act(messages):
            words = messages[-1].content.split() or ["x"]
            text = rng.choice([rng.choice(words), f"ls {rng.choice(words)}", f"rm {rng.choice(words)}"])
            return env.call("bash", command=text) if rng.random() < 0.7 else env.say(rng.choice(words))

        return act

    assert sum(value or 0 for value in values(random_policy)) == 0


def test_files_stay_and_the_shell_does_not(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shell, "_LIMITS", replace(shell._LIMITS, wall_s=2.0))

    async def run(*commands: str) -> list[str]:
        env = environment_factory("shell", {"max_turns": 20})()
        await env.reset(tasks()["sort"], 0)
        turns = [await env.step(AssistantMessage(content=env.call("bash", command=command))) for command in commands]
        await env.close()
        return [turn.messages[0].content for turn in turns]

    said = asyncio.run(
        run(
            "mkdir -p a && cd a && echo hello > b && X=1",
            "cat a/b; echo [$X]",
            "grep nothing a/b",
            "cat missing",
            "exit 3",
            "sleep 60",
        )
    )
    assert said[:3] == ["(no output)", "hello\n[]", "(no output)"]
    assert "No such file" in said[3] and said[3].startswith("Error") and "exit code 3" in said[4]
    assert "stopped" in said[5]


def test_splits_are_disjoint_and_repeat():
    def ids(split: str, seed: int = 3) -> list[str]:
        return [task.id for task in islice(environment_factory("shell")().tasks(split, seed), 60)]

    assert ids("train") == ids("train") != ids("train", 4)
    assert not {*ids("train")} & {*ids("dev")} and not {*ids("dev")} & {*ids("test")}


@pytest.mark.parametrize("kind", KINDS)
def test_the_start_is_not_the_end(kind: str):
    data = tasks()[kind].data
    assert data["start_state"] != data["final_state"] and data["start_state"].keys() == data["final_state"].keys()


def test_the_audit_finds_no_hole():
    make = environment_factory("shell")
    world = World(make_env=make, rubric=Rubric([("state", verifier_from("state"), 1.0)]), tasks=make().tasks)
    report = asyncio.run(audit(world, [tasks()[kind] for kind in ("rename", "link", "total", "config")]))
    assert report.false_accept == 0 and report.false_reject == 0 and not report.untested
    assert {"idle", "another play", "a turn left out"} <= {v.attack.name for v in report.verdicts}
