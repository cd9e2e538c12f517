"""One world for all tests here (it takes seconds to build), and a way to play an expert."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from upswing.envs.base import AssistantMessage, Observation
from upswing.envs.geo_search import GeoSearch
from upswing.envs.geo_search.corpus import World, build_world
from upswing.trajectory.types import Message, Task, ToolRecord


@dataclass(frozen=True)
class Played:
    """A finished episode."""

    last: Observation
    messages: tuple[Message, ...]
    records: tuple[ToolRecord, ...]


@pytest.fixture(scope="session")
def world() -> World:
    return build_world()


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
