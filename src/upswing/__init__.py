"""Upswing: make LLM agents better with reinforcement learning.

The names below are the public API; each is imported on first use, so that `import upswing` stays instant.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from upswing.envs.base import AssistantMessage, Environment, Observation
    from upswing.envs.tool_env import ToolEnv
    from upswing.envs.tools import tool
    from upswing.errors import ConfigError, UpswingError
    from upswing.recipe import Recipe, load_recipe
    from upswing.stages.runner import RunResult, run_recipe
    from upswing.trajectory.types import Message, Score, Task, Trajectory
    from upswing.verify.base import Episode

_HOMES = {
    "AssistantMessage": "upswing.envs.base",
    "ConfigError": "upswing.errors",
    "Environment": "upswing.envs.base",
    "Episode": "upswing.verify.base",
    "Message": "upswing.trajectory.types",
    "Observation": "upswing.envs.base",
    "Recipe": "upswing.recipe",
    "RunResult": "upswing.stages.runner",
    "Score": "upswing.trajectory.types",
    "Task": "upswing.trajectory.types",
    "ToolEnv": "upswing.envs.tool_env",
    "Trajectory": "upswing.trajectory.types",
    "UpswingError": "upswing.errors",
    "load_recipe": "upswing.recipe",
    "run_recipe": "upswing.stages.runner",
    "tool": "upswing.envs.tools",
}

__all__ = [
    "AssistantMessage",
    "ConfigError",
    "Environment",
    "Episode",
    "Message",
    "Observation",
    "Recipe",
    "RunResult",
    "Score",
    "Task",
    "ToolEnv",
    "Trajectory",
    "UpswingError",
    "load_recipe",
    "run_recipe",
    "tool",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'upswing' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
