"""The facts, the passages and the search over them."""

from __future__ import annotations

import pytest

from upswing.envs.geo_search.corpus import World, build_world
from upswing.envs.geo_search.names import ascii_text, display, fold, forms, number, tokenize
from upswing.envs.geo_search.relations import RELATIONS, read
from upswing.envs.geo_search.tables import WORDINGS


def test_known_facts(world: World) -> None:
    """Checked by hand against public sources; each was wrong or missing in the raw data or easy to get wrong."""
    countries = world.facts.countries
    assert countries["KZ"].capital == "Astana"
    assert countries["NL"].name == "Netherlands"
    assert countries["BE"].main_language is None and countries["JP"].main_language == "Japanese"
    assert countries["GR"].main_language == "Greek" and countries["ZA"].main_language is None
    assert countries["SE"].currency == ("Swedish Krona", "SEK")
    assert countries["TO"].currency == ("Pa'anga", "TOP")
    assert countries["US"].neighbours == ("CA", "MX") and countries["PT"].neighbours == ("ES",)
    assert not {"AN", "CS", "AQ", "PR", "PS"} & set(countries)
    by_title = {city.title: city for city in world.facts.cities.values()}
    assert by_title["Munich"].subdivision == "Bavaria"
    assert by_title["Yokohama"].subdivision == "Kanagawa"
    assert by_title["Valencia, Venezuela"].country == "VE" and by_title["Valencia, Spain"].country == "ES"
    assert "Simferopol" not in by_title and "Jerusalem" not in by_title


def test_neighbours_are_mutual(world: World) -> None:
    countries = world.facts.countries
    assert all(iso in countries[other].neighbours for iso, c in countries.items() for other in c.neighbours)


def test_titles_name_one_place_each(world: World) -> None:
    titles = [fold(city.title) for city in world.facts.cities.values()]
    assert len(titles) == len(set(titles))
    assert not set(titles) & {fold(c.name) for c in world.facts.countries.values()}
    assert len(world.by_line) == len(world.passages)


@pytest.mark.parametrize(
    ("query", "passage"),
    [
        ("Belgium capital", "country/BE/capital"),
        ("what is the CAPITAL of belgium?", "country/BE/capital"),
        ("Brussels capital", "country/BE/capital"),
        ("Niger population", "country/NE/population"),
        ("Guinea capital", "country/GN/capital"),
        ("Mexico borders", "country/MX/borders"),
        ("Baht currency", "country/TH/currency"),
        ("Swaziland", "alias/SZ/1"),
        ("MRT ISO code", "country/MR/iso"),
    ],
)
def test_a_good_query_finds_its_passage_first(world: World, query: str, passage: str) -> None:
    assert world.search(query, 1)[0].id == passage


def test_the_place_alone_does_not_find_every_attribute(world: World) -> None:
    attributes = {f"country/FR/{a}" for a in ("capital", "currency", "population", "area", "borders")}
    assert len({p.id for p in world.search("France", 1)} & attributes) <= 1
    assert world.search("Swaziland currency", 1)[0].id != "country/SZ/currency"


def test_search_is_ordered_repeatable_and_bounded(world: World) -> None:
    hits = world.search("population", 50)
    assert len(hits) == 50 and hits == world.search("population", 50)
    assert world.search("population", 7) == hits[:7]
    assert world.search("Åland söker ingenting xyzzy", 3) == world.search("Aland soker ingenting xyzzy", 3)


def test_the_world_is_built_once(world: World) -> None:
    assert build_world() is world


def test_reading_inverts_every_wording() -> None:
    values = {"o": "the United States", "c": "ABC", "s": "Ohio"}
    for name, relation in RELATIONS.items():
        wanted = "Place" if relation.inverse else values[relation.group].removeprefix("the ")
        subject = "United States" if relation.inverse else "Place"
        for topic in relation.topics:
            for wording in WORDINGS["passages"][topic]:
                assert read(name, f"Place: {wording.format(**values)}", subject, None) == wanted, (name, wording)


def test_reading_takes_no_other_place_for_the_one_asked() -> None:
    line = "Valencia, Spain: The population is 824,340."
    assert read("city_population", line, "Valencia", "Venezuela") is None
    assert read("city_population", line, "Valencia", None) is None
    assert read("city_population", line, "Valencia", "Spain") == "824,340"
    assert read("capital", line, "Valencia, Spain", None) is None
    assert (
        read("language", "Haiti: Main language: Haitian Creole. Also spoken: French.", "Haiti", None)
        == "Haitian Creole"
    )


def test_text_helpers() -> None:
    assert tokenize("What are Côte d'Ivoire's countries? 1,019,022 people; St. John's") == (
        ["cote", "divoire", "country", "1019022", "people", "st", "john"]
    )
    assert (ascii_text("Łódź"), fold("The  Gambia"), display("Warīsān"), display("Köln")) == (
        ("Lodz", "gambia", "Warisan", "Köln")
    )
    assert forms("Köln", "Bonn") == ("Köln", "Koln", "Bonn") and number(1019022) == "1,019,022"
