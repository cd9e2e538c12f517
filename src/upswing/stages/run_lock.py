"""One process at a time writes a run folder."""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from upswing.errors import ConfigError
from upswing.monitor.progress import Progress


@contextmanager
def alone_in(out: Path, log: Progress) -> Iterator[None]:
    """Hold the run folder meanwhile. Raises ConfigError when another process does.

    The folder itself is locked: nothing is left in it, and the lock goes with the process, however that ends. Where the
    file system has no such locks (some network ones), it only warns.
    """
    handle = os.open(out, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            who = _holder(out.stat().st_ino)
            raise ConfigError(f"run '{out}' is still being written by {who}; wait for it or stop it") from None
        except OSError as problem:
            why = problem.strerror or problem
            log.warn(f"'{out}' can't be locked ({why}): see to it that no other process writes this run meanwhile")
        yield
    finally:
        os.close(handle)


def _holder(inode: int) -> str:
    """Who locked it, as Linux tells; of a process that can't be seen from here (another container's) it says 0."""
    with suppress(OSError):
        found = re.search(rf"FLOCK +\w+ +WRITE +([1-9]\d*) +\w+:\w+:{inode} ", Path("/proc/locks").read_text())
        if found:
            return f"pid {found[1]}"
    return "another process"
