"""Predicts step time, utilisation and staleness by playing the real scheduler in virtual time.

Only what takes time is simulated: engines, tools, learners and the weights' way between them. The clock jumps to
whatever happens next, so a thousand devices cost seconds.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
import selectors
import statistics
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from upswing.rollout.scheduler import Pace, Scheduler

T = TypeVar("T")


# -- virtual time ---------------------------------------------------------------------------------------------------


class _Jump(selectors.SelectSelector):
    """Waits by moving the clock; for threads it really waits, and the clock stands."""

    now = 0.0
    threads = 0
    """Calls in threads that haven't returned."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self.threads and timeout != 0:
            return super().select(None)
        if timeout is None:
            raise RuntimeError("nothing is left that could happen: everything waits for something else")
        self.now += max(0.0, timeout)
        return super().select(0)


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        future = super().run_in_executor(executor, func, *args)
        self._jump.threads += 1
        future.add_done_callback(lambda _: setattr(self._jump, "threads", self._jump.threads - 1))
        return future

    async def shutdown_default_executor(self, *args: Any) -> None:
        self._jump.threads += 1  # it waits for them in one of its own
        await super().shutdown_default_executor(*args)
        self._jump.threads -= 1


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` in virtual time: sleeping takes none, nor does work in threads. Sockets have no place in it."""
    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        return runner.run(main)


# -- what takes time ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One turn of a trajectory."""

    new_tokens: int
    """Prompt tokens that the engine hasn't read yet: the prompt, or the last tool's result."""
    sampled_tokens: int
    tool_s: float = 0.0


Plays = Callable[[random.Random], Sequence[Turn]]
"""Draws a trajectory."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What the devices take, in seconds."""

    step_s: float
    """An engine's step with one completion running: mostly reading the weights."""
    row_s: float
    """More for each further completion in the batch."""
    prefill_token_s: float
    """A prompt token."""
    train_token_s: float
    """Learning from a token, prompts included, on one learner device."""
    sync_s: float = 0.0
    """New weights to the engines, which stand still meanwhile."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where things run. `shared`: engines and learners are the same devices, which take turns."""

    engines: int
    learners: int
    slots: int = 64
    """Completions an engine runs at once; more wait."""
    shared: bool = False


class SimulatedEngine:
    """All running completions advance a token a step; a step takes longer the more there are."""

    def __init__(self, costs: Costs, slots: int) -> None:
        self.costs, self.slots = costs, slots
        self.busy_s = 0.0
        self._loop = asyncio.get_running_loop()
        self._running: list[tuple[float, int, asyncio.Future[None]]] = []
        self._waiting: deque[tuple[float, asyncio.Future[None]]] = deque()
        self._numbers = itertools.count()
        self._steps, self._last = 0.0, self._loop.time()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def load(self) -> int:
        return len(self._running) + len(self._waiting)

    def _step_s(self) -> float:
        return self.costs.step_s + self.costs.row_s * (len(self._running) - 1)

    def _catch_up(self) -> None:
        now = self._loop.time()
        if self._running and now > self._last:
            self._steps += (now - self._last) / self._step_s()
            self.busy_s += now - self._last
        self._last = max(now, self._last)

    async def generate(self, turn: Turn) -> None:
        steps = turn.sampled_tokens + turn.new_tokens * self.costs.prefill_token_s / self.costs.step_s
        done: asyncio.Future[None] = self._loop.create_future()
        self._catch_up()
        self._waiting.append((steps, done))
        self._admit()
        await done

    def stand_still(self, seconds: float) -> None:
        self._catch_up()
        self._last += seconds
        self._admit()

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.slots:
            steps, done = self._waiting.popleft()
            if not done.cancelled():
                heapq.heappush(self._running, (self._steps + steps, next(self._numbers), done))
        if self._timer is not None:
            self._timer.cancel()
        if self._running:
            left = max(0.0, self._running[0][0] - self._steps) * self._step_s()
            self._timer = self._loop.call_at(max(self._last, self._loop.time()) + left, self._end)

    def _end(self) -> None:
        self._catch_up()
        while self._running and self._running[0][0] <= self._steps + 1e-9:
            done = heapq.heappop(self._running)[2]
            if not done.done():
                done.set_result(None)
        self._admit()


# -- the loop -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Played:
    """A simulated group."""

    tokens: int
    sampled_tokens: int
    oldest: int
    """Version that its first token was sampled with."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Of the steps after the warm-up, medians unless said otherwise."""

    step_s: float
    wait_s: float
    """Of a step, how long the learner waits for groups."""
    update_s: float
    sampled_tokens_per_s: float
    engine_busy: float
    """Share of the time in which an engine had something to do, mean over engines."""
    learner_busy: float
    staleness: float
    """Mean over the groups learned from."""
    max_staleness: int
    requeued_frac: float
    """Groups played again, over those learned from."""


@dataclass(kw_only=True)
class _World:
    plays: Plays
    group_size: int
    costs: Costs
    layout: Layout
    seed: int
    scheduler: Scheduler[Played] = field(init=False)
    engines: list[SimulatedEngine] = field(init=False)

    def start(self, pace: Pace) -> None:
        """Inside the event loop."""
        self.engines = [SimulatedEngine(self.costs, self.layout.slots) for _ in range(self.layout.engines)]
        self.scheduler = Scheduler(
            play=self.group, pace=pace, staleness=lambda group: self.scheduler.version - group.oldest
        )

    async def group(self, number: int, attempt: int) -> Played:
        rng = random.Random(f"{self.seed}/{number}/{attempt}")
        trajectories = [self.plays(rng) for _ in range(self.group_size)]
        # The less busy of two, as routers do; all turns of a trajectory go to the engine that has its cache.
        engines = [min(rng.choices(self.engines, k=2), key=lambda engine: engine.load) for _ in trajectories]
        oldest = await asyncio.gather(*map(self._trajectory, trajectories, engines))
        turns = [turn for one in trajectories for turn in one]
        sampled = sum(turn.sampled_tokens for turn in turns)
        return Played(
            tokens=sampled + sum(turn.new_tokens for turn in turns), sampled_tokens=sampled, oldest=min(oldest)
        )

    async def _trajectory(self, turns: Sequence[Turn], engine: SimulatedEngine) -> int:
        oldest = self.scheduler.version
        for turn in turns:
            await engine.generate(turn)
            if turn.tool_s:
                await asyncio.sleep(turn.tool_s)
        return oldest


def simulate(
    *, plays: Plays, pace: Pace, group_size: int, costs: Costs, layout: Layout, steps: int = 12, seed: int = 0
) -> Prediction:
    """Play `steps` steps; the first third warms up and isn't counted."""
    return run_virtual(
        _train(_World(plays=plays, group_size=group_size, costs=costs, layout=layout, seed=seed), pace, steps)
    )


async def _train(world: _World, pace: Pace, steps: int) -> Prediction:
    loop, costs, layout = asyncio.get_running_loop(), world.costs, world.layout
    world.start(pace)
    scheduler = world.scheduler
    warm = steps // 3
    rows: list[tuple[float, float, float]] = []
    stale: list[int] = []
    requeued = sampled = 0
    since, busy = 0.0, [0.0] * len(world.engines)
    for step in range(steps):
        if step == warm:
            since, busy = loop.time(), [engine.busy_s for engine in world.engines]
        began = loop.time()
        taken = await scheduler.take()
        waited = loop.time() - began
        update = sum(group.tokens for group in taken.groups) * costs.train_token_s / layout.learners
        if layout.shared:
            for engine in world.engines:
                engine.stand_still(update)
        await asyncio.sleep(update)
        for engine in world.engines:
            engine.stand_still(costs.sync_s)
        await asyncio.sleep(costs.sync_s)
        if step >= warm:
            stale += [scheduler.version - group.oldest for group in taken.groups]
            requeued += taken.counts.requeued
            sampled += sum(group.sampled_tokens for group in taken.groups)
            rows.append((loop.time() - began, waited, update))
        scheduler.advance()
    total = loop.time() - since
    worked = [engine.busy_s - before for engine, before in zip(world.engines, busy, strict=True)]
    await scheduler.close()
    step_s, wait_s, update_s = (statistics.median(column) for column in zip(*rows, strict=True))
    return Prediction(
        step_s=step_s,
        wait_s=wait_s,
        update_s=update_s,
        sampled_tokens_per_s=sampled / total,
        engine_busy=statistics.fmean(worked) / total,
        learner_busy=sum(update for _, _, update in rows) / total,
        staleness=statistics.fmean(stale),
        max_staleness=max(stale),
        requeued_frac=requeued / len(stale),
    )


def best_split(
    devices: int,
    *,
    plays: Plays,
    pace: Pace,
    group_size: int,
    costs: Costs,
    slots: int = 64,
    steps: int = 12,
    seed: int = 0,
) -> tuple[Layout, Prediction]:
    """The number of engines among `devices` with the shortest step: the optimum is where neither side waits for the
    other, so a search by halves finds it."""
    tried: dict[int, Prediction] = {}

    def step_s(engines: int) -> float:
        if engines not in tried:
            layout = Layout(engines=engines, learners=devices - engines, slots=slots)
            tried[engines] = simulate(
                plays=plays, pace=pace, group_size=group_size, costs=costs, layout=layout, steps=steps, seed=seed
            )
        return tried[engines].step_s

    low, high = 1, devices - 1
    while high - low > 2:
        left, right = low + (high - low) // 3, high - (high - low) // 3
        if step_s(left) <= step_s(right):
            high = right
        else:
            low = left
    best = min(range(low, high + 1), key=step_s)
    return Layout(engines=best, learners=devices - best, slots=slots), tried[best]


def lognormal_plays(
    *,
    turns: int,
    prompt_tokens: int,
    turn_tokens: float,
    turn_spread: float,
    tool_s: float,
    tool_spread: float,
    result_tokens: int,
) -> Plays:
    """Trajectories of up to `turns` turns; lengths and tool times are log-normal with these medians and the deviations
    `*_spread` of their logarithms."""

    def draw(rng: random.Random) -> list[Turn]:
        count = rng.randint(1, turns) if turns > 1 else 1
        return [
            Turn(
                new_tokens=prompt_tokens if i == 0 else result_tokens,
                sampled_tokens=max(1, round(turn_tokens * rng.lognormvariate(0.0, turn_spread))),
                tool_s=tool_s * rng.lognormvariate(0.0, tool_spread) if i + 1 < count else 0.0,
            )
            for i in range(count)
        ]

    return draw
