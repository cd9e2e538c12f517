"""Relations between a place and a fact: how a query asks for one and how it is read back out of a result line.

Reading is by inverting the passages' wordings, so the scripted expert knows only what a search returned.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass

from upswing.envs.geo_search.corpus import TEMPLATES
from upswing.envs.geo_search.names import fold


@dataclass(frozen=True, kw_only=True)
class Relation:
    """One kind of hop."""

    topics: tuple[str, ...]
    """Topics whose wording states the fact (see `corpus.TEMPLATES`)."""
    queries: tuple[str, ...]
    """Queries that work, best first; `{s}` is the subject."""
    vague: tuple[str, ...]
    """Words that a careless searcher would use and that no passage of the topic contains."""
    inverse: bool = False
    """True: the subject is the fact and the answer is the title ('Brussels' -> 'Belgium')."""
    also: tuple[str, ...] = ()
    """Relations whose passages state the same fact."""
    group: str = "o"
    """Which part of the wording is the answer."""


RELATIONS: Mapping[str, Relation] = {
    "continent": Relation(topics=("continent",), queries=("{s} continent", "{s} country continent"), vague=("where",)),
    "capital": Relation(topics=("capital",), queries=("{s} capital", "country {s} capital"), vague=("main city",)),
    "currency": Relation(topics=("currency",), queries=("{s} currency", "{s} currency called"), vague=("money",)),
    "language": Relation(topics=("language",), queries=("{s} main language", "{s} language"), vague=("speaks",)),
    "population": Relation(topics=("population",), queries=("{s} population",), vague=("people", "inhabitants")),
    "area": Relation(topics=("area",), queries=("{s} area", "{s} area square km"), vague=("size",)),
    "borders": Relation(topics=("borders",), queries=("{s} borders", "{s} shares borders"), vague=("next to",)),
    "neighbour": Relation(topics=("borders",), queries=("{s} borders", "{s} shares borders"), vague=("next to",)),
    "calling_code": Relation(topics=("calling_code",), queries=("{s} calling code",), vague=("phone prefix",)),
    "capital_of": Relation(
        topics=("capital",), queries=("{s} capital", "capital is {s}"), vague=("main city",), inverse=True
    ),
    "currency_of": Relation(
        topics=("currency",), queries=("{s} currency", "currency called {s}"), vague=("money",), inverse=True
    ),
    "iso_of": Relation(
        topics=("iso",), queries=("{s} ISO code", "ISO code {s}"), vague=("abbreviation",), inverse=True
    ),
    "alias": Relation(
        topics=("official", "former", "local"), queries=("{s}", "{s} name"), vague=("country", "government")
    ),
    "country": Relation(
        topics=("subdivision", "country"),
        queries=("{s} country", "{s} city country"),
        vague=("nation", "where"),
        also=("capital_of",),
    ),
    "subdivision": Relation(
        topics=("subdivision",), queries=("{s} region", "{s} city region country"), vague=("province",), group="s"
    ),
    "city_population": Relation(topics=("city_population",), queries=("{s} population",), vague=("people",)),
    "latitude": Relation(topics=("coordinates",), queries=("{s} latitude", "{s} latitude longitude"), vague=("north",)),
}


def read(relation: str, line: str, subject: str, qualifier: str | None) -> str | None:
    """What `line` says about `relation` of `subject`, or of the relations that state the same."""
    spec = RELATIONS[relation]
    facts = (_read(name, line, subject, qualifier) for name in (relation, *spec.also))
    return next((fact for fact in facts if fact is not None), None)


def _read(relation: str, line: str, subject: str, qualifier: str | None) -> str | None:
    """What `line` ('Title: text') says about `relation` of `subject`; None when it says nothing of it.

    A title that adds a qualifier ('Valencia, Spain') is taken only for the qualifier asked for.
    """
    spec = RELATIONS[relation]
    title, colon, text = line.partition(": ")
    if not colon:
        return None
    for pattern in _patterns(relation):
        match = pattern.match(text)
        if match is None:
            continue
        fact = match.group(spec.group).removeprefix("the ")
        if spec.inverse:
            return title if fold(fact) == fold(subject) else None
        wanted = {fold(subject)} if qualifier is None else {fold(subject), fold(f"{subject}, {qualifier}")}
        return fact if fold(title) in wanted else None
    return None


@functools.cache
def _patterns(relation: str) -> tuple[re.Pattern[str], ...]:
    return tuple(_invert(wording) for topic in RELATIONS[relation].topics for wording in TEMPLATES[topic])


def _invert(wording: str) -> re.Pattern[str]:
    """'The capital is {o}.' -> a pattern with the groups of its fields; trailing sentences are ignored."""
    parts = re.split(r"\{(\w)\}", wording)
    pattern = "".join(re.escape(part) if i % 2 == 0 else f"(?P<{part}>.+?)" for i, part in enumerate(parts))
    return re.compile(pattern + r"(?: Also spoken: .+)?$")
