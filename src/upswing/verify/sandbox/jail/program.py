"""What a sandboxed process does last before, and after, it becomes the program."""

from __future__ import annotations

import atexit
import contextlib
import functools
import linecache
import math
import os
import resource
import signal
import sys
import threading
import traceback
import types
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from . import linux, seccomp

_NAME = "main.py"
_MIB = 1 << 20
_MOST_FRAMES = -100
"""Of a traceback, the innermost."""


class Job(NamedTuple):
    """`argv` None: `code` is Python, run in this process as `__main__`. `filter_` None: without isolation."""

    workspace: str
    filter_: seccomp._Program | None
    limits: Mapping[str, Any]
    argv: Sequence[str] | None
    code: bytes


def play(job: Job) -> NoReturn:
    """Become the program."""
    os.chdir(job.workspace)
    os.environ["HOME"] = job.workspace
    if job.filter_ is None:
        os.environ["TMPDIR"] = os.path.join(os.path.dirname(job.workspace), "tmp")
    _limit(job)
    if job.filter_ is not None:
        linux.drop_privileges(job.filter_)
    if job.argv is None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _run_python(job.code)
    for one in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(one, signal.SIG_DFL)
    argv = list(job.argv or ())
    try:
        os.execvp(argv[0], argv)
    except (OSError, ValueError) as error:
        os.write(2, f"{argv[0]}: {getattr(error, 'strerror', error)}\n".encode(errors="backslashreplace"))
        os._exit(127)


def _limit(job: Job) -> None:
    """The kernel's limits of each process. The supervisor watches what they use together."""
    memory, disk = job.limits["memory_mb"] * _MIB, job.limits["disk_mb"] * _MIB
    limits = {
        resource.RLIMIT_CPU: math.ceil(job.limits["cpu_s"]) + 1,
        resource.RLIMIT_DATA: memory,
        resource.RLIMIT_AS: 2 * memory + 256 * _MIB,  # what is shared, or only reserved, isn't data
        resource.RLIMIT_STACK: min(memory, 64 * _MIB),
        resource.RLIMIT_FSIZE: disk,
        resource.RLIMIT_NOFILE: 256,
        resource.RLIMIT_CORE: 1,  # not 0: that would still feed a crash handler of the host's
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: 1024,
        resource.RLIMIT_RTPRIO: 0,
        resource.RLIMIT_NICE: 0,
    }
    if job.filter_ is not None:  # counted in this sandbox alone; process 1 is one of them, its starter may be
        limits[resource.RLIMIT_NPROC] = job.limits["processes"] + 1
    for kind, value in limits.items():
        most = resource.getrlimit(kind)[1]
        value = int(value) if most == resource.RLIM_INFINITY else min(int(value), most)
        soft = min(value, 8 * _MIB) if kind == resource.RLIMIT_STACK else value
        resource.setrlimit(kind, (soft, value))


def _run_python(code: bytes) -> NoReturn:
    """As a script, but for the end: what only frees memory, most of the time of a small program, is left out."""
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    sys.argv = [_NAME]
    sys.path.insert(0, "")
    text = code.decode("utf-8", "replace")
    linecache.cache[_NAME] = (len(text), None, text.splitlines(keepends=True), _NAME)
    sys.excepthook = functools.partial(traceback.print_exception, limit=_MOST_FRAMES)
    status: object = None
    try:
        exec(compile(code, _NAME, "exec", dont_inherit=True), main.__dict__)
    except SystemExit as end:
        status = end.code
    except BaseException as error:
        where = error.__traceback__
        sys.excepthook(type(error), error, where and where.tb_next)
        status = 1
    if not isinstance(status, int | None):
        print(status, file=sys.stderr)
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for its threads
    atexit._run_exitfuncs()
    main.__dict__.clear()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit((status or 0) & 0xFF)
