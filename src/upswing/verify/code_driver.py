"""What runs inside the sandbox for the `code` verifier: its text is handed in, so it stands alone.

Each test is a process of its own, forked from this one, which never runs the program. What is expected isn't in here:
a program that takes the driver over can only say what it could have returned.

In (stdin, JSON): program, setup, imports, tests ({stdin} or {calls}), timeout_s, output_bytes, stop_at_fault.
Out: READY, then a line of JSON a test: {status, out, note}; `status` is the exit code, None past the time.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import json
import os
import resource
import signal
import sys
import tempfile
import threading
import traceback
import types
from typing import IO, Any

READY = "ready"


def main() -> None:
    job = json.loads(sys.stdin.buffer.read())
    results = os.fdopen(os.dup(1), "w")
    sys.set_int_max_str_digits(0)  # as before Python 3.11: data sets have tests with longer numbers
    exec(job["imports"], {})  # once, and not in every test
    print(READY, file=results, flush=True)
    for test in job["tests"]:
        result = run_test(job, test, results)
        print(json.dumps(result), file=results, flush=True)
        if job["stop_at_fault"] and result["status"] != 0:
            break


def run_test(job: dict[str, Any], test: dict[str, Any], results: IO[str]) -> dict[str, Any]:
    fed, out, note = (tempfile.TemporaryFile(buffering=0) for _ in range(3))  # noqa: SIM115
    with fed, out, note:
        fed.write(test.get("stdin", "").encode("utf-8", "surrogateescape"))
        fed.seek(0)
        pid = os.fork()
        if pid == 0:
            results.close()
            start(job["output_bytes"], fed.fileno(), out.fileno() if "stdin" in test else None)
            play(job, test, note.fileno())
        return {
            "status": wait(pid, job["timeout_s"]),
            "out": os.pread(out.fileno(), job["output_bytes"], 0).decode("utf-8", "replace"),
            "note": os.pread(note.fileno(), job["output_bytes"], 0).decode("utf-8", "replace"),
        }


def start(output_bytes: int, fed: int, out: int | None) -> None:
    """Give this process, just forked, its own group, its limit of what it may write and its streams."""
    os.setsid()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    atexit._clear()
    resource.setrlimit(resource.RLIMIT_FSIZE, (output_bytes, output_bytes))
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(fed, 0)
    os.dup2(null if out is None else out, 1)
    os.dup2(null, 2)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]


def play(job: dict[str, Any], test: dict[str, Any], note: int) -> None:
    """Run the program for one test, and never return."""
    script = "stdin" in test
    module = types.ModuleType("__main__" if script else "program")
    sys.modules[module.__name__] = module
    said: dict[str, Any] = {}
    me = os.getpid()
    try:
        with contextlib.suppress(*[SystemExit] * script):  # `exit()` is an end like another, whatever its code
            for name in ("imports", "setup", "program"):
                exec(compile(job[name], f"{name}.py", "exec", dont_inherit=True), module.__dict__)
        names = {"inf": float("inf"), "nan": float("nan")}  # how repr writes them in arguments
        said["values"] = [encode(eval(call, module.__dict__, names)) for call in test.get("calls", ())]
        if script:  # leave as a script does
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            flush()
            module.__dict__.clear()  # ends, and so flushes, what it left open
            flush()
    except BaseException as error:
        said["error"] = traceback.format_exception_only(error)[-1].strip()[:500]
    try:
        if os.getpid() == me:  # and not a child of the program that came to its end as well
            os.write(note, json.dumps(said, separators=(",", ":")).encode())
    finally:
        os._exit(int("error" in said))


def flush() -> None:
    for stream in (sys.stdout, sys.__stdout__):
        with contextlib.suppress(Exception):  # closed, or nothing like a file any more
            stream.flush()  # type: ignore[union-attr]


def encode(value: Any) -> Any:
    """Plain data as JSON with its types kept. Raises TypeError for anything else."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        number = int.__add__(value, 0)
        return number if -(1 << 64) < number < 1 << 64 else ["i", format(number, "x")]  # read in no time
    if isinstance(value, float):
        return value
    if isinstance(value, complex):
        return ["c", repr(value.real), repr(value.imag)]
    if isinstance(value, bytes | bytearray):
        return ["b", bytes(value).hex()]
    if isinstance(value, dict):
        return ["d", [[encode(key), encode(item)] for key, item in dict.items(value)]]
    for tag, kind in (("l", list), ("t", tuple), ("s", set), ("z", frozenset)):
        if isinstance(value, kind):
            return [tag, [encode(item) for item in value]]
    raise TypeError(f"it gave an object of type {type(value).__name__}, which is no plain data")


def wait(pid: int, timeout_s: float) -> int | None:
    """The exit code of a test's process (negative: the signal that ended it), or None past its time. Ends its group."""
    signal.signal(signal.SIGALRM, _alarm)
    status = None
    with contextlib.suppress(TimeoutError):
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        signal.setitimer(signal.ITIMER_REAL, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if status is None:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return status


def _alarm(*_: Any) -> None:
    raise TimeoutError


if __name__ == "__main__":
    main()
