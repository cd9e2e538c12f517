"""The simulator against what can be computed by hand, and at the sizes it is for."""

import asyncio
import time

import pytest

from upswing.rollout.scheduler import Pace
from upswing.rollout.simulate import Costs, Layout, Turn, best_split, lognormal_plays, run_virtual, simulate

COSTS = Costs(step_s=0.1, row_s=0.01, prefill_token_s=0.001, train_token_s=0.002, sync_s=0.5)


def one_turn(rng):
    return [Turn(new_tokens=100, sampled_tokens=50)]


def test_virtual_time_takes_none():
    async def main():
        await asyncio.gather(asyncio.sleep(3600.0), asyncio.sleep(7200.0))
        return asyncio.get_running_loop().time()

    began = time.perf_counter()
    assert run_virtual(main()) == pytest.approx(7200.0)
    assert time.perf_counter() - began < 5.0


def test_waiting_for_each_other_is_an_error_and_not_a_hang():
    async def main():
        await asyncio.get_running_loop().create_future()

    with pytest.raises(RuntimeError, match="nothing is left"):
        run_virtual(main())


def test_a_synchronous_step_by_hand():
    # 8 completions on one engine: 50 steps and a prompt of 100 tokens worth 1 step each, at 0.1 + 7 * 0.01 s;
    # then 8 * 150 tokens to learn from and the weights.
    found = simulate(
        plays=one_turn, pace=Pace(batch=2), group_size=4, costs=COSTS, layout=Layout(engines=1, learners=1)
    )
    rollout, update = 51 * 0.17, 8 * 150 * 0.002
    assert found.wait_s == pytest.approx(rollout) and found.update_s == pytest.approx(update)
    assert found.step_s == pytest.approx(rollout + update + 0.5)
    assert found.engine_busy == pytest.approx(rollout / found.step_s)
    assert found.staleness == 0


def test_with_fewer_slots_the_rest_waits():
    found = simulate(
        plays=one_turn, pace=Pace(batch=2), group_size=4, costs=COSTS, layout=Layout(engines=1, learners=1, slots=4)
    )
    assert found.wait_s == pytest.approx(2 * 51 * 0.13)


def test_asynchronous_steps_take_as_long_as_the_slower_side():
    # Two engines are slower than the learner: what they make in a step's time decides.
    slow = simulate(
        plays=one_turn,
        pace=Pace(batch=2, max_staleness=4),
        group_size=4,
        costs=COSTS,
        layout=Layout(engines=1, learners=4, slots=4),
        steps=30,
    )
    assert slow.step_s == pytest.approx(2 * 51 * 0.13 + 0.5, rel=0.1)  # the engine stands still for the weights
    assert slow.engine_busy > 0.85
    fast = simulate(
        plays=one_turn,
        pace=Pace(batch=2, max_staleness=4),
        group_size=4,
        costs=Costs(step_s=0.001, row_s=0.0, prefill_token_s=0.0, train_token_s=0.01),
        layout=Layout(engines=4, learners=1),
        steps=30,
    )
    assert fast.step_s == pytest.approx(8 * 150 * 0.01) and fast.learner_busy == pytest.approx(1.0)
    assert fast.max_staleness <= 4


def test_asynchronous_beats_synchronous_with_long_tails():
    plays = lognormal_plays(
        turns=3, prompt_tokens=100, turn_tokens=40, turn_spread=0.8, tool_s=5.0, tool_spread=1.2, result_tokens=60
    )
    same = {"plays": plays, "group_size": 8, "costs": COSTS, "steps": 24}
    sync = simulate(pace=Pace(batch=8), layout=Layout(engines=2, learners=2), **same)
    later = simulate(pace=Pace(batch=8, max_staleness=2), layout=Layout(engines=2, learners=2), **same)
    assert sync.step_s / later.step_s > 1.5
    assert 0 < later.staleness <= later.max_staleness <= 2


def test_the_best_split_is_the_best_of_all():
    plays = lognormal_plays(
        turns=2, prompt_tokens=100, turn_tokens=40, turn_spread=0.3, tool_s=0.5, tool_spread=0.5, result_tokens=60
    )
    same = {"plays": plays, "pace": Pace(batch=8, max_staleness=2), "group_size": 4, "costs": COSTS}
    layout, found = best_split(8, **same)
    every = [simulate(layout=Layout(engines=n, learners=8 - n), **same).step_s for n in range(1, 8)]
    assert found.step_s <= min(every) * 1.02
    assert layout.engines + layout.learners == 8


def test_a_hundred_devices_and_10000_trajectories():
    plays = lognormal_plays(
        turns=2, prompt_tokens=500, turn_tokens=200, turn_spread=1.0, tool_s=2.0, tool_spread=1.0, result_tokens=100
    )
    found = simulate(
        plays=plays,
        pace=Pace(batch=625, max_staleness=1),
        group_size=8,
        costs=Costs(step_s=0.02, row_s=0.0001, prefill_token_s=1e-5, train_token_s=1e-3),
        layout=Layout(engines=70, learners=30, slots=256),
        steps=3,
    )
    assert found.step_s > 0 and 0 < found.engine_busy <= 1


def test_work_in_threads_takes_no_virtual_time():
    async def main():
        loop = asyncio.get_running_loop()
        sleeping = asyncio.ensure_future(asyncio.sleep(100))
        said = await asyncio.to_thread(lambda: time.sleep(0.02) or "done")
        before = loop.time()
        await sleeping
        return before, f"{said} {loop.time():.0f}"

    assert run_virtual(main()) == (0.0, "done 100")
