"""The server that a recipe's `engine` section names."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from upswing.engine.http import HttpEngine
from upswing.engine.openai import OpenAIEngine
from upswing.engine.sglang import SglangEngine
from upswing.engine.vllm import VllmEngine
from upswing.errors import ConfigError
from upswing.recipe import EvalStage, Recipe

SERVERS: Mapping[str, type[HttpEngine]] = {"vllm": VllmEngine, "sglang": SglangEngine}


def server_of(recipe: Recipe, note: Callable[[str], None]) -> HttpEngine | OpenAIEngine | None:
    """None: the embedded engine. Raises ConfigError when the server isn't there or can't do what the stages need."""
    section = recipe.engine
    if section.url is None:
        return None
    api_key = None if section.api_key_env is None else os.environ.get(section.api_key_env)
    if section.api_key_env is not None and not api_key:
        raise ConfigError(f"engine.api_key_env: no '{section.api_key_env}' in the environment; export it, with the key")
    if section.kind == "openai":
        assert section.model is not None, "the recipe was checked"
        text = OpenAIEngine.connect(section.url, model=section.model, api_key=api_key)
        if text.capabilities.token_out:
            note(f"{section.url} tells token ids: if it is vLLM, kind: vllm keeps them, and can train")
        return text
    folder = None if section.weights_dir is None else Path(section.weights_dir)
    engine = SERVERS[section.kind].connect(section.url, weights_dir=folder, api_key=api_key)
    if any(not isinstance(stage, EvalStage) for stage in recipe.stages):
        engine.require_training()
    return engine
