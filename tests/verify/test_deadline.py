"""Whatever a function does, its deadline holds and nothing piles up."""

import asyncio
import contextvars
import functools
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest

from upswing.verify import deadline
from upswing.verify.deadline import DeadlineExceeded, call_with_deadline, in_turn, off_the_clock, to_its_end


async def forever():
    await asyncio.Event().wait()


async def stubborn():
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            continue


async def mulish():
    while True:
        try:
            await asyncio.Event().wait()
        except BaseException:
            continue


def spin():
    while True:
        pass


def make_sleeper():
    released = threading.Event()

    def sleep():
        released.wait(30)  # stands for a wait in C that nothing can end

    return sleep, released


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # mulish ignores even its closing
@pytest.mark.parametrize("function", [forever, stubborn, mulish, spin])
async def test_the_deadline_holds_and_the_call_is_ended(function):
    threads = threading.active_count()
    started = time.perf_counter()
    for _ in range(3):
        with pytest.raises(DeadlineExceeded):
            await call_with_deadline(function, {}, 0.1)
    assert time.perf_counter() - started < 2
    for _ in range(100):
        if threading.active_count() <= threads and len(asyncio.all_tasks()) == 1:
            break
        await asyncio.sleep(0.02)
    assert threading.active_count() <= threads and len(asyncio.all_tasks()) == 1


async def test_calls_that_can_not_be_ended_do_not_pile_up(monkeypatch):
    monkeypatch.setattr(deadline, "MAX_PER_FUNCTION", 4)
    sleep, released = make_sleeper()
    threads = threading.active_count()
    calls = [call_with_deadline(sleep, {}, 0.1) for _ in range(100)]
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(result, DeadlineExceeded) for result in results)
    assert threading.active_count() - threads <= 4
    released.set()
    for _ in range(100):
        if threading.active_count() <= threads:
            break
        await asyncio.sleep(0.02)

    def quick():
        return 1

    assert await call_with_deadline(quick, {}, 1) == 1


async def test_more_calls_than_slots_all_run(monkeypatch):
    monkeypatch.setattr(deadline, "MAX_PER_FUNCTION", 4)

    def quick(n):
        time.sleep(0.005)
        return n

    results = await asyncio.gather(*(call_with_deadline(quick, {"n": n}, 5) for n in range(40)))
    assert results == list(range(40))


async def test_waiting_for_a_thread_takes_nothing_off_a_calls_own_time(monkeypatch):
    monkeypatch.setattr(deadline, "MAX_PER_FUNCTION", 2)

    def slow():
        time.sleep(0.1)

    await asyncio.gather(*(call_with_deadline(slow, {}, 0.3) for _ in range(12)))


async def test_waiting_takes_nothing_off_the_calls_around_it_either(monkeypatch):
    """As a rubric's time, in which its verifiers wait for a thread behind those of other trajectories."""
    monkeypatch.setattr(deadline, "MAX_PER_FUNCTION", 1)

    def check():
        time.sleep(0.1)

    async def score(checks=1):
        await asyncio.gather(*(call_with_deadline(check, {}, 0.3) for _ in range(checks)))

    await asyncio.gather(*(call_with_deadline(score, {}, 0.3) for _ in range(10)))
    with pytest.raises(DeadlineExceeded):  # its own work counts, also when others waited before
        await asyncio.gather(*(call_with_deadline(slow_after_a_wait, {}, 0.2) for _ in range(3)))


async def slow_after_a_wait():
    with off_the_clock(), off_the_clock():
        await asyncio.sleep(0.3)
    await asyncio.sleep(0.3)


async def test_off_the_clock_is_not_for_ever():
    started = time.perf_counter()
    with pytest.raises(DeadlineExceeded):
        await call_with_deadline(slow_after_a_wait, {}, 0.2)
    assert 0.5 <= time.perf_counter() - started < 0.6
    with off_the_clock():  # without a call around it, nothing
        pass


async def test_waiting_for_a_thread_of_an_executor_is_off_the_clock():
    ran = []

    def check():
        time.sleep(0.1)
        ran.append(None)
        return len(ran)

    async def score():
        return await in_turn(executor, check)

    with ThreadPoolExecutor(1) as executor:
        found = await asyncio.gather(*(call_with_deadline(score, {}, 0.3) for _ in range(8)))
        assert sorted(found) == list(range(1, 9))
        task = [asyncio.create_task(score()) for _ in range(3)][-1]
        await asyncio.sleep(0.05)
        task.cancel()  # while it waits: it is never begun
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(ZeroDivisionError):
            await in_turn(executor, lambda: 1 / 0)
    assert len(ran) == 10


class Bye(BaseException):
    pass


@pytest.mark.parametrize("kind", ["async", "plain"])
async def test_what_nobody_would_catch_ends_the_call_and_not_the_run(kind):
    async def later():
        raise Bye("now")

    def now():
        raise Bye("now")

    with pytest.raises(RuntimeError, match="it raised Bye: now"):
        await call_with_deadline(later if kind == "async" else now, {}, 1)


@pytest.mark.filterwarnings("error")
async def test_a_coroutine_that_comes_too_late_is_closed():
    def late():
        time.sleep(0.2)
        return forever()

    with pytest.raises(DeadlineExceeded):
        await call_with_deadline(late, {}, 0.05)
    await asyncio.sleep(0.3)


async def test_async_calls_need_no_thread_and_are_not_bounded(monkeypatch):
    monkeypatch.setattr(deadline, "MAX_PER_FUNCTION", 1)

    async def slow():
        await asyncio.sleep(0.1)

    await asyncio.gather(*(call_with_deadline(slow, {}, 0.3) for _ in range(50)))


@pytest.mark.parametrize("kind", ["async", "plain"])
async def test_a_function_that_cancels_itself_is_not_the_caller_being_cancelled(kind):
    async def later():
        raise asyncio.CancelledError

    def now():
        raise asyncio.CancelledError

    cancel = later if kind == "async" else now
    with pytest.raises(RuntimeError, match="cancelled itself"):
        await call_with_deadline(cancel, {}, 1)


async def test_results_errors_and_handed_back_coroutines():
    async def later():
        return 3

    def fail():
        raise LookupError("x")

    assert await call_with_deadline(lambda: later(), {}, 1) == 3
    with pytest.raises(LookupError):
        await call_with_deadline(fail, {}, 1)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # mulish ignores even its closing
@pytest.mark.parametrize("function", [forever, stubborn, mulish, spin])
async def test_cancelling_the_caller_ends_the_call(function):
    threads = threading.active_count()
    task = asyncio.create_task(call_with_deadline(function, {}, 60))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    for _ in range(100):
        if threading.active_count() <= threads and len(asyncio.all_tasks()) == 1:
            break
        await asyncio.sleep(0.02)
    assert threading.active_count() <= threads and len(asyncio.all_tasks()) == 1


def test_a_stuck_tool_does_not_keep_the_process_alive():
    code = (
        "import asyncio, time\n"
        "from upswing.verify.deadline import call_with_deadline, DeadlineExceeded\n"
        "async def stubborn():\n"
        "    while True:\n"
        "        try: await asyncio.sleep(60)\n"
        "        except asyncio.CancelledError: continue\n"
        "async def main():\n"
        "    for f in (lambda: time.sleep(60), stubborn):\n"
        "        try: await call_with_deadline(f, {}, 0.1)\n"
        "        except DeadlineExceeded: print('late')\n"
        "asyncio.run(main())\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20)
    assert result.stdout.split() == ["late", "late"] and result.returncode == 0 and not result.stderr


async def test_a_thread_is_used_again_unless_it_had_to_be_stopped():
    async def used():
        await asyncio.sleep(0.05)  # the last one is idle by now
        return await call_with_deadline(threading.current_thread, {}, 1.0)

    first, seen = await used(), []
    assert await used() is first

    def endless():
        seen.append(threading.current_thread())
        while True:
            pass

    await asyncio.sleep(0.05)
    with pytest.raises(DeadlineExceeded):
        await call_with_deadline(endless, {}, 0.1)
    assert seen == [first]
    assert await used() is not first
    first.join(2)
    assert not first.is_alive()


@pytest.mark.parametrize("cancels", [0, 1, 3])
@pytest.mark.parametrize("breaks", [False, True])
async def test_what_must_be_undone_is_undone_however_often_it_is_cancelled(cancels, breaks):
    ended = []

    async def work():
        await asyncio.sleep(0.1)
        ended.append(True)
        if breaks:
            raise OSError("no")
        return 7

    job = asyncio.ensure_future(to_its_end(work()))
    for _ in range(cancels):
        await asyncio.sleep(0.01)
        job.cancel()
    (result,) = await asyncio.gather(job, return_exceptions=True)
    assert ended == [True]
    assert isinstance(result, asyncio.CancelledError if cancels else OSError if breaks else int)


async def test_what_never_waits_runs_where_it_is_and_its_override_in_a_thread():
    class Plain:
        @deadline.inline
        def where(self, back=None):
            return back or threading.current_thread()

    class Own(Plain):
        def where(self, back=None):
            return threading.current_thread()

        def wrapped(self, back=None):
            return None

        wrapped = functools.wraps(Plain.where)(wrapped)

        @deadline.inline
        def breaks(self):
            raise asyncio.CancelledError

    here = threading.current_thread()
    assert await call_with_deadline(Plain().where, {}, 1.0) is here
    assert await deadline.call_env(Plain().where, timeout_s=1.0) is here
    assert await call_with_deadline(Own().where, {}, 1.0) is not here
    assert not deadline._is_inline(Own().wrapped) and not deadline._is_inline(Mock())
    with pytest.raises(RuntimeError, match="cancelled itself"):
        await call_with_deadline(Own().breaks, {}, 1.0)
    with pytest.raises(DeadlineExceeded):  # what it hands back keeps the deadline
        await call_with_deadline(Plain().where, {"back": forever()}, 0.05)


async def test_a_call_keeps_its_context_to_itself():
    variable = contextvars.ContextVar("variable", default="outside")

    async def quick(fail: bool) -> str:
        variable.set("inside")
        if fail:
            raise LookupError(variable.get())
        return variable.get()

    assert await call_with_deadline(quick, {"fail": False}, 1) == "inside"
    with pytest.raises(LookupError, match="inside"):
        await call_with_deadline(quick, {"fail": True}, 1)
    assert variable.get() == "outside"


async def test_time_limits_and_task_groups_in_a_call_are_its_own():
    tasks = []

    async def limited() -> str:
        tasks.append(asyncio.current_task())
        try:
            async with asyncio.timeout(0.01):
                await forever()
        except TimeoutError:
            tasks.append(asyncio.current_task())
            return "its own limit"
        return ""

    async def grouped() -> str:
        async def fail() -> None:
            raise LookupError("one of several")

        async with asyncio.TaskGroup() as group:
            group.create_task(fail())
            await forever()
        return ""

    assert await call_with_deadline(limited, {}, 5) == "its own limit"
    assert tasks[0] is tasks[1] is not asyncio.current_task()
    with pytest.raises(ExceptionGroup, match="unhandled errors"):
        await call_with_deadline(grouped, {}, 5)
    task = asyncio.current_task()
    assert task is not None and task.cancelling() == 0


@pytest.mark.parametrize("turns", [0, 1, 2])
async def test_a_cancellation_reaches_the_call_however_early_it_comes(turns):
    told = []

    async def wait() -> None:
        try:
            await forever()
        except asyncio.CancelledError:
            await asyncio.sleep(0)  # what has to be undone may take a while
            told.append("cancelled")
            raise

    job = asyncio.create_task(call_with_deadline(wait, {}, 5))
    for _ in range(turns):
        await asyncio.sleep(0)
    asyncio.get_running_loop().call_soon(job.cancel)
    await asyncio.wait({job})
    await asyncio.sleep(0.02)
    assert job.cancelled() and told == ["cancelled"]


async def test_a_call_that_cancels_itself_on_the_way_is_not_the_caller_being_cancelled():
    async def cancel() -> None:
        asyncio.current_task().cancel()

    with pytest.raises(RuntimeError, match="cancelled itself"):
        await call_with_deadline(cancel, {}, 1)


async def test_a_first_step_that_takes_too_long_counts():
    async def slow() -> None:
        time.sleep(0.1)
        await asyncio.sleep(0.02)

    with pytest.raises(DeadlineExceeded):
        await call_with_deadline(slow, {}, 0.05)
