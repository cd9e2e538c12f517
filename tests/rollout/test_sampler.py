"""Which task comes next: order, fairness, what success changes, and going on from a saved state."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count, cycle, islice

import pytest

from upswing.rollout.sampler import CHOICE, Sampler
from upswing.trajectory.types import Task


def task(index: int, kind: str = "") -> Task:
    return Task(id=f"t{index}", messages=(), tags={"kind": kind} if kind else {})


def ten() -> Iterator[Task]:
    return (task(i) for i in range(10))


def endless() -> Iterator[Task]:
    return (task(i, "abc"[i % 3]) for i in count())


def ids(sampler: Sampler, numbers: range) -> list[str]:
    return [found.id for number in numbers if (found := sampler.take(number)) is not None]


def test_the_stream_is_taken_in_its_order_and_ends() -> None:
    sampler = Sampler(stream=ten)
    assert ids(sampler, range(10)) == [f"t{i}" for i in range(10)]
    assert sampler.take(10) is None and sampler.take(3).id == "t3", "a number stays the same task"
    sampler.forget([3])
    with pytest.raises(KeyError):
        sampler.take(3)


def test_the_curriculum_prefers_what_is_solved_now_and_then() -> None:
    """Shares by hand: weights 0.02, 0.02 and 0.25 + 0.02 of kinds that are equally frequent among those to choose."""
    sampler = Sampler(stream=endless, tag="kind", seed=3)
    for index, success in enumerate((0.0, 0.5, 1.0)):
        for _ in range(8):
            sampler.learned(task(index, "abc"[index]), success)
    sampler.learned(task(0, "a"), None)  # could not be scored: says nothing
    counts = Counter(sampler.take(number).tags["kind"] for number in range(120))
    # Of 120 draws 110 are expected to be of b while there are any: they thin out among the 128 as they are taken.
    assert counts["b"] > 70 and counts["a"] > 0 and counts["c"] > 0, counts
    assert sampler.weight(task(0, "a")) == pytest.approx(0.02) and sampler.weight(task(0, "b")) == pytest.approx(0.27)
    assert sampler.weight(task(0, "new")) == pytest.approx(0.27), "what is unknown is tried"


def test_without_success_the_curriculum_is_a_fair_shuffle() -> None:
    sampler = Sampler(stream=endless, tag="kind", seed=5)
    taken = ids(sampler, range(300))
    assert len(set(taken)) == 300, "no task twice"
    counts = Counter(int(one[1:]) % 3 for one in taken)
    assert all(abs(counts[k] - 100) < 4 * math.sqrt(300 * 2 / 9) for k in range(3)), counts
    assert max(int(one[1:]) for one in taken) < 300 + CHOICE


def test_success_is_that_of_late() -> None:
    sampler = Sampler(stream=endless, tag="kind")
    for success in [0.0] * 100 + [0.5] * 64:
        sampler.learned(task(0, "a"), success)
    assert sampler.weight(task(0, "a")) == pytest.approx(0.27)


@pytest.mark.parametrize("tag", [None, "kind"])
@pytest.mark.parametrize("saved_after", [0, 1, 7, 23])
def test_a_resumed_sampler_goes_on_exactly(tag: str | None, saved_after: int) -> None:
    """Learning on the way, numbers that are still open, and tasks that are left out from some point on."""

    def play(sampler: Sampler, numbers: range) -> list[str]:
        taken = []
        for number in numbers:
            taken.append(sampler.take(number).id)
            sampler.learned(sampler.take(number), (number % 5) / 4)
            if number == 5:
                sampler.left_out = frozenset({"t3", "t12", "t30"})
            if number >= 3:
                sampler.forget([number - 3])
        return taken

    def fresh() -> Sampler:
        return Sampler(stream=endless, tag=tag, seed=9)

    whole = play(fresh(), range(40))
    before, after = fresh(), fresh()
    play(before, range(saved_after))
    after.restore(json.loads(json.dumps(before.state())))
    for number in range(max(0, saved_after - 3), saved_after):
        assert after.take(number).id == whole[number], "an open group gets another task"
    assert play(after, range(saved_after, 40)) == whole[saved_after:]
    assert "t30" not in whole[6:] and "t12" not in whole[6:]
    assert len(after.state()["places"]) <= 4 and len(after.state()["choice"]) <= CHOICE


@pytest.mark.parametrize("tag", [None, "kind"])
@pytest.mark.parametrize("stream", [ten, lambda: cycle(ten())])
def test_when_everything_is_left_out_it_ends(tag: str | None, stream: Callable[[], Iterator[Task]]) -> None:
    sampler = Sampler(stream=stream, tag=tag, left_out=frozenset(t.id for t in ten()))
    assert sampler.take(0) is None


def test_the_stream_is_only_read_as_far_as_needed() -> None:
    read: list[int] = []

    def watched() -> Iterator[Task]:
        for i in count():
            read.append(i)
            yield task(i)

    sampler = Sampler(stream=watched)
    list(islice((sampler.take(n) for n in count()), 5))
    assert len(read) == 5
