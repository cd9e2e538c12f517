"""The simulator against what can be computed by hand, and at the sizes it is for."""

import asyncio
import itertools
import time

import pytest

from upswing.rollout import simulate as module
from upswing.rollout.scheduler import Pace
from upswing.rollout.simulate import Costs, Layout, SimulatedEngine, Stream, Turn, best_split, lognormal_plays, simulate
from upswing.rollout.virtual import run_virtual
from upswing.verify.deadline import call_with_deadline

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
    # 8 completions on one engine: two groups' prompts of 100 tokens, one after the other, then 50 steps at
    # 0.1 + 7 * 0.01 s; then 8 * 150 tokens to learn from and the weights.
    found = simulate(
        plays=one_turn, pace=Pace(batch=2), group_size=4, costs=COSTS, layout=Layout(engines=1, learners=1)
    )
    rollout, update = 2 * 100 * 0.001 + 50 * 0.17, 8 * 150 * 0.002
    assert found.wait_s == pytest.approx(rollout) and found.update_s == pytest.approx(update)
    assert found.step_s == pytest.approx(rollout + update + 0.5)
    assert found.engine_busy == pytest.approx(rollout / found.step_s)
    assert found.staleness == 0


def test_with_fewer_slots_the_rest_waits():
    found = simulate(
        plays=one_turn, pace=Pace(batch=2), group_size=4, costs=COSTS, layout=Layout(engines=1, learners=1, slots=4)
    )
    assert found.wait_s == pytest.approx(2 * (0.1 + 50 * 0.13))


def took(costs, *streams, then=None):
    """Virtual seconds of these (stream, turn) at once on one engine; `then` is called with it after a second."""

    async def main():
        engine = SimulatedEngine(costs, 64)
        if then:
            asyncio.get_running_loop().call_later(1.0, then, engine)
        await asyncio.gather(*(engine.generate(turn, stream) for stream, turn in streams))
        return asyncio.get_running_loop().time()

    return run_virtual(main())


def test_prompts_are_read_one_after_the_other_and_all_wait():
    long = Turn(new_tokens=8000, sampled_tokens=10)
    costs = Costs(step_s=0.005, row_s=0.0, prefill_token_s=4e-5, train_token_s=0.0)
    assert took(costs, *((Stream(), long) for _ in range(64))) == pytest.approx(64 * 8000 * 4e-5 + 10 * 0.005)
    group = object()
    assert took(costs, *((Stream(group=group), long) for _ in range(64))) == pytest.approx(8000 * 4e-5 + 10 * 0.005)


def test_later_turns_read_only_what_is_new_until_there_are_new_weights():
    stream, costs = Stream(), Costs(step_s=0.1, row_s=0.0, prefill_token_s=0.01, train_token_s=0.0)

    async def main():
        engine, loop, ends = SimulatedEngine(costs, 64), asyncio.get_running_loop(), [0.0]
        for new in (100, 20, 20):
            await engine.generate(Turn(new_tokens=new, sampled_tokens=10), stream)
            ends.append(loop.time())
            if len(ends) == 3:
                engine.new_weights()
        return [later - earlier for earlier, later in itertools.pairwise(ends)]

    # 100 of the prompt, 20 of a result; then all: 100 + 10 + 20 + 10 and the next 20
    assert run_virtual(main()) == pytest.approx([1 + 1.0, 0.2 + 1.0, 1.6 + 1.0])


def test_what_runs_is_read_again_with_new_weights():
    turn, costs = (
        Turn(new_tokens=0, sampled_tokens=20),
        Costs(step_s=0.1, row_s=0.0, prefill_token_s=0.01, train_token_s=0.0),
    )
    assert took(costs, (Stream(), turn), then=SimulatedEngine.new_weights) == pytest.approx(2.0 + 10 * 0.01)


def test_a_step_reads_the_cache():
    costs = Costs(step_s=0.1, row_s=0.01, prefill_token_s=0.0, train_token_s=0.0, cache_token_s=1e-5)
    turn = Turn(new_tokens=1000, sampled_tokens=100)
    # Two with 1,000 to 1,100 tokens
    assert took(costs, (Stream(), turn), (Stream(), turn)) == pytest.approx(100 * (0.11 + 2 * 1050 * 1e-5))


def test_a_trajectory_keeps_its_place_while_its_tool_runs():
    # 512 trajectories in 64 places, 30 s each: eight rounds
    found = simulate(
        plays=lambda rng: [Turn(new_tokens=0, sampled_tokens=1, tool_s=30.0)],
        pace=Pace(batch=64),
        group_size=8,
        costs=Costs(step_s=0.001, row_s=0.0, prefill_token_s=0.0, train_token_s=0.0),
        layout=Layout(engines=1, learners=1, slots=64),
        steps=3,
    )
    assert found.wait_s == pytest.approx(8 * 30.001)


def test_what_over_sampling_cancels_gives_its_place_back():
    # Two places and three groups a step, the last of which is cancelled; two of them would take a million seconds.
    drawn = itertools.count()

    def plays(rng):
        return [Turn(new_tokens=10, sampled_tokens=10, tool_s=1e6 if next(drawn) in (0, 4) else 0.0)]

    found = simulate(
        plays=plays,
        pace=Pace(batch=2, oversample=1),
        group_size=1,
        costs=COSTS,
        layout=Layout(engines=1, learners=1, slots=2),
        steps=3,
    )
    assert found.requeued_frac == pytest.approx(0.5) and found.step_s < 10


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
    assert slow.step_s == pytest.approx(2 * (0.1 + 50 * 0.13) + 0.5, rel=0.1)  # the engine stands still for the weights
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


LARGE = {
    "plays": lognormal_plays(
        turns=3, prompt_tokens=500, turn_tokens=200, turn_spread=1.0, tool_s=2.0, tool_spread=1.0, result_tokens=100
    ),
    "pace": Pace(batch=640, max_staleness=1),
    "group_size": 8,
    "costs": Costs(step_s=0.02, row_s=0.0001, prefill_token_s=1e-5, train_token_s=2e-4),
}


def test_a_hundred_devices_and_10000_trajectories_in_play():
    began = time.process_time()
    found = simulate(layout=Layout(engines=70, learners=30, slots=256), steps=3, **LARGE)
    assert found.step_s > 0 and 0 < found.engine_busy <= 1
    assert time.process_time() - began < 20  # about 2


def test_the_split_of_a_large_plan_is_found_on_a_smaller_one(monkeypatch):
    played = []

    def noted(**keys):
        played.append((keys["layout"].engines + keys["layout"].learners, keys["pace"].batch))
        return simulate(**keys)

    monkeypatch.setattr(module, "simulate", noted)
    monkeypatch.setattr(module, "SEARCHED", 256)
    plan = {**LARGE, "pace": Pace(batch=160, max_staleness=1), "steps": 6}
    layout, found = best_split(100, slots=32, **plan)
    assert played[-1] == (100, 160) and set(played[:-1]) == {(20, 32)} and len(played) < 10
    assert layout.engines + layout.learners == 100
    for engines in (layout.engines // 2, (layout.engines + 100) // 2):
        other = Layout(engines=engines, learners=100 - engines, slots=32)
        assert found.step_s < simulate(layout=other, **plan).step_s


def test_work_in_threads_takes_no_virtual_time():
    async def main():
        loop = asyncio.get_running_loop()
        sleeping = asyncio.ensure_future(asyncio.sleep(100))
        said = await asyncio.to_thread(lambda: time.sleep(0.02) or "done")
        before = loop.time()
        await sleeping
        return before, f"{said} {loop.time():.0f}"

    assert run_virtual(main()) == (0.0, "done 100")


def test_a_plain_function_with_a_time_limit_takes_no_virtual_time():
    async def main():
        said = await call_with_deadline(lambda: time.sleep(0.02) or "done", {}, 1.0)
        return asyncio.get_running_loop().time(), said

    assert run_virtual(main()) == (0.0, "done")
