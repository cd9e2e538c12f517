"""What `upswing run --dry-run` says: what would be where, and how much memory it takes. No weights are loaded."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from upswing.cluster.actors import check_room, connect, room_here
from upswing.engine.kv_cache import KVCache
from upswing.engine.weights import compute_dtype
from upswing.learn.activations import Fits
from upswing.learn.precision import compute_context, native_bf16
from upswing.models.attention import use_upswing_attention
from upswing.models.load import TINY, resolve_model
from upswing.models.tiny import tiny_model
from upswing.recipe import Recipe, RlStage
from upswing.stages.preflight import learner_bytes, machine_bytes
from upswing.stages.servers import explicit_dtype

CPU = torch.device("cpu")
MODEL: Any = AutoModelForCausalLM
HEAD = 8
"""Size of a head in the narrow model whose activations are measured."""


def plan(recipe: Recipe) -> Iterator[str]:
    """Lines. A cluster with an address is asked for what it has; ConfigError when that is too little."""
    section = recipe.cluster
    there, where = _there(recipe)
    yield f"{where}: {there['CPU']:g} CPUs, {there.get('GPU', 0):g} GPUs, {there['memory'] / 1e9:.1f} GB of memory"
    model = _sized(recipe.model)
    if section.kind == "ray":
        wanted = check_room(section, there)
        gpus = wanted[0].get("GPU", 0)
        yield f"engines: {section.engines}, each {_room(wanted[0])}{_engine(recipe, model, gpus)}"
        if section.env_workers:
            yield f"env workers: {section.env_workers}, each {_room(wanted[section.engines])}; verifiers are there, too"
        else:
            yield "environments and verifiers: in the process of the run"
        more = f" and {section.learners - 1} more, each {_room(wanted[-1])}" if section.learners > 1 else ""
        yield f"learner: the process of the run{more} (placement: {section.placement})"
    elif recipe.engine.kind == "torch":
        yield f"engine: in the process of the run{_engine(recipe, model, float(torch.cuda.is_available()))}"
    else:
        yield f"engine: {recipe.engine.kind} at {recipe.engine.url}"
    for stage in recipe.stages:
        if isinstance(stage, RlStage):
            yield f"{stage.name}: {_learner(recipe, stage, model, there.get('GPU', 0) > 0 and section.learners > 1)}"


def _there(recipe: Recipe) -> tuple[dict[str, float], str]:
    """What the machines have, and which they are."""
    section, memory = recipe.cluster, {"memory": machine_bytes(CPU)}
    if section.kind == "local":
        return {"CPU": float(os.cpu_count() or 1), "GPU": torch.cuda.device_count(), **memory}, "this machine"
    if section.address is None:
        return room_here(section) | memory, "Ray, started on this machine"
    ray, ours = connect(section)
    try:
        found = ray.cluster_resources()
        nodes = sum(node["Alive"] for node in ray.nodes())
        return found, f"Ray at {section.address}, {nodes} node{'s' * (nodes > 1)}"
    finally:
        if ours:
            ray.shutdown()


def _room(place: dict[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}{'s' * (amount > 1)}" for name, amount in place.items())


def _sized(spec: str) -> Any:
    """The model without its weights; None when its config isn't on this machine."""
    if spec == TINY:
        return tiny_model()
    folder = resolve_model(spec, download=False)
    if not (folder / "config.json").is_file():
        return None
    with torch.device("meta"):
        return MODEL.from_config(AutoConfig.from_pretrained(folder))


def _engine(recipe: Recipe, model: Any, gpus: float) -> str:
    if model is None:
        return "; memory not known: the model isn't on this machine"
    engine, tokens = recipe.engine, recipe.limits.context_tokens
    default = compute_dtype(torch.device("cuda") if gpus and torch.cuda.is_available() else CPU)
    dtype = explicit_dtype(engine.dtype) or (torch.bfloat16 if gpus else default)
    size = 1 if engine.quantize else dtype.itemsize
    shape: Any = SimpleNamespace(config=model.config, dtype=dtype, device="meta")
    token_bytes = KVCache(shape, max_slots=1, max_positions=1).token_bytes
    weights = size * sum(p.numel() for p in model.parameters()) / 1e9
    cached = min(token_bytes * engine.max_slots * tokens / 1e9, engine.kv_memory_gb or math.inf)
    return (
        f"; {weights + cached:.3g} GB: weights {weights:.3g} ({engine.quantize or str(dtype).removeprefix('torch.')}), "
        f"keys and values {cached:.3g} ({engine.max_slots} x {tokens} tokens)"
    )


def _learner(recipe: Recipe, stage: RlStage, model: Any, gpu: bool) -> str:
    """Of one rank, by what takes it."""
    if model is None:
        return "memory not known: the model isn't on this machine"
    dtype = explicit_dtype(recipe.learner.dtype) or (torch.bfloat16 if gpu or native_bf16() else torch.float32)
    fits = _fits(model.config, dtype)
    found = learner_bytes(
        recipe, stage, model, fits or Fits(), dtype, "cuda" if gpu else "cpu", recipe.cluster.learners
    )
    parts = ", ".join(f"{what} {size / 1e9:.3g}" for what, size in found.items() if size)
    unknown = "" if fits else "; activations not known for this architecture"
    return f"{sum(found.values()) / 1e9:.3g} GB{' a rank' * (recipe.cluster.learners > 1)}: {parts}{unknown}"


def _fits(config: Any, dtype: torch.dtype) -> Fits | None:
    """Activations in 1 GB. Those of a layer grow as its width does and with the layers, so they are measured on a
    narrow model of one and of two layers; None for an architecture where that can't be done."""
    heads, layers = config.num_attention_heads, config.num_hidden_layers
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    width = math.gcd(max(head // HEAD, 1), config.hidden_size, config.intermediate_size)
    costs = []
    with suppress(Exception):  # architectures differ in more than can be known here
        for count in (1, 2):
            narrow = copy.deepcopy(config)
            changes = {"hidden_size": config.hidden_size // width, "head_dim": head // width, "pad_token_id": None}
            changes |= {"intermediate_size": config.intermediate_size // width, "vocab_size": 64}
            changes |= {"num_hidden_layers": count, "layer_types": ["full_attention"] * count}
            for key, value in changes.items():
                setattr(narrow, key, value)
            model = MODEL.from_config(narrow)
            use_upswing_attention(model)
            costs.append(width * 1e9 / Fits.measure(model, lambda: compute_context("cpu", dtype), 1.0).kept)
    if len(costs) < 2:
        return None
    total = costs[0] + (layers - 1) * (costs[1] - costs[0])
    return Fits(kept=1e9 / total, recomputed=1e9 / (total / layers + 4 * layers * config.hidden_size))
