"""What a run measures before step 1: its reward is audited where that is free, in little time, and without a trace; and
hours follow from what was played before."""

from __future__ import annotations

import asyncio
import random
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from upswing.envs import ToolEnv
from upswing.evals.stats import Interval
from upswing.preflight.advice import UNKNOWN, Measured, measured_findings
from upswing.recipe import RlStage
from upswing.stages import preflight
from upswing.stages.context import TaskSource
from upswing.stages.graduation import pace_of
from upswing.trajectory.types import Branch, Message, Task
from upswing.verify import Rubric
from upswing.verify.forms import Regex
from upswing.verify.judge import Judge
from upswing.verify.qa import strict_match

LIMITS = SimpleNamespace(turn_tokens=8, context_tokens=64)
TASKS = [Task(id=gold, messages=(Message(role="user", content="How many?"),), gold=(gold,)) for gold in ("12", "7")]


class Drawing(ToolEnv):
    """Draws from every global random state there is."""

    def reset(self, task: Task, seed: int) -> Any:
        random.random(), np.random.rand(), torch.rand(1)
        return super().reset(task, seed)


def contains(answer: str | None, gold: tuple[str, ...]) -> bool:
    return any(one in (answer or "") for one in gold)


async def asked(answer: str | None, gold: tuple[str, ...]) -> float:
    raise AssertionError("it may cost")


def slow(answer: str | None, gold: tuple[str, ...]) -> float:
    time.sleep(0.5)
    return float(answer in gold)


class Breaking(Drawing):
    def expert(self, task: Task, rng: random.Random) -> Any:
        if task.id == "7":
            raise ValueError("no plan")
        return lambda messages: task.gold[0]


class Away(list[Task]):
    def __iter__(self) -> Any:
        raise TimeoutError("the hub is away")


async def alone(work: Any) -> Any:
    """What it gives, and that nothing of it goes on."""
    found = await work
    assert asyncio.all_tasks() == {asyncio.current_task()}
    return found


def audited(
    verifier: Any, tasks: list[Task] = TASKS, workers: int = 0, env: type[Drawing] = Drawing, **stage: Any
) -> tuple[Measured, str]:
    recipe = SimpleNamespace(seed=0, cluster=SimpleNamespace(env_workers=workers))
    context: Any = SimpleNamespace(
        recipe=recipe,
        rubric=Rubric([("v", verifier, 1.0)]),
        make_env=lambda: env(tasks=TASKS),
        tasks=TaskSource(lambda split, seed: iter(tasks)),
    )
    found = preflight._audited(context, RlStage(steps=1).model_copy(update=stage), Measured(samples=3))
    return asyncio.run(alone(found))  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def _time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "AUDIT_S", 300.0)


def test_what_it_finds_is_what_upswing_check_finds_of_the_same_numbers() -> None:
    found, why = audited(strict_match)
    assert (found.false_accept, found.false_reject, found.samples, why) == (0, 0, 3, "")
    found, why = audited(contains)
    assert found.false_accept > 0.1 and not why
    recipe: Any = SimpleNamespace(limits=LIMITS)
    [finding] = measured_findings(found, recipe, RlStage(steps=1))
    assert (finding.mode, finding.severity) == ("reward_accepts_wrong_answers", "critical")


def test_a_verifier_that_waits_for_something_outside_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = Judge(model="m", url="http://localhost:1/v1", criteria="It is right.")
    for verifier, elsewhere in ((asked, ["v"]), (judge, ["v"]), (Regex(pattern="a"), []), (contains, [])):
        assert preflight._awaited(Rubric([("v", verifier, 1.0)])) == elsewhere
    monkeypatch.setattr(preflight, "audit", None)
    for found, why in (audited(asked), audited(contains, workers=1), audited(contains, reward_model="rm")):
        assert found == Measured(samples=3) and why


def test_it_ends_in_time_and_stops_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert audited(strict_match, [TASKS[0], Task(id="none", messages=TASKS[0].messages)])[1] == ""
    assert "no task's right play is accepted" in audited(lambda: 0.0)[1]
    assert "no task" in audited(strict_match, [])[1]
    assert audited(slow, env=Breaking) == (Measured(samples=3), "ValueError: no plan")
    assert audited(contains, Away()) == (Measured(samples=3), "TimeoutError: the hub is away")
    monkeypatch.setattr(preflight, "audit", lambda *args, **options: 1 / 0)
    assert audited(contains) == (Measured(samples=3), "ZeroDivisionError: division by zero")
    monkeypatch.undo()
    monkeypatch.setattr(preflight, "AUDIT_S", 0.2)
    began = time.perf_counter()
    assert audited(slow) == (Measured(samples=3), "not done within 0.2 s") and time.perf_counter() - began < 20


def test_a_run_plays_nothing_hostile_and_nothing_where_no_right_play_is_known() -> None:
    """A verifier of one's own may run programs where it is: one that exits would end the run."""
    heard: list[str] = []

    def ran(answer: str | None, gold: tuple[str, ...]) -> bool:
        heard.append(answer or "")
        return answer in gold

    program = "def add(a, b):\n    return a + b"
    found, _ = audited(ran, [Task(id="add", messages=TASKS[0].messages, gold=(program,))])
    assert found.false_reject == 0 and program in heard and not any("exit" in one for one in heard)
    heard.clear()
    assert "no expert and no accepted answer" in audited(ran, [Task(id="?", messages=TASKS[0].messages)])[1]
    assert not heard


def test_what_a_run_draws_at_random_is_the_same_with_it() -> None:
    states = []
    for audits in (False, True):
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        if audits:
            audited(contains)
        states.append((random.random(), np.random.rand(), float(torch.rand(1))))
    assert states[0] == states[1]


def test_hours_follow_from_both_speeds_and_a_groups_prompt_is_computed_once() -> None:
    sampled, other = np.repeat([False, True, False, True], [40, 20, 30, 10]), np.zeros(100)
    branch = Branch(tokens=other, sampled=sampled, engine_logprobs=other, policy_version=other, turn=other)
    played: Any = SimpleNamespace(branches=[branch], num_sampled_tokens=30)
    pace = pace_of([played] * 4, 2.0)
    assert pace == {"sampled_per_s": 60, "trajectory_s": 0.5, "prompt_tokens": 40, "further_tokens": 60}
    rows = [{"num_tokens": 1000, "seconds": 10.0}, {"validation_loss": 1.0}]
    stages = {"sft": {"pace": pace, "graduation": {"pass_1": 0.25}}}
    context: Any = SimpleNamespace(
        metrics=SimpleNamespace(read=lambda name: rows if name == "sft" else []), state=SimpleNamespace(stages=stages)
    )
    stage = RlStage(steps=10, tasks_per_step=2, group_size=4, kl_coef=0.0, eval_every=0)
    found = preflight._known(context, stage, torch.nn.Linear(1, 1), "sft", UNKNOWN, None)
    assert (found.sampled_per_s, found.trained_per_s, found.pass_1.mean) == (60, 100, 0.25)
    # Of 8 trajectories; 70 tokens of each are learned from in a pass, and in the third of one for log-probs of before.
    assert found.step_s == pytest.approx(8 * (0.5 + 70 * 4 / 3 / 100)) and found.hours == found.step_s * 10 / 3600
    quick = preflight._known(context, stage, torch.nn.Linear(1, 1), "sft", Interval(0.5, 0.4, 0.6, 64), None)
    assert quick.pass_1.mean == 0.5, "an evaluation says more than a graduation check"
