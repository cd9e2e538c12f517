"""What a hostile program must not touch, and whether it did."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Self

from upswing.verify.sandbox import Sandbox, SandboxLimits, SandboxResult

from .programs import NUMBERS, PROLOGUE, Hostile, describe

NEXT_S = 4.5
"""A check takes some hundredths of a second; this leaves room for a busy machine, not for waiting until what hangs is
ended 5 s after its time."""


class Canaries:
    """A file, an environment variable, a process and four servers on the host. Make it before the sandbox."""

    def __init__(self) -> None:
        self.secret = f"CANARY-{secrets.token_hex(16)}"
        self.answer = secrets.token_hex(16)
        self._folder = tempfile.TemporaryDirectory()
        self.file = Path(self._folder.name, "canary.txt")
        self.file.write_text(self.secret)
        os.environ["UPSWING_CANARY_TOKEN"] = self.secret
        self.process = subprocess.Popen(["sleep", "600"])
        unix, abstract = str(self.file.parent / "socket"), f"upswing-{self.answer}"
        self.servers = [
            socket.create_server(("127.0.0.1", 0)),
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
            socket.socket(socket.AF_UNIX),
            socket.socket(socket.AF_UNIX),
        ]
        for server, address in zip(self.servers[1:], [("127.0.0.1", 0), unix, "\0" + abstract], strict=True):
            server.bind(address)
        for server in self.servers:
            server.setblocking(False)
            if server.type == socket.SOCK_STREAM:
                server.listen()
        tcp, udp = (server.getsockname()[1] for server in self.servers[:2])
        values = (str(self.file), str(self.file.parent), self.process.pid, tcp, udp, unix, abstract)
        self.prologue = PROLOGUE.format(numbers=NUMBERS, canary=values)

    def touched(self) -> list[str]:
        """What happened to them."""
        found = []
        if self.file.read_text() != self.secret or len(os.listdir(self.file.parent)) != 2:
            found.append("the file")
        if self.process.poll() is not None or _state(self.process.pid) not in "SR":
            found.append("the process")
        for server in self.servers:
            try:
                server.accept() if server.type == socket.SOCK_STREAM else server.recv(100)
                found.append(f"the server at {server.getsockname()}")
            except BlockingIOError:
                pass
        return found

    def close(self) -> None:
        os.environ.pop("UPSWING_CANARY_TOKEN", None)
        self.process.kill()
        self.process.wait()
        for server in self.servers:
            server.close()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


async def faults_of(sandbox: Sandbox, canaries: Canaries, program: Hostile) -> list[str]:
    """Run it, and a check after it -> everything that isn't as it must be."""
    limits = SandboxLimits(**{"wall_s": 15.0, "memory_mb": 256, **program.limits})
    started = time.monotonic()
    result = await sandbox.run_python(canaries.prologue + program.code, limits=limits)
    took = time.monotonic() - started
    found = canaries.touched()
    if not set(describe(result.returncode, result.killed, result.stdout)) & set(program.ends):
        found.append(f"its end: {result.returncode} {result.killed} {result.stdout[-300:]!r} {result.stderr[-600:]!r}")
    if b"ESCAPED" in result.stdout or canaries.secret.encode() in result.stdout + result.stderr:
        found.append(f"it got out: {result.stdout[-300:]!r}")
    if passes(result, canaries.answer):
        found.append("it passed")
    if len(result.stdout) + len(result.stderr) > limits.output_bytes:
        found.append("its output is too long")
    if took > limits.wall_s + NEXT_S:
        found.append(f"it took {took:.1f} s")
    if alive := survivors(sandbox):
        found.append(f"processes are left: {alive}")
    return [*found, *await next_check(sandbox)]


def passes(result: SandboxResult, answer: str) -> bool:
    """As a verifier judges: outside, with an answer that never went in."""
    return result.returncode == 0 and result.killed is None and result.stdout.decode("utf-8", "replace") == answer


async def next_check(sandbox: Sandbox) -> list[str]:
    """A right check is right, in time, and finds a clean place."""
    code = "import os, json, sys; print(6 * 7, os.listdir('.') + os.listdir('/tmp') + os.listdir('/dev/shm'))"
    started = time.monotonic()
    result = await sandbox.run_python(code)
    took = time.monotonic() - started
    found = [] if took < NEXT_S else [f"the next check took {took:.1f} s"]
    right = result.returncode == 0 and result.stdout == b"42 []\n" and not result.stderr
    return found if right else [*found, f"the next check gave {result}"]


def survivors(sandbox: Sandbox) -> list[int]:
    """Processes below those that lead an idle sandbox; there should be none."""
    end = time.monotonic() + NEXT_S
    while left := [pid for leader in _children(sandbox._launcher._process.pid) for pid in _children(leader)]:
        if time.monotonic() > end:
            break
        time.sleep(0.01)
    return left


def _children(pid: int) -> list[int]:
    found = list[int]()
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(one) for one in path.read_text().split()]
        except OSError:
            continue
    return found


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
