"""The sandbox: hostile programs contained, and how many small checks a second.

    python bench/sandbox.py [--quick]

`contained`: the share of the hostile programs (tests/faults/sandbox, listed in docs/sandbox.md) that touched nothing,
ended as they must, didn't pass, left no process, and didn't slow or spoil the check after them. `checks_per_second`: a
small Python program and its output, four at a time, each in a sandbox of its own; median of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time

from common import ROOT, Figure, cannot_run, describe_machine, finish
from upswing.verify.sandbox import Sandbox, SandboxUnavailable

sys.path.insert(0, str(ROOT / "tests"))
from faults.sandbox.harness import Canaries, faults_of
from faults.sandbox.programs import PROGRAMS

AT_ONCE = 4
CHECK = """
def solve(numbers):
    seen = {}
    for i, n in enumerate(numbers):
        seen.setdefault(n % 7, []).append(i)
    return sorted(seen.items())
print(solve([int(one) for one in input().split()]))
"""


async def main_async(quick: bool) -> int:
    with Canaries() as canaries:
        sandbox = Sandbox()
        contained = 0
        for program in PROGRAMS:
            faults = await faults_of(sandbox, canaries, program)
            contained += not faults
            for fault in faults:
                print(f"{program.kind}: {program.name}: {fault}")
        await checks(sandbox, 40)
        rates = [await checks(sandbox, 100 if quick else 500) for _ in range(5)]
        await sandbox.close()
    figures = {
        "contained": Figure(contained / len(PROGRAMS), 1.0),
        "hostile_programs": Figure(len(PROGRAMS), 60),
        "checks_per_second": Figure(statistics.median(rates), 50, spread=[min(rates), max(rates)]),
    }
    return finish("sandbox", quick, figures)


async def checks(sandbox: Sandbox, count: int) -> float:
    """Checks a second."""
    turn = asyncio.Semaphore(AT_ONCE)

    async def one() -> None:
        async with turn:
            result = await sandbox.run_python(CHECK, stdin=b"1 8 3 10")
            assert result.stdout == b"[(1, [0, 1]), (3, [2, 3])]\n", result

    started = time.monotonic()
    await asyncio.gather(*[one() for _ in range(count)])
    return count / (time.monotonic() - started)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer checks; the same hostile programs")
    quick = parser.parse_args().quick
    print(describe_machine(("upswing",)))
    try:
        return asyncio.run(main_async(quick))
    except SandboxUnavailable as error:
        return cannot_run(str(error))


if __name__ == "__main__":
    sys.exit(main())
