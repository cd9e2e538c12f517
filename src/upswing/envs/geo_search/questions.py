"""Question forms: each turns place ids into a draft with its question, gold answers and the hops that lead there.

A draft is a pure function of the facts and the random choice of wording. Whether it is fair (the passages are found
by a good query, a trap really traps) is checked against the real index in `pools`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from upswing.envs.geo_search.corpus import World
from upswing.envs.geo_search.facts import City, Country
from upswing.envs.geo_search.names import forms, join_names, number, with_the

ATTRIBUTES: Mapping[str, tuple[str, ...]] = {
    "capital": ("What is the capital of {x}?", "Which city is the capital of {x}?"),
    "currency": ("What is the currency of {x}?", "Which currency does {x} use?"),
    "language": ("What is the main language of {x}?", "Which language is the main one in {x}?"),
    "population": ("What is the population of {x}?", "How large is the population of {x}?"),
    "area": ("What is the area in square km of {x}?", "How many square km is the area of {x}?"),
    "calling_code": ("What is the calling code of {x}?", "Which calling code does {x} have?"),
    "continent": ("On which continent is {x}?", "Which continent is {x} part of?"),
}
VAGUE: Mapping[str, tuple[str, ...]] = {
    "currency": ("What money do people pay with in {x}?", "What do shops in {x} take as payment?"),
    "population": ("How many inhabitants does {x} have?", "How many people live in {x}?"),
    "language": ("What do people in {x} mostly speak?", "In what tongue do people in {x} talk?"),
    "area": ("How big is {x}, in square kilometres?", "How large is the territory of {x}?"),
    "calling_code": ("Which prefix do you dial to phone {x}?", "What do you dial before a number in {x}?"),
    "capital": ("Which city does {x} have as its seat of state?", "What is the main city of state of {x}?"),
}
"""Wordings that avoid the passages' own words, so that the question itself makes a poor query."""

Ids = tuple[Any, ...]
Step = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A question before it is checked."""

    question: str
    gold: tuple[str, ...]
    plan: tuple[Step, ...]
    """Hops: `relation`, `subject` (a name, or the index of an earlier hop), `qualifier` (same, or None), `gold`
    (ids of passages, any of which settles the hop) and `soft` (the question doesn't name the qualifier: it is only
    needed when the plain search found a namesake)."""
    final: Mapping[str, Any]
    """How the hops' facts make the answer: `{'op': 'value' | 'max' | 'north' | 'count_list' | 'count_equal', ...}`."""
    entities: tuple[str, ...]
    """`country:BE`, `city:2803138`, `subdivision:DE.02`: every place mentioned, traversed or answered."""
    hops: int


VALUE: Mapping[str, Any] = {"op": "value"}


def hop(relation: str, subject: str | int, *gold: str, qualifier: str | int | None = None, soft: bool = False) -> Step:
    """One step of a plan."""
    return {"relation": relation, "subject": subject, "qualifier": qualifier, "gold": list(gold), "soft": soft}


def country_id(country: Country) -> str:
    return f"country:{country.iso}"


def city_id(city: City) -> str:
    return f"city:{city.id}"


def attribute_gold(country: Country, attribute: str) -> tuple[str, ...]:
    """Accepted answers for an attribute of a country; empty when it has no reliable value."""
    if attribute == "currency":
        return forms(country.currency[0], "{} ({})".format(*country.currency)) if country.currency else ()
    value = {
        "capital": country.capital,
        "language": country.main_language,
        "population": number(country.population) if country.population else None,
        "area": number(country.area) if country.area else None,
        "calling_code": country.calling_code,
        "continent": country.continent,
    }[attribute]
    if value is None:
        return ()
    plain = value.replace(",", "") if attribute in ("population", "area") else value
    extra = (f"+{value}",) if attribute == "calling_code" else ()
    return tuple(dict.fromkeys((*forms(value), plain, *extra)))


def number_forms(value: int) -> tuple[str, ...]:
    return tuple(dict.fromkeys((number(value), str(value))))


def attribute_hop(country: Country, attribute: str, subject: str | int) -> Step:
    return hop(attribute, subject, f"country/{country.iso}/{attribute}")


def attribute_entities(world: World, country: Country, attribute: str) -> tuple[str, ...]:
    """The places an attribute's answer adds: the capital's city."""
    return (f"city:{country.capital_id}",) if attribute == "capital" and country.capital_id else ()


def _pick(rng: random.Random, texts: tuple[str, ...], **values: str) -> str:
    return rng.choice(texts).format(**values)


def _where(world: World, city: City, subject: str | int | None = None, qualifier: str | None = None) -> Step:
    """The hop from a city to its country; the capital's passage of that country says it too."""
    iso = city.country
    more = (f"country/{iso}/capital",) if world.facts.countries[iso].capital_id == city.id else ()
    name = city.name if subject is None else subject
    return hop("country", name, f"city/{city.id}/country", *more, qualifier=qualifier)


# --- what a question starts from: a country named outright or by way of something else ------------------------------


@dataclass(frozen=True)
class Reference:
    """A phrase for a country, and the hops that resolve it."""

    phrase: str
    steps: tuple[Step, ...]
    entities: tuple[str, ...]


def refer(world: World, way: str, key: Any, rng: random.Random) -> tuple[Country, Reference]:
    """The country that `key` leads to by `way`: `name`, `city`, `capital`, `currency`, `iso` or `alias`."""
    countries = world.facts.countries
    if way == "city":
        city = world.facts.cities[key]
        country = countries[city.country]
        texts: tuple[str, ...] = (
            "the country where {c} lies",
            "the country that {c} is in",
            "the country of the city {c}",
        )
        entities = (city_id(city), country_id(country))
        return country, Reference(_pick(rng, texts, c=city.name), (_where(world, city),), entities)
    country = countries[key[0] if way == "alias" else key]
    iso, own = country.iso, (country_id(country),)
    if way == "name":
        return country, Reference(with_the(country.name), (), own)
    if way == "capital":
        step = hop("capital_of", country.capital or "", f"country/{iso}/capital")
        phrase = f"the country whose capital is {country.capital}"
        return country, Reference(phrase, (step,), own + attribute_entities(world, country, "capital"))
    if way == "currency":
        name = country.currency[0] if country.currency else ""
        texts = ("the country whose currency is the {m}", "the country that uses the {m} as currency")
        step = hop("currency_of", name, f"country/{iso}/currency")
        return country, Reference(_pick(rng, texts, m=name), (step,), own)
    if way == "iso":
        step = hop("iso_of", country.iso3, f"country/{iso}/iso")
        return country, Reference(f"the country with ISO code {country.iso3}", (step,), own)
    alias, kind = country.aliases[key[1]]
    texts = {
        "official": ("the {a}", "the state officially called the {a}"),
        "former": ("the country once called {a}", "the country that used to be {a}"),
        "local": ("the country that calls itself {a}", "the country known at home as {a}"),
    }[kind]
    step = hop("alias", alias, f"alias/{iso}/{key[1]}")
    return country, Reference(_pick(rng, texts, a=alias), (step,), own)


# --- forms ----------------------------------------------------------------------------------------------------------


def attribute_of(world: World, ids: Ids, rng: random.Random) -> Draft:
    """(way, key, attribute[, 'vague']): an attribute of a country."""
    way, key, attribute = ids[:3]
    country, ref = refer(world, way, key, rng)
    texts = VAGUE[attribute] if ids[3:] == ("vague",) else ATTRIBUTES[attribute]
    steps = (*ref.steps, attribute_hop(country, attribute, len(ref.steps) - 1 if ref.steps else country.name))
    return Draft(
        question=_pick(rng, texts, x=ref.phrase),
        gold=attribute_gold(country, attribute),
        plan=steps,
        final=VALUE,
        entities=ref.entities + attribute_entities(world, country, attribute),
        hops=len(steps),
    )


def capital_population(world: World, ids: Ids, rng: random.Random) -> Draft:
    """(way, key): how many people the capital has."""
    country, ref = refer(world, ids[0], ids[1], rng)
    city = world.facts.cities[country.capital_id or 0]
    n = len(ref.steps)
    country_subject: str | int = n - 1 if ref.steps else country.name
    texts = ("What is the population of the capital of {x}?", "How large is the population of the capital of {x}?")
    qualifier = country_subject if city.qualifier == country.name else city.qualifier
    steps = (
        *ref.steps,
        attribute_hop(country, "capital", country_subject),
        hop("city_population", n, f"city/{city.id}/population", qualifier=qualifier, soft=True),
    )
    return Draft(
        question=_pick(rng, texts, x=ref.phrase),
        gold=number_forms(city.population),
        plan=steps,
        final=VALUE,
        entities=(*ref.entities, city_id(city)),
        hops=len(steps),
    )


def neighbour_attribute(world: World, ids: Ids, rng: random.Random) -> Draft:
    """(way, key, attribute): of the only country that borders another."""
    country, ref = refer(world, ids[0], ids[1], rng)
    other = world.facts.countries[country.neighbours[0]]
    n = len(ref.steps)
    steps = (
        *ref.steps,
        hop("neighbour", n - 1 if ref.steps else country.name, f"country/{country.iso}/borders"),
        attribute_hop(other, ids[2], n),
    )
    texts = ("the only country that borders {x}", "the single neighbour of {x}")
    return Draft(
        question=_pick(rng, ATTRIBUTES[ids[2]], x=_pick(rng, texts, x=ref.phrase)),
        gold=attribute_gold(other, ids[2]),
        plan=steps,
        final=VALUE,
        entities=(*ref.entities, country_id(other), *attribute_entities(world, other, ids[2])),
        hops=len(steps),
    )


def country_by(world: World, ids: Ids, rng: random.Random) -> Draft:
    """(way, key): which country has this capital or this currency."""
    country, ref = refer(world, ids[0], ids[1], rng)
    texts = {
        "capital": ("Which country has {v} as its capital?", "Of which country is {v} the capital?"),
        "currency": ("Which country uses the {v} as its currency?", "Which country has the {v} as currency?"),
    }[ids[0]]
    value = country.capital if ids[0] == "capital" else (country.currency or ("",))[0]
    return Draft(
        question=_pick(rng, texts, v=str(value)),
        gold=forms(country.name, with_the(country.name)),
        plan=ref.steps,
        final=VALUE,
        entities=ref.entities,
        hops=1,
    )


def city_fact(world: World, ids: Ids, rng: random.Random) -> Draft:
    """(relation, city id): country, subdivision or population of a city, homonyms named with a qualifier."""
    relation, key = ids
    city = world.facts.cities[key]
    country = world.facts.countries[city.country]
    name = city.name if city.qualifier is None else f"{city.name} in {with_the(city.qualifier)}"
    entities = [city_id(city)]
    if city.qualifier is not None:
        entities += [country_id(country) if city.qualifier == country.name else f"subdivision:{city.subdivision_id}"]
    texts: tuple[str, ...]
    if relation == "country":
        gold = forms(country.name, with_the(country.name))
        texts = ("In which country is {x}?", "Which country is {x} in?")
        entities += [country_id(country)]
    elif relation == "subdivision":
        gold = forms(city.subdivision or "")
        texts = ("In which region is the city {x}?", "Which region is {x} part of?")
        entities += [f"subdivision:{city.subdivision_id}"]
    else:
        gold = number_forms(city.population)
        texts = ("What is the population of {x}?", "How large is the population of {x}?")
    topic = "population" if relation == "city_population" else "country"
    step = hop(relation, city.name, f"city/{city.id}/{topic}", qualifier=city.qualifier)
    if relation == "country":
        step = _where(world, city, qualifier=city.qualifier)
    return Draft(
        question=_pick(rng, texts, x=name),
        gold=gold,
        plan=(step,),
        final=VALUE,
        entities=tuple(dict.fromkeys(entities)),
        hops=1,
    )


def homonym_by_country(world: World, ids: Ids, rng: random.Random) -> Draft:
    """(way, city id): the population of the namesake in a country that is itself only described."""
    way, key = ids
    city = world.facts.cities[key]
    ref = refer(world, way, city.country, rng)[1]
    texts = ("What is the population of the {c} in {x}?", "How large is the population of the city {c} in {x}?")
    step = hop("city_population", city.name, f"city/{city.id}/population", qualifier=0)
    return Draft(
        question=_pick(rng, texts, c=city.name, x=ref.phrase),
        gold=number_forms(city.population),
        plan=(*ref.steps, step),
        final=VALUE,
        entities=(*ref.entities, city_id(city)),
        hops=2,
    )


def renamed_city(world: World, ids: Ids, rng: random.Random) -> Draft:
    """(relation, city id, alias number): country or population of a city by its older name."""
    relation, key, index = ids
    city = world.facts.cities[key]
    country = world.facts.countries[city.country]
    alias = city.aliases[index]
    first = hop("alias", alias, f"alias/{city.id}/{index}")
    if relation == "country":
        step, gold = _where(world, city, 0), forms(country.name, with_the(country.name))
        texts = ("In which country is the city once called {a}?", "Which country is the former {a} in?")
    else:
        step, gold = hop(relation, 0, f"city/{city.id}/population"), number_forms(city.population)
        texts = (
            "What is the population of the city once called {a}?",
            "How large is the population of the former {a}?",
        )
    entities = (city_id(city), country_id(country)) if relation == "country" else (city_id(city),)
    return Draft(
        question=_pick(rng, texts, a=alias), gold=gold, plan=(first, step), final=VALUE, entities=entities, hops=2
    )


def compare(world: World, ids: Ids, rng: random.Random) -> Draft:
    """(measure, id, id): which of two cities or countries has more people or area, or lies further north."""
    measure, pair = ids[0], list(ids[1:])
    rng.shuffle(pair)
    texts = {
        "city_population": ("Which city has more people, {a} or {b}?", "Which has the larger population, {a} or {b}?"),
        "population": ("Which country has more people, {a} or {b}?", "Which has the larger population, {a} or {b}?"),
        "area": ("Which country has the larger area, {a} or {b}?", "Which is larger by area, {a} or {b}?"),
        "latitude": ("Which city is further north, {a} or {b}?", "Which lies further north, {a} or {b}?"),
    }[measure]
    if measure in ("population", "area"):
        countries = [world.facts.countries[i] for i in pair]
        names = [c.name for c in countries]
        values: list[float] = [getattr(c, measure) for c in countries]
        steps = [attribute_hop(c, measure, c.name) for c in countries]
        entities = tuple(country_id(c) for c in countries)
    else:
        cities = [world.facts.cities[i] for i in pair]
        names = [c.name for c in cities]
        values = [c.latitude if measure == "latitude" else c.population for c in cities]
        topic = "coordinates" if measure == "latitude" else "population"
        steps = [hop(measure, c.name, f"city/{c.id}/{topic}") for c in cities]
        entities = tuple(city_id(c) for c in cities)
    best = names[values.index(max(values))]
    return Draft(
        question=_pick(rng, texts, a=with_the(names[0]), b=with_the(names[1])),
        gold=forms(best, with_the(best)),
        plan=tuple(steps),
        final={"op": "north" if measure == "latitude" else "max", "names": names, "of": [0, 1]},
        entities=entities,
        hops=2,
    )


def compare_capital(world: World, ids: Ids, rng: random.Random) -> Draft:
    """(city id, iso): a city against the capital of a country."""
    city, country = world.facts.cities[ids[0]], world.facts.countries[ids[1]]
    capital = world.facts.cities[country.capital_id or 0]
    texts = (
        "Which has more people, {a} or the capital of {b}?",
        "Which has the larger population, {a} or the capital of {b}?",
    )
    steps = (
        attribute_hop(country, "capital", country.name),
        hop("city_population", 0, f"city/{capital.id}/population", qualifier=capital.qualifier, soft=True),
        hop("city_population", city.name, f"city/{city.id}/population"),
    )
    best = city.name if city.population > capital.population else capital.name
    return Draft(
        question=_pick(rng, texts, a=city.name, b=with_the(country.name)),
        gold=forms(best),
        plan=steps,
        final={"op": "max", "names": [0, city.name], "of": [1, 2]},
        entities=(city_id(city), country_id(country), city_id(capital)),
        hops=3,
    )


def count_borders(world: World, ids: Ids, rng: random.Random) -> Draft:
    """(way, key): how many countries border one. Only their number is asked, so the neighbours may be anyone's."""
    country, ref = refer(world, ids[0], ids[1], rng)
    texts = ("How many countries border {x}?", "With how many countries does {x} share borders?")
    step = hop("borders", len(ref.steps) - 1 if ref.steps else country.name, f"country/{country.iso}/borders")
    return Draft(
        question=_pick(rng, texts, x=ref.phrase),
        gold=(str(len(country.neighbours)),),
        plan=(*ref.steps, step),
        final={"op": "count_list"},
        entities=ref.entities,
        hops=1 + len(ref.steps),
    )


def count_in_country(world: World, ids: Ids, rng: random.Random) -> Draft:
    """(iso, city ids...): how many of the cities are in the country."""
    country = world.facts.countries[ids[0]]
    cities = [world.facts.cities[i] for i in ids[1:]]
    rng.shuffle(cities)
    names = [c.name for c in cities]
    texts = ("How many of {l} are cities in {x}?", "Of {l}, how many are in {x}?")
    found = tuple(dict.fromkeys(country_id(world.facts.countries[c.country]) for c in cities))
    return Draft(
        question=_pick(rng, texts, l=join_names(names), x=with_the(country.name)),
        gold=(str(sum(c.country == country.iso for c in cities)),),
        plan=tuple(_where(world, c) for c in cities),
        final={"op": "count_equal", "names": names, "to": country.name},
        entities=tuple(dict.fromkeys((country_id(country), *found, *(city_id(c) for c in cities)))),
        hops=len(cities),
    )


Form = Callable[[World, Ids, random.Random], Draft]
FORMS: Mapping[str, Form] = {
    form.__name__: form
    for form in (
        attribute_of,
        capital_population,
        neighbour_attribute,
        country_by,
        city_fact,
        homonym_by_country,
        renamed_city,
        compare,
        compare_capital,
        count_borders,
        count_in_country,
    )
}
