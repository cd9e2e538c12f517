"""A search environment over real facts about countries and cities."""

from __future__ import annotations

from upswing.envs.geo_search.check import entities_of, recovered, self_check
from upswing.envs.geo_search.env import GeoSearch
from upswing.envs.geo_search.pools import KINDS

__all__ = ["KINDS", "GeoSearch", "entities_of", "recovered", "self_check"]
