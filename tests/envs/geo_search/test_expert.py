"""The scripted expert plays for real; recovery is told from what its searches brought."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.envs.geo_search.conftest import Played

from upswing.envs.geo_search import KINDS, GeoSearch
from upswing.envs.geo_search.corpus import World
from upswing.envs.geo_search.env import parse_action
from upswing.envs.geo_search.expert import Plan
from upswing.errors import ConfigError
from upswing.stages.examples import publish_examples
from upswing.trajectory.types import Message, Outcome, Score, StopReason, Task, ToolCall, ToolRecord, Trajectory

Play = Callable[[GeoSearch, Task], Played]


@pytest.mark.parametrize("noise", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_the_expert_answers_strictly_and_within_its_searches(world: World, play: Play, kind: str, noise: float) -> None:
    env = GeoSearch(kinds=[kind], expert_noise=noise)
    played = [(task, play(env, task)) for task in islice(env.tasks("dev", 2), 40)]
    assert sum(p.last.answer in task.gold for task, p in played) >= 39
    assert all(len(p.records) <= env.max_searches and all(r.ok for r in p.records) for _, p in played)
    assert all(parse_action(m.content) for _, p in played for m in p.messages if m.role == "assistant")


def test_noise_makes_searches_fail_for_real_and_the_expert_recover(world: World, play: Play) -> None:
    rates = {}
    for noise in (0.0, 1.0):
        env = GeoSearch(kinds=["two_hop"], expert_noise=noise)
        marks = [recovered(play(env, task).records, task) for task in islice(env.tasks("dev", 4), 40)]
        assert False not in marks
        rates[noise] = marks.count(True) / len(marks)
    assert rates[0.0] < 0.2 and rates[1.0] > 0.9


def test_what_the_expert_says_comes_from_what_it_read(world: World, play: Play) -> None:
    """With every result replaced it can't know the answer, so it gives up in bounds."""
    env = GeoSearch(kinds=["two_hop"])
    task = next(env.tasks("dev"))
    expert = env.expert(task, random.Random(0))
    messages = task.messages
    for _ in range(env.max_searches + 1):
        text = expert(messages)
        messages = (*messages, Message(role="assistant", content=text), Message(role="tool", content="No results."))
        if "<answer>" in text:
            break
    assert text == "<answer> unknown</answer>"
    lie = (*task.messages, Message(role="assistant", content=expert(task.messages)))
    subject = task.data["plan"][0]["subject"]
    relation = task.data["plan"][0]["relation"]
    told = {
        "country": f"{subject}: A city in the country of Atlantis.",
        "capital": f"{subject}: The capital is Atlantis.",
    }
    told |= {"capital_of": f"Atlantis: The capital is {subject}."}
    told |= {"currency_of": f"Atlantis: The currency is the {subject} (ATL)."}
    assert "Atlantis" in expert((*lie, Message(role="tool", content=told[relation])))


def test_a_name_is_written_behind_a_space_as_it_was_read(world: World, play: Play) -> None:
    """A tokenizer has other tokens for a name right behind a tag or a line's end: copying them is spelling."""
    env = GeoSearch(kinds=KINDS, expert_noise=0.5)
    for task in islice(env.tasks("train"), 60):
        said = play(env, task).messages[1:]
        places = (entity.partition(":")[::2] for entity in task.data["entities"])
        tables = {"country": world.facts.countries, "city": world.facts.cities}
        for what, key in places:
            place = tables.get(what, {}).get(int(key) if key.isdigit() else key)
            for message in said:
                assert place is None or not re.search(rf"(?:^|[>\n]){re.escape(place.name)}\b", message.content)


def test_comparisons_and_counts_show_their_working(world: World, play: Play) -> None:
    env = GeoSearch(kinds=["comparison", "count"])
    for task in islice(env.tasks("dev"), 20):
        last = play(env, task).messages[-1].content
        assert not last.startswith("<answer>") and last.endswith(f"<answer> {task.gold[0]}</answer>")


def test_a_count_of_equal_places_names_both_before_it_says_yes_or_no() -> None:
    plan = Plan(steps=(), final={"op": "count_equal", "names": ["A", "B", "C"], "to": "Peru"})
    working = "Facts: A Peru, Peru yes 1; B Chad, Peru no 1; C Peru, Peru yes 2."
    assert plan.answer(("Peru", "Chad", "Peru")) == (working, "2")


@pytest.mark.parametrize(
    ("facts", "working"),
    [
        (("3,170,208", "17,351,822"), "Facts: A 3.1 million; B 17.3 million. 3.1 million < 17.3 million."),
        (("999,999", "1,000,000"), "Facts: A 999.9 thousand; B 1.0 million. 999.9 thousand < 1.0 million."),
        (("1,402,760,000", "801"), "Facts: A 1.4 billion; B 801. 1.4 billion > 801."),
        (("3,170,208", "3,190,000"), "Facts: A 3,170,208; B 3,190,000. 3,170,208 < 3,190,000."),
        (("33.45 S", "12.1 N"), "Facts: A 33.45 S; B 12.1 N. 33.45 S < 12.1 N."),
    ],
)
def test_numbers_are_compared_in_words_unless_these_tie(facts: tuple[str, str], working: str) -> None:
    plan = Plan(steps=(), final={"op": "max", "names": ["A", "B"], "of": [0, 1]})
    shown, answer = plan.answer(facts)
    assert shown == working
    assert answer == ("A" if facts[0].startswith("1,4") else "B")


def test_the_expert_is_the_same_for_the_same_rng(world: World, play: Play) -> None:
    env = GeoSearch(expert_noise=0.7)
    for task in islice(env.tasks("train"), 10):
        assert play(env, task).messages == play(env, task).messages


def test_typos_are_a_habit_that_can_be_left_out(world: World, play: Play) -> None:
    """A typo swaps two letters: a word of the query is then an anagram of one of the question without being one."""
    misspelt = {True: 0, False: 0}
    for typos in misspelt:
        env = GeoSearch(kinds=["one_hop"], expert_noise=1, expert_typos=typos)
        for task in islice(env.tasks("train"), 80):
            asked = set(task.messages[-1].content.rstrip("?").split())
            letters = {"".join(sorted(word)) for word in asked}
            queries = [r.call.arguments["query"] for r in play(env, task).records]
            odd = [w for query in queries for w in query.split() if w not in asked and "".join(sorted(w)) in letters]
            misspelt[typos] += len(odd)
    assert misspelt[True] > 0 == misspelt[False]


def test_a_task_of_another_environment_has_no_expert() -> None:
    with pytest.raises(ConfigError, match="'mine' has no plan"):
        GeoSearch().expert(Task(id="mine", messages=()), random.Random(0))


def recovered(records: Sequence[ToolRecord], task: Task) -> bool | None:
    finished = Trajectory(
        id="x", task=task, branches=(), messages=(), outcome=Outcome.COMPLETED, stop_reason=StopReason.ANSWERED,
        tool_records=tuple(records),
    )  # fmt: skip
    return GeoSearch().recovered(finished)


def record(world: World, *passages: str, ok: bool = True) -> ToolRecord:
    text = "\n".join(world.passages[p].line for p in passages)
    return ToolRecord(call=ToolCall(name="search"), result=text, ok=ok, turn=0)


def test_recovery_is_told_from_the_passages(world: World) -> None:
    task = Task(id="t", messages=(), data={"passages": [["country/BE/capital"], ["country/BE/area"]]})
    capital, area = record(world, "country/BE/capital"), record(world, "country/BE/area")
    other, both = record(world, "country/DE/capital"), record(world, "country/BE/area", "country/BE/capital")
    assert recovered([capital, area], task) is None
    assert recovered([both], task) is None
    assert recovered([], task) is None
    assert recovered([other, capital, area], task) is True
    assert recovered([capital, other, area], task) is True
    assert recovered([capital, capital, area], task) is True  # asking the same again brought nothing new
    assert recovered([capital, area, other], task) is None  # nothing was needed any more
    assert recovered([other, capital], task) is False
    assert recovered([capital, replace(other, ok=False), area], task) is None
    assert recovered([other], Task(id="t", messages=())) is None


def test_the_example_of_a_recovery_begins_with_a_miss(world: World, tmp_path: Path) -> None:
    """One that found something first, and missed later, recovered too, but isn't what the caption says."""
    data = {"passages": [["country/BE/capital"], ["country/BE/area"]]}
    capital, area = record(world, "country/BE/capital"), record(world, "country/BE/area")
    other = record(world, "country/DE/capital")
    malformed = ToolRecord(call=ToolCall(name=""), result="Invalid.", ok=False, turn=0)
    made = {"later": (capital, other, area), "none": (capital, area), "first": (malformed, other, capital, area)}
    played = [
        Trajectory(
            id=name, task=Task(id=name, messages=(), data=data), branches=(), messages=(), outcome=Outcome.COMPLETED,
            stop_reason=StopReason.ANSWERED, tool_records=records, score=Score(value=1.0),
        )
        for name, records in made.items()
    ]  # fmt: skip
    renderer = SimpleNamespace(decode=str)
    parts = {"out": tmp_path, "recovered": GeoSearch().recovered, "rollouts": SimpleNamespace(renderer=renderer)}
    publish_examples(cast(Any, SimpleNamespace(**parts)), "rl", {"SFT": played, "RL": played})
    shown = json.loads((tmp_path / "examples.json").read_text())
    assert [entry["task_id"] for entry in shown if entry["kind"] == "recovery"] == ["first"]
