"""When groups are played and which of them are learned from: the synchronous loop and the asynchronous one.

Groups have numbers, in the order of the stage's stream of tasks. A number stays open until its group was learned from
or dropped on purpose, so that no task is lost and none is learned from twice, whatever is cancelled, stale or killed.

A step is a batch's updates, however many, and the push of the weights after them, which makes a version. How many
groups may be started (AReaL, arXiv 2505.24298, section 5.1): before `version + 1` steps could use them,

    started - dropped <= (max_staleness + version + 1) * batch

so what waits in the buffer counts too, and a learner that is slow holds the engine back. With `max_staleness` 0 the
next batch starts only after the update: that is the synchronous loop.

Whoever was started first is learned from first. A group that is played again is waited for before it is too old once
more: tasks that take long must not vanish.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

T = TypeVar("T")
Play = Callable[[int, int], Awaitable[T]]
"""`play(number, attempt)`: the group of that number; `attempt` counts from 0, for a seed of its own."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How far the rollouts may be ahead of the learner."""

    batch: int
    """Groups a step."""
    max_staleness: int = 0
    """Steps (weight pushes) that may lie between sampling a token and learning from it, however many updates a step
    has."""
    stale: Literal["requeue", "drop", "keep"] = "requeue"
    """What becomes of a finished group that is older: its task is played again, or is given up, or it stays."""
    oversample: int = 0
    """Groups started beyond those that are needed; once enough are finished, the late ones are cancelled and their
    tasks played with the next ones. Only with `max_staleness` 0: otherwise late groups simply come later."""


@dataclass(kw_only=True)
class Counts:
    """Since the last `take`."""

    requeued: int = 0
    """Stale or cancelled groups whose tasks are played again."""
    dropped: int = 0
    cancelled: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            requeued=self.requeued + other.requeued,
            dropped=self.dropped + other.dropped,
            cancelled=self.cancelled + other.cancelled,
        )


@dataclass(frozen=True, kw_only=True)
class Taken(Generic[T]):
    """What a step learns from."""

    numbers: tuple[int, ...]
    groups: tuple[T, ...]
    counts: Counts


@dataclass(kw_only=True)
class _Open:
    """A group that was started and not yet learned from."""

    attempt: int = 0
    begun: int = 0
    """The version that it was started at."""
    task: asyncio.Task[Any] | None = None
    """None: it waits to be started (again)."""


@dataclass(kw_only=True)
class Scheduler(Generic[T]):
    """Keeps groups in play and hands out whole ones, oldest first. Make it inside the event loop that it runs in.

    `staleness(group)`: steps since the oldest token of a finished group was sampled. `version`: steps so far.
    `on_stale(number, group, times)`: told of a finished group that is too old, for the `times`-th time, before it is
    given up or its task played again. `state_before`: what `state()` said when a run was saved; its open groups are
    started again.
    """

    play: Play[T]
    pace: Pace
    staleness: Callable[[T], int]
    on_stale: Callable[[int, T, int], None] = lambda number, group, times: None
    version: int = 0
    state_before: Mapping[str, Any] | None = None
    _open: dict[int, _Open] = field(default_factory=dict)
    _waiting: list[int] = field(default_factory=list)
    """A heap: open groups to be started (again)."""
    _ready: set[int] = field(default_factory=set)
    """Finished and not too old."""
    _broken: set[int] = field(default_factory=set)
    """Ended with an error."""
    _owed: set[int] = field(default_factory=set)
    """In play again, and too old after the next step: to be waited for."""
    _learning: dict[int, _Open] = field(default_factory=dict)
    """Taken, and not yet learned from."""
    _next: int = 0
    _taken: int = 0
    _allowed: int = 0
    _first: int = 0
    _counts: Counts = field(default_factory=Counts)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _ending: set[asyncio.Future[Any]] = field(default_factory=set)
    """Cancelled, their environments not yet closed."""

    def __post_init__(self) -> None:
        self._first = self.version
        before = self.state_before or {}
        self._next = int(before.get("next", self.version * self.pace.batch))
        for number, attempt in before.get("open", ()):
            self._open[number] = _Open(attempt=attempt)
            heapq.heappush(self._waiting, number)

    # -- the learner's side -----------------------------------------------------------------------------------------

    async def take(self, *, more: bool = False) -> Taken[T]:
        """The next batch of whole groups, the oldest that are finished, in the order of their numbers.

        `more`: a further batch for the same step (dynamic sampling). Raises what `play` raised once no full batch is
        left of groups that were started before.
        """
        if more:
            self._allowed += self.pace.batch
        self._fill()
        self._owed = {number for number, one in self._open.items() if self._is_owed(one)}
        while len(self._ready) < self.pace.batch or self._owed:
            self._raise_needed()
            self._changed.clear()
            await self._changed.wait()
        numbers = tuple(sorted(sorted(self._ready, key=self._age)[: self.pace.batch]))
        self._ready.difference_update(numbers)
        self._learning |= (taken := {number: self._open.pop(number) for number in numbers})
        groups = tuple(self._result(one) for one in taken.values())
        self._taken += len(numbers)
        if self.pace.oversample and self.pace.max_staleness == 0:
            self._cancel_late()
        counts, self._counts = self._counts, Counts()
        return Taken(numbers=numbers, groups=groups, counts=counts)

    def advance(self) -> None:
        """A step was made and the engine has its weights: sort out what is stale now, and go on."""
        self.version += 1
        self._learning.clear()
        for number in [number for number in self._ready if self._is_stale(self._open[number])]:
            self._turn_away(number)
        if self.pace.max_staleness:  # else the next `take` does, so that nothing is in play between two steps
            self._fill()

    def state(self) -> dict[str, Any]:
        """JSON for a checkpoint of the weights after the last `advance`: what was taken since then is open, too."""
        groups = sorted((self._open | self._learning).items())
        return {"next": self._next, "open": [[number, one.attempt] for number, one in groups]}

    async def close(self) -> None:
        """Cancel what is in play; returns when it has ended."""
        for one in self._open.values():
            self._cancel(one)
        await asyncio.gather(*self._ending, return_exceptions=True)

    # -- what is played ---------------------------------------------------------------------------------------------

    def _capacity(self) -> int:
        """Groups that may be started now."""
        pace, begun = self.pace, self._taken + len(self._open) - len(self._waiting)
        steps = self.version - self._first
        return (pace.max_staleness + steps + 1) * pace.batch + self._allowed + pace.oversample - begun

    def _fill(self) -> None:
        for _ in range(self._capacity()):
            if self._waiting:
                number = heapq.heappop(self._waiting)
            else:
                number, self._next = self._next, self._next + 1
                self._open[number] = _Open()
            one = self._open[number]
            one.begun = self.version
            one.task = asyncio.ensure_future(self.play(number, one.attempt))
            one.task.add_done_callback(lambda task, number=number: self._on_done(number, task))  # type: ignore[misc]

    def _on_done(self, number: int, task: asyncio.Future[Any]) -> None:
        self._ending.discard(task)
        one = self._open.get(number)
        if one is not None and one.task is task:
            self._owed.discard(number)
            failed = task.cancelled() or task.exception() is not None
            (self._broken if failed else self._ready).add(number)
            if not failed and self._is_stale(one):
                self._turn_away(number)
            self._fill()
        self._changed.set()

    @staticmethod
    def _result(one: _Open) -> Any:
        assert one.task is not None
        return one.task.result()

    def _raise_needed(self) -> None:
        """What a group raised, unless a batch can still be had of groups before it."""
        if self._broken:
            for number in sorted(self._open, key=self._age)[: self.pace.batch]:
                if number in self._broken:
                    self._result(self._open[number])

    def _age(self, number: int) -> tuple[int, int]:
        """Sorts by who was started first; who waits to be started comes last."""
        one = self._open[number]
        return self.version + 1 if one.task is None else one.begun, number

    def _is_owed(self, one: _Open) -> bool:
        playing = one.task is not None and not one.task.done()
        return playing and one.attempt > 0 and one.begun + self.pace.max_staleness <= self.version

    def _is_stale(self, one: _Open) -> bool:
        """Of a finished group."""
        return self.pace.stale != "keep" and self.staleness(self._result(one)) > self.pace.max_staleness

    def _turn_away(self, number: int) -> None:
        """A finished group that is too old."""
        one = self._open[number]
        self.on_stale(number, self._result(one), one.attempt + 1)
        self._ready.discard(number)
        if self.pace.stale == "drop":
            del self._open[number]
            self._counts.dropped += 1
            return
        self._requeue(number)

    def _requeue(self, number: int) -> None:
        one = self._open[number]
        one.task, one.attempt = None, one.attempt + 1
        heapq.heappush(self._waiting, number)
        self._counts.requeued += 1

    def _cancel_late(self) -> None:
        """Those that others have overtaken; the next time they are waited for."""
        for number, one in self._open.items():
            if one.task is not None and not one.task.done():
                self._cancel(one)
                self._counts.cancelled += 1
                self._requeue(number)

    def _cancel(self, one: _Open) -> None:
        if one.task is not None and not one.task.done():
            self._ending.add(one.task)
            one.task.cancel()
            one.task = None
