"""The arms of bench/async_tools.py by hand, in virtual time."""

import importlib.util
import sys
from collections import Counter
from pathlib import Path

import pytest

from upswing.rollout.simulate import Costs, Turn
from upswing.rollout.virtual import run_virtual

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))
SPEC = importlib.util.spec_from_file_location("bench_async_tools", BENCH / "async_tools.py")
bench = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(bench)

COSTS = Costs(step_s=0.1, row_s=0.0, prefill_token_s=0.0, train_token_s=0.0)


def trajectory(*tools):
    """A second of sampling a turn."""
    return [Turn(new_tokens=8, sampled_tokens=10, tool_s=seconds) for seconds in tools]


def test_a_synchronous_batch_waits_for_the_slowest_at_each_turn():
    plan = [trajectory(4, 0, 0), trajectory(0, 4, 0), trajectory(0, 0, 4)]
    assert run_virtual(bench.batch_s(plan, COSTS, together=True)) == pytest.approx(15)
    assert run_virtual(bench.batch_s(plan, COSTS, together=False)) == pytest.approx(7)
    assert run_virtual(bench.ideal_s(plan, COSTS)) == pytest.approx(7)


def test_refilled_batches_are_bounded_in_staleness(monkeypatch):
    # Two places. The first trajectory takes 23 s, in which the other place makes three batches of the others: it is
    # too old then, and played again.
    begun = Counter()
    own = bench.Tools.reset
    monkeypatch.setattr(bench.Tools, "reset", lambda self, task, seed: begun.update([task.id]) or own(self, task, seed))
    plan = [trajectory(20, 0, 0), *(trajectory(0, 0, 0) for _ in range(9))]
    assert run_virtual(bench.refilled_s(plan, COSTS, 4, 2)) == pytest.approx((24 - 6) / 3)
    assert begun["0"] == 2 and max(count for task, count in begun.items() if task != "0") == 1


def test_the_figures_and_their_targets(monkeypatch):
    monkeypatch.setattr(bench.asyncio, "run", run_virtual)
    found = bench.rounds_of(COSTS, 2, batches=2, size=8)
    assert {name: figure.target for name, figure in found.items()} == {
        "async_vs_sync": 2.1,
        "fraction_of_bound": 0.9,
        "refilled_vs_sync": None,
        "sync_seconds": None,
        "async_seconds": None,
        "refilled_seconds": None,
    }
    assert found["async_vs_sync"].value > 1
    assert found["fraction_of_bound"].value == pytest.approx(1.0)
