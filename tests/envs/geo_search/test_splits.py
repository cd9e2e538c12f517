"""No place is in two splits, shown from the places that may be asked about; and what streams hold, counted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter, defaultdict
from itertools import combinations, islice

from tests.envs.geo_search.checks import split_of

from upswing.envs.base import SPLITS
from upswing.envs.geo_search import KINDS
from upswing.envs.geo_search.corpus import World
from upswing.envs.geo_search.pools import Places, draws
from upswing.trajectory.types import Task

Drawn = dict[str, list[Task]]


def test_every_place_has_exactly_one_split(world: World) -> None:
    owners: dict[str, set[str]] = defaultdict(set)
    for split in SPLITS:
        places = Places.of(world, split)
        for country in places.countries:
            owners[f"country:{country.iso}"].add(split)
        for city in (*places.cities, *places.homonyms):
            owners[f"city:{city.id}"].add(split)
            if city.subdivision_id:
                owners[f"subdivision:{city.subdivision_id}"].add(split)
    assert all(len(found) == 1 for found in owners.values())
    assert all(split_of(world, entity) in found for entity, found in owners.items())
    assert {f"country:{iso}" for iso in world.facts.countries} <= owners.keys()
    assert {f"city:{c.id}" for c in world.facts.cities.values() if not c.ambiguous} <= owners.keys()


def test_a_city_its_subdivision_and_a_capital_follow_their_country(world: World) -> None:
    for city in world.facts.cities.values():
        assert city.subdivision_id is None or city.subdivision_id.startswith(f"{city.country}.")
    for country in world.facts.countries.values():
        assert country.capital_id is None or world.facts.cities[country.capital_id].country == country.iso


def test_each_split_has_countries_of_every_continent(world: World) -> None:
    for split in SPLITS:
        assert len({c.continent for c in world.facts.countries.values() if c.split == split}) == 6


def test_no_question_or_id_is_in_two_splits(drawn: Drawn) -> None:
    for a, b in combinations(SPLITS, 2):
        assert not {t.messages[-1].content for t in drawn[a]} & {t.messages[-1].content for t in drawn[b]}
        assert not {t.id for t in drawn[a]} & {t.id for t in drawn[b]}


def test_one_id_is_one_question(drawn: Drawn) -> None:
    texts: dict[str, set[str]] = defaultdict(set)
    ids: dict[tuple[str, str], set[str]] = defaultdict(set)
    for task in (task for tasks in drawn.values() for task in tasks):
        texts[task.id].add(task.messages[-1].content)
        ids[task.tags["kind"], task.messages[-1].content].add(task.id)
    assert all(len(found) == 1 for found in (*texts.values(), *ids.values()))


def test_the_test_stream_holds_a_thousand_questions_and_a_hundred_of_each_kind(drawn: Drawn) -> None:
    distinct = {task.id: task.tags["kind"] for task in drawn["test"]}
    counts = Counter(distinct.values())
    assert len(distinct) >= 1000 and all(counts[kind] >= 100 for kind in KINDS), counts


def test_a_comparison_never_comes_again_the_other_way_round(world: World) -> None:
    """Pairs were once drawn in both orders, so a question came again after some eighty others."""
    tasks = list(islice(draws(world, "dev", "comparison", seed=1), 1500))
    assert len({task.id for task in tasks}) == 1500
    pairs = [(t.data["plan"][-1]["relation"], tuple(sorted(map(tuple, t.data["passages"])))) for t in tasks]
    assert len(set(pairs)) == 1500


def test_every_pass_holds_the_same_questions_in_another_order(world: World) -> None:
    def key(task: Task) -> str:
        return json.dumps([task.data["passages"], task.data["final"]], sort_keys=True)

    seen: list[str] = []
    stream = draws(world, "dev", "homonym", seed=9)
    first = next(stream)
    seen.append(key(first))
    for task in stream:
        if key(task) in seen:
            break
        seen.append(key(task))
    second = [key(task), *(key(t) for t in islice(stream, len(seen) - 1))]
    assert sorted(second) == sorted(seen) and second != seen
    other = [key(t) for t in islice(draws(world, "dev", "homonym", seed=10), len(seen))]
    assert sorted(other) == sorted(seen) and other != seen


OFFLINE = """
import socket
from itertools import islice
def refuse(*args, **kwargs):
    raise OSError("no network here")
class Closed(socket.socket):
    __init__ = refuse
socket.socket = Closed
socket.create_connection = socket.getaddrinfo = refuse
from upswing.envs.geo_search import GeoSearch
env = GeoSearch()
print(*[task.id for task in islice(env.tasks("test", 5), 30)])
print(env.search("Belgium capital", 1))
"""


def test_no_network_is_needed_and_ids_are_the_same_in_every_process(world: World, drawn: Drawn) -> None:
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "77"},
    )
    ids, result = done.stdout.strip().split("\n")
    assert ids.split() == [task.id for task in drawn["test"][:30]]
    assert result == world.passages["country/BE/capital"].line
