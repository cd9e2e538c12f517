"""What proves the questions right: their entities, and a check of drawn tasks against passages and facts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from upswing.envs.base import SPLITS
from upswing.envs.geo_search.corpus import World
from upswing.envs.geo_search.expert import Plan, solve
from upswing.envs.geo_search.names import fold
from upswing.envs.geo_search.pools import EXERCISES, KINDS, draws, lines
from upswing.trajectory.types import Task


def entities_of(task: Task) -> frozenset[str]:
    """Every place that the question mentions, passes through or answers with, such as `country:BE`, `city:2803138`,
    `subdivision:DE.02`. (A count of bordering countries asks for their number, not for them.)"""
    return frozenset(task.data["entities"])


def split_of(world: World, entity: str) -> str:
    """The split that an entity belongs to."""
    kind, _, key = entity.partition(":")
    if kind == "city":
        key = world.facts.cities[int(key)].country
    return world.facts.countries[key.partition(".")[0]].split


def self_check(world: World, n: int, k: int = 1) -> list[str]:
    """Draw `n` tasks of every kind and split; what is wrong with them, one line each (empty: all right).

    Checks that the gold passages exist, that the answer stands in the last one or follows from the facts, that good
    queries at `k` lead to it, and that every entity is of the task's split.
    """
    return [problem for task in _sample(world, n) for problem in problems(world, task, k)]


def _sample(world: World, n: int) -> Iterator[Task]:
    for split in SPLITS:
        for kind in (*KINDS, *EXERCISES):
            yield from islice(draws(world, split, kind, seed=n), n)


def problems(world: World, task: Task, k: int) -> Iterator[str]:
    where = f"{task.id} ({task.tags['kind']}) {task.messages[-1].content!r}"
    missing = [p for ids in task.data["passages"] for p in ids if p not in world.passages]
    if missing:
        yield f"{where}: no passage {', '.join(missing)}"
        return
    if task.data["final"]["op"] == "value":
        texts = [fold(world.passages[p].line) for p in task.data["passages"][-1]]
        if not any(fold(gold) in text for gold in task.gold for text in texts):
            yield f"{where}: the answer {task.gold} isn't in its passage"
    answer, _ = solve(Plan(steps=tuple(task.data["plan"]), final=task.data["final"]), lambda q: lines(world, q, k), 4)
    if answer not in task.gold:
        yield f"{where}: good queries lead to {answer!r}, not to {task.gold}"
    for entity in sorted(entities_of(task)):
        if split_of(world, entity) != task.split:
            yield f"{where}: {entity} belongs to {split_of(world, entity)}, not to {task.split}"
