"""Run a plain or async function with a deadline that holds whatever the function does.

A plain function runs in a daemon thread, so it never blocks the event loop. On a timeout the thread is asked to stop
(an exception is raised in it, which ends a Python loop); one that sleeps in C can't be ended, so the number of threads
of one function is bounded instead. Further calls wait for a free one, which takes nothing off their own time or that
of whoever waits for them (`off_the_clock`); only when none comes free for as long as a call may take are they given up.
Threads are used again: what a function leaves in thread-local state, another one may find.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import ctypes
import functools
import inspect
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterator
from concurrent.futures import Executor
from types import FunctionType, MethodType
from typing import Any, TypeVar

from upswing.errors import EnvironmentBroken

MAX_PER_FUNCTION = 128
"""Threads of one function that may be running or stuck at the same time."""
IDLE_S = 1.0
"""How long a thread waits for another call."""
GRACE_S = 0.05
"""How long a cancelled coroutine gets to end by itself."""

_T = TypeVar("_T")
_F = TypeVar("_F", bound=Callable[..., Any])
_Result = tuple[Any, BaseException | None]
"""(what was returned, what was raised)."""


class DeadlineExceeded(Exception):
    """The call did not return within its time."""


class _Stop(BaseException):
    """Raised inside an abandoned thread to end it."""


class _Clock:
    """How long an async call has been worked on, in seconds. Belongs to one event loop."""

    def __init__(self) -> None:
        self._now = asyncio.get_running_loop().time
        self._since, self._before, self._stops = self._now(), 0.0, 0

    def worked(self) -> float:
        return self._before + (0.0 if self._stops else self._now() - self._since)

    def stop(self) -> None:
        self._before, self._stops = self.worked(), self._stops + 1

    def go_on(self) -> None:
        self._since, self._stops = self._now(), self._stops - 1


_clocks: contextvars.ContextVar[tuple[_Clock, ...]] = contextvars.ContextVar("upswing_clocks", default=())


@contextlib.contextmanager
def off_the_clock() -> Iterator[None]:
    """What is awaited inside (a free worker, say) takes no time off the async calls with a deadline around it."""
    clocks = _clocks.get()
    for clock in clocks:
        clock.stop()
    try:
        yield
    finally:
        for clock in clocks:
            clock.go_on()


class _Slots:
    """How many threads of one function are running or stuck; shared by every event loop, hence the lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = self._freed = 0

    def free(self) -> None:
        with self._lock:
            self._freed += 1

    async def take(self, timeout_s: float) -> None:
        """Wait for a slot. Raises DeadlineExceeded when none comes free for `timeout_s` seconds."""
        loop = asyncio.get_running_loop()
        seen, since = -1, 0.0
        while True:
            with self._lock:
                freed = self._freed
                if self._taken - freed < MAX_PER_FUNCTION:
                    self._taken += 1
                    return
            if freed != seen:
                seen, since = freed, loop.time()
            elif loop.time() - since >= timeout_s:
                raise DeadlineExceeded(f"{MAX_PER_FUNCTION} earlier calls are still running")
            await asyncio.sleep(min(0.01, timeout_s / 10))


_Work = Callable[[], bool]
_idle: deque[queue.SimpleQueue[_Work]] = deque()
"""Of the threads that wait for a call, the last one to finish last. Starting one takes longer than most calls do."""
os.register_at_fork(after_in_child=_idle.clear)  # threads don't come along


def _in_thread(work: _Work) -> None:
    """Have an idle thread, else a new one, do the work, which returns whether the thread is fit for more."""
    try:
        jobs = _idle.pop()
    except IndexError:
        jobs = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(jobs,), daemon=True, name="upswing-call").start()
    jobs.put(work)


def _serve(jobs: queue.SimpleQueue[_Work]) -> None:
    fit = True
    with contextlib.suppress(_Stop):
        while fit:
            try:
                fit = jobs.get(timeout=IDLE_S)()
                if fit:
                    _idle.append(jobs)
            except queue.Empty:
                with contextlib.suppress(ValueError):  # it has just been taken
                    _idle.remove(jobs)
                    return


_slots: dict[str, _Slots] = {}


def _slots_of(function: Callable[..., Any]) -> _Slots:
    """By name and not by object: environments make their tools anew for every trajectory."""
    target = getattr(function, "func", function)
    kind = target if hasattr(target, "__qualname__") else type(target)
    return _slots.setdefault(f"{getattr(kind, '__module__', '')}:{kind.__qualname__}", _Slots())


def is_async(function: Callable[..., Any]) -> bool:
    """True for a coroutine function or an object whose `__call__` is one."""
    target = getattr(function, "func", function)
    if isinstance(target, FunctionType | MethodType):
        return inspect.iscoroutinefunction(target)
    return inspect.iscoroutinefunction(target) or inspect.iscoroutinefunction(getattr(target, "__call__", None))  # noqa: B004


_inline: set[Any] = set()


def inline(function: _F) -> _F:
    """Marks a plain function that never waits: it is called where it is, without a thread. What overrides or wraps it
    isn't marked."""
    _inline.add(function)
    return function


def _is_inline(function: Callable[..., Any]) -> bool:
    target = getattr(function, "func", function)
    return isinstance(target, FunctionType | MethodType) and getattr(target, "__func__", target) in _inline


async def call_with_deadline(function: Callable[..., Any], kwargs: dict[str, Any], timeout_s: float) -> Any:
    """`function(**kwargs)`, awaited when async.

    Raises DeadlineExceeded after `timeout_s` seconds, whatever the function raises, and RuntimeError when it cancels
    itself or raises what isn't meant to be caught. Cancelling the caller stops the call too and is never swallowed.
    """
    if _is_inline(function):
        try:
            result = function(**kwargs)
        except BaseException as error:
            result = _unwrap((None, error))
        return await _run_coroutine(result, timeout_s) if inspect.iscoroutine(result) else result
    if is_async(function):
        return await _run_coroutine(function(**kwargs), timeout_s)
    slots = _slots_of(function)
    with off_the_clock():
        await slots.take(timeout_s)
    deadline = asyncio.get_running_loop().time() + timeout_s
    result = await _run_thread(function, kwargs, timeout_s, slots)
    if inspect.iscoroutine(result):  # a plain function that hands back a coroutine, such as a lambda around one
        return await _run_coroutine(result, max(deadline - asyncio.get_running_loop().time(), 0.0))
    return result


async def to_its_end(work: Coroutine[Any, Any, _T]) -> _T:
    """What `work` returns or raises, however often the caller is cancelled meanwhile; the cancellation follows then.
    For what must be undone: whoever cancels a batch may cancel a trajectory again while its environment closes."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # retrieved: the cancellation matters more
        raise cancelled
    return task.result()


async def in_turn(executor: Executor, call: Callable[[], Any]) -> Any:
    """What `call` returns, run in a thread of `executor`; waiting for a free one is off the clock. For calls that keep
    their time themselves."""
    loop = asyncio.get_running_loop()
    begun: asyncio.Future[None] = loop.create_future()

    def begin() -> None:
        if not begun.done():
            begun.set_result(None)

    def work() -> Any:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(begin)
        return call()

    future = loop.run_in_executor(executor, work)
    try:
        with off_the_clock():
            await asyncio.wait({begun, future}, return_when=asyncio.FIRST_COMPLETED)
        return await future
    finally:
        future.cancel()
        begun.cancel()


async def call_env(method: Callable[..., Any], *args: Any, timeout_s: float) -> Any:
    """Call a plain or async environment method; plain ones run in a thread so that they never block the others.

    Raises EnvironmentBroken when it takes longer than `timeout_s` or tries to end the process; whatever else it raises
    is passed on.
    """
    try:
        return await call_with_deadline(functools.partial(method, *args), {}, timeout_s)
    except DeadlineExceeded as error:
        raise EnvironmentBroken(f"{method.__qualname__} took longer than {timeout_s:g} s") from error
    except (SystemExit, GeneratorExit) as error:
        raise EnvironmentBroken(f"{method.__qualname__} raised {type(error).__name__}: {error}") from error


def _unwrap(result: _Result) -> Any:
    value, error = result
    if isinstance(error, asyncio.CancelledError):  # raised on, it would look like the caller being cancelled
        raise RuntimeError("it cancelled itself") from error
    if error is not None and not isinstance(error, Exception | KeyboardInterrupt | SystemExit | GeneratorExit):
        raise RuntimeError(f"it raised {type(error).__name__}: {error}") from error  # nobody would catch it
    if error is not None:
        raise error
    return value


class _Driven:
    """Awaits a coroutine, and can leave it even when it swallows its cancellation."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._coroutine = coroutine
        self.leave = False
        """From now on, a cancellation closes the coroutine instead of being offered to it."""

    def __await__(self) -> Generator[Any, Any, _Result]:
        inner = self._coroutine.__await__()
        error: BaseException | None = None
        while True:
            try:
                waited_for = inner.send(None) if error is None else inner.throw(error)
            except StopIteration as stop:
                return stop.value, None
            except (Exception, asyncio.CancelledError, KeyboardInterrupt):
                raise
            except BaseException as fatal:  # a task that raises SystemExit would end the whole event loop
                return None, fatal
            error = None
            try:
                yield waited_for
            except BaseException as thrown:
                if self.leave:
                    with contextlib.suppress(RuntimeError):  # it ignores even this
                        inner.close()
                    raise
                error = thrown


async def _run_coroutine(coroutine: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
    driven = _Driven(coroutine)

    async def drive() -> _Result:
        return await driven

    def ended(done: asyncio.Task[Any]) -> None:
        if not done.cancelled():
            done.exception()  # retrieved, so that asyncio doesn't log what we report ourselves
        with contextlib.suppress(RuntimeError):
            coroutine.close()  # it may have been cancelled before it began

    clock = _Clock()
    token = _clocks.set((*_clocks.get(), clock))
    task = asyncio.ensure_future(drive())
    _clocks.reset(token)
    task.add_done_callback(ended)
    try:
        left_s = timeout_s
        while not (await asyncio.wait({task}, timeout=left_s))[0]:
            if clock.worked() >= timeout_s:
                raise DeadlineExceeded("it did not return")
            left_s = max(timeout_s - clock.worked(), 0.01)
    except BaseException:
        _end(task, driven)
        raise
    return _unwrap((None, asyncio.CancelledError()) if task.cancelled() else task.result())


def _end(task: asyncio.Task[Any], driven: _Driven) -> None:
    """Cancel, and leave a coroutine that swallowed that: it would hold up the loop's shutdown for ever."""

    def leave() -> None:
        if not task.done():
            driven.leave = True
            task.cancel()

    task.cancel()
    asyncio.get_running_loop().call_later(GRACE_S, leave)


async def _run_thread(function: Callable[..., Any], kwargs: dict[str, Any], timeout_s: float, slots: _Slots) -> Any:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_Result] = loop.create_future()
    context, lock, running, stopped, ident = contextvars.copy_context(), threading.Lock(), True, False, 0

    def call() -> _Result:
        nonlocal running, ident
        with lock:
            if stopped:
                return None, None
            ident = threading.get_ident()
        try:
            return context.run(function, **kwargs), None
        except BaseException as error:
            return None, error
        finally:
            with lock:
                running = False

    def deliver(result: _Result) -> None:
        if not future.done():
            future.set_result(result)
        elif inspect.iscoroutine(result[0]):
            result[0].close()  # it came too late to be awaited

    def work() -> bool:
        try:
            result = call()
        except _Stop:  # raised just as the function returned
            return False
        finally:
            slots.free()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(deliver, result)
        return not stopped  # else the exception may still be on its way

    getattr(loop, "in_thread", _in_thread)(work)  # a loop in virtual time has its own
    try:
        done, _ = await asyncio.wait({future}, timeout=timeout_s)
        if not done:
            raise DeadlineExceeded("it did not return")
    except BaseException:
        future.cancel()
        with lock:  # never once the function has returned: the exception would hit whatever comes next
            stopped = running
            if stopped and ident:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(_Stop))
        raise
    return _unwrap(future.result())
