"""A search environment over real facts about countries and cities."""

from upswing.envs.geo_search.env import GeoSearch
from upswing.envs.geo_search.pools import EXERCISES, KINDS

__all__ = ["EXERCISES", "KINDS", "GeoSearch"]
