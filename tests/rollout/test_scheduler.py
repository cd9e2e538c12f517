"""Which groups are played when, and which are learned from. Everything here runs in virtual time."""

import asyncio
import random
from collections import Counter

import pytest

from upswing.rollout.scheduler import Pace, Scheduler
from upswing.rollout.simulate import run_virtual


class Rollout:
    """Plays group `number` in `seconds(number, attempt)`; its result is (number, attempt, version at its start)."""

    def __init__(self, seconds, pace, **options):
        self.seconds = seconds
        self.started, self.running, self.most, self.closed = [], 0, 0, 0
        self.scheduler = Scheduler(
            play=self.play, pace=pace, staleness=lambda group: self.scheduler.version - group[2], **options
        )

    async def play(self, number, attempt):
        version = self.scheduler.version
        self.started.append((number, attempt))
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(self.seconds(number, attempt))
            return number, attempt, version
        finally:
            self.running -= 1
            self.closed += 1

    async def train(self, steps, update_s=0.0):
        taken = []
        for _ in range(steps):
            taken.append(await self.scheduler.take())
            await asyncio.sleep(update_s)
            self.scheduler.advance()
        await self.scheduler.close()
        return taken


def play(steps, seconds, pace, update_s=0.0, **options):
    async def main():
        rollout = Rollout(seconds, pace, **options)
        taken = await rollout.train(steps, update_s)
        return rollout, taken

    return run_virtual(main())


def uneven(number, attempt):
    return random.Random(f"{number}/{attempt}").lognormvariate(0.0, 1.5)


def test_without_staleness_it_is_the_synchronous_loop():
    rollout, taken = play(5, uneven, Pace(batch=4), update_s=1.0)
    assert [one.numbers for one in taken] == [tuple(range(4 * i, 4 * i + 4)) for i in range(5)]
    assert all(group[2] == step for step, one in enumerate(taken) for group in one.groups)  # of the newest weights
    assert rollout.most == 4


@pytest.mark.parametrize("max_staleness", [0, 1, 2, 5])
@pytest.mark.parametrize("stale", ["requeue", "drop", "keep"])
def test_staleness_is_bounded_and_every_number_is_learned_from_once(max_staleness, stale):
    rollout, taken = play(40, uneven, Pace(batch=3, max_staleness=max_staleness, stale=stale), update_s=0.7)
    numbers = [number for one in taken for number in one.numbers]
    assert len(numbers) == len(set(numbers)) == 120
    if stale != "keep":
        ages = [step - group[2] for step, one in enumerate(taken) for group in one.groups]
        assert max(ages) <= max_staleness
        assert max_staleness == 0 or max(ages) > 0
    counts = [one.counts for one in taken] + [rollout.scheduler._counts]
    left, dropped = rollout.scheduler.state(), sum(one.dropped for one in counts)
    lost = set(range(left["next"])) - set(numbers) - {number for number, *_ in left["open"]}
    assert len(lost) == dropped if stale == "drop" else not lost  # all others are taken or still open
    assert rollout.most <= 3 * (max_staleness + 1)


def test_the_capacity_counts_what_waits_in_the_buffer():
    async def main():
        rollout = Rollout(lambda number, attempt: 1.0, Pace(batch=2, max_staleness=1))
        await rollout.scheduler.take()
        await asyncio.sleep(100.0)  # a slow learner
        return rollout.started

    # (1 + 0 + 1) * 2 groups, and not one more while the learner is at version 0.
    assert [number for number, _ in run_virtual(main())] == [0, 1, 2, 3]


def test_the_oldest_finished_groups_come_first():
    seconds = {0: 9.0, 1: 3.0, 2: 2.0, 3: 1.0}
    _, taken = play(2, lambda number, attempt: seconds.get(number, 20.0), Pace(batch=2, max_staleness=1))
    assert taken[0].numbers == (2, 3)  # finished first; of those, in order
    assert taken[1].numbers == (0, 1)


def test_a_straggler_that_is_too_old_is_played_again_with_another_seed():
    def seconds(number, attempt):
        return 50.0 if (number, attempt) == (0, 0) else 1.0

    told = []
    pace, on_stale = Pace(batch=2, max_staleness=1), lambda *words: told.append(words)
    rollout, taken = play(60, seconds, pace, update_s=1.0, on_stale=on_stale)
    assert (0, 0) in rollout.started and (0, 1) in rollout.started
    again = [group for one in taken for group in one.groups if group[0] == 0]
    assert [group[1] for group in again] == [1]
    assert sum(one.counts.requeued for one in taken) == 1 and told == [(0, (0, 0, 0), 1)]


@pytest.mark.parametrize("max_staleness", [1, 2])
def test_tasks_that_take_longer_than_they_may_be_old_keep_their_share(max_staleness):
    pace = Pace(batch=4, max_staleness=max_staleness)
    rollout, taken = play(200, lambda n, a: 5.0 if n % 2 else 1.0, pace, update_s=1.0)  # an update takes a second
    slow = sum(group[0] % 2 for one in taken for group in one.groups)
    assert slow / 800 == pytest.approx(0.5, abs=0.01)
    assert max(step - group[2] for step, one in enumerate(taken) for group in one.groups) <= max_staleness
    assert sum(one.counts.dropped for one in taken) == 0
    assert max(attempt for _, attempt in rollout.started) <= 2


def test_late_groups_are_cancelled_once_and_then_waited_for():
    def seconds(number, attempt):
        return 100.0 if number == 1 else 1.0

    rollout, taken = play(4, seconds, Pace(batch=2, oversample=1))
    assert taken[0].numbers == (0, 2) and taken[0].counts.cancelled == 1
    assert Counter(number for number, _ in rollout.started)[1] == 2
    assert 1 in [number for one in taken for number in one.numbers]
    numbers = [number for one in taken for number in one.numbers]
    assert len(numbers) == len(set(numbers))
    assert rollout.closed == len(rollout.started)  # every environment was closed


def test_a_further_batch_for_the_same_update_is_of_the_same_weights():
    async def main():
        rollout = Rollout(lambda number, attempt: 1.0, Pace(batch=2))
        first, second = await rollout.scheduler.take(), await rollout.scheduler.take(more=True)
        rollout.scheduler.advance()
        third = await rollout.scheduler.take()
        return first, second, third, rollout.started

    first, second, third, started = run_virtual(main())
    assert (first.numbers, second.numbers, third.numbers) == ((0, 1), (2, 3), (4, 5))
    assert [group[2] for group in (*second.groups, *third.groups)] == [0, 0, 1, 1]
    assert len(started) == 6


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_killed_run_loses_no_task_and_learns_from_none_twice(max_staleness):
    pace = Pace(batch=3, max_staleness=max_staleness)

    async def part(state, version, steps):
        rollout = Rollout(uneven, pace, version=version, state_before=state)
        numbers = []
        for _ in range(steps):
            numbers += (await rollout.scheduler.take()).numbers
            rollout.scheduler.advance()
        state = rollout.scheduler.state()
        await rollout.scheduler.close()
        return numbers, state

    first, state = run_virtual(part(None, 0, 5))
    second, after = run_virtual(part(state, 5, 5))
    numbers = first + second
    assert len(numbers) == len(set(numbers)) == 30
    assert set(range(after["next"])) == set(numbers) | {number for number, *_ in after["open"]}
    if max_staleness == 0:
        assert numbers == list(range(30))


@pytest.mark.parametrize(("max_staleness", "oversample"), [(0, 0), (0, 2), (2, 0)])
@pytest.mark.parametrize("more", [False, True])
def test_an_end_at_any_moment_loses_no_task_and_learns_from_none_twice(max_staleness, oversample, more):
    """It ends after a random time; what was taken but not learned from is played again."""

    async def part(state, version, seconds):
        pace = Pace(batch=3, max_staleness=max_staleness, oversample=oversample)
        rollout = Rollout(uneven, pace, version=version, state_before=state)
        numbers = []

        async def train():
            while True:
                taken = [*(await rollout.scheduler.take()).numbers]
                if more:
                    taken += (await rollout.scheduler.take(more=True)).numbers
                await asyncio.sleep(0.5)
                numbers.extend(taken)
                rollout.scheduler.advance()

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(train(), seconds)
        state, version = rollout.scheduler.state(), rollout.scheduler.version
        await rollout.scheduler.close()
        assert rollout.running == 0
        return numbers, state, version

    numbers, state, version, rng = [], None, 0, random.Random(0)
    for _ in range(12):
        new, state, version = run_virtual(part(state, version, rng.uniform(0.1, 90.0)))
        numbers += new
        assert len(numbers) == len(set(numbers))
        assert sorted(numbers + [number for number, *_ in state["open"]]) == list(range(state["next"]))
    assert len(numbers) > 30
    if not max_staleness and not oversample:
        assert numbers == list(range(len(numbers)))


@pytest.mark.parametrize(("max_staleness", "oversample"), [(0, 0), (0, 2), (1, 0), (4, 0)])
def test_tasks_that_run_out_end_it_after_the_last_full_batch(max_staleness, oversample):
    async def main():
        async def tasks(number, attempt):
            if number >= 12:
                raise ValueError("ran out")
            await asyncio.sleep(uneven(number, attempt))
            return scheduler.version

        pace = Pace(batch=3, max_staleness=max_staleness, oversample=oversample)
        scheduler = Scheduler(play=tasks, pace=pace, staleness=lambda begun: scheduler.version - begun)
        taken = []
        with pytest.raises(ValueError, match="ran out"):
            while True:
                taken += (await scheduler.take()).numbers
                scheduler.advance()
        await scheduler.close()
        return taken

    assert sorted(run_virtual(main())) == list(range(12))


def test_what_breaks_in_a_group_reaches_the_learner():
    async def main():
        async def broken(number, attempt):
            raise ValueError("no such tool")

        scheduler = Scheduler(play=broken, pace=Pace(batch=1), staleness=lambda group: 0)
        await scheduler.take()

    with pytest.raises(ValueError, match="no such tool"):
        run_virtual(main())
