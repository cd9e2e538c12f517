"""What runs inside the sandbox for the `code` verifier, once for each test: its text is handed in, so it stands alone.

What is expected isn't in here: a program that takes it over can only say what it could have returned.

A job: program, setup, imports, calls (none: the program is a script, whose stdin and stdout are the test's).
Out: READY, then what the script prints, or the calls' values as JSON; on stderr why there are none.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import json
import os
import sys
import threading
import traceback
import types
from typing import Any

READY = b"ready\n"


def main(job: dict[str, Any]) -> None:
    """Play a test, and never return."""
    sys.set_int_max_str_digits(0)  # as before Python 3.11: data sets have tests with longer numbers
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]
    me, script, status = os.getpid(), not job["calls"], 1
    out, err, null = os.dup(1), os.dup(2), os.open(os.devnull, os.O_RDWR)
    for fd in (2,) if script else (1, 2):
        os.dup2(null, fd)
    module = types.ModuleType("__main__" if script else "program")
    sys.modules[module.__name__] = module
    os.write(out, READY)
    try:
        with contextlib.suppress(*[SystemExit] * script):  # `exit()` is an end like another, whatever its code
            for name in ("imports", "setup", "program"):
                exec(compile(job[name], f"{name}.py", "exec", dont_inherit=True), module.__dict__)
        if script:  # leave as a script does
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            flush()
            module.__dict__.clear()  # ends, and so flushes, what it left open
            flush()
        names = {"inf": float("inf"), "nan": float("nan")}  # how repr writes them in arguments
        text = json.dumps([encode(eval(call, module.__dict__, names)) for call in job["calls"]]).encode()
        while text and not script and os.getpid() == me:  # not a child of the program that came to its end as well
            text = text[os.write(out, text) :]
        status = 0
    except BaseException as error:
        os.write(err, traceback.format_exception_only(error)[-1].strip()[:500].encode("utf-8", "replace"))
    finally:
        os._exit(status)


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
