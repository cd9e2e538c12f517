"""Engines, environments and ranks as actors of one Ray, which the last test kills.

The oracle is the same run in one process: same seeds, same weights, so the same tokens; log-probs differ by rounding,
as the batches of several engines are others.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from upswing.cluster.actors import Cluster, Member, Pool
from upswing.cluster.engines import RayEngines
from upswing.cluster.ranks import led
from upswing.cluster.worlds import RemoteRubric, Workers
from upswing.engine.base import Completion, Engine, Sampling
from upswing.engine.torch import TorchEngine
from upswing.envs.base import AssistantMessage
from upswing.errors import EnvironmentBroken, UpswingError
from upswing.models.load import load_model
from upswing.monitor.metrics import MetricsLog
from upswing.monitor.progress import Progress
from upswing.recipe import ClusterSection, Recipe, recipe_from
from upswing.stages.runner import run_recipe
from upswing.trajectory.store import TrajectoryStore
from upswing.trajectory.types import Message, Outcome, StopReason, Task, Trajectory
from upswing.verify import rubric_from
from upswing.verify.base import Episode

ray = pytest.importorskip("ray")
OPTIONS: dict[str, Any] = {"max_slots": 8, "max_context": 256, "dtype": torch.float32}
WORLD = "tests.cluster.counting"


@pytest.fixture(scope="module", autouse=True)
def ray_here() -> Iterator[None]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.FATAL}
    ray.init("local", num_cpus=8, num_gpus=0, object_store_memory=100_000_000, **quiet)
    yield
    ray.shutdown()


def kill(actor: Any) -> None:
    os.kill(ray.get(actor.__ray_call__.remote(lambda self: os.getpid())), signal.SIGKILL)


# -- engines ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engines(ray_here: None) -> Iterator[tuple[RayEngines, list[str]]]:
    warned: list[str] = []
    found = RayEngines(Cluster(ClusterSection(kind="ray", engines=2), warned.append), "tiny", **OPTIONS)
    assert isinstance(found, Engine)
    yield found, warned
    asyncio.run(found.close())


def local() -> TorchEngine:
    return TorchEngine.from_model(load_model("tiny").model, **OPTIONS)


async def sampled(engine: Any, count: int, max_tokens: int, turn: str = "") -> list[Completion]:
    prompts = [[5 + number, 17, 40 + number, *(9 for _ in turn)] for number in range(count)]
    asked = (
        engine.generate(prompt, Sampling(max_tokens=max_tokens, seed=number), session=f"s{number}")
        for number, prompt in enumerate(prompts)
    )
    return list(await asyncio.gather(*asked))


def assert_same(found: list[Completion], expected: list[Completion], version: int) -> None:
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert set(one.policy_version) == {version} and len(one.policy_version) == len(one.tokens)
        assert np.allclose(one.engine_logprobs, other.engine_logprobs, atol=1e-4)


def other_weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {n: p + 0.05 * torch.randn_like(p) for n, p in load_model("tiny").model.state_dict().items()}


async def test_several_engines_are_one(engines: tuple[RayEngines, list[str]]) -> None:
    engine, _ = engines
    assert_same(await sampled(engine, 6, 20), await sampled(local(), 6, 20), 0)
    homes = dict(engine.pool._holders)
    assert Counter(homes.values()) == dict.fromkeys(engine.pool.members, 3)
    before = engine.stats.cached_tokens
    await sampled(engine, 6, 5, turn="again")
    assert engine.pool._holders == homes, "a session stays where its cache is"
    assert engine.stats.cached_tokens >= before + 6 * 2
    running = asyncio.ensure_future(sampled(engine, 6, 200))
    await asyncio.sleep(0.15)
    await engine.update_weights(other_weights(), 3)
    for one in await running:
        versions = one.policy_version
        assert versions[0] in (0, 3) and versions[-1] == 3 and list(versions) == sorted(versions)
    reference = local()
    await reference.update_weights(other_weights(), 3)
    assert_same(await sampled(engine, 6, 20), await sampled(reference, 6, 20), 3)
    with pytest.raises(ValueError, match="no parameter 'head'"):
        await engine.update_weights({"head": torch.zeros(1)}, 4)
    with pytest.raises(ValueError, match=r"max_tokens 300.*above the engine's context of 256"):
        await engine.generate([5], Sampling(max_tokens=300))
    for number in range(6):
        engine.release(f"s{number}")
    assert not engine.pool._holders and all(not member.names for member in engine.pool.members)


async def test_requests_of_a_killed_engine_are_sampled_again(engines: tuple[RayEngines, list[str]]) -> None:
    engine, warned = engines
    reference = local()
    await reference.update_weights(other_weights(), 3)
    expected = await sampled(reference, 8, 120)
    running = asyncio.ensure_future(sampled(engine, 8, 120))
    await asyncio.sleep(0.1)
    victim = engine.pool.members[0]
    assert victim.running == 4
    await asyncio.to_thread(kill, victim.actor)
    assert_same(await running, expected, 3)
    assert len(warned) == 1 and warned[0].startswith("engine 1 of 2 is replaced")
    assert victim.task is not None
    await victim.task
    engine.pool.members[1].up = False  # so that only the new one is asked
    for number in range(8):
        engine.release(f"s{number}")
    try:
        assert_same(await sampled(engine, 8, 20), await sampled(reference, 8, 20), 3)
    finally:
        engine.pool.members[1].up = True


async def test_requests_of_an_engine_that_hangs_are_sampled_again(engines: tuple[RayEngines, list[str]]) -> None:
    engine, warned = engines
    reference = local()
    await reference.update_weights(other_weights(), 3)
    victim, engine.pool._patience_s = engine.pool.members[0], 5.0
    victim.actor.__ray_call__.remote(lambda self: time.sleep(3600))  # in its event loop
    assert_same(await sampled(engine, 8, 20), await sampled(reference, 8, 20), 3)
    assert warned[-1] == "engine 1 of 2 is replaced: it has not answered for 5 s"
    await asyncio.wait_for(victim.task or asyncio.sleep(0), 120)
    assert victim.up
    for number in range(8):
        engine.release(f"s{number}")


# -- environments -----------------------------------------------------------------------------------------------------


def recipe(
    steps: int = 2, cluster: dict[str, Any] | None = None, stage: dict[str, Any] | None = None, **args: Any
) -> Recipe:
    own = {"stage": "rl", "steps": steps, "tasks_per_step": 2, "group_size": 4, "lr": 1e-3, "eval_every": 0}
    return recipe_from(
        {
            "name": "counted",
            "model": "tiny",
            "env": {"name": f"{WORLD}:Counting", "args": args},
            "verifiers": [f"{WORLD}:even", {"name": f"{WORLD}:here", "weight": 0}],
            "engine": {"max_slots": 8, "max_context": 128, "dtype": "float32"},
            "learner": {"dtype": "float32"},
            "limits": {"turn_tokens": 24, "context_tokens": 128},
            "cluster": {"kind": "ray", **cluster} if cluster else {},
            "stages": [{**own, **(stage or {})}],
        }
    )


async def test_a_worker_that_dies_breaks_what_it_played_and_is_replaced(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    one = recipe(cluster={"env_workers": 2}, dies_at=str(flag))
    warned: list[str] = []
    cluster = Cluster(one.cluster.model_copy(update={"engines": 0}), warned.append)
    workers = Workers(cluster, one.model_copy(update={"cluster": cluster.section}))
    task = Task(id="t", messages=(Message(role="user", content="say 1"),))
    said = AssistantMessage(content="abc")

    async def played(env: Any) -> Any:
        assert (await env.reset(task, 0)).messages == task.messages
        assert (await env.step(said)).messages[0].content == "1"
        seen = await env.step(said)
        assert (seen.done, seen.stop_reason, seen.answer) == (True, StopReason.ANSWERED, "abc")
        state = await env.state()
        await env.close()
        return state

    states = await asyncio.gather(*(played(workers.make_env()) for _ in range(4)))
    assert {state["turns"] for state in states} == {2} and os.getpid() not in {state["pid"] for state in states}
    assert len({state["pid"] for state in states}) == 2
    broken, unsent, odd = (workers.make_env() for _ in range(3))
    with pytest.raises(EnvironmentBroken, match="OSError: the disk is gone"):
        await broken.reset(Task(id="x", messages=(), data={"broken": 1}), 0)
    # What can't be sent or received is that episode's end, not the worker's, whose other episodes go on.
    with pytest.raises(TypeError, match="lock"):
        await unsent.reset(Task(id="y", messages=(), data={"lock": threading.Lock()}), 0)
    await odd.reset(Task(id="z", messages=(), data={"odd": 1}), 0)
    with pytest.raises(UpswingError, match=r"can't be read here.*nobody reads me"):
        await odd.state()
    for env in (broken, unsent, odd):
        await env.close()
    assert warned == [] and {state["pid"] for state in states} == {
        state["pid"] for state in await asyncio.gather(*(played(workers.make_env()) for _ in range(4)))
    }
    flag.touch()
    ended = await asyncio.gather(*(played(workers.make_env()) for _ in range(4)), return_exceptions=True)
    lost = [end for end in ended if not isinstance(end, dict)]
    assert all(isinstance(end, EnvironmentBroken) and "worker died" in str(end) for end in lost) and len(lost) == 2
    assert all(await asyncio.gather(*(played(workers.make_env()) for _ in range(4))))
    await asyncio.gather(*(member.task for member in workers.pool.members if member.task is not None))
    workers.pool._patience_s = 5.0
    hung = workers.pool.members[0].actor.__ray_call__.remote(lambda self: time.sleep(3600))
    ended = await asyncio.gather(*(played(workers.make_env()) for _ in range(4)), return_exceptions=True)
    lost = [end for end in ended if not isinstance(end, dict)]
    assert all(isinstance(end, EnvironmentBroken) and "worker died" in str(end) for end in lost) and lost
    assert warned[-1] == "env worker 1 of 2 is replaced: it has not answered for 5 s" and hung
    assert all(await asyncio.gather(*(played(workers.make_env()) for _ in range(4))))
    trajectory = Trajectory(
        id="t", task=task, branches=(), messages=(Message(role="assistant", content="b"),),
        outcome=Outcome.COMPLETED, stop_reason=StopReason.ANSWERED,
    )  # fmt: skip
    score = await RemoteRubric(rubric_from(one.verifiers), workers).at(0).score(Episode.of(trajectory))
    assert score.value == score.components["even"] == 1.0
    assert score.components["here"] not in (None, os.getpid()), "a worker scores"
    workers.pool.close()
    cluster.close()


# -- whole runs -------------------------------------------------------------------------------------------------------


def kill_at(monkeypatch: pytest.MonkeyPatch, at: int, also: Callable[[], object], *, engine: bool = True) -> None:
    """Kill the engine that is to get the n-th request (or not), just before it gets it, and do something else too."""
    real, count = Pool.call, itertools.count(1)

    async def call(pool: Pool, member: Member, method: str, *args: Any) -> Any:
        if method == "generate" and next(count) == at:
            pid = await member.actor.__ray_call__.remote(lambda self: os.getpid())
            also()
            if engine:
                os.kill(pid, signal.SIGKILL)
        return await real(pool, member, method, *args)

    monkeypatch.setattr(Pool, "call", call)


def learned(out: Path) -> list[tuple[int, Trajectory]]:
    return [(stored.step, stored.trajectory) for stored in TrajectoryStore(out / "trajectories").read("rl")]


def tokens(out: Path, step: int) -> dict[str, list[list[int]]]:
    return {t.id: [branch.tokens.tolist() for branch in t.branches] for at, t in learned(out) if at == step}


def assert_same_weights(out: Path, other: Path) -> None:
    found, expected = (load_file(path / "checkpoints/rl/final/model.safetensors") for path in (out, other))
    start = load_model("tiny").model.state_dict()
    moved = sum(float((expected[name] - start[name]).square().sum()) for name in expected) ** 0.5
    apart = sum(float((expected[name] - found[name]).square().sum()) for name in expected) ** 0.5
    assert moved > 0 and apart < 0.01 * moved


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps in one process."""
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    run_recipe(recipe(3), out, log=Progress(quiet=True))
    return out


def test_a_run_goes_on_when_an_engine_and_then_a_worker_die(
    undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flag, out = tmp_path / "flag", tmp_path / "run"
    kill_at(monkeypatch, 5, flag.touch)
    run_recipe(recipe(3, {"engines": 2, "env_workers": 1}, dies_at=str(flag)), out, log=Progress(quiet=True))
    assert not flag.exists() and re.search("engine . of 2 is replaced", capsys.readouterr().out)
    errored = [(step, t) for step, t in learned(out) if t.outcome is Outcome.ERRORED]
    assert errored and all("worker died" in (t.error or "") and t.score is None for _, t in errored)
    played = Counter((step, t.task.id) for step, t in learned(out) if t.outcome is not Outcome.ERRORED)
    assert played == {(step, f"train{2 * step - 2 + n}"): 4 for step in (1, 2, 3) for n in (0, 1)}
    for at, t in learned(out):  # a retry has a seed of its own; all others are what they would have been
        if at == 1 and not t.id.endswith(".1") and t.outcome is not Outcome.ERRORED:
            assert tokens(out, 1)[t.id] == tokens(undisturbed, 1)[t.id]


def test_ranks_of_the_learner_as_actors(undisturbed: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run_recipe(recipe(3, {"learners": 2}), out, log=Progress(quiet=True))
    assert "MASTER_ADDR" not in os.environ
    assert [row["reward"] for row in MetricsLog(out).read("rl")] == [
        row["reward"] for row in MetricsLog(undisturbed).read("rl")
    ]
    assert_same_weights(out, undisturbed)


def test_a_run_whose_rank_is_killed_ends_with_its_name_and_goes_on(
    undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the second step. What follows is in one process: after such a loss there are no ranks to be had here; nor are
    there after ranks that couldn't start, so that those tests come later."""

    class Rank:
        def __init__(self, folder: str) -> None:
            os.chdir(folder)

        def follow(self, place: dict[str, str]) -> None:
            from upswing.learn import sharded

            inner, calls = sharded.ShardedLearner._accumulate, []

            def fatal(self: Any, *args: Any) -> Any:
                calls.append(args)
                if len(calls) == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                return inner(self, *args)

            sharded.ShardedLearner._accumulate = fatal  # type: ignore[method-assign]
            sharded.follow(place)

    monkeypatch.setattr("upswing.cluster.ranks.RankActor", Rank)
    out, saves = tmp_path / "run", {"save_every": 1}
    with pytest.raises(UpswingError, match=r"rank 1 of 2 ended without a word.*start the run again with --resume"):
        run_recipe(recipe(3, {"learners": 2}, saves), out, log=Progress(quiet=True))
    torch.distributed.destroy_process_group()  # as the end of the process does
    assert [path.name for path in (out / "checkpoints/rl").glob("step-*")] == ["step-000001"]
    run_recipe(recipe(3, stage=saves), out, resume=True, log=Progress(quiet=True))
    assert Counter(t.task.id for _, t in learned(out)) == {f"train{n}": 4 for n in range(6)}
    assert_same_weights(out, undisturbed)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("is not made", "ActorDiedError: ImportError: no upswing here"),
        ("raises", "OSError: no room for torch"),
        ("dies", "ActorDiedError: The actor died unexpectedly"),
    ],
)
def test_a_rank_that_can_not_start_is_noticed(how: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it has met rank 0."""

    class Rank:
        def __init__(self, folder: str) -> None:
            if how == "is not made":
                raise ImportError("no upswing here")

        def follow(self, place: dict[str, str]) -> None:
            if how == "raises":
                raise OSError("no room for torch")
            os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr("upswing.cluster.ranks.RankActor", Rank)
    section = ClusterSection(kind="ray", learners=2).model_copy(update={"engines": 0})
    cluster, started = Cluster(section, print), time.monotonic()
    try:
        with pytest.raises(UpswingError, match=f"rank 1 of 2 can't start: {message}"), led(cluster):
            pass
        assert time.monotonic() - started < 60
    finally:
        cluster.close()


def test_a_run_whose_node_is_killed_ends_and_goes_on_elsewhere(
    undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    raylet = ray._private.worker._global_node.all_processes["raylet"][0].process
    first_step = sum(t.num_turns for step, t in learned(undisturbed) if step == 1)
    kill_at(monkeypatch, first_step + 3, raylet.kill)
    with pytest.raises(UpswingError, match=r"the Ray cluster is gone.*start the run again with --resume"):
        run_recipe(recipe(3, {"env_workers": 1}), out, log=Progress(quiet=True))
    assert [path.name for path in (out / "checkpoints/rl").glob("step-*")] == ["step-000001"]
    run_recipe(recipe(3), out, resume=True, log=Progress(quiet=True))
    assert Counter(t.task.id for _, t in learned(out)) == {f"train{n}": 4 for n in range(6)}
    assert all(tokens(out, step) == tokens(undisturbed, step) for step in (1, 2, 3))
    assert_same_weights(out, undisturbed)
