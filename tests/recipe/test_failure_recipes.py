"""The failure lab: each recipe differs from its healthy twin as its header says, and the bench counts as it says."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from upswing.envs.base import AssistantMessage
from upswing.envs.lookup import UNKNOWN
from upswing.monitor.detectors import MODES
from upswing.plugins import load_object
from upswing.recipe import RlStage, load_recipe

ROOT = Path(__file__).parents[2]
LAB = ROOT / "recipes" / "failures"
FAILING = sorted(path for path in LAB.glob("*.yaml") if path.stem != "healthy")


def load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


bench = load("bench_failures", ROOT / "bench" / "failures.py")
Desk = load_object(f"{LAB / 'lab.py'}:Desk", "environment", {})
lab = sys.modules[Desk.__module__]


# -- recipes -----------------------------------------------------------------------------------------------------------


def flat(data: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves by dotted path; stages by their kind, verifiers as one."""
    if isinstance(data, dict):
        for key, value in data.items():
            yield from flat(value, f"{path}.{key}" if path else key)
    elif path == "stages":
        for stage in data:
            yield from flat(stage, stage["stage"])
    else:
        yield path, data


def leaves(path: Path) -> dict[str, Any]:
    return dict(flat(yaml.safe_load(path.read_text())))


@pytest.mark.parametrize("path", FAILING, ids=lambda path: path.stem)
def test_a_failing_recipe_differs_from_the_healthy_one_by_its_stated_cause_alone(path: Path) -> None:
    header = [line.removeprefix("# ") for line in path.read_text().splitlines() if line.startswith("# ")]
    assert all(any(line.startswith(word) for line in header) for word in ("Cause: ", "Seen: ", "Remedy: "))
    stated = re.search("(?m)^Differs from healthy.yaml in: (.+)$", "\n".join(header))
    assert stated is not None
    ours, healthy = leaves(path), leaves(LAB / "healthy.yaml")
    differ = {key for key in ours | healthy if ours.get(key) != healthy.get(key)} - {"name"}
    assert {key if key in stated[1].split(", ") else key.split(".")[0] for key in differ} == {*stated[1].split(", ")}
    assert ours["name"] == path.stem
    recipe = load_recipe(path)
    assert isinstance(recipe.stages[-1], RlStage)
    load_recipe(path, ["rl.safeguards=auto"])


def test_every_mode_has_a_way_to_be_provoked() -> None:
    assert {*bench.NOT_PROVOKED} <= {*MODES}
    for mode in {*MODES} - {*bench.NOT_PROVOKED}:
        load_recipe(LAB / bench.mode_of(mode).recipe)
    assert {path.stem for path in FAILING} <= {*MODES}
    twin = bench.SPECIAL["reward_hacking"]
    strict = load_recipe(LAB / twin.twin, twin.twin_overrides)
    assert [(v.name, v.weight) for v in strict.verifiers] == [("strict_match", 1.0), ("exact_match", 0.0)]
    twin = bench.mode_of("repeated_calls")
    unpaid = load_recipe(LAB / twin.twin, twin.twin_overrides)
    assert unpaid.verifiers == load_recipe(LAB / "healthy.yaml").verifiers
    assert unpaid.stages == load_recipe(LAB / twin.recipe).stages


# -- the lab's world ---------------------------------------------------------------------------------------------------


async def played(env: Any, task: Any, seed: int, turns: list[str]) -> list[Any]:
    seen = [await env.reset(task, seed)]
    for turn in turns:
        seen.append(await env.step(AssistantMessage(content=turn)))
    return seen


def tasks(count: int, split: str = "train", **options: Any) -> list[Any]:
    return list(itertools.islice(Desk(**options).tasks(split), count))


async def test_two_turns_answer_what_is_not_told_and_the_expert_needs_a_third_after_a_wrong_key() -> None:
    import random

    for number, task in enumerate(tasks(60)):
        env = Desk(max_turns=3, expert_noise=0.75, guesses=0.0)
        act, messages, said = env.expert(task, random.Random(number)), task.messages, []
        seen = await env.reset(task, number)
        while not seen.done:
            said.append(act(messages))
            seen = await env.step(AssistantMessage(content=said[-1]))
            messages = (*messages, *seen.messages)
        assert seen.answer == task.gold[0]
        wrong = any(message.content == UNKNOWN for message in messages)
        assert len(said) == (1 if "told" in task.tags else 2 + wrong)


async def test_an_expert_that_repeats_itself_does_so_after_a_call_that_told_and_still_answers() -> None:
    import random

    repeated = asked = 0
    for number, task in enumerate(tasks(400)):
        env = Desk(max_turns=3, expert_noise=0.5, guesses=0.0, repeats=0.3)
        act, messages = env.expert(task, random.Random(number)), task.messages
        seen, told = await env.reset(task, number), list[str]()
        while not seen.done:
            seen = await env.step(AssistantMessage(content=act(messages)))
            messages = (*messages, *seen.messages)
            told = [message.content for message in messages if message.role == "tool"]
        assert seen.answer == task.gold[0]
        if told and told[0] != UNKNOWN:
            asked, repeated = asked + 1, repeated + (told == [task.gold[0]] * 2)
            assert len(told) <= 2
        else:
            assert told in ([], [UNKNOWN, task.gold[0]])
    assert 0.2 < repeated / asked < 0.4


async def test_each_fault_is_in_its_own_world_only() -> None:
    task = next(one for one in tasks(20) if "told" not in one.tags)
    call = f"<get>{task.data['key']}</get>"
    _, seen = await played(Desk(), task, 1, [call])
    assert [m.content for m in seen.messages] == [task.gold[0]] and not seen.rewrite
    _, seen = await played(Desk(fault="rewrites"), task, 1, [call])
    assert seen.rewrite and [m.content for m in seen.messages] == [task.messages[0].content, task.gold[0]]
    crashed = 0
    for seed in range(400):
        try:
            await Desk(fault="crashes").reset(task, seed)
        except ConnectionError:
            crashed += 1
    assert 160 < crashed < 240
    few = tasks(200, fault="few_tasks")
    assert {one.data["key"] for one in few} == {"a", "b"}
    assert len({one.data["key"] for one in tasks(200, "dev", fault="few_tasks")}) == len(lab.KEYS)


async def test_an_attempts_luck_is_its_seeds() -> None:
    task = tasks(1)[0]
    found = []
    for seed in [*range(2000), *range(5)]:
        env = Desk()
        await env.reset(task, seed)
        found.append(env.state())
    assert found[2000:] == found[:5]
    accepted = [lab.flipped(task.gold[0], task.gold, state, noise=0.8) for state in found[:2000]]
    assert abs(sum(accepted) / 2000 - 0.2) < 0.04
    assert not any(lab.flipped("x", task.gold, state, noise=0.0) for state in found)


# -- what the bench counts ---------------------------------------------------------------------------------------------


def curve(*values: float) -> list[tuple[int, float]]:
    return list(enumerate(values, start=1))


@pytest.mark.parametrize(
    ("values", "step"),
    [
        ((0.5, 0.8, 0.73, 0.71, 0.5), 4),  # below 0.72 from there on
        ((0.5, 0.8, 0.6, 0.8, 0.79), None),  # it came back
        ((0.8, 0.5, 0.8, 0.5, 0.5), 4),
        ((0.5, 0.6, 0.7), None),
        ((0.0, 0.0), None),
        ((0.9,), None),
    ],
)
def test_success_is_lost_from_where_it_stays_below_its_peak(values: tuple[float, ...], step: int | None) -> None:
    assert bench.lost_at(curve(*values)) == step


def test_a_run_lags_from_where_it_stays_below_its_twin() -> None:
    twin = curve(0.4, 0.5, 0.7, 0.9, 1.0)
    assert bench.lags_at(curve(0.4, 0.45, 0.55, 0.6, 0.6), twin) == 3
    assert bench.lags_at(curve(0.4, 0.3, 0.7, 0.85, 0.95), twin) is None
    assert bench.lags_at(curve(0.4, 0.5, 0.7, 0.9, 0.89), twin) == 5
    late = curve(*[0.0] * 8)
    faster = curve(*[0.4] * 6, 0.6, 0.9)
    assert bench.lags_at(late, faster) == 1
    assert bench.lags_at(late, faster, by_gain=True) == 7


def test_smoothing_is_over_the_newest_values_alone() -> None:
    assert bench.smooth(curve(1.0, 0.0, 0.5, 0.5), window=2) == curve(1.0, 0.5, 0.25, 0.5)


def test_a_lead_is_a_share_of_the_way_to_the_harm() -> None:
    assert bench.lead(5, 20) == 0.75
    assert bench.lead(20, 20) == bench.lead(25, 20) == bench.lead(None, 20) == 0.0


def outcome(**values: Any) -> Any:
    start = {"mode": "kl_explosion", "found": 5, "lost": 20, "lags": None, "kept": 0.2, "guarded": 0.98, "others": ()}
    return bench.Outcome(**{**start, **values})


def test_figures_count_runs_without_harm_for_detection_only() -> None:
    some = [
        outcome(),  # lead 0.75
        outcome(lags=10),  # 0.5
        outcome(found=None, guarded=0.5),  # 0
        outcome(lost=None, kept=1.0, guarded=math.nan),
    ]
    found = bench.detection_figures(some) | bench.kept_figures(some)
    assert {name: figure.value for name, figure in found.items()} == {
        "detected": 0.75,
        "lead_positive": pytest.approx(2 / 3),
        "median_lead": 0.5,
        "kept_with_safeguards": 0.98,
        "kept_without": 0.2,
    }
    harmless = bench.detection_figures([outcome(lost=None)])
    assert harmless["detected"].value == 1.0 and harmless["median_lead"].value is None


def test_the_cost_of_signals_is_told_step_by_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps differ, and the machine gets slower, by far more than signals cost: 2 %."""
    played = []

    def play(job: Any, folder: Path) -> None:
        slower = 1.0 + len(played) // 2
        played.append(job)
        ends = itertools.accumulate(
            slower * (1 + step % 4) * (1.02 if job.arm.startswith("cost-True") else 1.0) for step in range(20)
        )
        (folder / job.name).mkdir(parents=True)
        rows = "".join(f'{{"stage": "rl", "time": {end}}}\n' for end in ends)
        (folder / job.name / "metrics.jsonl").write_text(rows)

    monkeypatch.setattr(bench, "play", play)
    monkeypatch.setattr(bench, "_one_thread", lambda: None)
    monkeypatch.setattr(bench, "without_monitor", contextlib.nullcontext)
    figure = bench.cost_figure(tmp_path, quick=True)
    assert figure.value == pytest.approx(0.02) and figure.target == 0.03 and figure.better == "lower"
    assert figure.spread == pytest.approx((0.02, 0.02))
    assert [job.arm.split("-")[1] for job in played] == ["True", "False"] * 2
    assert len({(job.seed, job.recipe, job.overrides) for job in played}) == 1


def run(arm: str, mode: str, values: tuple[float, ...], found: dict[str, int], **more: Any) -> Any:
    job = bench.Job(arm=arm, mode=mode, seed=3, recipe="x.yaml", success=bench.mode_of(mode).success)
    return bench.Run(job=job, success=curve(*values), found=found, **more)


def test_outcomes_pair_a_run_with_its_twin_and_its_safeguards() -> None:
    runs = [
        run("healthy", "healthy", (0.5,) * 5 + (1.0,) * 15, {}),
        run("plain", "kl_explosion", (0.5,) * 5 + (0.0,) * 15, {"kl_explosion": 4, "stale_updates": 3}),
        run("guarded", "kl_explosion", (0.5,) * 5 + (0.9,) * 15, {}),
        run("llds-1", "likelihood_displacement", (0.5,) * 20, {}),
    ]
    (one,) = bench.outcomes_of(runs)
    assert (one.found, one.kept, one.guarded, one.others) == (4, 0.0, pytest.approx(0.9), ("stale_updates",))
    assert one.lost == 6 and one.lags == 6  # 0.4 of 0.5, and against 0.6
    assert bench.false_alarms(runs).value == 0.0
    assert bench.false_alarms([*runs, run("twin", "reward_hacking", (1.0,), {"echo_trap": 9})]).value == 0.5
