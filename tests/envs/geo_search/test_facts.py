"""Facts against what people know, and against the raw rows: a wrong gold answer is the worst bug here."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from tests.envs.geo_search.conftest import Raw

from upswing.envs.geo_search import tables
from upswing.envs.geo_search.corpus import World
from upswing.envs.geo_search.names import display, fold

# iso: capital, currency, main language (None: no single one), calling code, continent, bordering countries
KNOWN = {
    "AL": ("Tirana", "Lek", None, "355", "Europe", None),
    "AT": ("Vienna", "Euro", "German", "43", "Europe", "CH CZ DE HU IT LI SI SK"),
    "AU": ("Canberra", "Australian Dollar", "English", "61", "Oceania", ""),
    "BE": ("Brussels", "Euro", None, "32", "Europe", "DE FR LU NL"),
    "BR": ("Brasilia", "Brazilian Real", "Portuguese", "55", "South America", None),
    "CH": ("Bern", "Swiss Franc", None, "41", "Europe", "AT DE FR IT LI"),
    "CI": ("Yamoussoukro", "CFA Franc BCEAO", "French", "225", "Africa", "BF GH GN LR ML"),
    "CL": ("Santiago", "Chilean Peso", "Spanish", "56", "South America", "AR BO PE"),
    "DE": ("Berlin", "Euro", "German", "49", "Europe", "AT BE CH CZ DK FR LU NL PL"),
    "HR": ("Zagreb", "Euro", "Croatian", "385", "Europe", "BA HU ME RS SI"),
    "HU": ("Budapest", "Forint", "Hungarian", "36", "Europe", "AT HR RO RS SI SK UA"),
    "IN": ("New Delhi", "Indian Rupee", None, "91", "Asia", None),
    "IR": ("Tehran", "Iranian Rial", "Persian", "98", "Asia", "AF AM AZ IQ PK TM TR"),
    "JP": ("Tokyo", "Yen", "Japanese", "81", "Asia", ""),
    "KE": ("Nairobi", "Kenyan Shilling", None, "254", "Africa", "ET SO SS TZ UG"),
    "KZ": ("Astana", "Tenge", None, "7", None, "CN KG RU TM UZ"),
    "MG": ("Antananarivo", "Malagasy Ariary", None, "261", "Africa", ""),
    "MM": ("Nay Pyi Taw", "Kyat", "Burmese", "95", "Asia", "BD CN IN LA TH"),
    "NG": ("Abuja", "Naira", None, "234", "Africa", "BJ CM NE TD"),
    "NP": ("Kathmandu", "Nepalese Rupee", None, "977", "Asia", "CN IN"),
    "PL": ("Warsaw", "Zloty", "Polish", "48", "Europe", "BY CZ DE LT RU SK UA"),
    "TH": ("Bangkok", "Baht", None, "66", "Asia", "KH LA MM MY"),
    "TZ": ("Dodoma", "Tanzanian Shilling", "Swahili", "255", "Africa", "BI CD KE MW MZ RW UG ZM"),
    "VN": ("Hanoi", "Dong", None, "84", "Asia", "CN KH LA"),
}

# Cities whose state or province is common knowledge; they cover every table of subdivisions.
REGIONS = {
    "US": {"Chicago": "Illinois", "Houston": "Texas", "Seattle": "Washington", "Miami": "Florida"},
    "CA": {"Calgary": "Alberta", "Winnipeg": "Manitoba", "Toronto": "Ontario"},
    "AU": {"Melbourne": "Victoria", "Brisbane": "Queensland", "Adelaide": "South Australia"},
    "DE": {"Munich": "Bavaria", "Köln": "North Rhine-Westphalia", "Dresden": "Saxony", "Frankfurt am Main": "Hesse"},
    "JP": {"Nagoya": "Aichi", "Sapporo": "Hokkaido", "Yokohama": "Kanagawa", "Naha": "Okinawa"},
    "MX": {"Monterrey": "Nuevo León", "Tijuana": "Baja California", "Acapulco de Juárez": "Guerrero"},
    "BR": {"Salvador": "Bahia", "Manaus": "Amazonas", "Porto Alegre": "Rio Grande do Sul", "Fortaleza": "Ceará"},
    "IN": {"Mumbai": "Maharashtra", "Chennai": "Tamil Nadu", "Kolkata": "West Bengal", "Jaipur": "Rajasthan"},
    "IT": {"Naples": "Campania", "Turin": "Piedmont", "Palermo": "Sicily", "Florence": "Tuscany"},
    "ES": {"Barcelona": "Catalonia", "Sevilla": "Andalusia", "Bilbao": "Basque Country"},
    "GB": {"Liverpool": "England", "Glasgow": "Scotland", "Cardiff": "Wales", "Belfast": "Northern Ireland"},
    "PL": {"Kraków": "Lesser Poland", "Gdańsk": "Pomerania", "Łódź": "Lodz", "Poznań": "Greater Poland"},
}


@pytest.mark.parametrize("iso", KNOWN)
def test_known_countries(world: World, iso: str) -> None:
    capital, currency, language, code, continent, borders = KNOWN[iso]
    country = world.facts.countries[iso]
    assert (country.capital, country.main_language, country.calling_code) == (capital, language, code)
    assert country.currency is not None and country.currency[0] == currency
    if continent is None:
        assert iso in tables.NO_CONTINENT_QUESTION
    else:
        assert country.continent == continent
    if borders is None:
        assert iso in tables.NO_BORDER_QUESTION or len(country.neighbours) > 4
    else:
        assert country.neighbours == tuple(borders.split())


@pytest.mark.parametrize("iso", REGIONS)
def test_known_subdivisions(world: World, iso: str) -> None:
    found = {fold(c.name): c.subdivision for c in world.facts.cities.values() if c.country == iso and not c.ambiguous}
    known = {fold(city): region for city, region in REGIONS[iso].items()}
    assert len(found.keys() & known.keys()) >= 2
    assert {city: found[city] for city in found.keys() & known.keys()} == {
        city: known[city] for city in found.keys() & known.keys()
    }


def test_subdivision_tables_name_real_codes_once(raw: Raw) -> None:
    codes = {(row["countrycode"], row["admin1code"]) for row in raw.cities.values()}
    for iso, names in tables.ADMIN1.items():
        assert len(set(names.values())) == len(names)
        assert {(iso, code) for code in names} <= codes | {(iso, "14")}  # Nunavut has no town of 15,000


def test_values_are_the_data_s_own_unless_a_table_says_otherwise(world: World, raw: Raw) -> None:
    for iso, country in world.facts.countries.items():
        row = raw.countries[iso]
        assert country.population == row["population"]
        assert country.area == tables.AREAS.get(iso, row["areakm2"])
        assert country.iso3 == row["iso3"] and (country.currency is None or country.currency[1] == row["currencycode"])
        assert iso in tables.CAPITALS or country.capital == display(row["capital"])
        assert set(country.neighbours) <= set(row["neighbours"].split(","))
    for key, city in world.facts.cities.items():
        row = raw.cities[key]
        assert (city.population, city.country, city.name) == (
            row["population"],
            row["countrycode"],
            display(row["name"]),
        )


def test_no_odd_values(world: World) -> None:
    for country in world.facts.countries.values():
        named = [country.name, country.capital or "-", (country.currency or ("-",))[0], country.main_language or "-"]
        assert not [text for text in (*named, *country.languages) if re.search(r"[\d()<>|]|\s{2}|^\s|^$", text)]
        assert not re.search(r"macrolanguage|testing|No currency|uncertain|\bUSN\b", " ".join(named))
        assert country.calling_code is None or re.fullmatch(r"[1-9]\d{0,2}", country.calling_code)
        assert country.neighbours == tuple(sorted(set(country.neighbours) - {country.iso}))
        assert all("," not in alias for alias, _ in country.aliases), country.aliases
        assert country.area != 0 or country.iso in {"VA"}


def test_a_language_that_most_people_don_t_speak_is_not_the_main_one(world: World) -> None:
    for iso in tables.NO_MAIN_LANGUAGE:
        assert world.facts.countries[iso].main_language is None
        assert f"country/{iso}/language" not in world.passages and f"country/{iso}/languages" in world.passages
    assert world.passages["country/MG/languages"].line == "- Madagascar: Languages: French and Malagasy."


def test_unique_cities_have_no_namesake_in_the_raw_rows(world: World, raw: Raw) -> None:
    names = Counter(fold(row["name"]) for row in raw.cities.values())
    for city in world.facts.cities.values():
        assert (city.qualifier is None) == (names[fold(city.name)] == 1)


def test_no_place_of_a_disputed_or_dependent_territory(world: World) -> None:
    assert not tables.TERRITORIES & world.facts.countries.keys()
    assert not [c for c in world.facts.cities.values() if c.country in tables.TERRITORIES]
    shown = " ".join(c.name for c in world.facts.cities.values() if c.country in ("UA", "RU"))
    assert "Sevastopol" not in shown and "Simferopol" not in shown
