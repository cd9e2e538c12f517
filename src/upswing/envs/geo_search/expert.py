"""The scripted expert: plays a task by searching and reading, with mistakes on purpose when asked for.

It knows the plan (which relation leads from what to what) but takes every intermediate name and the answer from the
text that searches returned. Its turns are computed from the conversation alone, so it can also continue someone
else's.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from upswing.envs.geo_search.names import fold
from upswing.envs.geo_search.relations import RELATIONS, read
from upswing.trajectory.types import Message

Search = Callable[[str], Sequence[str]]
"""A query -> result lines, as the agent would see them."""
UNKNOWN = "unknown"
_UNITS = ("", "thousand", "million", "billion")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A task's hops and how they make an answer (see `questions.Draft`)."""

    steps: tuple[Mapping[str, Any], ...]
    final: Mapping[str, Any]

    def resolve(self, ref: str | int | None, values: Sequence[str]) -> str | None:
        """A name, or the fact that an earlier hop found."""
        return values[ref] if isinstance(ref, int) else ref

    def about(self, index: int, values: Sequence[str]) -> tuple[str, str | None]:
        """(subject, qualifier) of hop `index`."""
        step = self.steps[index]
        return self.resolve(step["subject"], values) or "", self.resolve(step["qualifier"], values)

    def read(self, index: int, lines: Sequence[str], values: Sequence[str]) -> str | None:
        """What the lines say on hop `index`; None when nothing."""
        relation = self.steps[index]["relation"]
        found = (read(relation, line, *self.about(index, values)) for line in lines)
        return next((fact for fact in found if fact is not None), None)

    def queries(self, index: int, values: Sequence[str]) -> list[str]:
        """Queries that ask well for hop `index`, best first."""
        step, (subject, qualifier) = self.steps[index], self.about(index, values)
        full = subject if qualifier is None else f"{subject} {qualifier}"
        subjects = [subject, full] if step["soft"] and full != subject else [full]
        return [query.format(s=name) for query in RELATIONS[step["relation"]].queries for name in subjects]

    def answer(self, values: Sequence[str]) -> tuple[str, str]:
        """(a few words of working, the answer) from the facts of all hops."""
        op = self.final["op"]
        if op == "value":
            return "", values[-1]
        if op == "count_list":
            names = [name.strip() for name in values[-1].split(",")]
            return ", ".join(f"{i} {name}" for i, name in enumerate(names, 1)) + ".", str(len(names))
        if op == "count_equal":
            return self._count_equal(values)
        names = [self.resolve(name, values) or "" for name in self.final["names"]]
        facts = self.final.get("facts") or [values[i] for i in self.final["of"]]
        sizes = [_size(fact) for fact in facts]
        short = [_in_words(fact) for fact in facts]
        # Two numbers that look the same in words are told apart by all of their digits.
        shown = short if len(set(short)) == len(short) else facts
        working = "; ".join(f"{name} {fact}" for name, fact in zip(names, shown, strict=True))
        # The order is written too: a decision of its own, apart from copying a name.
        order = f"{shown[0]} {'>' if sizes[0] > sizes[1] else '<'} {shown[1]}"
        return f"Facts: {working}. {order}.", names[sizes.index(max(sizes))]

    def _count_equal(self, values: Sequence[str]) -> tuple[str, str]:
        count, parts, to = 0, [], self.final["to"]
        for name, value in zip(self.final["names"], values, strict=True):
            hit = fold(value) == fold(to)
            count += hit
            # Both names side by side and then the word: told apart before anything is counted.
            parts.append(f"{name} {value}, {to} {'yes' if hit else 'no'} {count}")
        return f"Facts: {'; '.join(parts)}.", str(count)


def act(verb: str, content: str) -> str:
    """('search', 'Norway capital') -> '<search> Norway capital</search>'.

    With the space a name has the tokens that it has in the question (`ĠNorway`), so that a small model only copies;
    right behind the tag it would have to be spelt anew (`Nor`, `way`), and comes out as Norwood.
    """
    return f"<{verb}> {content}</{verb}>"


def _size(fact: str) -> float:
    """'1,019,022' -> 1019022; '33.45 S' -> -33.45."""
    value = float(fact.replace(",", "").rstrip(" NS"))
    return -value if fact.endswith("S") else value


def _in_words(fact: str) -> str:
    """'17,351,822' -> '17.3 million', cut, not rounded: a small model orders such words far better than digits."""
    head, *groups = fact.split(",")
    return f"{head}.{groups[0][0]} {_UNITS[len(groups)]}" if groups else fact


def solve(plan: Plan, search: Search, max_searches: int) -> tuple[str | None, int]:
    """Play with good queries only -> (the answer, searches made); the answer is None when they don't lead to one."""
    values: list[str] = []
    attempt = used = 0
    while len(values) < len(plan.steps):
        queries = plan.queries(len(values), values)
        if used >= max_searches or attempt >= len(queries):
            return None, used
        values, progressed = absorb(plan, search(queries[attempt]), values)
        used += 1
        attempt = 0 if progressed else attempt + 1
    return plan.answer(values)[1], used


def absorb(plan: Plan, lines: Sequence[str], values: list[str]) -> tuple[list[str], bool]:
    """The values with whatever the lines settle of the next hops, and whether they settled any."""
    values, before = list(values), len(values)
    while len(values) < len(plan.steps):
        found = plan.read(len(values), lines, values)
        if found is None:
            break
        values.append(found)
    return values, len(values) > before


class ScriptedExpert:
    """Callable as an `Expert`: messages -> the next assistant text.

    `noise` is the chance that the first query of a hop is careless (place only, attribute only, vague words, the whole
    question and, with `typos`, a misspelt place). A careless query is only made when it really finds nothing of use
    and the search budget leaves room to recover.
    """

    def __init__(
        self,
        plan: Plan,
        question: str,
        search: Search,
        rng: random.Random,
        *,
        noise: float,
        max_searches: int,
        typos: bool = True,
    ) -> None:
        self.plan, self.question, self.search = plan, question, search
        self.max_searches, self.typos = max_searches, typos
        _, needed = solve(plan, search, max_searches)
        spare = max(0, max_searches - needed)
        careless = [i for i in range(len(plan.steps)) if rng.random() < noise]
        rng.shuffle(careless)
        self.careless = {index: rng.randrange(2**32) for index in careless[:spare]}

    def __call__(self, messages: tuple[Message, ...]) -> str:
        values: list[str] = []
        attempt = used = 0
        for message in messages:
            if message.role == "tool":
                used += 1
                values, progressed = absorb(self.plan, message.content.split("\n"), values)
                attempt = 0 if progressed else attempt + 1
        if len(values) == len(self.plan.steps):
            working, answer = self.plan.answer(values)
            return f"{working} {act('answer', answer)}".strip()
        query = self._query(len(values), values, attempt) if used < self.max_searches else None
        return act("answer", UNKNOWN) if query is None else act("search", query)

    def _query(self, index: int, values: list[str], attempt: int) -> str | None:
        good = self.plan.queries(index, values)
        poor = self._careless_query(index, values)
        queries = good if poor is None else [poor, *good]
        return queries[attempt] if attempt < len(queries) else None

    def _careless_query(self, index: int, values: list[str]) -> str | None:
        """A query that misses the hop, or None when this hop is asked well."""
        if index not in self.careless:
            return None
        rng = random.Random(self.careless[index])
        step, (subject, _) = self.plan.steps[index], self.plan.about(index, values)
        relation = RELATIONS[step["relation"]]
        proper = relation.queries[0].format(s="").strip()
        options = [subject, proper, *(f"{subject} {vague}" for vague in relation.vague)]
        if self.typos:
            options.append(f"{_typo(subject, rng)} {proper}".strip())
        if step["qualifier"] is not None:
            options += [f"{subject} {proper}"] * 3
        if index == 0:
            options.append(self.question.rstrip("?"))
        rng.shuffle(options)
        misses = (q for q in options if q and self.plan.read(index, self.search(q), values) is None)
        return next(misses, None)


def _typo(name: str, rng: random.Random) -> str:
    """Two neighbouring letters of the longest word swapped."""
    words = name.split()
    longest = max(range(len(words)), key=lambda i: len(words[i]))
    letters = words[longest]
    if len(letters) < 4:
        return name
    at = rng.randrange(1, len(letters) - 2)
    words[longest] = letters[:at] + letters[at + 1] + letters[at] + letters[at + 2 :]
    return " ".join(words)
