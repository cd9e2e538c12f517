"""Which questions there are: per kind and split, every combination of places, checked for fairness when drawn."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from upswing.envs.geo_search import questions
from upswing.envs.geo_search.corpus import World
from upswing.envs.geo_search.expert import Plan, solve
from upswing.envs.geo_search.facts import City, Country
from upswing.envs.geo_search.names import fold, stable_hash, tokenize
from upswing.envs.geo_search.questions import ATTRIBUTES, VAGUE, Draft, Ids, attribute_gold
from upswing.envs.geo_search.relations import RELATIONS
from upswing.envs.geo_search.tables import (
    NO_BORDER_QUESTION,
    NO_CAPITAL_QUESTION,
    NO_CONTINENT_QUESTION,
    SHARED_CURRENCIES,
)
from upswing.trajectory.types import Message, Task

KINDS = ("one_hop", "two_hop", "three_hop", "comparison", "count", "homonym", "distractor")
EXERCISES = ("order",)
"""What only demonstrations are made of, when asked for by name."""
SYSTEM = "Search: <search> words</search>. Give only the answer: <answer> ...</answer>"
_PAIRS = 1500  # pairs and triples drawn per form: far more than anyone plays, few enough to hold
_RATIO = 1.3  # a comparison is fair when the larger value is at least this much larger
_DEGREES = 3.0
_MAX_COUNT = 8  # neighbours that a question may ask to count

Spec = tuple[str, Ids]
"""(a form: the name of its function in `questions`; the form's ids)."""


@dataclass(frozen=True, eq=False)
class Places:
    """The places of one split that may be asked about."""

    world: World
    countries: tuple[Country, ...]
    cities: tuple[City, ...]
    """With a name of their own."""
    homonyms: tuple[City, ...]

    @classmethod
    def of(cls, world: World, split: str) -> Places:
        facts = world.facts
        own = [c for c in facts.cities.values() if facts.countries[c.country].split == split]
        return cls(
            world,
            tuple(c for c in facts.countries.values() if c.split == split),
            tuple(c for c in own if c.qualifier is None),
            tuple(c for c in own if c.qualifier is not None and not c.ambiguous),
        )

    def attributes(self, country: Country) -> list[str]:
        """The attributes of a country that have one correct answer."""
        barred = {"capital": NO_CAPITAL_QUESTION, "continent": NO_CONTINENT_QUESTION}
        return [a for a in ATTRIBUTES if attribute_gold(country, a) and country.iso not in barred.get(a, ())]

    def ways(self, country: Country) -> list[tuple[str, Any]]:
        """How a country can be described without its name: by capital or by a currency of its own."""
        found: list[tuple[str, Any]] = []
        if country.iso not in NO_CAPITAL_QUESTION and country.capital:
            found.append(("capital", country.iso))
        if country.currency and country.currency[0] in _own_currencies(self.world):
            found.append(("currency", country.iso))
        return found

    def has_capital(self, country: Country) -> bool:
        return country.capital_id is not None and country.iso not in NO_CAPITAL_QUESTION


@functools.lru_cache(maxsize=8)
def _own_currencies(world: World) -> frozenset[str]:
    pairs = [c.currency for c in world.facts.countries.values() if c.currency]
    names = [name for name, code in pairs if code not in SHARED_CURRENCIES]
    return frozenset(name for name in names if names.count(name) == 1)


def _one_hop(p: Places) -> dict[str, list[Spec]]:
    return {
        "country": [("attribute_of", ("name", c.iso, a)) for c in p.countries for a in p.attributes(c)],
        "city": [("city_fact", (r, c.id)) for c in p.cities for r in ("country", "city_population")],
        "region": [("city_fact", ("subdivision", c.id)) for c in p.cities if c.subdivision],
        "inverse": [("country_by", way) for c in p.countries for way in p.ways(c)],
    }


def _two_hop(p: Places) -> dict[str, list[Spec]]:
    by_iso = p.world.facts.countries
    return {
        "city": [
            ("attribute_of", ("city", c.id, a))
            for c in p.cities
            for a in p.attributes(by_iso[c.country])
            if not (a == "capital" and by_iso[c.country].capital_id == c.id)
        ],
        "described": [
            ("attribute_of", (*way, a))
            for c in p.countries
            for way in p.ways(c)
            for a in p.attributes(c)
            if a != way[0]
        ],
        "capital": [("capital_population", ("name", c.iso)) for c in p.countries if p.has_capital(c)],
    }


def _three_hop(p: Places) -> dict[str, list[Spec]]:
    by_iso = p.world.facts.countries
    single = {
        c.iso: by_iso[c.neighbours[0]]
        for c in p.countries
        if len(c.neighbours) == 1 and c.iso not in NO_BORDER_QUESTION and by_iso[c.neighbours[0]].split == c.split
    }
    return {
        "city": [
            ("capital_population", ("city", c.id))
            for c in p.cities
            if p.has_capital(by_iso[c.country]) and by_iso[c.country].capital_id != c.id
        ],
        "currency": [
            ("capital_population", w) for c in p.countries if p.has_capital(c) for w in p.ways(c) if w[0] == "currency"
        ],
        "neighbour": [
            ("neighbour_attribute", (*way, a))
            for iso, other in single.items()
            for way in [*p.ways(by_iso[iso]), *(("city", c.id) for c in p.cities if c.country == iso)]
            for a in p.attributes(other)
        ],
    }


def _comparison(p: Places) -> dict[str, list[Spec]]:
    rng = random.Random(stable_hash("comparison", len(p.cities)))
    large = [c for c in p.countries if c.population and c.area]
    capitals = [c for c in p.countries if p.has_capital(c)]
    found: dict[str, list[Spec]] = {"city": [], "population": [], "area": [], "north": [], "capital": []}
    for _ in range(_PAIRS):
        # In a fixed order, so that a pair is one question whichever place was drawn first.
        a, b = sorted(rng.sample(p.cities, 2), key=lambda c: c.id)
        if _apart(a.population, b.population):
            found["city"].append(("compare", ("city_population", a.id, b.id)))
        a, b = sorted(rng.sample(p.cities, 2), key=lambda c: c.id)
        if abs(a.latitude - b.latitude) >= _DEGREES and max(a.latitude, b.latitude) > 0:
            found["north"].append(("compare", ("latitude", a.id, b.id)))
        x, y = sorted(rng.sample(large, 2), key=lambda c: c.iso)
        for measure in ("population", "area"):
            if _apart(getattr(x, measure), getattr(y, measure)):
                found[measure].append(("compare", (measure, x.iso, y.iso)))
        city, country = rng.choice(p.cities), rng.choice(capitals)
        capital = p.world.facts.cities[country.capital_id or 0]
        if city.country != country.iso and _apart(city.population, capital.population):
            found["capital"].append(("compare_capital", (city.id, country.iso)))
    return {name: list(dict.fromkeys(specs)) for name, specs in found.items()}


def _apart(a: float, b: float) -> bool:
    return max(a, b) >= _RATIO * min(a, b)


def _count(p: Places) -> dict[str, list[Spec]]:
    rng = random.Random(stable_hash("count", len(p.cities)))
    countable = {c.iso for c in p.countries if 0 < len(c.neighbours) <= _MAX_COUNT and c.iso not in NO_BORDER_QUESTION}
    by_country: dict[str, list[int]] = {}
    for city in p.cities:
        by_country.setdefault(city.country, []).append(city.id)
    rich = [iso for iso, ids in by_country.items() if len(ids) >= 3]
    triples: list[Spec] = []
    for _ in range(_PAIRS):
        iso, size = rng.choice(rich), rng.choice((2, 3, 3))
        inside = rng.randint(0, size)
        others = rng.sample([c.id for c in p.cities if c.country != iso], size - inside)
        triples.append(("count_in_country", (iso, *sorted(rng.sample(by_country[iso], inside) + others))))
    return {
        "borders": [("count_borders", ("name", iso)) for iso in sorted(countable)],
        "described": [("count_borders", w) for c in p.countries if c.iso in countable for w in p.ways(c)],
        "city": [("count_borders", ("city", c.id)) for c in p.cities if c.country in countable],
        "inside": list(dict.fromkeys(triples)),
    }


def _homonym(p: Places) -> dict[str, list[Spec]]:
    by_iso = p.world.facts.countries
    abroad = [c for c in p.homonyms if c.qualifier == by_iso[c.country].name]
    return {
        "named": [("city_fact", ("city_population", c.id)) for c in p.homonyms],
        "region": [("city_fact", ("subdivision", c.id)) for c in abroad if c.subdivision],
        "described": [("homonym_by_country", (way[0], c.id)) for c in abroad for way in p.ways(by_iso[c.country])],
    }


def _distractor(p: Places) -> dict[str, list[Spec]]:
    aliases = [(c, "alias", (c.iso, i)) for c in p.countries for i in range(len(c.aliases))]
    codes = [(c, "iso", c.iso) for c in p.countries]
    renamed = [(c.id, i) for c in p.cities for i in range(len(c.aliases))]
    return {
        "alias": [("attribute_of", (w, k, a)) for c, w, k in aliases for a in p.attributes(c)],
        "code": [("attribute_of", (w, k, a)) for c, w, k in codes for a in p.attributes(c)],
        "far": [("capital_population", (w, k)) for c, w, k in aliases + codes if p.has_capital(c)],
        "renamed": [("renamed_city", (r, c, i)) for c, i in renamed for r in ("country", "city_population")],
        "vague": [
            ("attribute_of", ("name", c.iso, a, "vague")) for c in p.countries for a in p.attributes(c) if a in VAGUE
        ],
    }


def _order(p: Places) -> dict[str, list[Spec]]:
    return {
        name: [("order", ids) for form, ids in specs if form == "compare"] for name, specs in _comparison(p).items()
    }


_BUILDERS = (_one_hop, _two_hop, _three_hop, _comparison, _count, _homonym, _distractor, _order)
_BY_KIND = dict(zip((*KINDS, *EXERCISES), _BUILDERS, strict=True))


@functools.lru_cache(maxsize=64)
def pool(world: World, split: str, kind: str) -> Mapping[str, Sequence[Spec]]:
    """Form -> the specs of a kind in a split, before fairness is checked."""
    return {name: specs for name, specs in _BY_KIND[kind](Places.of(world, split)).items() if specs}


def draws(world: World, split: str, kind: str, seed: int, max_searches: int = 4) -> Iterator[Task]:
    """The fair tasks of a kind, shuffled; none repeats before all have come; then again in a new order, for ever.

    Forms take equal turns while they last, so a form with few questions isn't drowned by one with thousands.
    """
    rng = random.Random(stable_hash(split, kind, seed))
    while True:
        left = {name: list(specs) for name, specs in pool(world, split, kind).items()}
        for specs in left.values():
            rng.shuffle(specs)
        found = False
        while left:
            name = rng.choice(sorted(left))
            spec = left[name].pop()
            if not left[name]:
                del left[name]
            task = make_task(world, split, kind, spec, rng, max_searches)
            if task is not None:
                found = True
                yield task
        if not found:
            return


def make_task(
    world: World, split: str, kind: str, spec: Spec, rng: random.Random, max_searches: int = 4
) -> Task | None:
    """The task of a spec, or None when it wouldn't be a fair one (see `fair`)."""
    form, ids = spec
    draft: Draft = getattr(questions, form)(world, ids, rng)
    if not fair(world, kind, draft, max_searches):
        return None
    plan = list(draft.plan)
    passages = [step["gold"] for step in plan]
    trap = kind if kind in ("homonym", "distractor") else "none"
    return Task(
        id=f"geo-{stable_hash(split, kind, draft.question):016x}",
        messages=(Message(role="system", content=SYSTEM), Message(role="user", content=draft.question)),
        gold=draft.gold,
        data={"entities": list(draft.entities), "passages": passages, "plan": plan, "final": dict(draft.final)},
        tags={"kind": kind, "hops": str(len(plan)), "trap": trap},
        env="geo_search",
        split=split,
    )


def fair(world: World, kind: str, draft: Draft, max_searches: int = 4) -> bool:
    """Is the question fair, and its trap real?

    At most `max_searches` good queries at k=1 must lead to the gold answer, and the question must not hold it.
    """
    if not draft.gold:
        return False
    asked = f" {fold(draft.question)} "
    choice = draft.final["op"] in ("max", "north")
    if not choice and any(f" {fold(answer)}" in asked for answer in draft.gold if not answer.isdigit()):
        return False
    answer, _ = solve(Plan(steps=draft.plan, final=draft.final), lambda q: lines(world, q, 1), max_searches)
    if answer not in draft.gold:
        return False
    if not draft.plan:
        return True
    last, first = draft.plan[-1], draft.plan[0]["subject"]
    query, own = RELATIONS[last["relation"]].queries[0], set(tokenize(draft.question))
    traps = {
        "homonym": [(query.format(s=last["subject"]), 1)],
        "distractor": [(draft.question, 2), (f"{first} {' '.join(t for t in tokenize(query) if t in own)}", 2)],
    }
    wanted = set(last["gold"])
    return not any(p.id in wanted for text, k in traps.get(kind, ()) for p in world.search(text, k))


def lines(world: World, query: str, k: int) -> list[str]:
    """Result lines as the agent sees them."""
    return [p.line for p in world.search(query, k)]
