"""The `code` environment: what an expert, a random policy and short cuts score, its splits and its tool."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from upswing.audit import audit, scripted_episode
from upswing.cli.main import app
from upswing.envs import AssistantMessage, code, environment_factory
from upswing.errors import ConfigError
from upswing.trajectory.types import Task
from upswing.verify import Rubric, verifier_from
from upswing.verify.base import Episode
from upswing.world import World


def tasks_of(count: int, split: str = "train", seed: int = 1, **args: Any) -> list[Task]:
    return list(islice(environment_factory("code", args)().tasks(split, seed), count))


def scored(tasks: list[Task], speaker: Callable[..., Any], **args: Any) -> list[tuple[float | None, Episode]]:
    """Plays every task -> (score, episode)."""
    make, check = environment_factory("code", args), verifier_from("code")

    async def play(index: int, task: Task) -> tuple[float | None, Episode]:
        env = make()
        episode = await scripted_episode(env, task, speaker(env, task, random.Random(index)), index)
        return (await check(episode)).value, episode

    async def all_() -> list[tuple[float | None, Episode]]:
        return await asyncio.gather(*(play(index, task) for index, task in enumerate(tasks)))

    return asyncio.run(all_())


def values(*given: Any, **args: Any) -> list[float | None]:
    return [value for value, _ in scored(*given, **args)]


def expert(env, task, rng):
    return env.expert(task, rng)


def says(text: str):
    return lambda env, task, rng: lambda messages: env.say(text)


def random_policy(env, task, rng):
    def act(messages):
        words = messages[-1].content.split() or ["x"]
        code = f"def solve(x):\n    return {rng.choice(['x', '0', 'x[::-1]', 'sorted(x)', 'len(x)', '[]'])}"
        return env.call("run_python", code=rng.choice(words)) if rng.random() < 0.5 else env.say(code)

    return act


@pytest.mark.parametrize("protocol", ["hermes", "tags", "python"])
def test_the_expert_succeeds_in_every_protocol(protocol: str):
    tasks = tasks_of(4, steps=5) + tasks_of(2, "test")
    played = scored(tasks, expert, protocol=protocol)
    assert [value for value, _ in played] == [1.0] * 6
    assert all(record.result == "True\nTrue" for _, episode in played for record in episode.tool_records)


def test_short_cuts_fail():
    tasks = tasks_of(8)
    assert values(tasks, random_policy) == [0.0] * 8
    for text in ("", "def solve(x):\n    return x", "import os\nos._exit(0)"):
        assert values(tasks[:2], says(text)) == [0.0, 0.0]

    def knows_the_examples(env, task, rng):
        known = [(repr(x), y) for x, y in task.data["examples"]]
        return says(f"def solve(x):\n    return dict({known})[repr(x)]")(env, task, rng)

    assert values(tasks[:4], knows_the_examples) == [0.0] * 4


def test_every_step_counts():
    def forgets(env, task, rng):
        codes = list(task.data["codes"])
        del codes[rng.randrange(len(codes))]
        return says("\n    ".join(["def solve(x):", *(f"x = {code}" for code in codes), "return x"]))(env, task, rng)

    assert values(tasks_of(10), forgets) == [0.0] * 10


def test_a_careless_expert_mends_its_draft():
    played = scored(tasks_of(4), expert, expert_noise=1.0)
    for value, episode in played:
        first, second = episode.tool_records
        assert value == 1.0 and not first.ok and "name 'y' is not defined" in first.result and second.ok


def test_no_sequence_of_steps_is_in_two_splits():
    def shapes(split: str, seed: int = 0) -> set[str]:
        return {"|".join(_form(code) for code in task.data["codes"]) for task in tasks_of(80, split, seed)}

    def _form(code: str) -> str:
        return "".join("#" if char.isdigit() else char for char in code)

    by_split = {split: shapes(split) for split in ("train", "dev", "test")}
    for a, b in (("train", "dev"), ("train", "test"), ("dev", "test")):
        shared = {one for one in by_split[a] & by_split[b] if '"' not in one}  # a letter isn't told from another here
        assert not shared
    assert len(by_split["train"]) > 60
    assert [task.id for task in tasks_of(5)] == [task.id for task in tasks_of(5)] != [t.id for t in tasks_of(5, seed=2)]


def test_what_the_tool_shows(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(code, "_LIMITS", replace(code._LIMITS, wall_s=2.0))

    async def run(*codes: str) -> list[str]:
        env = environment_factory("code", {"max_turns": 9})()
        await env.reset(tasks_of(1)[0], 0)
        turns = [await env.step(AssistantMessage(content=env.call("run_python", code=code))) for code in codes]
        return [turn.messages[0].content for turn in turns]

    fine, silent, failed, ended, slow = asyncio.run(
        run("print('é' * 3)", "x = 1", "print(1)\n1 / 0", "import os\nos._exit(4)", "while True: pass")
    )
    assert (fine, silent) == ("ééé", "(no output)")
    assert failed.startswith("Error") and "exit code 1" in failed and failed.endswith("division by zero")
    assert "exit code 4" in ended and "stopped" in slow


@pytest.mark.parametrize("args", [{"steps": 1}, {"expert_noise": 2}, {"unsafe_local": "yes"}, {"step": 3}])
def test_options_are_checked(args):
    with pytest.raises(ConfigError):
        environment_factory("code", args)()


def test_the_audit_finds_no_hole():
    check = verifier_from("code", {"timeout_s": 1.0, "total_timeout_s": 4.0})
    make = environment_factory("code")
    world = World(make_env=make, rubric=Rubric([("code", check, 1.0)]), tasks=make().tasks)
    report = asyncio.run(audit(world, tasks_of(2)))
    # "idle" is a right program that wasn't tried before: right.
    wrong = {v.attack.name for v in report.verdicts if v.accepted and v.attack.wanted == "refused"} - {"idle"}
    assert not wrong and report.false_reject == 0 and not report.untested
    tried = {verdict.attack.name for verdict in report.verdicts}
    assert {"exits with 0", "patches the checker", "reads the tests", "sleeps"} <= tried


@pytest.mark.parametrize(("env", "verifier"), [("code", "code"), ("shell", "state")])
def test_a_person_can_play_it(tmp_path: Path, env: str, verifier: str):
    stages = "stages:\n  - {stage: eval, of: [base], tasks: 4}\n"
    (tmp_path / "r.yaml").write_text(f"name: played\nmodel: tiny\nenv: {env}\nverifiers: [{verifier}]\n{stages}")
    result = CliRunner().invoke(app, ["play", str(tmp_path / "r.yaml")], input="/expert\n" * 4)
    assert result.exit_code == 0 and "reward   1\n" in result.stdout, result.output
