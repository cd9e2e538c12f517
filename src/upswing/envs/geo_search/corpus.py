"""The passages, one short topic each, and the BM25 index over them.

A passage reads `- Title: text`. Facts about a place are spread over passages of one topic each, so that at k=1 a query
has to name both the place and the attribute. Wording varies between places by a fixed hash.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from upswing.envs.geo_search.facts import City, Country, Facts, load_facts
from upswing.envs.geo_search.names import join_names, number, stable_hash, tokenize, with_the
from upswing.envs.geo_search.tables import WORDINGS

BULLET = "- "


@dataclass(frozen=True)
class Passage:
    """One searchable passage."""

    id: str
    """`country/BE/capital`, `city/2803138/country`, `alias/BE/0`."""
    title: str
    text: str

    @property
    def line(self) -> str:
        """As the agent sees it. Behind the dash a name has the tokens that it has in a sentence (see `expert.act`)."""
        return f"{BULLET}{self.title}: {self.text}"


def word(topic: str, key: str, **values: str) -> str:
    """The wording of a topic for the place `key`."""
    choices = WORDINGS["passages"][topic]
    return str(choices[stable_hash(key, topic) % len(choices)]).format(**values)


def degrees(value: float, positive: str, negative: str) -> str:
    """(50.8466, 'N', 'S') -> '50.85 N'."""
    return f"{abs(value):.2f} {positive if value >= 0 else negative}"


def _country_passages(country: Country, facts: Facts) -> Iterator[Passage]:
    neighbours = [facts.countries[n].name for n in country.neighbours]
    texts = {
        "continent": country.continent,
        "iso": country.iso3,
        "capital": country.capital,
        "currency": country.currency and country.currency[0],
        "language": country.main_language,
        "population": country.population and number(country.population),
        "area": country.area and number(country.area),
        "calling_code": country.calling_code,
        "borders": ", ".join(neighbours),  # commas only: "Bosnia and Herzegovina" would make a final "and" unreadable
    }
    for topic, fact in texts.items():
        if not fact:
            continue
        text = word(topic, country.iso, o=str(fact), c=country.currency[1] if country.currency else "")
        if topic == "language" and len(country.languages) > 1:
            text = f"{text} Also spoken: {join_names(country.languages[1:4])}."
        yield Passage(f"country/{country.iso}/{topic}", country.name, text)
    if not country.main_language and country.languages:
        yield Passage(
            f"country/{country.iso}/languages", country.name, f"Languages: {join_names(country.languages[:5])}."
        )
    for index, (alias, kind) in enumerate(country.aliases):
        text = word(kind, country.iso, o=with_the(country.name))
        yield Passage(f"alias/{country.iso}/{index}", alias, text)


def _city_passages(city: City, facts: Facts) -> Iterator[Passage]:
    country = with_the(facts.countries[city.country].name)
    key = str(city.id)
    place = word("subdivision" if city.subdivision else "country", key, s=city.subdivision or "", o=country)
    latitude, longitude = degrees(city.latitude, "N", "S"), degrees(city.longitude, "E", "W")
    yield Passage(f"city/{key}/country", city.title, place)
    yield Passage(f"city/{key}/population", city.title, word("city_population", key, o=number(city.population)))
    yield Passage(f"city/{key}/coordinates", city.title, word("coordinates", key, o=latitude, c=longitude))
    for index, alias in enumerate(city.aliases):
        yield Passage(f"alias/{key}/{index}", alias, word("former", key, o=city.name))


class Index:
    """BM25 over passages. Equal scores keep the passages' order (countries first, then cities by population)."""

    def __init__(self, passages: tuple[Passage, ...]) -> None:
        import bm25s

        self.passages = passages
        # A title counts twice, as in most search engines; passages differ little in length, so length counts little.
        self._bm25 = bm25s.BM25(k1=0.8, b=0.3)
        self._bm25.index([tokenize(p.title) * 2 + tokenize(p.text) for p in passages], show_progress=False)
        self._search = functools.lru_cache(maxsize=50_000)(self._search_uncached)

    def search(self, query: str, k: int) -> tuple[Passage, ...]:
        """The k best passages, best first; empty when no word of the query is known."""
        return tuple(self.passages[i] for i in self._search(" ".join(tokenize(query)), k))

    def _search_uncached(self, tokens: str, k: int) -> tuple[int, ...]:
        ids = [self._bm25.vocab_dict[t] for t in tokens.split() if t in self._bm25.vocab_dict]
        if not ids:
            return ()
        scores = np.round(self._bm25.get_scores_from_ids(ids).astype(np.float64), 5)
        k = min(k, len(scores))
        threshold = np.partition(scores, -k)[-k]
        best = np.flatnonzero(scores >= max(threshold, 1e-5))
        order = np.argsort(-scores[best], kind="stable")[:k]
        return tuple(int(i) for i in best[order])


@dataclass(frozen=True, eq=False)
class World:
    """Facts, passages and index: built once a process and shared."""

    facts: Facts
    passages: Mapping[str, Passage]
    index: Index
    by_line: Mapping[str, str]
    """Passage as shown -> its id."""

    def search(self, query: str, k: int) -> tuple[Passage, ...]:
        return self.index.search(query, k)


_LOCK = threading.Lock()


def build_world(min_population: int = 100_000, max_cities_per_country: int = 60) -> World:
    """The world for these options, from this process's cache when it is there. Seconds the first time."""
    with _LOCK:
        return _build_world(min_population, max_cities_per_country)


@functools.lru_cache(maxsize=4)
def _build_world(min_population: int, max_cities_per_country: int) -> World:
    facts = load_facts(min_population, max_cities_per_country)
    passages: list[Passage] = []
    for country in facts.countries.values():
        passages.extend(_country_passages(country, facts))
    for city in facts.cities.values():
        passages.extend(_city_passages(city, facts))
    by_id: dict[str, Any] = {p.id: p for p in passages}
    return World(facts, by_id, Index(tuple(passages)), {p.line: p.id for p in passages})
