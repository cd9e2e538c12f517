"""Question forms: each turns place ids into a draft with its question, gold answers and the hops that lead there.

A draft is a pure function of the facts and the random choice of wording. Whether it is fair (the passages are found
by a good query, a trap really traps) is checked against the real index in `pools`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from upswing.envs.geo_search.corpus import World, degrees
from upswing.envs.geo_search.facts import City, Country
from upswing.envs.geo_search.names import forms, join_names, number, with_the
from upswing.envs.geo_search.tables import WORDINGS

ATTRIBUTES: Mapping[str, Sequence[str]] = WORDINGS["attributes"]
VAGUE: Mapping[str, Sequence[str]] = WORDINGS["vague"]
_QUESTIONS: Mapping[str, Sequence[str]] = WORDINGS["questions"]
_REFERENCES: Mapping[str, Sequence[str]] = WORDINGS["references"]

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
    entities: tuple[str, ...]
    """`country:BE`, `city:2803138`, `subdivision:DE.02`: every place mentioned, traversed or answered."""
    final: Mapping[str, Any] = field(default_factory=lambda: {"op": "value"})
    """How the hops' facts make the answer: `{'op': 'value' | 'max' | 'north' | 'count_list' | 'count_equal', ...}`;
    `facts` in it are those that the question gives."""


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
    if attribute in ("population", "area"):
        value = getattr(country, attribute)
        return number_forms(value) if value else ()
    text = getattr(country, "main_language" if attribute == "language" else attribute)
    if text is None:
        return ()
    return (text, f"+{text}") if attribute == "calling_code" else forms(text)


def number_forms(value: int) -> tuple[str, ...]:
    return tuple(dict.fromkeys((number(value), str(value))))


def country_forms(country: Country) -> tuple[str, ...]:
    return forms(country.name, with_the(country.name))


def attribute_hop(country: Country, attribute: str, subject: str | int) -> Step:
    return hop(attribute, subject, f"country/{country.iso}/{attribute}")


def attribute_entities(country: Country, attribute: str) -> tuple[str, ...]:
    """The places an attribute's answer adds: the capital's city."""
    return (f"city:{country.capital_id}",) if attribute == "capital" and country.capital_id else ()


def _say(rng: random.Random, texts: Sequence[str], **values: str) -> str:
    """One of the wordings, filled in; a single one is taken without drawing."""
    return (rng.choice(texts) if len(texts) > 1 else texts[0]).format(**values)


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

    country: Country
    phrase: str
    steps: tuple[Step, ...]
    entities: tuple[str, ...]

    @property
    def subject(self) -> str | int:
        """What the next hop asks about: the last hop's fact, or the country's name."""
        return len(self.steps) - 1 if self.steps else self.country.name


def refer(world: World, way: str, key: Any, rng: random.Random) -> Reference:
    """The country that `key` leads to by `way`: `name`, `city`, `capital`, `currency`, `iso` or `alias`."""
    if way == "city":
        city = world.facts.cities[key]
        country = world.facts.countries[city.country]
        phrase = _say(rng, _REFERENCES["city"], x=city.name)
        return Reference(country, phrase, (_where(world, city),), (city_id(city), country_id(country)))
    country = world.facts.countries[key[0] if way == "alias" else key]
    own = (country_id(country), *attribute_entities(country, way))
    if way == "name":
        return Reference(country, with_the(country.name), (), own)
    if way == "alias":
        name, wording = country.aliases[key[1]]
        step = hop("alias", name, f"alias/{country.iso}/{key[1]}")
    else:
        currency = country.currency[0] if country.currency else ""
        name, wording = {"capital": country.capital or "", "currency": currency, "iso": country.iso3}[way], way
        step = hop(f"{way}_of", name, f"country/{country.iso}/{way}")
    return Reference(country, _say(rng, _REFERENCES[wording], x=name), (step,), own)


# --- forms: `pools` names them ----------------------------------------------------------------------------------------


def attribute_of(world: World, ids: Ids, rng: random.Random) -> Draft:
    """(way, key, attribute[, 'vague']): an attribute of a country."""
    way, key, attribute = ids[:3]
    ref = refer(world, way, key, rng)
    texts = VAGUE[attribute] if ids[3:] == ("vague",) else ATTRIBUTES[attribute]
    return Draft(
        question=_say(rng, texts, x=ref.phrase),
        gold=attribute_gold(ref.country, attribute),
        plan=(*ref.steps, attribute_hop(ref.country, attribute, ref.subject)),
        entities=ref.entities + attribute_entities(ref.country, attribute),
    )


def capital_population(world: World, ids: Ids, rng: random.Random) -> Draft:
    """(way, key): how many people the capital has."""
    ref = refer(world, ids[0], ids[1], rng)
    city = world.facts.cities[ref.country.capital_id or 0]
    qualifier = ref.subject if city.qualifier == ref.country.name else city.qualifier
    passage = f"city/{city.id}/population"
    return Draft(
        question=_say(rng, ATTRIBUTES["population"], x=f"the capital of {ref.phrase}"),
        gold=number_forms(city.population),
        plan=(
            *ref.steps,
            attribute_hop(ref.country, "capital", ref.subject),
            hop("city_population", len(ref.steps), passage, qualifier=qualifier, soft=True),
        ),
        entities=(*ref.entities, city_id(city)),
    )


def neighbour_attribute(world: World, ids: Ids, rng: random.Random) -> Draft:
    """(way, key, attribute): of the only country that borders another."""
    ref = refer(world, ids[0], ids[1], rng)
    other = world.facts.countries[ref.country.neighbours[0]]
    phrase = _say(rng, _REFERENCES["neighbour"], x=ref.phrase)
    return Draft(
        question=_say(rng, ATTRIBUTES[ids[2]], x=phrase),
        gold=attribute_gold(other, ids[2]),
        plan=(
            *ref.steps,
            hop("neighbour", ref.subject, f"country/{ref.country.iso}/borders"),
            attribute_hop(other, ids[2], len(ref.steps)),
        ),
        entities=(*ref.entities, country_id(other), *attribute_entities(other, ids[2])),
    )


def country_by(world: World, ids: Ids, rng: random.Random) -> Draft:
    """(way, key): which country has this capital or this currency."""
    ref = refer(world, ids[0], ids[1], rng)
    question = _say(rng, _QUESTIONS[f"by_{ids[0]}"], x=ref.steps[0]["subject"])
    return Draft(question=question, gold=country_forms(ref.country), plan=ref.steps, entities=ref.entities)


def city_fact(world: World, ids: Ids, rng: random.Random) -> Draft:
    """(relation, city id): country, subdivision or population of a city, homonyms named with a qualifier."""
    relation, key = ids
    city = world.facts.cities[key]
    country = world.facts.countries[city.country]
    region, nation = f"subdivision:{city.subdivision_id}", country_id(country)
    name, entities = city.name, [city_id(city)]
    if city.qualifier is not None:
        name += f" in {with_the(city.qualifier)}"
        entities.append(nation if city.qualifier == country.name else region)
    if relation == "country":
        texts, gold = _QUESTIONS["city_country"], country_forms(country)
        step = _where(world, city, qualifier=city.qualifier)
        entities.append(nation)
    elif relation == "subdivision":
        texts, gold = _QUESTIONS["city_subdivision"], forms(city.subdivision or "")
        step = hop(relation, city.name, f"city/{key}/country", qualifier=city.qualifier)
        entities.append(region)
    else:
        texts, gold = ATTRIBUTES["population"], number_forms(city.population)
        step = hop(relation, city.name, f"city/{key}/population", qualifier=city.qualifier)
    question = _say(rng, texts, x=name)
    return Draft(question=question, gold=gold, plan=(step,), entities=tuple(dict.fromkeys(entities)))


def homonym_by_country(world: World, ids: Ids, rng: random.Random) -> Draft:
    """(way, city id): the population of the namesake in a country that is itself only described."""
    way, key = ids
    city = world.facts.cities[key]
    ref = refer(world, way, city.country, rng)
    return Draft(
        question=_say(rng, _QUESTIONS["homonym_population"], c=city.name, x=ref.phrase),
        gold=number_forms(city.population),
        plan=(*ref.steps, hop("city_population", city.name, f"city/{city.id}/population", qualifier=0)),
        entities=(*ref.entities, city_id(city)),
    )


def renamed_city(world: World, ids: Ids, rng: random.Random) -> Draft:
    """(relation, city id, alias number): country or population of a city by its older name."""
    relation, key, index = ids
    city = world.facts.cities[key]
    country = world.facts.countries[city.country]
    alias = city.aliases[index]
    if relation == "country":
        step, gold, more = _where(world, city, 0), country_forms(country), [country_id(country)]
    else:
        step, gold, more = hop(relation, 0, f"city/{city.id}/population"), number_forms(city.population), []
    return Draft(
        question=_say(rng, _QUESTIONS[f"renamed_{relation}"], x=alias),
        gold=gold,
        plan=(hop("alias", alias, f"alias/{city.id}/{index}"), step),
        entities=(city_id(city), *more),
    )


def compare(world: World, ids: Ids, rng: random.Random, *, given: bool = False) -> Draft:
    """(measure, id, id): which of two cities or countries has more people or area, or lies further north; where both
    facts are `given` in the question there is nothing to search for."""
    measure, pair = ids[0], list(ids[1:])
    rng.shuffle(pair)
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
    facts = [degrees(v, "N", "S") if measure == "latitude" else number(int(v)) for v in values]
    a, b = (with_the(name) + f" ({fact})" * given for name, fact in zip(names, facts, strict=True))
    source = {"facts": facts} if given else {"of": [0, 1]}
    return Draft(
        question=_say(rng, _QUESTIONS[f"compare_{measure}"], a=a, b=b),
        gold=forms(best, with_the(best)),
        plan=() if given else tuple(steps),
        entities=entities,
        final={"op": "north" if measure == "latitude" else "max", "names": names, **source},
    )


def order(world: World, ids: Ids, rng: random.Random) -> Draft:
    """(measure, id, id): the exercise for `compare`."""
    return compare(world, ids, rng, given=True)


def compare_capital(world: World, ids: Ids, rng: random.Random) -> Draft:
    """(city id, iso): a city against the capital of a country."""
    city, country = world.facts.cities[ids[0]], world.facts.countries[ids[1]]
    capital = world.facts.cities[country.capital_id or 0]
    best = city.name if city.population > capital.population else capital.name
    return Draft(
        question=_say(rng, _QUESTIONS["compare_capital"], a=city.name, b=with_the(country.name)),
        gold=forms(best),
        plan=(
            attribute_hop(country, "capital", country.name),
            hop("city_population", 0, f"city/{capital.id}/population", qualifier=capital.qualifier, soft=True),
            hop("city_population", city.name, f"city/{city.id}/population"),
        ),
        entities=(city_id(city), country_id(country), city_id(capital)),
        final={"op": "max", "names": [0, city.name], "of": [1, 2]},
    )


def count_borders(world: World, ids: Ids, rng: random.Random) -> Draft:
    """(way, key): how many countries border one. Only their number is asked, so the neighbours may be anyone's."""
    ref = refer(world, ids[0], ids[1], rng)
    return Draft(
        question=_say(rng, _QUESTIONS["count_borders"], x=ref.phrase),
        gold=(str(len(ref.country.neighbours)),),
        plan=(*ref.steps, attribute_hop(ref.country, "borders", ref.subject)),
        entities=ref.entities,
        final={"op": "count_list"},
    )


def count_in_country(world: World, ids: Ids, rng: random.Random) -> Draft:
    """(iso, city ids...): how many of the cities are in the country."""
    country = world.facts.countries[ids[0]]
    cities = [world.facts.cities[i] for i in ids[1:]]
    rng.shuffle(cities)
    names = [c.name for c in cities]
    found = [country_id(world.facts.countries[c.country]) for c in cities]
    return Draft(
        question=_say(rng, _QUESTIONS["count_in_country"], l=join_names(names), x=with_the(country.name)),
        gold=(str(sum(c.country == country.iso for c in cities)),),
        plan=tuple(_where(world, c) for c in cities),
        entities=tuple(dict.fromkeys((country_id(country), *found, *(city_id(c) for c in cities)))),
        final={"op": "count_equal", "names": names, "to": country.name},
    )
