"""Process 1 of a sandbox: runs its programs one after the other, watches their limits, and leaves none alive."""

from __future__ import annotations

import contextlib
import glob
import math
import os
import resource
import select
import signal
import socket
import stat
import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from . import linux, seccomp, wire
from .program import Job

_TICK_S = 0.02
_CHUNK = 1 << 16
_HZ = os.sysconf("SC_CLK_TCK")


class Place:
    """Where programs run: `{box}/workspace` and `{box}/tmp`; `filter_` None: without isolation."""

    disk_mb = 64

    def __init__(self, box: str, filter_: seccomp._Program | None) -> None:
        self.box, self.filter_, self.workspace = box, filter_, os.path.join(box, "workspace")
        for name in ("workspace", "tmp"):
            os.makedirs(os.path.join(self.box, name), exist_ok=True)

    def resize(self, disk_mb: int) -> None:
        if self.filter_ is not None and disk_mb != self.disk_mb:
            with contextlib.suppress(OSError):  # smaller than what is there already: stays as it is
                linux.resize(disk_mb)
                self.disk_mb = disk_mb

    def put(self, names: list[str], texts: list[bytes]) -> None:
        for name, text in zip(names, texts, strict=True):
            path = os.path.join(self.workspace, name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "wb") as file:
                file.write(text)

    def get(self, most: int) -> tuple[list[str], list[bytes]]:
        """The regular files. No program is alive, so none can swap a path for a link meanwhile."""
        names, texts, left = list[str](), list[bytes](), [self.workspace]
        while left:
            path = left.pop()
            with contextlib.suppress(OSError):
                status = os.lstat(path)
                if stat.S_ISDIR(status.st_mode):
                    left += [os.path.join(path, name) for name in os.listdir(path)]
                elif stat.S_ISREG(status.st_mode) and status.st_size <= most:
                    with open(path, "rb") as file:
                        texts.append(file.read(status.st_size))
                    names.append(os.path.relpath(path, self.workspace))
                    most -= status.st_size
        return names, texts


def serve(control: socket.socket, place: Place) -> Job | None:
    """Answer requests until the client is gone -> None; in a program's process -> its job."""
    while True:
        try:
            header, parts = wire.receive(control)
        except (EOFError, OSError):
            return None
        try:
            match header.pop("ask"):
                case "put":
                    place.resize(header["disk_mb"])
                    place.put(header["names"], parts)
                    reply, back = dict[str, Any](), list[bytes]()
                case "get":
                    names, back = place.get(header["most"])
                    reply = {"names": names}
                case _:
                    place.resize(header["limits"]["disk_mb"])
                    answer = _run(place, header, *parts)
                    if isinstance(answer, Job):
                        return answer
                    if answer is None:
                        return None
                    reply, back = answer
        except OSError as error:
            reply, back = {"error": f"{error.strerror}: {error.filename or ''}"}, []
        wire.send(control, reply, back)


def _run(
    place: Place, header: dict[str, Any], stdin: bytes, code: bytes
) -> Job | tuple[dict[str, Any], list[bytes]] | None:
    """The result; None when the client went away; in the program's process its job."""
    pipes = [os.pipe() for _ in range(3)]
    ends = [pipes[0][0], pipes[1][1], pipes[2][1]]
    pid = os.fork()
    if pid == 0:
        os.setsid()
        for target, fd in enumerate(ends):
            os.dup2(fd, target)
        os.closerange(3, 1 << 16)
        if place.filter_ is None:
            linux.die_with_parent()
        return Job(place.workspace, place.filter_, header["limits"], header["argv"], code)
    for fd in ends:
        os.close(fd)
    run = _Run(pid, header["limits"], place.filter_ is not None, pipes[0][1], pipes[1][0], pipes[2][0], stdin)
    return run.result() if run.watch() else None


class _Run:
    """One program and all that comes from it."""

    def __init__(
        self, pid: int, limits: dict[str, Any], jailed: bool, into: int, out: int, err: int, stdin: bytes
    ) -> None:
        self.pid, self.limits, self.jailed = pid, limits, jailed
        self.into, self.stdin, self.texts = into, memoryview(stdin), {out: bytearray(), err: bytearray()}
        self.started, self.children_s = time.monotonic(), _children_s()
        self.seen_s, self.at_once = dict[int, float](), deque([0] * 5, 5)
        self.status: int | None = None
        self.killed: str | None = None
        self.exit = os.pidfd_open(pid)
        self.polled = select.poll()
        for fd in (0, out, err, self.exit):
            self.polled.register(fd, select.POLLIN * (fd != 0))  # 0, the client: only whether it is gone
        os.set_blocking(into, False)
        self.polled.register(into, select.POLLOUT)
        self._feed()

    def watch(self) -> bool:
        """Until the program ends or breaks a limit; then end everything -> False when the client is gone."""
        look, gone = self.started + _TICK_S, False
        while self.status is None and self.killed is None and not gone:
            for fd, _ in self.polled.poll(_TICK_S * 1000):
                if fd in self.texts:
                    if not self._read(fd):
                        self.polled.unregister(fd)
                elif fd == self.into:
                    self._feed()
                gone = gone or fd == 0
            self._reap(os.WNOHANG)
            if (now := time.monotonic()) >= self.started + self.limits["wall_s"]:
                self.killed = self.killed or "wall"
            elif now >= look:
                look = now + _TICK_S
                self.killed = self.killed or self._broken()
        self._end_all()
        return not gone

    def result(self) -> tuple[dict[str, Any], list[bytes]]:
        code = None if self.killed or self.status is None else os.waitstatus_to_exitcode(self.status)
        header = {"returncode": code, "killed": self.killed, "duration_s": time.monotonic() - self.started}
        return header, [bytes(text) for text in self.texts.values()]

    def _read(self, fd: int) -> bool:
        """Take what is there, or the one byte too many -> False at the end."""
        room = self.limits["output_bytes"] - sum(map(len, self.texts.values()))
        text = os.read(fd, min(_CHUNK, room + 1))
        self.texts[fd] += text[:room]
        if len(text) > room:
            self.killed = self.killed or "output"
        return bool(text)

    def _feed(self) -> None:
        try:
            self.stdin = self.stdin[os.write(self.into, self.stdin[:_CHUNK]) :] if self.stdin else self.stdin
        except BlockingIOError:
            return
        except OSError:  # nobody reads it any more
            self.stdin = self.stdin[:0]
        if not self.stdin:
            self.polled.unregister(self.into)
            os.close(self.into)
            self.into = -1

    def _reap(self, flags: int) -> bool:
        """Bury the dead -> whether any child is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, flags)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self.pid:
                self.status = status

    def _end_all(self) -> None:
        """Nothing that the program started outlives it; what it wrote before is kept."""
        if self.jailed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)  # all of this PID namespace but this process
            self._reap(0)
        else:
            while True:
                for pid in _descendants():
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL)
                if not self._reap(os.WNOHANG):
                    break
                time.sleep(0.001)
        for fd in self.texts:
            os.set_blocking(fd, False)
            with contextlib.suppress(BlockingIOError):
                while self.killed != "output" and self._read(fd):
                    pass
            os.close(fd)
        for fd in (self.exit, *[self.into] * (self.into >= 0)):
            os.close(fd)

    def _broken(self) -> str | None:
        """The limit that the processes break together."""
        jailed = (int(one) for one in os.listdir("/proc") if one.isdigit() and one != "1")
        pids = list(jailed if self.jailed else _descendants())
        used = {pid: one for pid in pids if (one := _used(pid))}
        self._share(used)
        if sum(one.memory for one in used.values()) > self.limits["memory_mb"] * 1024:
            return "memory"
        self.seen_s.update((pid, one.own_s) for pid, one in used.items())
        counted_s = sum(one.own_s + one.children_s for one in used.values()) + _children_s() - self.children_s
        if max(counted_s, sum(self.seen_s.values())) > self.limits["cpu_s"]:  # seen: whose parent ignores its end
            return "cpu"
        return "processes" if len(used) > self.limits["processes"] else None

    def _share(self, used: Mapping[int, _Used]) -> None:
        """Threads that want the cores together for a while get less of them each, so that a program weighs about as one
        and can't starve its neighbours. Less stays less."""
        running = _running(used) if sum(one.threads for one in used.values()) > 2 else []
        self.at_once.append(len(running))
        steps = min(19, round(math.log(max(1, min(self.at_once)), 1.25)))
        for thread in running if steps else ():
            with contextlib.suppress(OSError):  # gone, or has less already
                os.setpriority(os.PRIO_PROCESS, thread, steps)


class _Used(NamedTuple):
    """Of a process: its memory in KiB without files, its CPU seconds, those of its dead children, its threads."""

    memory: int
    own_s: float
    children_s: float
    threads: int


def _used(pid: int) -> _Used | None:
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            lines = file.read().split(b"\n")
        with open(f"/proc/{pid}/stat", "rb") as file:
            numbers = [int(one) for one in file.read().rpartition(b")")[2].split()[1:19]]
    except OSError:
        return None
    memory = sum(int(line.split()[1]) for line in lines if line.startswith((b"RssAnon", b"RssShmem")))
    return _Used(memory, sum(numbers[10:12]) / _HZ, sum(numbers[12:14]) / _HZ, numbers[16])


def _running(pids: Iterable[int]) -> list[int]:
    """The threads of these processes that run or wait for a core."""
    found = list[int]()
    for path in (path for pid in pids for path in glob.glob(f"/proc/{pid}/task/*")):
        with contextlib.suppress(OSError), open(f"{path}/stat", "rb") as file:
            if file.read().rpartition(b")")[2].split()[0] == b"R":
                found.append(int(os.path.basename(path)))
    return found


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _descendants() -> list[int]:
    """Of this process, which adopts orphans."""
    found, left = list[int](), [os.getpid()]
    while left:
        pid = left.pop()
        for path in glob.glob(f"/proc/{pid}/task/*/children"):
            with contextlib.suppress(OSError), open(path) as file:
                new = [int(one) for one in file.read().split()]
                found += new
                left += new
    return found
