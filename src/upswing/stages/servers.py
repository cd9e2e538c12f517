"""An engine outside this process: the server that a recipe's `engine` section names, or actors of a cluster."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from upswing.cluster.actors import Cluster
from upswing.cluster.engines import RayEngines
from upswing.engine.http import HttpEngine
from upswing.engine.openai import OpenAIEngine
from upswing.engine.sglang import SglangEngine
from upswing.engine.vllm import VllmEngine, max_lora_rank
from upswing.errors import ConfigError
from upswing.models.resolve import resolve_model
from upswing.monitor.progress import Progress
from upswing.recipe import EvalStage, Recipe
from upswing.recipe.engine import adapter_ranks
from upswing.rollout.collect import Rollouts
from upswing.trajectory.types import Group

SERVERS: Mapping[str, type[HttpEngine]] = {"vllm": VllmEngine, "sglang": SglangEngine}


@dataclass(kw_only=True)
class RestingRollouts(Rollouts):
    """Between its calls the engine sleeps, if it was told to: a learner has the GPU then."""

    async def groups(self, *args: Any, **options: Any) -> list[Group]:
        assert isinstance(self.engine, VllmEngine)
        async with self.engine.in_use():
            return await super().groups(*args, **options)


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
        more = {"turn_timeout_s": recipe.limits.turn_timeout_s, **engine_options(recipe)}
        return RayEngines(Cluster(recipe.cluster, log.warn), recipe.model, **more)
    if section.url is None:
        return _vllm_here(recipe) if section.kind == "vllm" else None
    api_key = None if section.api_key_env is None else os.environ.get(section.api_key_env)
    if section.api_key_env is not None and not api_key:
        raise ConfigError(f"engine.api_key_env: no '{section.api_key_env}' in the environment; export it, with the key")
    options: dict[str, Any] = {"api_key": api_key, "warn": log.warn, "outage_s": section.outage_s}
    if section.kind == "openai":
        assert section.model is not None, "the recipe was checked"
        evals = [stage for stage in recipe.stages if isinstance(stage, EvalStage)]  # it can do no others
        asked = {0.0 if one.greedy else float(one.temperature or 1.0) for one in evals}
        text = OpenAIEngine.connect(section.url, model=section.model, temperatures=sorted(asked), **options)
        if text.capabilities.token_out:
            log.note(f"{section.url} tells token ids: if it is vLLM, kind: vllm keeps them, and can train")
        return text
    folder = None if section.weights_dir is None else Path(section.weights_dir)
    engine = SERVERS[section.kind].connect(section.url, weights_dir=folder, **options)
    if isinstance(engine, VllmEngine):
        engine.use(adapter_rank=_adapter_rank(recipe), adapters=_adapters(recipe), sleep=section.sleep)
    if any(not isinstance(stage, EvalStage) for stage in recipe.stages):
        engine.require_training()
    return engine


def _adapter_rank(recipe: Recipe) -> int | None:
    """The largest that the engine is given; None: none."""
    if not recipe.engine.adapters:
        return None
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "engine.adapters: got true, but a learner of several ranks gives merged weights; leave it out"
        )
    return max(adapter_ranks(recipe.stages).values())


def _adapters(recipe: Recipe) -> int:
    """That completions may be sampled with at once: they end with their own, and the newest is added to those."""
    return 2 + max(getattr(stage, "max_staleness", None) or 0 for stage in recipe.stages)


def _vllm_here(recipe: Recipe) -> VllmEngine:
    """Started in this process."""
    section, rank = recipe.engine, _adapter_rank(recipe)
    if (tokens := recipe.limits.context_tokens) > section.max_context:
        raise ConfigError(
            f"limits.context_tokens: got {tokens}; allowed: up to engine.max_context ({section.max_context})"
        )
    given: dict[str, Any] = {
        "model": str(resolve_model(recipe.model)),
        "max_model_len": section.max_context,
        "max_num_seqs": section.max_slots,
        "dtype": section.dtype,
        "logprobs_mode": "processed_logprobs",
        "enable_sleep_mode": section.sleep,
        "disable_log_stats": True,
    }
    if section.kv_memory_gb is not None:
        given["kv_cache_memory_bytes"] = int(section.kv_memory_gb * 1e9)
    if rank is not None:
        given |= {"enable_lora": True, "max_loras": _adapters(recipe), "max_lora_rank": max_lora_rank(rank)}
    folder = None if section.weights_dir is None else Path(section.weights_dir)
    engine = VllmEngine.here(given, section.options, weights_dir=folder)
    engine.use(adapter_rank=rank, sleep=section.sleep)
    return engine
