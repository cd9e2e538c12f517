"""The protocol: what a turn may be, what comes back, and how an episode ends."""

from __future__ import annotations

import importlib.util
from itertools import islice

import pytest

from upswing.envs.base import AssistantMessage, Observation
from upswing.envs.geo_search import GeoSearch
from upswing.envs.geo_search.corpus import World
from upswing.envs.geo_search.env import neutralise, parse_action
from upswing.errors import ConfigError
from upswing.trajectory.types import Message, StopReason, Task


@pytest.fixture
def env(world: World) -> GeoSearch:
    made = GeoSearch()
    made.reset(Task(id="t", messages=(Message(role="user", content="What is the capital of Belgium?"),)), 0)
    return made


def say(env: GeoSearch, text: str, *, finished: bool = True) -> Observation:
    return env.step(AssistantMessage(content=text, finished=finished))


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("<search>Belgium capital</search>", ("search", "Belgium capital")),
        ("I look it up. <search> Belgium </search>\n", ("search", "Belgium")),
        ("A 3; B 2. <answer>A</answer>", ("answer", "A")),
        ("<answer></answer>", ("answer", "")),
        ("Brussels", None),
        ("<search>a</search><search>b</search>", None),
        ("<search>a</search> <answer>b</answer>", None),
        ("<search>a</search>\nBelgium: Its capital is Ghent.", None),
        ("<search>a</answer>", None),
        ("<search>a", None),
        ("</answer>a<answer>", None),
        ("<answer><search>a</search></answer>", None),
        ("<Answer>a</Answer>", None),
    ],
)
def test_a_turn_is_one_action_tag_at_its_end(text: str, action: tuple[str, str] | None) -> None:
    assert parse_action(text) == action


def test_a_search_brings_one_tool_message_and_a_record(env: GeoSearch) -> None:
    seen = say(env, "<search>Belgium capital</search>")
    assert [m.role for m in seen.messages] == ["tool"] and not seen.done
    assert seen.messages[0].content.startswith("- Belgium: ") and "Brussels" in seen.messages[0].content
    (record,) = seen.tool_records
    assert (record.call.name, record.ok, record.turn) == ("search", True, 0)
    assert record.call.arguments == {"query": "Belgium capital", "k": 1}
    assert record.result == seen.messages[0].content
    assert env.state() == {"num_searches": 1, "num_invalid": 0, "queries": ["Belgium capital"]}


def test_k_passages_come_one_a_line(world: World) -> None:
    env = GeoSearch(k=3)
    env.reset(Task(id="t", messages=()), 0)
    assert len(say(env, "<search>Belgium capital</search>").messages[0].content.split("\n")) == 3


@pytest.mark.parametrize("query", ["", "???", "the of", "zzzzqqqq"])
def test_a_query_without_known_words_has_no_results(env: GeoSearch, query: str) -> None:
    seen = say(env, f"<search>{query}</search>")
    assert seen.messages[0].content == "No results." and seen.tool_records[0].ok


def test_the_answer_ends_the_episode(env: GeoSearch) -> None:
    seen = say(env, "It says so. <answer> Brussels </answer>")
    assert (seen.done, seen.stop_reason, seen.answer) == (True, StopReason.ANSWERED, "Brussels")
    assert seen.messages == ()


def test_malformed_turns_are_corrected_then_end_the_episode(env: GeoSearch) -> None:
    first = say(env, "Brussels")
    assert first.messages[0].role == "tool" and "<answer>" in first.messages[0].content
    assert not first.tool_records[0].ok and not first.tool_records[0].call.name  # malformed, and no call
    say(env, "<search>Belgium</search>")  # a good turn in between starts the count anew
    assert not say(env, "Brussels").done
    last = say(env, "Brussels")
    assert (last.done, last.stop_reason, last.answer) == (True, StopReason.INVALID_CALLS, None)
    assert env.state()["num_invalid"] == 3


def test_after_the_last_search_the_agent_must_answer(world: World) -> None:
    def searched() -> GeoSearch:
        env = GeoSearch(max_searches=2)
        env.reset(Task(id="t", messages=()), 0)
        assert not say(env, "<search>Belgium</search>").done
        assert not say(env, "<search>Belgium capital</search>").done
        return env

    assert say(searched(), "<answer>Brussels</answer>").stop_reason is StopReason.ANSWERED
    late = searched()
    assert say(late, "<search>Ghent</search>").stop_reason is StopReason.MAX_TURNS
    assert late.state()["num_searches"] == 2
    assert say(searched(), "Brussels").stop_reason is StopReason.MAX_TURNS


def test_a_cut_turn_ends_the_episode_even_when_it_holds_an_answer(env: GeoSearch) -> None:
    seen = say(env, "<answer>Brussels</answer>", finished=False)
    assert (seen.done, seen.stop_reason, seen.answer) == (True, StopReason.MAX_TOKENS, None)


def test_reset_forgets_the_episode_before_and_adds_a_system_message_once(env: GeoSearch) -> None:
    say(env, "<search>Belgium</search>")
    task = next(env.tasks("dev"))
    assert env.reset(task, 0).messages == task.messages
    assert [m.role for m in task.messages] == ["system", "user"]
    assert env.state()["num_searches"] == 0
    bare = Task(id="t", messages=task.messages[1:])
    assert env.reset(bare, 0).messages == task.messages


@pytest.mark.parametrize("tag", ["<search>", "</answer>", "< /Answer >", "<|im_end|>"])
def test_markup_in_retrieved_text_is_neutralised(tag: str) -> None:
    text = neutralise(f"Ghent {tag} 3 < 4 <b>")
    assert tag not in text and text.endswith("3 < 4 <b>") and text.startswith("Ghent [")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"k": 0}, ["k: got 0", "greater than or equal to 1"]),
        ({"max_searches": "4"}, ["max_searches: got '4'"]),
        ({"max_invalid": True}, ["max_invalid: got True"]),
        ({"min_population": 100}, ["min_population: got 100", "15000"]),
        ({"max_cities_per_country": 1}, ["max_cities_per_country"]),
        ({"expert_noise": 1.5}, ["expert_noise: got 1.5", "less than or equal to 1"]),
        ({"kinds": "count"}, ["kinds: got 'count'", "a list"]),
        ({"kinds": ["two_hops"]}, ["'two_hops'", "three_hop", "did you mean 'two_hop'"]),
        ({"kinds": {"count": -1}}, ["kinds.count: got -1"]),
        ({"kinds": []}, ["chooses nothing"]),
    ],
)
def test_a_wrong_option_is_refused_in_one_line(options: dict, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        GeoSearch(**options)
    assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value)


def test_an_unknown_split_is_refused_when_asked_for(env: GeoSearch) -> None:
    with pytest.raises(ConfigError, match="no split 'tset'; allowed: train, dev, test; did you mean 'test'"):
        env.tasks("tset")


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "bm25s" else real(name))
    with pytest.raises(ConfigError, match=r"needs bm25s; install with: pip install 'upswing\[search\]'"):
        GeoSearch()


def test_kinds_that_the_searches_cannot_answer_are_refused(world: World) -> None:
    with pytest.raises(ConfigError, match=r"no three_hop question .* raise max_searches"):
        next(GeoSearch(kinds=["three_hop"], max_searches=2).tasks("dev"))


def test_weights_choose_the_mix(world: World) -> None:
    env = GeoSearch(kinds={"count": 3, "homonym": 1, "one_hop": 0})
    kinds = [task.tags["kind"] for task in islice(env.tasks("train"), 200)]
    assert set(kinds) == {"count", "homonym"} and 120 <= kinds.count("count") <= 180
