"""Calls a function in a process of its own that the kernel ends when its time is over, whatever it is doing.

For what a thread can't leave (see `deadline`): a power tower in SymPy, a regular expression that backtracks for ever.
The worker arms its own timer and limits its own memory, so that it ends even when nobody is left to end it. It is a
fresh interpreter and no fork: the parent holds threads, and perhaps a GPU.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from upswing.trajectory.types import Score
from upswing.verify.deadline import in_turn

MAX_WORKERS = min(4, os.cpu_count() or 1)
"""Of one function; further calls wait."""
MEMORY_BYTES = 2 << 30
"""Address space of one worker."""
START_S = 120.0
"""How long a worker may take to import its function and to warm up."""


class Overrun(RuntimeError):
    """A call took more time or memory than it may."""


class Workers:
    """The workers of one function, `module:name`, whose arguments and result are JSON. Started when first needed; each
    then runs its module's `warm_up()`, if there is one, before the clock does."""

    def __init__(self, function: str) -> None:
        self._command = [sys.executable, "-P", "-m", "upswing.verify.worker", function]
        self._threads = ThreadPoolExecutor(MAX_WORKERS, "upswing-waiter")
        self._idle: list[subprocess.Popen[str]] = []

    async def call(self, timeout_s: float, **kwargs: Any) -> Any:
        """What the function returns. Raises Overrun after `timeout_s` seconds of work (waiting for a worker and
        starting one take nothing off them), without memory or when its process died; RuntimeError for what it raised.
        """
        return await in_turn(self._threads, partial(self._call, timeout_s, kwargs))

    def _call(self, timeout_s: float, kwargs: dict[str, Any]) -> Any:
        process = self._take()
        try:
            value = _ask(process, timeout_s, kwargs)
        except BaseException:
            process.kill()
            process.communicate()
            raise
        self._idle.append(process)
        return value

    async def judge(self, timeout_s: float, harmless: str = "", **kwargs: Any) -> Any:
        """What `call` returns. An answer, `text`, that takes too much is a Score of 0: to go unjudged must not be the
        agent's choice. Raises Overrun when a `harmless` answer takes too much as well: that is the task's fault."""
        try:
            return await self.call(timeout_s, **kwargs)
        except Overrun as error:
            blank = await self.call(timeout_s, **{**kwargs, "text": harmless})
            return None if blank is None else Score(value=0.0, reason=str(error))

    def _take(self) -> subprocess.Popen[str]:
        while self._idle:
            process = self._idle.pop()
            if process.poll() is None:
                return process
        return subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )


def _ask(process: subprocess.Popen[str], timeout_s: float, kwargs: dict[str, Any]) -> Any:
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(json.dumps([timeout_s, kwargs]) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
    except BrokenPipeError:
        line = ""
    if not line:
        if process.wait() == -signal.SIGALRM:
            raise Overrun(f"no verdict within {timeout_s:g} s")
        raise Overrun(f"the checking process died (exit code {process.returncode})")
    value, error = json.loads(line)
    if error is not None:
        raise (Overrun if error.startswith(("MemoryError", "RecursionError")) else RuntimeError)(error)
    return value


def main(function: str) -> None:
    """Answer calls on stdin, one JSON line each, until it is closed."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    module, _, name = function.partition(":")
    called: Any = None
    for line in sys.stdin:
        timeout_s, kwargs = json.loads(line)
        value = error = None
        try:
            if called is None:
                signal.setitimer(signal.ITIMER_REAL, START_S)
                found = importlib.import_module(module)
                getattr(found, "warm_up", lambda: None)()
                called = getattr(found, name)
            signal.setitimer(signal.ITIMER_REAL, timeout_s)
            value = called(**kwargs)
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem}"[:500]
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps([value, error]), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
