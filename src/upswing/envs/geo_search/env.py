"""GeoSearch: questions about places, answered by searching short passages of real facts.

The agent's turn holds exactly one action tag, at its end: `<search>words</search>` or `<answer>text</answer>`.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from upswing.envs.base import AssistantMessage, Environment, Expert, Observation, check_split
from upswing.envs.geo_search.corpus import World, build_world
from upswing.envs.geo_search.expert import Plan, ScriptedExpert
from upswing.envs.geo_search.facts import require_packages
from upswing.envs.geo_search.names import stable_hash
from upswing.envs.geo_search.pools import EXERCISES, KINDS, SYSTEM, draws
from upswing.errors import ConfigError, did_you_mean
from upswing.trajectory.types import Message, StopReason, Task, ToolCall, ToolRecord, Trajectory
from upswing.verify.deadline import inline
from upswing.verify.options import Amount, Share

NO_RESULTS = "No results."
INVALID = "Invalid. End with one <search> words</search> or one <answer> text</answer>."
_TAG = re.compile(r"<(/?)(search|answer)>")
_MARKUP = re.compile(r"<(\s*/?\s*(?:search|answer)\s*|\|[^<>|]*\|)>", re.IGNORECASE)


def parse_action(text: str) -> tuple[str, str] | None:
    """('search' | 'answer', content) when the text ends with its only tag; None when malformed."""
    tags = list(_TAG.finditer(text))
    if len(tags) != 2 or tags[0].group(1) or not tags[1].group(1) or tags[0].group(2) != tags[1].group(2):
        return None
    if text[tags[1].end() :].strip():
        return None
    return tags[0].group(2), text[tags[0].end() : tags[1].start()].strip()


def neutralise(text: str) -> str:
    """Result text without anything that reads as an action tag or a chat-template marker: '<' becomes '['."""
    return _MARKUP.sub(r"[\1]", text)


class GeoSearch(Environment):
    """Multi-turn search over facts of GeoNames and ISO, without a network.

    Places (countries, cities, subdivisions) of the splits `train`, `dev` and `test` are disjoint; names of currencies
    and languages, continents and numbers are shared vocabulary. All splits search the same passages.

    Options: `k` passages a search; `max_searches`, after which the next turn must answer; `max_invalid` malformed
    turns in a row end the episode; `kinds`, a list of question kinds or a mapping of weights (`order`, an exercise with
    nothing to search for, comes only when named); `min_population` and `max_cities_per_country` choose the cities;
    `expert_noise`, the chance of a careless first query a hop in demonstrations, and `expert_typos`, whether
    misspelling is one of its habits.
    Raises ConfigError for a wrong option or when the extra `search` isn't installed.
    """

    name = "geo_search"
    protocol = "tags"
    answers_as_tool = True
    """Its answers are tool messages, which the chat template must have a place for."""
    task_options = frozenset({"kinds"})
    play_options = frozenset({"k", "max_invalid", "expert_noise", "expert_typos"})
    k: Annotated[int, Field(ge=1, le=20)] = 1
    max_searches: Annotated[int, Field(ge=1, le=50)] = 4
    max_invalid: Annotated[int, Field(ge=1, le=50)] = 2
    kinds: Sequence[str] | Mapping[str, Amount] = KINDS
    min_population: Annotated[int, Field(ge=15_000, le=1_000_000)] = 100_000
    max_cities_per_country: Annotated[int, Field(ge=5, le=5_000)] = 60
    expert_noise: Share = 0.0
    expert_typos: bool = True

    def __init__(self, **options: Any) -> None:
        require_packages()
        super().__init__(**options)
        self.weights = _weights(self.kinds)
        self._turns = self._invalid_in_a_row = self._invalid = 0
        self._queries: list[str] = []

    @property
    def world(self) -> World:
        """Facts, passages and index, shared by every instance of the process."""
        return build_world(self.min_population, self.max_cities_per_country)

    def search(self, query: str, k: int) -> str:
        """The tool: the k best passages for the query, one `- Title: text` a line, or 'No results.'"""
        return "\n".join(neutralise(p.line) for p in self.world.search(query, k)) or NO_RESULTS

    @inline
    def reset(self, task: Task, seed: int) -> Observation:
        """Start: the task's messages, with the system message in front when the task has none."""
        self._turns = self._invalid_in_a_row = self._invalid = 0
        self._queries = []
        system = () if any(m.role == "system" for m in task.messages) else (Message(role="system", content=SYSTEM),)
        return Observation(messages=system + task.messages)

    def step(self, message: AssistantMessage) -> Observation:
        """Search, answer, or a corrective message; see the class for when an episode ends."""
        self._turns += 1
        if not message.finished:
            return Observation(done=True, stop_reason=StopReason.MAX_TOKENS)
        action = parse_action(message.content)
        if action is None:
            return self._refuse()
        self._invalid_in_a_row = 0
        verb, content = action
        if verb == "answer":
            return Observation(done=True, stop_reason=StopReason.ANSWERED, answer=content)
        if self._turns > self.max_searches:
            return Observation(done=True, stop_reason=StopReason.MAX_TURNS)
        start = time.perf_counter()
        result = self.search(content, self.k)
        call = ToolCall(name="search", arguments={"query": content, "k": self.k})
        took_s = time.perf_counter() - start
        record = ToolRecord(call=call, result=result, ok=True, turn=self._turns - 1, duration_s=took_s)
        self._queries.append(content)
        return _heard(record)

    def _refuse(self) -> Observation:
        self._invalid += 1
        self._invalid_in_a_row += 1
        call = ToolCall(name="")  # what can't be read must not pass for a call
        record = ToolRecord(call=call, result=INVALID, ok=False, turn=self._turns - 1)
        if self._invalid_in_a_row >= self.max_invalid:
            return Observation(done=True, stop_reason=StopReason.INVALID_CALLS, tool_records=(record,))
        if self._turns > self.max_searches:
            return Observation(done=True, stop_reason=StopReason.MAX_TURNS, tool_records=(record,))
        return _heard(record)

    @inline
    def state(self) -> Mapping[str, Any]:
        """`num_searches`, `num_invalid` and the queries."""
        return {"num_searches": len(self._queries), "num_invalid": self._invalid, "queries": list(self._queries)}

    def recovered(self, trajectory: Trajectory) -> bool | None:
        """Did the agent find everything after a search had missed?

        True: some search brought nothing that was still needed, and later ones brought all that was. False: one
        missed and something needed was never found. None: no search missed (or there was none).
        """
        by_line = self.world.by_line
        pending = [set(ids) for ids in trajectory.task.data.get("passages", ())]
        missed = False
        for record in trajectory.tool_records:
            if not record.ok or not pending:
                continue
            seen = {by_line[line] for line in record.result.split("\n") if line in by_line}
            left = [ids for ids in pending if not ids & seen]
            missed = missed or len(left) == len(pending)
            pending = left
        return not pending if missed else None

    def tasks(self, split: str, seed: int = 0) -> Iterator[Task]:
        """Endless tasks of a split, kinds mixed by weight. Within a kind none repeats until all have come.

        Raises ConfigError for an unknown split.
        """
        check_split(self.name, split)
        return self._mixed(split, seed)

    def _mixed(self, split: str, seed: int) -> Iterator[Task]:
        rng = random.Random(stable_hash("mix", split, seed))
        streams = {kind: draws(self.world, split, kind, seed, self.max_searches) for kind in self.weights}
        names, weights = list(self.weights), list(self.weights.values())
        while True:
            kind = rng.choices(names, weights)[0]
            task = next(streams[kind], None)
            if task is None:
                raise ConfigError(
                    f"geo_search has no {kind} question in split '{split}' that {self.max_searches} searches can "
                    "answer; raise max_searches or max_cities_per_country, or leave the kind out of kinds"
                )
            yield task

    def expert(self, task: Task, rng: random.Random) -> Expert:
        """A scripted policy for a task of this environment; careless with chance `expert_noise` a hop.

        Raises ConfigError for a task without a plan.
        """
        if "plan" not in task.data:
            raise ConfigError(f"task '{task.id}' has no plan in its data; the expert only plays geo_search's own tasks")
        plan = Plan(steps=tuple(task.data["plan"]), final=task.data["final"])
        question, noise, typos = task.messages[-1].content, self.expert_noise, self.expert_typos
        limit = self.max_searches
        return ScriptedExpert(plan, question, self._lines, rng, noise=noise, typos=typos, max_searches=limit)

    def _lines(self, query: str) -> list[str]:
        return self.search(query, self.k).split("\n")


def _heard(record: ToolRecord) -> Observation:
    return Observation(messages=(Message(role="tool", content=record.result, name="search"),), tool_records=(record,))


def _weights(kinds: Mapping[str, float] | Sequence[str]) -> dict[str, float]:
    """Kind -> weight above 0. Raises ConfigError."""
    weights = dict(kinds) if isinstance(kinds, Mapping) else dict.fromkeys(kinds, 1.0)
    for kind in weights:
        if kind not in (allowed := (*KINDS, *EXERCISES)):
            hint = did_you_mean(kind, allowed)
            raise ConfigError(f"geo_search option kinds has '{kind}'; allowed: {', '.join(allowed)}{hint}")
    if not any(weights.values()):
        raise ConfigError("geo_search option kinds chooses nothing; give at least one kind a weight above 0")
    return {kind: float(weight) for kind, weight in weights.items() if weight > 0}
