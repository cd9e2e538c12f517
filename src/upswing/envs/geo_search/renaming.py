"""Tasks whose places bear other names, the same ones in the question, in what a search finds and in the answer.

A small model that has seen only a hundred countries learns to say those: it reads 'Norway' and writes 'Norwood'. Under
names that it has never seen and will never see again, nothing but copying helps.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from upswing.envs.geo_search.corpus import World
from upswing.envs.geo_search.expert import Plan, Search, solve
from upswing.envs.geo_search.names import ascii_text, forms, tokenize
from upswing.trajectory.types import Task

KEY = "renamed"
"""In a task's data: the places' names -> their other names."""


def there(names: Mapping[str, str], text: str) -> str:
    """`text` under the other names."""
    return _swap(tuple(names.items()), text, re.NOFLAG)


def back(names: Mapping[str, str], text: str) -> str:
    """`text` under the real names; in any case of letters, with or without accents, as a search hears them."""
    found = {form.lower(): name for name, other in names.items() for form in forms(other)}
    return _swap(tuple(found.items()), text, re.IGNORECASE)


def _swap(pairs: tuple[tuple[str, str], ...], text: str, flags: re.RegexFlag) -> str:
    pattern, table = _pattern(pairs, flags)
    return pattern.sub(lambda m: table[m[0].lower() if flags else m[0]], text) if table else text


@functools.lru_cache(maxsize=2_000)
def _pattern(pairs: tuple[tuple[str, str], ...], flags: re.RegexFlag) -> tuple[re.Pattern[str], dict[str, str]]:
    longest_first = sorted((name for name, _ in pairs), key=len, reverse=True)
    return re.compile(rf"(?<![\w-])(?:{'|'.join(map(re.escape, longest_first))})(?![\w-])", flags), dict(pairs)


def rename(world: World, task: Task, search: Search, max_searches: int, rng: random.Random) -> Task:
    """The task under other names; the task itself where it can't be solved under them."""
    makers = _made_up(world, rng)
    other: dict[str, str] = {}
    for name in sorted(set(_names(world, task))):
        other[name] = other.get(ascii_text(name)) or next(makers)
        other.setdefault(ascii_text(name), other[name])
    plan = tuple({**s, **{k: _said(other, s[k]) for k in ("subject", "qualifier")}} for s in task.data["plan"])
    final = {**task.data["final"]}
    if "names" in final:
        final["names"] = [_said(other, name) for name in final["names"]]
    if "to" in final:
        final["to"] = there(other, final["to"])
    gold = forms(*(there(other, answer) for answer in task.gold))
    answer, _ = solve(Plan(steps=plan, final=final), lambda q: lines(other, search, q), max_searches)
    if answer not in gold:
        return task
    messages = tuple(replace(m, content=there(other, m.content)) if m.role == "user" else m for m in task.messages)
    data = {**task.data, "plan": [*plan], "final": final, KEY: other}
    tags = {**task.tags, KEY: "yes"}
    return replace(task, id=f"{task.id}-{rng.getrandbits(32):08x}", messages=messages, gold=gold, data=data, tags=tags)


def _said(names: Mapping[str, str], ref: str | int | None) -> str | int | None:
    return there(names, ref) if isinstance(ref, str) else ref


def lines(names: Mapping[str, str], search: Search, query: str) -> list[str]:
    """What a search under the other names finds."""
    return [there(names, line) for line in search(back(names, query))]


def _names(world: World, task: Task) -> Iterator[str]:
    """Every name of the places that a task is about; of a list of neighbours, theirs too."""
    facts = world.facts
    for entity in task.data["entities"]:
        what, _, key = entity.partition(":")
        if what == "country":
            country = facts.countries[key]
            yield from (country.name, *(alias for alias, _ in country.aliases), *filter(None, [country.capital]))
            if task.data["final"]["op"] == "count_list":
                yield from (facts.countries[iso].name for iso in country.neighbours)
        elif what == "city":
            city = facts.cities[int(key)]
            yield from (city.name, *city.aliases, *([city.subdivision] if city.subdivision else []))


def _made_up(world: World, rng: random.Random) -> Iterator[str]:
    """Names that no passage has a word of, none twice: a town's, two towns' halves, or two words."""
    given: set[str] = set()
    while True:
        first, second = rng.choices(world.spare, k=2)
        blend = first[: len(first) // 2 + 1] + second[len(second) // 2 + 1 :]
        name = rng.choices((first, blend, f"{first} {second}"), (3, 3, 1))[0]
        if name not in given and not any(token in world.words for token in tokenize(name)):
            given.add(name)
            yield name
