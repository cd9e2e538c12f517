"""Data kept by hand: corrections to the GeoNames rows (`tables.yaml`) and all wordings (`wordings.yaml`)."""

from __future__ import annotations

from importlib import resources
from typing import Any

import yaml


def _load(name: str) -> dict[str, Any]:
    text = resources.files(__package__).joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    return dict(yaml.load(text, yaml.BaseLoader))  # all values as text: NO is Norway here, and 01 a code


_T, WORDINGS = _load("tables"), _load("wordings")

TERRITORIES = frozenset(_T["territories"])
COUNTRY_NAMES: dict[str, str] = _T["country_names"]
CAPITALS: dict[str, str] = _T["capitals"]
NO_CAPITAL_QUESTION = frozenset(_T["no_capital_question"])
NO_CONTINENT_QUESTION = frozenset(_T["no_continent_question"])
NO_BORDER_QUESTION = frozenset(_T["no_border_question"])
SHARED_CURRENCIES = frozenset(_T["shared_currencies"])
NO_MAIN_LANGUAGE = frozenset(_T["no_main_language"])
NO_OFFICIAL_NAME = frozenset(_T["no_official_name"])
AREAS = {iso: int(area) for iso, area in _T["areas"].items()}
NO_NEIGHBOUR_PAIR = frozenset(map(tuple, _T["no_neighbour_pair"]))
DISPUTED_ADMIN1 = frozenset(map(tuple, _T["disputed_admin1"]))
NOT_CITIES = frozenset(_T["not_cities"])
CONTINENTS: dict[str, str] = _T["continents"]
LANGUAGE_NAMES: dict[str, str] = _T["language_names"]
FORCED_SPLITS = {iso: split for split, codes in _T["forced_splits"].items() for iso in codes}
COUNTRY_ALIASES: dict[str, dict[str, str]] = _T["country_aliases"]
CITY_ALIASES: dict[str, dict[str, str]] = _T["city_aliases"]
ADMIN1: dict[str, dict[str, str]] = _T["admin1"]
