"""Code judged by unit tests: the program runs in the sandbox, and what it gave is compared outside of it.

No expected value ever goes in. Values come back as data with their types (no pickle, no object whose `__eq__` says
yes), and even these are read in a process apart, with a deadline.
"""

from __future__ import annotations

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
from upswing.verify.sandbox import Sandbox, SandboxLimits, SandboxResult, SandboxUnavailable, default_sandbox
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
    Tests are in `data['tests']` (see `code_tests`); `data['setup']` runs before the program. Each test has a sandbox of
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
        imports = IMPORTS * any("tuples_are_lists" in case for case in cases)
        setup = str(data.get("setup") or data.get("test_setup_code") or "")
        try:
            results = await self._play(cases, {"imports": imports, "setup": setup, "program": program})
        except SandboxUnavailable as error:
            return unscored(str(error))
        try:
            faults = await _compare.call(_COMPARE_S, cases=cases, results=results, tolerance=self.tolerance)
        except Overrun as error:
            faults = [f"what it gave takes too much to compare ({error})"] * len(cases)
        passed = sum(not fault for fault in faults) / len(faults)
        first = next((f"test {i} of {len(faults)}: {fault}" for i, fault in enumerate(faults, 1) if fault), "")
        value = passed if self.partial else float(passed == 1)
        return Score(value=value, components={"passed": passed}, reason=first[:500])

    async def _play(self, cases: Sequence[Mapping[str, Any]], job: Mapping[str, str]) -> list[tuple[str, str]]:
        """(fault, what came out) of every test up to the first fault, or with `partial` of all, as far as time and room
        last. Raises SandboxUnavailable."""
        longest = max((len(str(one)) for case in cases for one in case.get("accepted", (case.get("test"),))), default=0)
        room, left_s, left_bytes = min(_MOST_ROOM, _ROOM + 4 * longest), self.total_timeout_s, _MOST_BYTES
        found: list[tuple[str, str]] = []
        for case in cases:
            if left_s <= 0 or left_bytes <= 0 or (found and found[-1][0] and not self.partial):
                break
            wall_s, most = min(self.timeout_s, left_s), min(room, left_bytes)
            given = {**job, "calls": case.get("calls", ())}
            result = await self._run(given, case.get("stdin", ""), wall_s=wall_s, cpu_s=left_s, output_bytes=most)
            if not result.stdout.startswith(READY):  # is it the program's doing, or the sandbox's?
                idle = await self._run({**dict.fromkeys(job, ""), "calls": ()}, "")
                if not idle.stdout.startswith(READY):
                    raise SandboxUnavailable(f"the sandbox doesn't work: {_fault(idle)}: {idle.stderr[-300:]!r}")
            left_s, left_bytes = left_s - result.duration_s, left_bytes - len(result.stdout)
            found.append((_fault(result), result.stdout.removeprefix(READY).decode("utf-8", "replace")))
        return found

    async def _run(self, job: Mapping[str, Any], stdin: str, **limits: Any) -> SandboxResult:
        fed, most = stdin.encode("utf-8", "surrogateescape"), SandboxLimits(memory_mb=self.memory_mb, **limits)
        return await self._sandbox.run_python(f"{_DRIVER}\nmain({job!r})\n", stdin=fed, limits=most)


def _fault(result: SandboxResult) -> str:
    """Why a test's program didn't come to its end; empty when it did."""
    if result.killed:
        return "it took too long" if result.killed == "wall" else f"it was stopped ({result.killed})"
    said = result.stderr.decode("utf-8", "replace")[:300]
    return said or f"it ended with exit code {result.returncode} and without a result" if result.returncode else ""


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
