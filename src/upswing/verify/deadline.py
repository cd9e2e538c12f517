"""Run a plain or async function with a deadline that holds whatever the function does.

A plain function runs in a daemon thread, so it never blocks the event loop. On a timeout the thread is asked to stop
(an exception is raised in it, which ends a Python loop); one that sleeps in C can't be ended, so the number of threads
of one function is bounded instead: further calls wait for a free one, inside their own deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import ctypes
import inspect
import threading
from collections.abc import Callable, Coroutine, Generator
from typing import Any

MAX_PER_FUNCTION = 32
"""Calls of one function that may be running or stuck at the same time."""
GRACE_S = 0.05
"""How long a cancelled coroutine gets to end by itself."""


class DeadlineExceeded(Exception):
    """The call did not return within its time."""


class _Stop(BaseException):
    """Raised inside an abandoned thread to end it."""


class _Slots:
    """How many calls of one function are running or stuck; shared by every event loop, hence the lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._used = 0

    def take(self) -> bool:
        with self._lock:
            if self._used >= MAX_PER_FUNCTION:
                return False
            self._used += 1
            return True

    def free(self) -> None:
        with self._lock:
            self._used -= 1


_slots: dict[str, _Slots] = {}
_slots_lock = threading.Lock()


def _slots_of(function: Callable[..., Any]) -> _Slots:
    """By name and not by object: environments make their tools anew for every trajectory."""
    target = getattr(function, "func", function)
    kind = target if hasattr(target, "__qualname__") else type(target)
    key = f"{getattr(kind, '__module__', '')}:{kind.__qualname__}"
    with _slots_lock:
        return _slots.setdefault(key, _Slots())


def is_async(function: Callable[..., Any]) -> bool:
    """True for a coroutine function or an object whose `__call__` is one."""
    target = getattr(function, "func", function)
    return inspect.iscoroutinefunction(target) or inspect.iscoroutinefunction(getattr(target, "__call__", None))  # noqa: B004


async def call_with_deadline(function: Callable[..., Any], kwargs: dict[str, Any], timeout_s: float) -> Any:
    """`function(**kwargs)`, awaited when async.

    Raises DeadlineExceeded after `timeout_s` seconds, and whatever the function raises. Cancelling the caller stops
    the call too and is never swallowed.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    slots = _slots_of(function)
    while not slots.take():
        if loop.time() >= deadline:
            raise DeadlineExceeded(f"{MAX_PER_FUNCTION} earlier calls are still running")
        await asyncio.sleep(min(0.01, timeout_s / 10))
    left_s = max(deadline - loop.time(), 0.0)
    if is_async(function):
        try:
            coroutine = function(**kwargs)
        except BaseException:
            slots.free()
            raise
        return await _run_coroutine(coroutine, left_s, slots)
    result = await _run_thread(function, kwargs, left_s, slots)
    if inspect.iscoroutine(result):  # a plain function that hands back a coroutine, such as a lambda around one
        return await _run_coroutine(result, max(deadline - loop.time(), 0.0), None)
    return result


class _Driven:
    """Awaits a coroutine, and can leave it even when it swallows its cancellation."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._coroutine = coroutine
        self.leave = False
        """From now on, a cancellation closes the coroutine instead of being offered to it."""

    def __await__(self) -> Generator[Any, Any, tuple[Any, BaseException | None]]:
        inner = self._coroutine.__await__()
        error: BaseException | None = None
        while True:
            try:
                waited_for = inner.send(None) if error is None else inner.throw(error)
            except StopIteration as stop:
                return stop.value, None
            except SystemExit as exit_:  # a task that raises it would end the whole event loop
                return None, exit_
            error = None
            try:
                yield waited_for
            except BaseException as thrown:
                if self.leave:
                    with contextlib.suppress(RuntimeError):  # it ignores even this
                        inner.close()
                    raise
                error = thrown


async def _run_coroutine(coroutine: Coroutine[Any, Any, Any], timeout_s: float, slots: _Slots | None) -> Any:
    driven = _Driven(coroutine)

    async def drive() -> tuple[Any, BaseException | None]:
        return await driven

    def ended(done: asyncio.Task[Any]) -> None:
        if slots is not None:
            slots.free()
        if not done.cancelled():
            done.exception()  # retrieved, so that asyncio doesn't log what we report ourselves

    task = asyncio.ensure_future(drive())
    task.add_done_callback(ended)
    try:
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
    except asyncio.CancelledError:
        _end(task, driven)
        raise
    if not done:
        _end(task, driven)
        raise DeadlineExceeded("it did not return")
    if task.cancelled():
        raise RuntimeError("it cancelled itself")
    value, error = task.result()
    if error is not None:
        raise error
    return value


def _end(task: asyncio.Task[Any], driven: _Driven) -> None:
    """Cancel, and leave a coroutine that swallowed that: it would hold up the loop's shutdown for ever."""

    def leave() -> None:
        if not task.done():
            driven.leave = True
            task.cancel()

    task.cancel()
    asyncio.get_running_loop().call_later(GRACE_S, leave)


class _ThreadCall:
    """One call in its own thread; `stop` ends it only while the function itself runs."""

    def __init__(self, function: Callable[..., Any], kwargs: dict[str, Any], slots: _Slots) -> None:
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[tuple[Any, BaseException | None]] = self.loop.create_future()
        self._function, self._kwargs, self._slots = function, kwargs, slots
        self._context = contextvars.copy_context()
        self._lock = threading.Lock()
        self._returned = False
        name = f"upswing-{getattr(function, '__name__', 'call')}"
        self._thread = threading.Thread(target=self._work, daemon=True, name=name)
        self._thread.start()

    def stop(self) -> None:
        with self._lock:
            if not self._returned and self._thread.ident is not None:
                ident = ctypes.c_ulong(self._thread.ident)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(_Stop))

    def _work(self) -> None:
        try:
            value, error = self._call()
        except _Stop:  # raised just as the function returned
            return
        finally:
            self._slots.free()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self.loop.call_soon_threadsafe(self._deliver, value, error)

    def _call(self) -> tuple[Any, BaseException | None]:
        try:
            return self._context.run(self._function, **self._kwargs), None
        except BaseException as error:
            return None, error
        finally:
            with self._lock:
                self._returned = True

    def _deliver(self, value: Any, error: BaseException | None) -> None:
        if not self.future.done():
            self.future.set_result((value, error))


async def _run_thread(function: Callable[..., Any], kwargs: dict[str, Any], timeout_s: float, slots: _Slots) -> Any:
    call = _ThreadCall(function, kwargs, slots)
    try:
        done, _ = await asyncio.wait({call.future}, timeout=timeout_s)
    except asyncio.CancelledError:
        call.stop()
        raise
    if not done:
        call.future.cancel()
        call.stop()
        raise DeadlineExceeded("it did not return")
    value, error = call.future.result()
    if error is not None:
        raise error
    return value
