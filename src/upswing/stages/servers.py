"""An engine outside this process: the server that a recipe's `engine` section names, or actors of a cluster."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from upswing.cluster.actors import Cluster
from upswing.cluster.engines import RayEngines
from upswing.engine.http import HttpEngine
from upswing.engine.openai import OpenAIEngine
from upswing.engine.sglang import SglangEngine
from upswing.engine.vllm import VllmEngine
from upswing.errors import ConfigError
from upswing.monitor.progress import Progress
from upswing.recipe import EvalStage, Recipe

SERVERS: Mapping[str, type[HttpEngine]] = {"vllm": VllmEngine, "sglang": SglangEngine}


def explicit_dtype(name: str) -> torch.dtype | None:
    """None for `auto`: the engine and the learner then choose by the device that they compute on."""
    return {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def engine_options(recipe: Recipe) -> dict[str, Any]:
    """Of an embedded engine."""
    names = ("max_slots", "max_context", "prefill_chunk", "kv_memory_gb", "quantize")
    return {**{name: getattr(recipe.engine, name) for name in names}, "dtype": explicit_dtype(recipe.engine.dtype)}


def server_of(recipe: Recipe, log: Progress) -> HttpEngine | OpenAIEngine | RayEngines | None:
    """None: the embedded engine. Raises ConfigError when it isn't there or can't do what the stages need."""
    section = recipe.engine
    if recipe.cluster.kind == "ray":
        return RayEngines(Cluster(recipe.cluster, log.warn), recipe.model, **engine_options(recipe))
    if section.url is None:
        return None
    api_key = None if section.api_key_env is None else os.environ.get(section.api_key_env)
    if section.api_key_env is not None and not api_key:
        raise ConfigError(f"engine.api_key_env: no '{section.api_key_env}' in the environment; export it, with the key")
    if section.kind == "openai":
        assert section.model is not None, "the recipe was checked"
        text = OpenAIEngine.connect(section.url, model=section.model, api_key=api_key)
        if text.capabilities.token_out:
            log.note(f"{section.url} tells token ids: if it is vLLM, kind: vllm keeps them, and can train")
        return text
    folder = None if section.weights_dir is None else Path(section.weights_dir)
    engine = SERVERS[section.kind].connect(section.url, weights_dir=folder, api_key=api_key)
    if any(not isinstance(stage, EvalStage) for stage in recipe.stages):
        engine.require_training()
    return engine
