"""The side of Upswing: asks the launcher for sandboxes, gives them work and keeps the last word on time.

Every call blocks in a thread of the sandbox's own, so one sandbox serves any number of event loops, and so many runs
at once as it has threads; the others wait, which counts neither as their wall time nor for their callers' deadlines.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from upswing.errors import ConfigError
from upswing.verify.deadline import in_turn, off_the_clock
from upswing.verify.sandbox.base import SandboxLimits, SandboxResult, SandboxUnavailable
from upswing.verify.sandbox.jail import wire

T = TypeVar("T")
Files = Mapping[str, bytes]
"""Contents by path."""
_START_S = 30.0
_GRACE_S = 5.0
"""How long after the wall time process 1 may take to say so, before it is killed itself."""
_MOST_FILE_BYTES = 64 << 20
_LIMITS = SandboxLimits()
_HELP = (
    "It needs Linux 5.14 or newer on x86-64 or arm64, user namespaces, and a whole /proc (docs/sandbox.md tells what "
    "to change in a container or on Ubuntu). To run programs without isolation, as yourself, set unsafe_local: true or "
    "give --unsafe-local"
)


class _Launcher:
    """The launcher's process, and the socket to it. Raises SandboxUnavailable."""

    def __init__(self, unsafe_local: bool, ready: int) -> None:
        if sys.platform != "linux":
            raise SandboxUnavailable(f"the sandbox needs Linux; this is {sys.platform}. Use a virtual machine or WSL 2")
        folder = str(Path(__file__).parent)
        python = getattr(sys, "_base_executable", None) or sys.executable  # the environment's packages stay outside
        prefixes = [(os.path.realpath(path), path) for path in dict.fromkeys((sys.base_prefix, sys.base_exec_prefix))]
        prefixes += [(real, real) for real, path in prefixes if real != path]
        home = f"{os.path.realpath(os.path.expanduser('~'))}/"
        if any(home.startswith(f"{real.rstrip('/')}/") for real, _ in prefixes):
            raise SandboxUnavailable(f"Python lies in {prefixes}, above your home; use one in a folder of its own")
        programs = dict.fromkeys(os.path.join(path, "bin") for _, path in prefixes)
        env = {
            "PATH": ":".join((*programs, "/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin")),
            "LANG": "C.UTF-8",
            "TMPDIR": "/tmp",
            "PYTHONHASHSEED": "0",
            "PYTHONDONTWRITEBYTECODE": "1",
            "MALLOC_ARENA_MAX": "2",
        }
        code = f"import sys; sys.path.insert(0, {folder!r}); from jail.launcher import main; main()"
        self._lock = threading.Lock()
        self._sock, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [python, "-sSP", "-X", "utf8", "-c", code],
                env=env,
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        try:
            wire.send(self._sock, {"unsafe_local": unsafe_local, "ready": ready, "prefixes": prefixes, "path": folder})
            reply, _ = wire.receive(self._sock, timeout_s=_START_S)
        except (EOFError, OSError, ValueError):
            self._process.kill()
            reply = {"error": self._process.communicate()[1].decode("utf-8", "replace").strip()[-300:] or "no answer"}
        if "error" in reply:
            self.close()
            raise SandboxUnavailable(f"there is no isolation for programs here: {reply['error']}. {_HELP}")
        self._sock.settimeout(_START_S)

    def sandbox(self) -> socket.socket:
        """The socket of a fresh sandbox. Raises EOFError or OSError when the launcher is gone."""
        with self._lock:
            self._sock.sendall(b"+")
            _, fds, _, _ = socket.recv_fds(self._sock, 1, 1, socket.MSG_CMSG_CLOEXEC)
        if not fds:
            raise EOFError("the launcher is gone")
        return socket.socket(fileno=fds[0])

    def close(self) -> None:
        self._sock.close()  # it ends by itself, and so do its sandboxes
        try:
            self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()


class _Worker:
    """A socket to process 1 of a sandbox, and a handle that kills it and with it everything inside."""

    def __init__(self, sock: socket.socket, unsafe_local: bool) -> None:
        self._sock, self._unsafe_local = sock, unsafe_local
        self._lock, self._pidfd = threading.Lock(), -1
        sock.settimeout(_START_S)
        try:
            tag, fds, _, _ = socket.recv_fds(sock, 1, 1, socket.MSG_CMSG_CLOEXEC)
            if tag == b"-":
                error = wire.receive(sock, timeout_s=_START_S)[0]["error"]
                raise SandboxUnavailable(f"there is no isolation for programs here: {error}. {_HELP}")
            if not fds:
                raise EOFError("the sandbox is gone")
        except BaseException:
            sock.close()
            raise
        self._pidfd = fds[0]

    def ask(
        self, header: Mapping[str, Any], parts: Sequence[bytes], most: int, timeout_s: float = _START_S
    ) -> tuple[dict[str, Any], list[bytes]]:
        """Raises EOFError, OSError (TimeoutError too) or ValueError when process 1 can't answer."""
        self._sock.settimeout(timeout_s)
        wire.send(self._sock, dict(header), parts)
        return wire.receive(self._sock, most, timeout_s)

    def kill(self) -> None:
        """From any thread, at any time."""
        with self._lock, contextlib.suppress(OSError):
            if self._pidfd >= 0:
                if not self._unsafe_local:  # there, process 1 has to kill the others itself
                    signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
                self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Returns when every process of the sandbox is dead."""
        self.kill()
        dead = select.poll()
        dead.register(self._pidfd, select.POLLIN)
        if not dead.poll(_GRACE_S * 1000):
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        with self._lock:
            os.close(self._pidfd)
            self._pidfd = -1
            self._sock.close()


class Workspace:
    """Files in a sandbox of their own, for several runs one after the other. Made by `Sandbox.workspace`."""

    def __init__(self, sandbox: Sandbox, files: Files, limits: SandboxLimits = _LIMITS) -> None:
        for name in files:
            path = PurePosixPath(name)
            if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in name:
                raise ConfigError(f"a file for the sandbox is named {name!r}; allowed: a path inside the workspace")
        self._sandbox, self._given, self._disk_mb = sandbox, dict(files), limits.disk_mb
        self._worker: _Worker | None = None
        self._ended, self._lock = False, threading.Lock()

    async def run(self, argv: Sequence[str], *, stdin: bytes = b"", limits: SandboxLimits = _LIMITS) -> SandboxResult:
        """Run a command in the workspace; nothing that it started outlives it, its files do."""
        return await self._sandbox._call(self, functools.partial(self._run, list(argv), b"", stdin, limits))

    async def run_python(self, code: str, *, stdin: bytes = b"", limits: SandboxLimits = _LIMITS) -> SandboxResult:
        return await self._sandbox._call(self, functools.partial(self._run, None, _encoded(code), stdin, limits))

    def files(self) -> dict[str, bytes]:
        """Every regular file by its path; links are never followed. What doesn't fit into 64 MiB is left out."""
        with self._lock:
            header, texts = self._ask({"ask": "get", "most": _MOST_FILE_BYTES}, [], _MOST_FILE_BYTES)
        return dict(zip(header["names"], texts, strict=True))

    def read(self, path: str) -> bytes | None:
        """A file's bytes; None when there is none, it isn't a regular file, or it lies behind a link."""
        return self.files().get(path)

    def _open(self) -> None:
        with self._lock:
            if self._ended:  # cancelled meanwhile
                return
            self._worker = self._sandbox._worker()
            if self._given:
                names, texts = list(self._given), list(self._given.values())
                self._ask({"ask": "put", "names": names, "disk_mb": self._disk_mb}, texts, 0)

    def _ask(self, header: Mapping[str, Any], parts: Sequence[bytes], most: int) -> tuple[dict[str, Any], list[bytes]]:
        """Raises SandboxUnavailable."""
        if self._worker is None:
            raise SandboxUnavailable("this workspace is closed")
        try:
            reply, back = self._worker.ask(header, parts, most)
        except (EOFError, OSError, ValueError) as error:
            raise SandboxUnavailable(f"the workspace is gone: its processes were killed ({error})") from error
        if "error" in reply:
            raise SandboxUnavailable(f"the sandbox can't do this: {reply['error']}")
        return reply, back

    def _run(self, argv: list[str] | None, code: bytes, stdin: bytes, limits: SandboxLimits) -> SandboxResult:
        if argv is not None and (not argv or any("\0" in one for one in argv)):
            allowed = "words without a zero byte, at least one"
            raise ConfigError(f"a command for the sandbox is {argv!r}; allowed: {allowed}")
        header = {"ask": "run", "argv": argv, "limits": asdict(limits)}
        with self._lock:
            if self._worker is None or self._ended:
                raise SandboxUnavailable("this workspace is gone")
            try:
                timeout_s = limits.wall_s + _GRACE_S
                reply, (out, err) = self._worker.ask(header, [stdin, code], limits.output_bytes, timeout_s)
            except (EOFError, OSError, ValueError) as error:
                self.kill()
                killed = "wall" if isinstance(error, TimeoutError) else "lost"
                return SandboxResult(stdout=b"", stderr=b"", returncode=None, killed=killed, duration_s=limits.wall_s)
        if "error" in reply:
            raise SandboxUnavailable(f"the sandbox can't run this: {reply['error']}")
        return SandboxResult(stdout=out, stderr=err, **reply)

    def _once(self, argv: list[str] | None, code: bytes, stdin: bytes, limits: SandboxLimits) -> SandboxResult:
        try:
            self._open()
            return self._run(argv, code, stdin, limits)
        finally:
            self._close()

    def kill(self) -> None:
        """End whatever runs in it, and the workspace."""
        self._ended = True
        if (worker := self._worker) is not None:
            worker.kill()

    def _close(self) -> None:
        self.kill()  # frees the lock when something still runs
        with self._lock:
            worker, self._worker = self._worker, None
            if worker is not None:
                worker.close()


class Sandbox:
    """Runs programs that nobody has to trust, each in a sandbox that is used once.

    `workers`: how many are kept ready. `unsafe_local`: without isolation, as this user. Raises SandboxUnavailable.
    """

    def __init__(self, *, unsafe_local: bool = False, workers: int = 4) -> None:
        self._unsafe_local, self._ready = unsafe_local, max(1, workers)
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(max(4, 2 * (os.cpu_count() or 1)), thread_name_prefix="sandbox")
        self._launcher = _Launcher(unsafe_local, self._ready)
        try:
            self._worker().close()
        except BaseException:
            self._launcher.close()
            raise

    async def run(
        self, argv: Sequence[str], *, files: Files | None = None, stdin: bytes = b"", limits: SandboxLimits = _LIMITS
    ) -> SandboxResult:
        """Run a command in a fresh workspace with these files; both are dropped afterwards."""
        place = Workspace(self, files or {}, limits)
        return await self._call(place, functools.partial(place._once, list(argv), b"", stdin, limits))

    async def run_python(
        self, code: str, *, files: Files | None = None, stdin: bytes = b"", limits: SandboxLimits = _LIMITS
    ) -> SandboxResult:
        """Run Python code as `__main__` in a process whose interpreter is up already; the standard library only."""
        place = Workspace(self, files or {}, limits)
        return await self._call(place, functools.partial(place._once, None, _encoded(code), stdin, limits))

    @contextlib.asynccontextmanager
    async def workspace(self, files: Files) -> AsyncIterator[Workspace]:
        place = Workspace(self, files)
        try:
            await self._call(place, place._open)
            yield place
        finally:
            place.kill()
            closed = self._threads.submit(place._close)  # however often the caller is cancelled
            with off_the_clock():
                await asyncio.shield(asyncio.wrap_future(closed))

    async def close(self) -> None:
        await asyncio.to_thread(self._threads.shutdown)
        await asyncio.to_thread(self._launcher.close)

    async def _call(self, place: Workspace, work: Callable[[], T]) -> T:
        try:
            done: T = await in_turn(self._threads, work)
            return done
        except asyncio.CancelledError:
            place.kill()
            raise

    def _worker(self) -> _Worker:
        """A fresh sandbox; a launcher, or a sandbox, that died idle is replaced once."""
        launcher = self._launcher
        try:
            return _Worker(launcher.sandbox(), self._unsafe_local)
        except (EOFError, OSError):
            with self._lock:
                if self._launcher is launcher:
                    launcher.close()
                    self._launcher = _Launcher(self._unsafe_local, self._ready)
        try:
            return _Worker(self._launcher.sandbox(), self._unsafe_local)
        except (EOFError, OSError) as error:
            raise SandboxUnavailable(f"the sandbox can't be started ({error})") from error


def _encoded(code: str) -> bytes:
    return code.encode("utf-8", "surrogatepass")


_shared: dict[bool, Sandbox] = {}
_sharing = threading.Lock()


def default_sandbox(unsafe_local: bool = False) -> Sandbox:
    """The one that this process shares. Raises SandboxUnavailable."""
    with _sharing:
        if unsafe_local not in _shared:
            _shared[unsafe_local] = Sandbox(unsafe_local=unsafe_local)
        return _shared[unsafe_local]


os.register_at_fork(after_in_child=_shared.clear)
