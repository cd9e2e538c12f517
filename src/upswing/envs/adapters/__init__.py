"""Environments and scorers that exist elsewhere, as Upswing's: each library is imported when it is first used."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from upswing.errors import ConfigError
from upswing.trajectory.types import Score
from upswing.verify.text import unscored


def library(module: str, extra: str) -> Any:
    """An optional library. Raises ConfigError naming the extra that brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as problem:
        raise ConfigError(
            f"{module.partition('.')[0]} can't be imported ({problem}); install it with: pip install 'upswing[{extra}]'"
        ) from None


def env_reward(env_reward: float, state: Mapping[str, Any]) -> float | Score:
    """A verifier: the sum of what the environment gave. Not scored when it scores at its end and never came to it
    (`state['scored']` is false): the context or the time ran out first."""
    if state.get("scored") is False:
        return unscored("the trajectory ended before its environment had scored it")
    return env_reward
