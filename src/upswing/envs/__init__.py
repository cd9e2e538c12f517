"""Environments: where tasks are played. Importing this loads neither torch nor any built-in environment."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from upswing.envs.base import AssistantMessage, Environment, Observation
from upswing.envs.dataset import check_disjoint, tasks_from_jsonl
from upswing.envs.tool_env import ToolEnv
from upswing.envs.tools import tool
from upswing.errors import ConfigError
from upswing.plugins import load_object
from upswing.verify.functions import check_arguments

BUILTIN: Mapping[str, str] = {
    "code": "upswing.envs.code:Code",
    "customer_service": "upswing.envs.customer_service:CustomerService",
    "geo_search": "upswing.envs.geo_search:GeoSearch",
    "calculator": "upswing.envs.calculator:Calculator",
    "grid": "upswing.envs.grid:Grid",
    "gymnasium": "upswing.envs.adapters.gymnasium:Gymnasium",
    "lookup": "upswing.envs.lookup:Lookup",
    "memory": "upswing.envs.memory:Memory",
    "reasoning_gym": "upswing.envs.adapters.reasoning_gym:ReasoningGym",
    "shell": "upswing.envs.shell:Shell",
    "sql": "upswing.envs.sql:Sql",
    "tool": "upswing.envs.tool_env:ToolEnv",
    "tool_server": "upswing.envs.tool_server:RemoteTools",
    "trl": "upswing.envs.adapters.trl:Trl",
    "verifiers": "upswing.envs.adapters.verifiers:Verifiers",
    "web_shop": "upswing.envs.web_shop:WebShop",
    "wordle": "upswing.envs.wordle:Wordle",
}

__all__ = [
    "AssistantMessage",
    "Environment",
    "Observation",
    "ToolEnv",
    "check_disjoint",
    "environment_factory",
    "tasks_from_jsonl",
    "tool",
]


def environment_factory(name: str, args: Mapping[str, Any] | None = None) -> Callable[[], Environment]:
    """A function that makes a new environment for every trajectory.

    `name` is a built-in name, `pkg.module:Class` or `file.py:Class`. Raises ConfigError for an unknown name, something
    that is no environment, and arguments that its constructor doesn't take or lacks.
    """
    args = dict(args or {})
    cls = load_object(name, "environment", BUILTIN)
    if not inspect.isclass(cls) or not issubclass(cls, Environment):
        raise ConfigError(f"environment '{name}' must be a subclass of upswing.envs.Environment, got {cls!r}")
    if inspect.isabstract(cls):
        raise ConfigError(f"environment '{name}' lacks {', '.join(sorted(cls.__abstractmethods__))}")
    check_arguments(cls, args, f"environment '{name}'")
    if issubclass(cls, ToolEnv) or name in BUILTIN:
        cls(**args)  # cheap, and it checks options and tools (or that the server answers) before any model loads
    return lambda: cls(**args)
