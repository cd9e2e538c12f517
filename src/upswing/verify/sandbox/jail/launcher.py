"""The launcher: one small process that keeps sandboxes ready, each a fork of itself with the interpreter already up.

It never sees a program, its files or its output: what it hands out is a socket to process 1 of a fresh sandbox.
File descriptor 0 is its socket to the client, and in a sandbox's process 1 that one's socket.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
from typing import Any

from . import linux, seccomp, wire
from .program import Job, play
from .supervisor import Place, serve

_PRELOADED = (
    "bisect", "collections", "functools", "heapq", "itertools", "json", "math", "random", "re", "string", "tempfile",
    "typing",
)  # fmt: skip
"""In every program from the start: what most programs, and the tests of a coding task, import."""


def main() -> None:
    control = socket.socket(fileno=0)
    job = _launch(control)
    if job is not None:
        play(job)


def _launch(control: socket.socket) -> Job | None:
    """Hand out sandboxes until the client is gone -> None; in a program's process -> its job."""
    config, _ = wire.receive(control)
    sys.path.remove(config["path"])
    for name in [name for name in sys.modules if name.partition(".")[0] == "jail"]:
        del sys.modules[name]
    for name in _PRELOADED:
        __import__(name)
    try:
        filter_ = _prepare(config)
    except OSError as error:
        wire.send(control, {"error": error.strerror or str(error)})
        return None
    wire.send(control, {})
    gc.collect()
    gc.freeze()
    ids = os.getuid(), os.getgid()
    ready = list[int]()
    while True:
        while len(ready) < config["ready"]:
            ours, theirs = socket.socketpair()
            if not (linux.fork_sandbox() if filter_ else os.fork()):
                for fd in (0, 1, 2):
                    os.dup2(theirs.fileno(), fd)
                ours.detach(), theirs.detach()
                os.closerange(3, 1 << 16)
                return _sandbox(control, filter_, ids)
            theirs.close()
            ready.append(ours.detach())
        if not control.recv(1):
            return None
        given = ready.pop(0)
        socket.send_fds(control, [b"+"], [given])
        os.close(given)


def _prepare(config: dict[str, Any]) -> seccomp._Program | None:
    """-> the filter of isolated programs; None: no isolation. Raises OSError."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # process 1 of a sandbox can't be sent what it doesn't handle
    os.umask(0o022)
    if config["unsafe_local"]:
        return None
    filter_ = seccomp.program()
    linux.leave_host(config["prefixes"])
    return filter_


def _sandbox(control: socket.socket, filter_: seccomp._Program | None, ids: tuple[int, int]) -> Job | None:
    """Lead a sandbox for as long as the client holds its socket; in a program's process -> its job."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    folder = None
    try:
        if filter_ is None:
            import tempfile

            linux.adopt_orphans()
            folder = tempfile.TemporaryDirectory(prefix="upswing-")
            place = Place(folder.name, None)
        else:
            linux.enter(ids, Place.disk_mb)
            place = Place(linux.BOX, filter_)
        pidfd = os.pidfd_open(os.getpid())
    except OSError as error:
        control.sendall(b"-")
        wire.send(control, {"error": error.strerror or str(error)})
        os._exit(1)
    socket.send_fds(control, [b"+"], [pidfd])
    os.close(pidfd)
    job = serve(control, place)
    if job is None:
        if folder is not None:
            folder.cleanup()
        os._exit(0)
    if folder is not None:
        folder._finalizer.detach()  # type: ignore[attr-defined]  # process 1's to remove
    control.detach()
    return job
