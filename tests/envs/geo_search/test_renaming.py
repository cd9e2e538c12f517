"""Tasks under made-up names: solvable, consistent, found by those names alone, and only in the train split."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from itertools import islice

import pytest
from tests.envs.geo_search.conftest import Played

from upswing.envs.base import AssistantMessage
from upswing.envs.geo_search import GeoSearch, renaming
from upswing.envs.geo_search.corpus import World
from upswing.envs.geo_search.names import ascii_text, tokenize
from upswing.envs.geo_search.pools import EXERCISES, KINDS
from upswing.errors import ConfigError
from upswing.trajectory.types import Outcome, StopReason, Task, Trajectory

Play = Callable[[GeoSearch, Task], Played]
ALL = (*KINDS, *EXERCISES)


def renamed(kinds: tuple[str, ...] = ALL, count: int = 120, **options: float) -> Iterator[tuple[GeoSearch, Task]]:
    env = GeoSearch(kinds=kinds, renamed=1.0, **options)
    return ((env, task) for task in islice(env.tasks("train", 3), count) if renaming.KEY in task.data)


@pytest.mark.parametrize("kind", ALL)
def test_the_expert_solves_them_as_it_solves_the_real_ones(play: Play, kind: str) -> None:
    played = [(task, play(env, task)) for env, task in renamed((kind,), 40, expert_noise=0.5)]
    assert len(played) >= 38
    assert sum(p.last.answer in task.gold for task, p in played) >= len(played) - 1


def test_no_real_name_of_a_place_is_left_in_the_episode(world: World, play: Play) -> None:
    for env, task in renamed():
        said = "\n".join(m.content for m in play(env, task).messages)
        for entity in task.data["entities"]:
            what, _, key = entity.partition(":")
            place = {"country": world.facts.countries, "city": world.facts.cities}.get(what, {})
            name = getattr(place.get(int(key) if key.isdigit() else key), "name", None)
            assert name is None or not re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", said)
        assert all(
            other in said for name, other in task.data[renaming.KEY].items() if name in task.messages[-1].content
        )


def test_made_up_names_are_no_words_of_any_passage_and_new_each_time(world: World) -> None:
    seen: list[str] = []
    for _, task in renamed():
        mine = set(task.data[renaming.KEY].values())
        assert not any(token in world.words for name in mine for token in tokenize(name))
        seen += mine
    assert len(set(seen)) > 0.98 * len(seen)


def test_a_share_of_the_train_split_only() -> None:
    env = GeoSearch(renamed=0.5)
    marks = [renaming.KEY in task.data for task in islice(env.tasks("train"), 200)]
    assert 70 < sum(marks) < 130
    for split in ("dev", "test"):
        own = [*islice(GeoSearch(renamed=1.0).tasks(split, 1), 30)]
        assert own == [*islice(GeoSearch().tasks(split, 1), 30)]
    assert [*islice(env.tasks("train"), 50)] == [*islice(GeoSearch(renamed=0.5).tasks("train"), 50)]
    with pytest.raises(ConfigError, match="renamed"):
        GeoSearch(renamed=1.5)


def test_a_place_is_found_by_its_other_name_however_it_is_written_and_by_no_other(world: World) -> None:
    env = GeoSearch()
    names = {"Norway": "Zwöllengà Brük"}
    task = Task(id="t", messages=(), data={renaming.KEY: names, "entities": ["country:NO"]})

    def found(query: str) -> str:
        env.reset(task, 0)
        return env.step(AssistantMessage(content=f"<search>{query}</search>")).messages[0].content

    line = found("Zwöllengà Brük capital")
    assert line.startswith("- Zwöllengà Brük: ") and "Oslo" in line and "Norway" not in line
    assert found("zwollenga bruk capital") == line
    assert found("Zwöllengà Brük's capital") == line
    assert found("Zwöllenga Bru") == "No results."
    assert not found("Zwöllengà capital").startswith("- Zwöllengà")
    env.reset(Task(id="u", messages=()), 0)  # the next task has none of it
    assert (
        env.step(AssistantMessage(content="<search>Norway capital</search>")).messages[0].content.startswith("- Norway")
    )


def test_the_longest_name_wins_and_parts_of_words_stay() -> None:
    names = {"Guinea": "A", "Equatorial Guinea": "B", "Niger": "C"}
    text = "Equatorial Guinea, Guinea-Bissau, Guinea; Niger's, Nigeria"
    assert renaming.there(names, text) == "B, Guinea-Bissau, A; C's, Nigeria"
    assert renaming.there({}, text) == renaming.back({}, text) == text
    assert renaming.back({"Chad": "São Pim"}, "sao pim, SÃO PIM, saopim") == "Chad, Chad, saopim"


def test_an_accented_name_and_its_plain_form_are_one_place() -> None:
    env = GeoSearch(kinds=["one_hop"], renamed=1.0)
    for task in islice(env.tasks("train"), 400):
        names = task.data.get(renaming.KEY, {})
        for name, other in names.items():
            assert names[ascii_text(name)] == other


def test_recovery_is_told_under_other_names_too(play: Play) -> None:
    marks = []
    for env, task in renamed(("two_hop",), 30, expert_noise=1.0):
        p = play(env, task)
        trajectory = Trajectory(
            id="x", task=task, branches=(), messages=p.messages, outcome=Outcome.COMPLETED,
            stop_reason=StopReason.ANSWERED, tool_records=p.records,
        )  # fmt: skip
        marks.append(env.recovered(trajectory))
    assert marks.count(True) > 0.9 * len(marks)


def test_a_task_that_cannot_be_solved_under_other_names_keeps_its_own(world: World) -> None:
    task = next(iter(GeoSearch(kinds=["one_hop"]).tasks("train")))
    assert renaming.rename(world, task, lambda query: ["No results."], 4, random.Random(0)) is task
