"""A search environment over real facts about countries and cities."""

from upswing.envs.geo_search.env import GeoSearch
from upswing.envs.geo_search.pools import KINDS

__all__ = ["KINDS", "GeoSearch"]
