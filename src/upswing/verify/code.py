"""Code judged by unit tests: the program runs in the sandbox, and what it gave is compared outside of it.

No expected value ever goes in. Values come back as data with their types (no pickle, no object whose `__eq__` says
yes), and even these are read in a process apart, with a deadline.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Annotated, Any

from pydantic import Field

from upswing.trajectory.types import Score
from upswing.verify.code_driver import READY
from upswing.verify.code_tests import IMPORTS, plan
from upswing.verify.options import Amount, Options
from upswing.verify.sandbox import Sandbox, SandboxLimits, SandboxUnavailable, default_sandbox
from upswing.verify.text import Timeout, read_answer, unscored
from upswing.verify.worker import Overrun, Workers

_FENCE = re.compile(r"^ {0,3}```[ \t]*([\w+-]*)[^`\n]*$", re.MULTILINE)
_DRIVER = files("upswing.verify").joinpath("code_driver.py").read_text(encoding="utf-8")
_COMPARE_S = 5.0
_ROOM, _MOST_ROOM = 4 << 20, 32 << 20
"""Bytes that a program may print or return in a test: the least and the most, by the longest text that is wanted."""
_MOST_BYTES = 64 << 20
"""What all tests of a program may bring out."""
_compare = Workers("upswing.verify.code_tests:compare")


@dataclass(frozen=True, kw_only=True)
class Code(Options):
    """1 when the answer's program passes every test of the task; with `partial`, the share of tests passed.

    The program is the last block fenced as Python (or not as anything), or the whole answer where nothing is fenced.
    Tests are in `data['tests']` (see `code_tests`); `data['setup']` runs before the program. Each test is a process of
    its own. A fault of the program is 0; tests that can't be read, and a sandbox that doesn't work, are no score.

    `tolerance`: of floats, absolute and relative; not in asserts, which say their own. `timeout_s`: of one test, wall
    time; `total_timeout_s`: of all. `memory_mb`: of all its processes. `unsafe_local`: run it without isolation.
    """

    partial: bool = False
    tolerance: Amount = 0.0
    timeout_s: Timeout = 6.0
    total_timeout_s: Timeout = 30.0
    memory_mb: Annotated[int, Field(ge=32)] = 512
    unsafe_local: bool = False
    _sandbox: Sandbox = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "_sandbox", default_sandbox(self.unsafe_local))

    async def __call__(self, answer: str | None, data: Mapping[str, Any]) -> Score:
        program = read_code(answer)
        try:
            cases = plan(data, program)
        except (ValueError, TypeError, RecursionError) as error:
            return unscored(str(error))
        if not program:
            return Score(value=0.0, components={"passed": 0.0}, reason="there is no Python code in the answer")
        given = {
            "program": program,
            "setup": str(data.get("setup") or data.get("test_setup_code") or ""),
            "imports": IMPORTS * any("tuples_are_lists" in case for case in cases),
        }
        try:
            text = await self._run(given, cases)
            if not text.startswith(READY):  # is it the program's doing, or the sandbox's?
                idle = await self._run({"program": "", "imports": ""}, ())
                if not idle.startswith(READY):
                    return unscored(f"the sandbox doesn't work: {idle:.300}")
        except SandboxUnavailable as error:
            return unscored(str(error))
        try:
            told = {"cases": cases, "text": text.partition("\n")[2], "tolerance": self.tolerance}
            faults = await _compare.call(_COMPARE_S, **told)
        except Overrun as error:
            faults = [f"what it gave takes too much to compare ({error})"] * len(cases)
        passed = sum(not fault for fault in faults) / len(faults)
        first = next((f"test {i} of {len(faults)}: {fault}" for i, fault in enumerate(faults, 1) if fault), "")
        return Score(
            value=passed if self.partial else float(passed == 1), components={"passed": passed}, reason=first[:500]
        )

    async def _run(self, given: Mapping[str, str], cases: Sequence[Mapping[str, Any]]) -> str:
        """What the driver wrote. Raises SandboxUnavailable."""
        longest = max((len(str(one)) for case in cases for one in case.get("accepted", (case.get("test"),))), default=0)
        room = min(_MOST_ROOM, _ROOM * (1 + 4 * longest // _ROOM))  # coarse: the program can see its limit
        total_s = min(self.total_timeout_s, self.timeout_s * len(cases) + 5)
        job = {
            **given,
            "tests": [{key: case[key] for key in ("stdin", "calls") if key in case} for case in cases],
            "timeout_s": self.timeout_s,
            "output_bytes": room,
            "stop_at_fault": not self.partial,
        }
        most = min(_MOST_BYTES, (len(cases) + 1) * 6 * room)  # a byte that is no text becomes six
        limits = SandboxLimits(wall_s=total_s, cpu_s=total_s, memory_mb=self.memory_mb, output_bytes=most)
        result = await self._sandbox.run_python(_DRIVER, stdin=json.dumps(job).encode(), limits=limits)
        text = result.stdout.decode("utf-8", "replace")
        ended = result.killed or f"exit code {result.returncode}"
        return text if text.startswith(READY) else f"it was ended ({ended}): {text or result.stderr!r}"


def read_code(answer: str | None) -> str:
    """The program in an answer, or nothing: reasoning is cut, and a block that isn't closed is none."""
    text = read_answer(answer) or ""
    parts = _FENCE.split(text)  # text, language, text, language, …: every second fence closes
    if len(parts) == 1:
        return text
    if len(parts) // 2 % 2:
        return ""
    blocks = [(parts[i].lower(), parts[i + 1]) for i in range(1, len(parts), 4)]
    named = [body for language, body in blocks if language in ("python", "python3", "py")]
    found = named or [body for language, body in blocks if not language]
    return found[-1].strip("\n") if found and found[-1].strip() else ""
