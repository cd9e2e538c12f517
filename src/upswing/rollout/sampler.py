"""Which task comes next: as the stream has them, or rather those that something can be learned from.

Tasks are numbered as they are taken: a number is the same task whenever it is asked for (a group that is played again),
also in a run that goes on from `state()`. A curriculum looks at what was learned. It is told by `learned`, in the order
of the updates, and looks when a task is taken: the choice is that of the moment, and is kept with the number.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from upswing.seeding import derive_seed
from upswing.trajectory.types import Task

WINDOW = 64
"""Newest groups of a kind of task whose success counts."""
CHOICE = 128
"""Tasks of the stream among which a curriculum chooses; who is passed over stays among them."""
MAX_LEFT_OUT = 100_000
"""So many tasks in a row that are left out count as the stream's end."""


@dataclass(kw_only=True)
class Sampler:
    """Tasks by number. `stream` makes the stage's tasks, the same ones in the same order each time (a dataset's are
    already shuffled anew at every pass).

    With a `tag` it is a curriculum: a task's weight is s (1 - s) + `floor`, s the success of late of the tasks with its
    value of the tag (0.5 where none is known). What is always or never solved becomes rare; with a floor it never
    vanishes, so that what changes is noticed.
    """

    stream: Callable[[], Iterator[Task]]
    seed: int = 0
    tag: str | None = None
    floor: float = 0.02
    left_out: frozenset[str] = frozenset()
    """Ids of tasks that are passed over from the next one on."""
    _next: int = 0
    _made: dict[int, Task] = field(default_factory=dict)
    _places: dict[int, int] = field(default_factory=dict)
    """Of the numbers that may be asked for again: the place in the stream."""
    _read: int = 0
    """Places that are behind, or there to choose from."""
    _choice: dict[int, Task] = field(default_factory=dict)
    """By place."""
    _success: dict[str, deque[float]] = field(default_factory=dict)
    _source: Iterator[Task] | None = None

    def take(self, number: int) -> Task | None:
        """The task of that number; None: the stream has ended. KeyError for one that was forgotten."""
        while self._next <= number:
            found = next(self._ahead(), None) if self.tag is None else self._chosen()
            if found is None:
                return None
            self._places[self._next], self._made[self._next] = found
            self._next += 1
        return self._made[number]

    def forget(self, numbers: Iterable[int]) -> None:
        """These won't be asked for again, nor by a run that goes on from here: they were learned from, or given up."""
        for number in numbers:
            del self._made[number], self._places[number]

    def learned(self, task: Task, success: float | None) -> None:
        """The share of a group that solved its task; None: nobody could tell."""
        if success is not None:
            self._success.setdefault(self._kind(task), deque(maxlen=WINDOW)).append(success)

    def weight(self, task: Task) -> float:
        """Of a task in the curriculum's draw."""
        seen = self._success.get(self._kind(task))
        mean = sum(seen) / len(seen) if seen else 0.5
        return mean * (1 - mean) + self.floor

    def state(self) -> dict[str, Any]:
        """JSON for a checkpoint; its size doesn't grow with the tasks that are done with."""
        return {
            "next": self._next,
            "read": self._read,
            "places": [[number, place] for number, place in self._places.items()],
            "choice": list(self._choice),
            "success": {kind: list(seen) for kind, seen in self._success.items()},
            "left_out": sorted(self.left_out),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on as the sampler of that state would have; of a fresh one only. The stream is read up to there again."""
        self._next, self._read = state["next"], state["read"]
        self._places = dict(state["places"])
        self._success = {kind: deque(seen, maxlen=WINDOW) for kind, seen in state["success"].items()}
        self.left_out = frozenset(state["left_out"])
        wanted = {*self._places.values(), *state["choice"]}
        self._source = self.stream()
        held = {place: task for place, task in enumerate(islice(self._source, self._read)) if place in wanted}
        self._made = {number: held[place] for number, place in self._places.items()}
        self._choice = {place: held[place] for place in state["choice"]}

    # -- how ----------------------------------------------------------------------------------------------------------

    def _kind(self, task: Task) -> str:
        return task.tags.get(self.tag or "", "")

    def _ahead(self) -> Iterator[tuple[int, Task]]:
        """(place, task) of what comes next, less what is left out."""
        self._source = self._source or self.stream()
        passed = 0
        for task in self._source:
            self._read, passed = self._read + 1, passed + 1
            if task.id not in self.left_out:
                yield self._read - 1, task
                passed = 0
            elif passed == MAX_LEFT_OUT:
                return

    def _chosen(self) -> tuple[int, Task] | None:
        """One of those to choose from, by weight; None: there are none."""
        self._choice = {place: task for place, task in self._choice.items() if task.id not in self.left_out}
        self._choice |= dict(islice(self._ahead(), CHOICE - len(self._choice)))
        if not self._choice:
            return None
        weights = [self.weight(task) for task in self._choice.values()]
        rng = random.Random(derive_seed(self.seed, "choice", self._next))
        place = rng.choices(list(self._choice), weights)[0]
        return place, self._choice.pop(place)
