"""Virtual time: an event loop whose clock jumps to whatever happens next."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Jump(selectors.SelectSelector):
    """Waits by moving the clock; for threads it really waits, and the clock stands."""

    def __init__(self, has_work: Callable[[], bool]) -> None:
        """`has_work`: whether the loop has something to do now."""
        super().__init__()
        self.now, self.threads = 0.0, 0
        """Threads: calls in them that haven't returned."""
        self.events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        """A heap of what happens beside the loop's own timers, at a tenth of their cost."""
        self._has_work = has_work

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self.threads and timeout != 0:
            return super().select(None)
        until = math.inf if timeout is None else self.now + max(0.0, timeout)
        while self.events and self.events[0][0] <= until and not self._has_work():
            when, _, call, args = heapq.heappop(self.events)
            self.now = max(self.now, when)
            call(*args)
        if not self._has_work():
            if timeout is None:
                raise RuntimeError("nothing is left that could happen: everything waits for something else")
            self.now = until
        return super().select(0)


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jump = _Jump(lambda: bool(self._ready))  # type: ignore[attr-defined]
        self._numbers = itertools.count()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now

    def later(self, when: float, call: Callable[..., None], *args: Any) -> None:
        """`call_at` for what is never cancelled and sets no timers."""
        heapq.heappush(self._jump.events, (when, next(self._numbers), call, args))

    def in_thread(self, work: Callable[[], object]) -> None:
        """What `call_with_deadline` has threads for, done at once and here: time would be up before a thread ended."""
        work()

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
