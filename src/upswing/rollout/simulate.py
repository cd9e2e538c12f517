"""Predicts step time, utilisation and staleness by playing the real scheduler in virtual time.

Only what takes time is simulated: engines, tools, learners and the weights' way between them. The clock jumps to
whatever happens next. Groups are asyncio tasks, as the scheduler wants them; the trajectories in them are not, for a
task each would cost more than all the rest.
"""

from __future__ import annotations

import asyncio
import gc
import heapq
import itertools
import math
import random
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from upswing.rollout.scheduler import Pace, Scheduler
from upswing.rollout.virtual import run_virtual

# -- what takes time ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One turn of a trajectory."""

    new_tokens: int
    """What the engine hasn't read yet: the prompt, which a group shares, or the last tool's result."""
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
    """A token that is only read; meanwhile nothing is sampled."""
    train_token_s: float
    """Learning from a token, prompts included, on one learner device."""
    cache_token_s: float = 0.0
    """More for each token that a running completion has in the cache: reading its keys and values."""
    sync_s: float = 0.0
    """New weights to the engines, which stand still meanwhile."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where things run. `shared`: engines and learners are the same devices, which take turns."""

    engines: int
    learners: int
    slots: int = 64
    """Completions an engine runs at once. As many trajectories an engine are in play, their tools' time included."""
    shared: bool = False


def _nothing() -> None: ...


@dataclass(eq=False, slots=True, kw_only=True)
class Stream:
    """A trajectory as its engine sees it."""

    group: Any = field(default_factory=object)
    """Whose members have the same prompt, the first turn's new tokens."""
    prompt: int | None = None
    """None: the first turn hasn't begun."""
    own: int = 0
    """Tokens after the prompt, those that are being sampled left out."""
    turn: Turn = Turn(new_tokens=0, sampled_tokens=0)
    row_s: float = 0.0
    """What it adds to a step."""
    then: Callable[[], None] = _nothing


class SimulatedEngine:
    """All running completions advance a token a step, which takes longer the more there are and the more they have
    cached. New tokens are read before that, and everybody waits meanwhile. What is cached isn't read again until
    new weights come."""

    def __init__(self, costs: Costs, slots: int) -> None:
        self.costs, self.slots = costs, slots
        self.busy_s, self.load = 0.0, 0
        """Load: trajectories that are to be played here; for whoever hands them out."""
        loop: Any = asyncio.get_running_loop()
        self._time: Callable[[], float] = loop.time
        self._at: Callable[..., Any] = getattr(loop, "later", loop.call_at)
        self._running: list[tuple[float, int, Stream]] = []
        """A heap, by the step at which they end."""
        self._waiting: deque[Stream] = deque()
        self._cached: set[object] = set()
        """Streams, and groups for their prompts."""
        self._numbers = itertools.count()
        self._last: float = self._time()
        self._steps = self._row_s = self._prefill_s = 0.0
        self._wake = math.inf

    async def generate(self, turn: Turn, stream: Stream | None = None) -> None:
        """Take a turn. Without a `stream` of its own it has nothing in the cache."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        mine = stream or Stream()
        self.begin(mine, turn, lambda: None if done.done() else done.set_result(None))
        try:
            await done
        except BaseException:
            self.drop(mine)
            raise

    def begin(self, stream: Stream, turn: Turn, then: Callable[[], None]) -> None:
        """`then` is called when the turn has been sampled."""
        self._catch_up()
        stream.turn, stream.then = turn, then
        self._waiting.append(stream)
        self._admit()

    def forget(self, stream: Stream) -> None:
        """Nothing more comes of it."""
        self._cached.discard(stream)

    def drop(self, stream: Stream) -> None:
        """Cancel its turn, if it takes one."""
        self._catch_up()
        if stream in self._waiting:
            self._waiting.remove(stream)
        elif mine := [one for one in self._running if one[2] is stream]:
            self._running.remove(mine[0])
            heapq.heapify(self._running)
            self._leave(stream)
        self._admit()

    def stand_still(self, seconds: float) -> None:
        self._catch_up()
        self._last += seconds

    def new_weights(self) -> None:
        """The cache is worth nothing now; what runs is read again, prompts once a group."""
        self._catch_up()
        prompts = {stream.group: stream.prompt or 0 for *_, stream in self._running}
        own = sum(stream.own + stream.turn.sampled_tokens - end + self._steps for end, _, stream in self._running)
        self._prefill_s += (sum(prompts.values()) + own) * self.costs.prefill_token_s
        self._cached = {*prompts, *(stream for *_, stream in self._running)}

    def _step_s(self) -> float:
        return self.costs.step_s - self.costs.row_s + self._row_s

    def _catch_up(self) -> None:
        now = self._time()
        if now <= self._last:
            return
        passed, self._last = now - self._last, now
        if self._running:
            read = min(passed, self._prefill_s)
            self._prefill_s -= read
            self._steps += (passed - read) / self._step_s()
            self.busy_s += passed

    def _due(self) -> float:
        """When the next one ends."""
        return self._last + self._prefill_s + (self._running[0][0] - self._steps) * self._step_s()

    def _leave(self, stream: Stream) -> None:
        self._row_s -= stream.row_s
        if not self._running:
            self._row_s = self._prefill_s = 0.0

    def _admit(self) -> None:
        costs = self.costs
        while self._waiting and len(self._running) < self.slots:
            stream = self._waiting.popleft()
            new, sampled = stream.turn.new_tokens, stream.turn.sampled_tokens
            if stream.prompt is None:
                stream.prompt, new = new, 0
            read = new if stream in self._cached else stream.own + new
            read += 0 if stream.group in self._cached else stream.prompt
            stream.own += new
            self._cached.add(stream)
            self._cached.add(stream.group)
            self._prefill_s += read * costs.prefill_token_s
            stream.row_s = costs.row_s + costs.cache_token_s * (stream.prompt + stream.own + sampled / 2)
            self._row_s += stream.row_s
            heapq.heappush(self._running, (self._steps + sampled, next(self._numbers), stream))
        if self._running and (due := self._due()) < self._wake:
            self._wake = due
            self._at(due, self._on_wake, due)

    def _on_wake(self, due: float) -> None:
        """At the time when one was due; what has come since may have put it off."""
        if due != self._wake:
            return
        self._wake = math.inf
        self._catch_up()
        ended, now = [], self._time() + 1e-9
        while self._running and self._due() <= now:
            stream = heapq.heappop(self._running)[2]
            stream.own += stream.turn.sampled_tokens
            self._leave(stream)
            ended.append(stream)
        for stream in ended:
            then, stream.then = stream.then, _nothing  # else a stream that is called back would be a cycle
            then()
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
    queue: deque[_Trajectory] = field(default_factory=deque)
    """Those that wait for a place."""
    over: bool = False
    """What is cancelled now needn't be tidied up."""

    def start(self, pace: Pace) -> None:
        """Inside the event loop."""
        self.loop: Any = asyncio.get_running_loop()
        self.rng = random.Random(self.seed)
        self.places = self.layout.slots * self.layout.engines
        self.engines = [SimulatedEngine(self.costs, self.layout.slots) for _ in range(self.layout.engines)]
        self.scheduler = Scheduler(
            play=self.group, pace=pace, staleness=lambda group: self.scheduler.version - group.oldest
        )

    async def group(self, number: int, attempt: int) -> Played:
        rng = random.Random(f"{self.seed}/{number}/{attempt}")
        members = _Members(left=self.group_size, done=self.loop.create_future())
        played = [_Trajectory(world=self, group=members, turns=self.plays(rng)) for _ in range(self.group_size)]
        self.queue.extend(played)
        self.admit()
        try:
            await members.done
        except BaseException:
            for one in () if self.over else played:
                one.stop()
            raise
        turns = [turn for one in played for turn in one.turns]
        sampled = sum(turn.sampled_tokens for turn in turns)
        tokens = sampled + sum(turn.new_tokens for turn in turns)
        return Played(tokens=tokens, sampled_tokens=sampled, oldest=min(one.version for one in played))

    def admit(self) -> None:
        while self.queue and self.places:
            one = self.queue.popleft()
            if not one.over:
                self.places -= 1
                one.begin()


@dataclass(eq=False, slots=True, kw_only=True)
class _Members:
    """A group in play."""

    left: int
    done: asyncio.Future[None]


@dataclass(eq=False, slots=True, kw_only=True)
class _Trajectory(Stream):
    """One in play."""

    world: _World
    turns: Sequence[Turn]
    taken: int = 0
    """Turns."""
    engine: SimulatedEngine | None = None
    """None: it waits for a place."""
    version: int = 0
    over: bool = False

    def begin(self) -> None:
        # The less busy of two, as the product does; it stays where its cache is.
        two = self.world.rng.choices(self.world.engines, k=2)
        self.engine, self.version = min(two, key=lambda engine: engine.load), self.world.scheduler.version
        self.engine.load += 1
        self._speak()

    def _speak(self) -> None:
        if self.engine is not None and not self.over:
            self.engine.begin(self, self.turns[self.taken], self._spoken)

    def _spoken(self) -> None:
        tool_s = self.turns[self.taken].tool_s
        self.taken += 1
        after = self._end if self.taken == len(self.turns) else self._speak
        if tool_s:
            self.world.loop.later(self.world.loop.time() + tool_s, after)
        else:
            after()

    def _end(self) -> None:
        if not self.over:
            self._leave()
            self.group.left -= 1
            if not self.group.left:
                self.group.done.set_result(None)

    def stop(self) -> None:
        if self.engine is not None and not self.over:
            self.engine.drop(self)
            self._leave()
        self.over = True

    def _leave(self) -> None:
        """Give its place to the next one."""
        self.over = True
        assert self.engine is not None
        self.engine.forget(self)
        self.engine.load -= 1
        self.world.places += 1
        self.world.admit()


def simulate(
    *, plays: Plays, pace: Pace, group_size: int, costs: Costs, layout: Layout, steps: int = 12, seed: int = 0
) -> Prediction:
    """Play `steps` steps; the first third warms up and isn't counted."""
    world = _World(plays=plays, group_size=group_size, costs=costs, layout=layout, seed=seed)
    collects = gc.isenabled()
    gc.disable()  # it would look at all that is in play again and again; there are no cycles to speak of
    try:
        return run_virtual(_train(world, pace, steps))
    finally:
        if collects:
            gc.enable()


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
        began = loop.time()
        if step == warm:
            since, busy = began, [engine.busy_s for engine in world.engines]
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
        for engine in world.engines:
            engine.new_weights()
        if step >= warm:
            stale += [scheduler.version - group.oldest for group in taken.groups]
            requeued += taken.counts.requeued
            sampled += sum(group.sampled_tokens for group in taken.groups)
            rows.append((loop.time() - began, waited, update))
        scheduler.advance()
    total = loop.time() - since
    worked = [engine.busy_s - before for engine, before in zip(world.engines, busy, strict=True)]
    world.over = True
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


SEARCHED = 2048
"""Trajectories a step with which the best split is searched for."""


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
    engine_devices: int = 1,
    learner_devices: int = 1,
) -> tuple[Layout, Prediction]:
    """The number of engines among `devices` with the shortest step: the optimum is where neither side waits for the
    other, so a golden-section search finds it. One has `engine_devices`; learners take what is left, at least
    `learner_devices`.

    What is large is searched for in a smaller copy, with as much work a device, and played in full once."""
    same: dict[str, Any] = {"plays": plays, "group_size": group_size, "costs": costs, "steps": steps, "seed": seed}
    smaller = max(1.0, min(pace.batch * group_size / SEARCHED, devices / engine_devices / 16))
    there, pace_there = round(devices / smaller), replace(pace, batch=max(1, round(pace.batch / smaller)))
    tried: dict[int, Prediction] = {}

    def layout(devices: int, engines: int) -> Layout:
        return Layout(engines=engines, learners=devices - engines * engine_devices, slots=slots)

    def step_s(engines: int) -> float:
        if engines not in tried:
            tried[engines] = simulate(pace=pace_there, layout=layout(there, engines), **same)
        return tried[engines].step_s

    low, high = 1, max(1, (there - math.ceil(learner_devices / smaller)) // engine_devices)
    while high - low > 2:
        left, right = low + int(0.382 * (high - low)), high - int(0.382 * (high - low))
        if step_s(left) <= step_s(right):
            high = right
        else:
            low = left
    best = min(range(low, high + 1), key=step_s)
    if smaller == 1:
        return layout(devices, best), tried[best]
    most = (devices - learner_devices) // engine_devices
    found = layout(devices, min(most, max(1, round(best * devices / there))))
    return found, simulate(pace=pace, layout=found, **same)


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
