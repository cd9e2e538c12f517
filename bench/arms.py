"""Arms of a comparison: each is a process of its own that is told what to do and says how long it took.

So arms share no memory, and can alternate A B A B all the same. Standard library only: a peer's own Python runs it too.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

Conversation = Sequence[tuple[Sequence[int], int]]
"""Turns: the token ids given, and how many tokens are sampled after them."""


class ArmFailed(Exception):
    """Why an arm could not do what it was asked, in one line."""


class Worker:
    """An arm's process; calling it calls a method of the arm there."""

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str]) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=self._log, text=True, env={**os.environ, **env}
        )

    def __call__(self, method: str, **arguments: Any) -> Any:
        """What the arm's method returned. Raises ArmFailed with what it raised, or the last it said before it died."""
        assert self._process.stdin and self._process.stdout
        with suppress(BrokenPipeError):
            print(json.dumps([method, arguments]), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            self._log.seek(0)
            raise ArmFailed((self._log.read().strip() or f"ended with status {status}").splitlines()[-1])
        reply = json.loads(line)
        if "error" in reply:
            raise ArmFailed(reply["error"])
        return reply["value"]

    def close(self) -> None:
        """End the process, by force when it doesn't within ten seconds."""
        try:
            self._process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()


def serve(make: Callable[..., Any], *arguments: str) -> None:
    """Make an arm and do what stdin asks of it until it closes; whatever else is printed goes to stderr."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    arm = make(*arguments)
    for line in sys.stdin:
        method, given = json.loads(line)
        try:
            reply = {"value": getattr(arm, method)(**given)}
        except Exception as error:
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        print(json.dumps(reply), file=replies, flush=True)
    os._exit(0)  # an arm may have threads that would keep it alive


class Arm:
    """What every arm has. A subclass has `complete`, or plays in its own way."""

    def setup(self, conversations: Sequence[Conversation]) -> str | None:
        """Get ready for work of this size -> what is worth printing."""
        return None

    def complete(self, texts: Sequence[list[int]], new: Sequence[int]) -> list[list[int]]:
        """Sample so many tokens after each."""
        raise NotImplementedError

    def play(self, conversations: Sequence[Conversation]) -> list[list[int]]:
        """What was given and sampled of each; turn by turn, so all have as many."""
        texts: list[list[int]] = [[] for _ in conversations]
        for turns in zip(*conversations, strict=True):
            for text, (given, _) in zip(texts, turns, strict=True):
                text += given
            for text, tokens in zip(texts, self.complete(texts, [new for _, new in turns]), strict=True):
                text += tokens
        return texts

    def run(self, conversations: Sequence[Conversation]) -> dict[str, float]:
        """`seconds`, and `peak_mb` of resident memory, libraries and weights included."""
        with measured() as found:
            texts = self.play(conversations)
        if [len(text) for text in texts] != [sum(len(ids) + new for ids, new in turns) for turns in conversations]:
            raise RuntimeError("not as many tokens were sampled as asked for")
        return found


@contextmanager
def measured() -> Iterator[dict[str, float]]:
    """Wall time and peak memory of what runs inside, of this process and those that it started."""
    found: dict[str, float] = {}
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # so that memory freed before doesn't count
        for process in _processes(os.getpid()):
            (process / "clear_refs").write_text("5")  # the peak starts again from here
    began = time.perf_counter()
    yield found
    found["seconds"] = time.perf_counter() - began
    status = [(process / "status").read_text() for process in _processes(os.getpid())]
    found["peak_mb"] = sum(int(text.split("VmHWM:")[1].split()[0]) for text in status if "VmHWM:" in text) / 1024


def _processes(pid: int | str) -> list[Path]:
    """/proc folders of a process and its descendants; none where there is no /proc."""
    folder = Path(f"/proc/{pid}")
    children = [child for file in folder.glob("task/*/children") for child in file.read_text().split()]
    return [folder] * folder.is_dir() + [found for child in children for found in _processes(child)]
