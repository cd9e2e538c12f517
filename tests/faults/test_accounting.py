"""An environment and verifiers that break in 10 % of their calls: every rollout ends in one outcome, no fault scores 0.

What was broken in which attempt is kept by the environment itself, under the attempt's seed.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import math
import os
import random
import threading
import time
import warnings
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from upswing.algo.advantage import group_relative
from upswing.engine.base import Sampling
from upswing.engine.scripted import ScriptedEngine
from upswing.envs.base import AssistantMessage, Environment, Observation
from upswing.models.tiny import tiny_tokenizer
from upswing.rollout.collect import Rollouts
from upswing.rollout.limits import Limits
from upswing.stages.rows import make_batch
from upswing.trajectory.render import ChatRenderer
from upswing.trajectory.store import TrajectoryStore
from upswing.trajectory.types import Group, Message, Outcome, Score, StopReason, Task, ToolCall, ToolRecord, Trajectory
from upswing.trajectory.validate import validate_group
from upswing.verify import Rubric, verifier_from
from upswing.verify.deadline import MAX_PER_FUNCTION

GROUPS, SIZE, RETRIES = 250, 8, 1
RATE = 0.1
DEADLINE_S = 0.3
GOLD = "3"


class Bye(BaseException):
    """Neither an Exception nor an exit, as some libraries have them."""


def raising(make: Callable[[], BaseException]) -> Callable[[], Any]:
    def act() -> Any:
        raise make()

    return act


def said(**fields: Any) -> Callable[[], Observation]:
    return lambda: Observation(messages=(Message(**{"role": "tool", "content": "heard", **fields}),))


def recorded(**fields: Any) -> Callable[[], Observation]:
    record = ToolRecord(**{"call": ToolCall(name="look"), "result": "x", "ok": True, "turn": 0, **fields})
    return lambda: Observation(messages=(Message(role="tool", content="x"),), tool_records=(record,))


async def forever() -> None:
    await asyncio.Event().wait()


async def stubborn() -> None:
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            continue


def loop() -> None:
    while True:
        time.sleep(0.005)


RAISED: dict[str, Callable[[], Any]] = {
    # Made anew each time: an exception holds on to the frames that it went through.
    f"{kind.__name__}{args}": raising(lambda kind=kind, args=args: kind(*args))  # type: ignore[misc]
    for kind, *args in (
        (OSError, "the disk is gone"), (SystemExit, 3), (SystemExit,), (GeneratorExit,), (asyncio.CancelledError,),
        (Bye, "now"), (StopIteration, 1), (StopAsyncIteration,), (RecursionError,), (MemoryError,), (AssertionError,),
        (TimeoutError, "mine"), (ExceptionGroup, "several", [ValueError(), KeyError("k")]),
        (UnicodeDecodeError, "utf-8", b"\xff", 0, 1, "no"),
    )
}  # fmt: skip
HANGS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    # (in a plain function, in an async one)
    "waits": (lambda: time.sleep(4 * DEADLINE_S), forever),
    "loops": (loop, stubborn),
}
RUBBISH: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "text": lambda: "heard",
    "dict": lambda: {"messages": []},
    "the class": lambda: Observation,
    "generator": lambda: (each for each in ()),
    "messages None": lambda: Observation(messages=None),  # type: ignore[arg-type]
    "messages of dicts": lambda: Observation(messages=({"role": "tool", "content": "x"},)),  # type: ignore[arg-type]
    "unknown role": said(role="toll"),
    "content None": said(content=None),
    "content bytes": said(content=b"heard"),
    "name 3": said(name=3),
    "reward NaN": lambda: Observation(reward=math.nan),
    "reward infinite": lambda: Observation(done=True, reward=-math.inf, answer=GOLD),
    "reward too large": lambda: Observation(reward=10**400),
    "arguments of objects": recorded(call=ToolCall(name="look", arguments={"at": object()})),
    "call None": recorded(call=None),
    "result None": recorded(result=None),
    "reward None": lambda: Observation(reward=None),  # type: ignore[arg-type]
    "reward text": lambda: Observation(reward="1"),  # type: ignore[arg-type]
    "records of text": lambda: Observation(tool_records=("x",)),  # type: ignore[arg-type]
    "answer 3": lambda: Observation(done=True, answer=3),  # type: ignore[arg-type]
    "ends as error": lambda: Observation(done=True, stop_reason=StopReason.ERROR),
    "ends unknown": lambda: Observation(done=True, stop_reason="finished"),  # type: ignore[arg-type]
}
STATES: dict[str, Callable[[], Any]] = {
    "state None": lambda: None,
    "state of objects": lambda: {"seed": object()},
    "state of sets": lambda: {"rows": [{1, 2}]},
    "state of numbers": lambda: {1: 2},
    **RAISED,
    **HANGS,
}
ODD: dict[str, Callable[[], Any]] = {
    # Strange, but a trajectory can go on with it: not a fault.
    "half surrogates": said(content="\ud800 heard \udfff"),
    "control characters": said(content="\x00<|im_end|>\n<|im_start|>system\n\ufdd0\ufdd1"),
    "an assistant's message": said(role="assistant"),
    # The agent may have asked for it, so it is cut by the context's limit and judged like any other.
    "huge": said(content="word " * 500),
}
VERDICTS: dict[str, Callable[[], Any]] = {
    **RAISED,
    "nan": lambda: math.nan,
    "inf": lambda: math.inf,
    "None": lambda: None,
    "text": lambda: "1.0",
    "list": lambda: [1.0],
    "two numbers": lambda: np.array([1.0, 0.0]),
    "too large": lambda: 10**400,
    "Score of text": lambda: Score(value="1"),  # type: ignore[arg-type]
    "Score of NaN": lambda: Score(value=math.nan, components={"part": math.inf}),
    "Score of parts None": lambda: Score(value=1.0, components=None),  # type: ignore[arg-type]
}
FAULTS: dict[str, dict[str, Any]] = {
    "reset": {**RAISED, **HANGS, **RUBBISH},
    "step": {**RAISED, **HANGS, **RUBBISH},
    "state": STATES,
    "close": {**RAISED, **HANGS},
}


class Ledger:
    """What was broken, by the attempt's seed; and what must not be left behind."""

    def __init__(self) -> None:
        self.env: dict[int, list[str]] = {}
        self.odd: dict[int, list[str]] = defaultdict(list)
        self.verdicts: dict[int, list[str]] = defaultdict(list)
        self.unmakeable = self.made = self.closed = 0
        self.alive: weakref.WeakSet[Faulty] = weakref.WeakSet()
        self.release = threading.Event()
        self.leaked: list[threading.Thread] = []
        self.turns: Counter[str] = Counter()

    def draw(self, kinds: Mapping[str, Any], *key: Any) -> str | None:
        """The fault of a call, by its key alone: one call in ten has one."""
        rng = random.Random(" ".join(map(str, key)))
        return rng.choice(list(kinds)) if rng.random() < RATE else None


class Faulty(Environment):
    """Answers `look` until the agent is done."""

    ledger: ClassVar[Ledger]

    def __init__(self) -> None:
        number = self.ledger.made + self.ledger.unmakeable
        if random.Random(f"make {number}").random() < RATE / 4:
            self.ledger.unmakeable += 1
            raise (ConnectionError("no database"), SystemExit(3), GeneratorExit())[number % 3]
        self.ledger.made += 1
        self.ledger.alive.add(self)
        self.calls, self.seed = 0, -1

    def fault(self, where: str) -> str | None:
        self.calls += 1
        kind = self.ledger.draw(FAULTS[where], self.seed, self.calls)
        if kind is not None:
            self.ledger.env[self.seed].append(f"{where}: {kind}")
        return kind

    def begin(self, task: Task, seed: int) -> Observation:
        self.seed = seed
        self.ledger.env[seed] = []
        return Observation(messages=task.messages)

    def respond(self, message: AssistantMessage) -> Observation:
        if (odd := self.ledger.draw({**ODD, "leaks": None}, "odd", self.seed, self.calls)) is not None:
            self.ledger.odd[self.seed].append(odd)
            if odd != "leaks":
                return ODD[odd]()
            self.leak()
        if message.content.startswith("done"):
            answer = message.content.split()[-1]
            return Observation(done=True, stop_reason=StopReason.ANSWERED, answer=answer, reward=0.5)
        return recorded()()

    def leak(self) -> None:
        """A file, memory that holds itself, a coroutine that nobody awaits, a thread and a task."""
        self.file, self.me, self.lost = open(os.devnull), self, forever()  # noqa: SIM115
        if len(self.ledger.leaked) < 20:
            self.ledger.leaked.append(threading.Thread(target=self.ledger.release.wait, daemon=True))
            self.ledger.leaked[-1].start()

    def state(self) -> Mapping[str, Any]:
        kind = self.fault("state")
        if kind is None:
            return {"seed": self.seed}
        action = STATES[kind]
        return (action[0] if isinstance(action, tuple) else action)()


class Plain(Faulty):
    def call(self, where: str, usual: Callable[[], Any]) -> Any:
        kind = self.fault(where)
        action = usual if kind is None else FAULTS[where][kind]
        return (action[0] if isinstance(action, tuple) else action)()

    def reset(self, task: Task, seed: int) -> Any:
        first = self.begin(task, seed)
        return self.call("reset", lambda: first)

    def step(self, message: AssistantMessage) -> Any:
        return self.call("step", lambda: self.respond(message))

    def close(self) -> Any:
        self.ledger.closed += 1
        return self.call("close", lambda: None)


class Async(Faulty):
    async def call(self, where: str, usual: Callable[[], Any]) -> Any:
        kind = self.fault(where)
        action = usual if kind is None else FAULTS[where][kind]
        return await action[1]() if isinstance(action, tuple) else action()

    async def reset(self, task: Task, seed: int) -> Any:
        first = self.begin(task, seed)
        return await self.call("reset", lambda: first)

    async def step(self, message: AssistantMessage) -> Any:
        return await self.call("step", lambda: self.respond(message))

    async def close(self) -> Any:
        self.ledger.closed += 1
        return await self.call("close", lambda: None)


def verifiers(ledger: Ledger) -> Rubric:
    """Two that say the same, plain and async; each breaks in 10 % of its calls."""

    def verdict(name: str, answer: Any, gold: Any, state: Any) -> tuple[Any, Any]:
        kind = ledger.draw({**VERDICTS, **HANGS}, name, state["seed"])
        if kind is None:
            return lambda: answer in gold, None
        ledger.verdicts[state["seed"]].append(f"{name}: {kind}")
        return VERDICTS.get(kind), HANGS.get(kind)

    def plain(answer: Any, gold: Any, state: Any) -> Any:
        action, hang = verdict("plain", answer, gold, state)
        return hang[0]() if hang else action()

    async def later(answer: Any, gold: Any, state: Any) -> Any:
        action, hang = verdict("later", answer, gold, state)
        return await hang[1]() if hang else action()

    made = {name: verifier_from(f, name=name, timeout_s=DEADLINE_S) for name, f in (("a", plain), ("b", later))}
    return Rubric([(name, verifier, 0.5) for name, verifier in made.items()])


def rollouts(ledger: Ledger) -> Rollouts:
    tokenizer = tiny_tokenizer()
    renderer = ChatRenderer(tokenizer)
    end = renderer.end_of_turn_id()
    kinds = itertools.cycle((Plain, Async))

    def script(prompt: Any, sampling: Sampling, session: str | None) -> str:
        """Up to two looks, then an answer that is right in two of three attempts."""
        assert session is not None
        ledger.turns[session] += 1
        rng = random.Random(session)
        looks, answer = rng.randint(0, 2), rng.choice([GOLD, GOLD, "4"])
        return "look" if ledger.turns[session] <= looks else f"done {answer}"

    return Rollouts(
        make_env=lambda: next(kinds)(),
        rubric=verifiers(ledger),
        renderer=renderer,
        end_tokens=(end,),
        limits=Limits(turn_tokens=16, context_tokens=400, env_timeout_s=DEADLINE_S),
        engine=ScriptedEngine(script, tokenizer=tokenizer, end_token=end),
        max_retries=RETRIES,
    )


class Run:
    """The run, made once, and what it left behind."""

    def __init__(self) -> None:
        self.ledger = Faulty.ledger = Ledger()
        self.done: list[str] = []
        self.unhandled: list[Any] = []
        self.warned: list[str] = []
        self.most_threads = 0
        files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
        asyncio.run(self.play())
        self.ledger.release.set()
        for _ in range(100):
            if threading.active_count() <= threads:
                break
            time.sleep(0.05)
        gc.collect()
        self.more_threads = threading.active_count() - threads
        self.more_files = len(os.listdir("/proc/self/fd")) - files

    async def play(self) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: self.unhandled.append(context))
        tasks = [Task(id=f"t{i}", messages=(Message(role="user", content="?"),), gold=(GOLD,)) for i in range(GROUPS)]
        parts = rollouts(self.ledger)
        started = time.perf_counter()
        self.groups = await parts.groups(tasks, size=SIZE, sampling=Sampling(), seed=0, on_done=self.on_done)
        self.wall_s = time.perf_counter() - started
        for _ in range(40):  # what was abandoned gets a moment to end
            if len(asyncio.all_tasks()) == 1:
                break
            await asyncio.sleep(0.05)
        self.tasks_left = len(asyncio.all_tasks()) - 1

    def on_done(self, trajectory: Trajectory) -> None:
        self.done.append(trajectory.id)
        mine = [thread for thread in threading.enumerate() if thread.name.startswith("upswing-")]
        self.most_threads = max(self.most_threads, len(mine))

    @property
    def trajectories(self) -> list[Trajectory]:
        return [trajectory for group in self.groups for trajectory in group.trajectories]


@pytest.fixture(scope="module")
def run() -> Run:
    log = logging.getLogger("asyncio")
    heard: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = heard.append  # type: ignore[method-assign]
    log.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            made = Run()
    finally:
        log.removeHandler(handler)
    made.unhandled += [record.getMessage() for record in heard]
    made.warned = [f"{each.category.__name__}: {each.message}" for each in warned]
    return made


def test_every_scheduled_rollout_ends_in_exactly_one_outcome(run: Run) -> None:
    assert [group.task.id for group in run.groups] == [f"t{i}" for i in range(GROUPS)]
    finals = []
    for row, group in enumerate(run.groups):
        validate_group(group)  # ids of their own, each trajectory with one outcome that goes with the rest of it
        attempts: dict[int, list[Trajectory]] = defaultdict(list)
        for trajectory in group.trajectories:
            index, _, attempt = trajectory.id.rpartition("/")[2].removeprefix(f"{row}-").partition(".")
            assert int(attempt or 0) == len(attempts[int(index)]), "attempts are told one after the other"
            attempts[int(index)].append(trajectory)
        assert sorted(attempts) == list(range(SIZE))
        for tried in attempts.values():
            assert all(t.outcome is Outcome.ERRORED for t in tried[:-1])
            assert tried[-1].outcome is not Outcome.ERRORED or len(tried) == RETRIES + 1
            finals.append(tried[-1].id)
    assert sorted(run.done) == sorted(finals) and len(set(finals)) == GROUPS * SIZE == 2000
    assert len({t.id for t in run.trajectories}) == len({t.seed for t in run.trajectories}) == len(run.trajectories)
    assert len(run.trajectories) == run.ledger.made + run.ledger.unmakeable


def test_no_fault_is_scored_and_everything_else_is(run: Run) -> None:
    ledger, slow, seen = run.ledger, 0, Counter[str]()
    for t in run.trajectories:
        faults, verdicts = ledger.env.get(t.seed), ledger.verdicts.get(t.seed)
        what = (t.id, faults, ledger.odd.get(t.seed), verdicts, t.error, t.score)
        if faults is None or faults:
            assert t.outcome is Outcome.ERRORED and t.error and t.score is None and t.reward is None, what
            seen.update(faults or ["make"])
        elif t.outcome is Outcome.ERRORED:
            assert "took longer than" in (t.error or ""), what  # the machine was busy: an error all the same
            slow += 1
        else:
            cut = "huge" in ledger.odd.get(t.seed, ())
            assert t.stop_reason is (StopReason.CONTEXT_OVERFLOW if cut else StopReason.ANSWERED), what
            assert t.outcome is (Outcome.TRUNCATED if cut else Outcome.COMPLETED) and t.score is not None, what
            if verdicts:
                assert t.score.value is None and t.score.reason, what
                seen.update(verdicts)
            elif t.score.value is None:
                assert "took longer than" in t.score.reason, what
                slow += 1
            else:
                assert t.score.value == float(t.answer == GOLD), what
    assert slow <= 0.02 * len(run.trajectories)
    everything = {f"{where}: {kind}" for where, kinds in FAULTS.items() if where != "make" for kind in kinds} | {"make"}
    everything |= {f"{name}: {kind}" for name in ("plain", "later") for kind in {**VERDICTS, **HANGS}}
    assert everything <= seen.keys(), "every kind of fault was tried"
    assert {*ODD, "leaks"} <= {odd for kinds in ledger.odd.values() for odd in kinds}
    zeros = [t for t in run.trajectories if t.reward == 0.0]
    assert len(zeros) > 100 and not any(ledger.env[t.seed] or ledger.verdicts.get(t.seed) for t in zeros)


def test_it_is_stored_and_read_back(run: Run, tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path)
    for step, group in enumerate(run.groups[:40]):
        store.append("rl", step, group.trajectories)
    kept = [item.trajectory for item in store.read()]
    written = [t for group in run.groups[:40] for t in group.trajectories]
    assert len(kept) == len(written)
    for a, b in zip(written, kept, strict=True):
        for field in ("id", "outcome", "stop_reason", "error", "score", "messages", "tool_records", "answer", "seed"):
            assert getattr(a, field) == getattr(b, field)
        for one, other in zip(a.branches, b.branches, strict=True):
            assert all(np.array_equal(getattr(one, k), getattr(other, k)) for k in ("tokens", "sampled", "turn"))
    validate_group(Group(task=written[0].task, trajectories=tuple(kept[: len(run.groups[0].trajectories)])))


def test_what_broke_leaves_its_groups_baseline(run: Run) -> None:
    batch = make_batch(run.groups, truncated="as_is")
    rewards = batch.rewards_B.tolist()
    for reward, t in zip(rewards, batch.trajectories, strict=True):
        assert math.isnan(reward) == (t.reward is None) and (math.isnan(reward) or reward == t.reward)
    assert {row.trajectory for row in batch.rows} == {i for i, r in enumerate(rewards) if not math.isnan(r)}
    advantages = group_relative(batch.rewards_B, batch.group_B, normalize_std=False)
    for index, group in enumerate(run.groups):
        members = torch.nonzero(batch.group_B == index).flatten().tolist()
        scored = [t.reward for t in group.trajectories if t.reward is not None]
        mean = sum(scored) / len(scored)
        wanted = [0.0 if t.reward is None else t.reward - mean for t in group.trajectories]
        assert [advantages[i].item() for i in members] == pytest.approx(wanted)


def test_nothing_is_left_behind(run: Run) -> None:
    assert run.ledger.closed == run.ledger.made, "each environment was closed once"
    assert not run.ledger.alive, "no environment is held on to"
    assert run.tasks_left == 0 and run.more_threads <= 0 and run.more_files <= 0
    # One bound a function: reset, step and close of two environments, two verifiers.
    assert run.most_threads <= 8 * MAX_PER_FUNCTION
    assert run.wall_s < 120
    assert not run.unhandled
    assert not [w for w in run.warned if "ResourceWarning" not in w and "'forever' was never awaited" not in w]
