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

from upswing.cluster.actors import check_room, connect, live_nodes, room_here, shown
from upswing.engine.kv_cache import KVCache
from upswing.engine.weights import compute_dtype
from upswing.errors import ConfigError
from upswing.learn.activations import Fits
from upswing.learn.precision import compute_context, native_bf16
from upswing.learn.sharded import decoder_layers
from upswing.models.attention import use_upswing_attention
from upswing.models.resolve import TINY, first_line, resolve_model
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
    nodes, where = _there(recipe)
    there = {name: sum(node.get(name, 0) for node in nodes) for name in ("CPU", "GPU", "memory")}
    yield f"{where}: {there['CPU']:g} CPUs, {there['GPU']:g} GPUs, {there['memory'] / 1e9:.1f} GB of memory"
    model = _sized(recipe.model)
    ranks = section.learners
    if section.kind == "ray":
        wanted = check_room(section, nodes)
        gpus = wanted[0].get("GPU", 0)
        yield f"engines: {section.engines}, each {shown(wanted[0])}{_engine(recipe, model, gpus)}"
        if section.env_workers:
            yield f"env workers: {section.env_workers}, each {shown(wanted[section.engines])}; verifiers are there, too"
        else:
            yield "environments and verifiers: in the process of the run"
        more = f" and {ranks - 1} more, each {shown(wanted[-1])}" if ranks > 1 else ""
        yield f"learner: the process of the run{more} (placement: {section.placement})"
    elif recipe.engine.kind == "torch":
        yield f"engine: in the process of the run{_engine(recipe, model, float(torch.cuda.is_available()))}"
    else:
        yield f"engine: {recipe.engine.kind} {f'at {recipe.engine.url}' if recipe.engine.url else 'in one process'}"
    if "MASTER_ADDR" in os.environ:
        ranks = max(ranks, int(os.environ.get("WORLD_SIZE", 1)))  # torchrun's
    for stage in recipe.stages:
        if isinstance(stage, RlStage):
            yield f"{stage.name}: {_learner(recipe, stage, model, there['GPU'] > 0, ranks)}"


def _there(recipe: Recipe) -> tuple[list[dict[str, float]], str]:
    """What each machine has, and which they are."""
    section, memory = recipe.cluster, {"memory": machine_bytes(CPU)}
    if section.kind == "local":
        return [{"CPU": os.cpu_count() or 1, "GPU": torch.cuda.device_count(), **memory}], "this machine"
    if section.address is None:
        return [room_here(section) | memory], "Ray, started on this machine"
    ray, ours = connect(section)
    try:
        nodes = live_nodes(ray)
        return nodes, f"Ray at {section.address}, {len(nodes)} node{'s' * (len(nodes) > 1)}"
    finally:
        if ours:
            ray.shutdown()


def _sized(spec: str) -> Any:
    """The model without its weights, which would be float32; None when its config isn't on this machine."""
    if spec == TINY:
        return tiny_model()
    folder = resolve_model(spec, download=False)
    if not (folder / "config.json").is_file():
        return None
    try:
        with torch.device("meta"):
            return MODEL.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    except Exception as error:  # as `load_model`: of many kinds
        raise ConfigError(f"model '{spec}': can't use {folder / 'config.json'}: {first_line(error)}") from error


def _engine(recipe: Recipe, model: Any, gpus: float) -> str:
    if model is None:
        return "; memory not known: the model isn't on this machine"
    engine, tokens = recipe.engine, recipe.limits.context_tokens
    elsewhere = gpus and not torch.cuda.is_available()  # a GPU of another machine: a new one, presumably
    here = torch.device("cuda") if gpus else CPU
    dtype = explicit_dtype(engine.dtype) or (torch.bfloat16 if elsewhere else compute_dtype(here))
    shape: Any = SimpleNamespace(config=model.config, dtype=dtype, device="meta")
    token_bytes = KVCache(shape, max_slots=1, max_positions=1).token_bytes
    weights = _weight_bytes(model, dtype, int8=engine.quantize is not None) / 1e9
    cached = min(token_bytes * engine.max_slots * tokens / 1e9, engine.kv_memory_gb or math.inf)
    return (
        f"; {weights + cached:.3g} GB: weights {weights:.3g} ({engine.quantize or str(dtype).removeprefix('torch.')}), "
        f"keys and values {cached:.3g} ({engine.max_slots} x {tokens} tokens)"
    )


def _weight_bytes(model: Any, dtype: torch.dtype, *, int8: bool) -> int:
    """Of an engine. In int8 linear layers take a byte a weight; embeddings stay as they are, tied ones too."""
    products = [module.weight for module in model.modules() if int8 and isinstance(module, torch.nn.Linear)]
    embedded = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    replaced = {id(weight) for weight in products} - embedded
    kept = sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in replaced)
    return int(sum(weight.numel() for weight in products) + dtype.itemsize * kept)


def _learner(recipe: Recipe, stage: RlStage, model: Any, gpu: bool, ranks: int) -> str:
    """Of one rank, by what takes it."""
    if model is None:
        return "memory not known: the model isn't on this machine"
    dtype = explicit_dtype(recipe.learner.dtype) or (torch.bfloat16 if gpu or native_bf16() else torch.float32)
    fits = _fits(model.config, dtype)
    found = learner_bytes(recipe, stage, model, fits or Fits(), dtype, "cuda" if gpu else "cpu", ranks)
    if ranks > 1:
        found["weights put together"] = _whole_bytes(model)
    parts = ", ".join(f"{what} {size / 1e9:.3g}" for what, size in found.items() if size)
    unknown = "" if fits else "; activations not known for this architecture"
    return f"{sum(found.values()) / 1e9:.3g} GB{' a rank' * (ranks > 1)}: {parts}{unknown}"


def _whole_bytes(model: Any) -> float:
    """What a rank holds beside its shards in a backward pass: float32 weights and gradients of what is in no layer, and
    of a layer, and the weights of the next one."""
    layer = sum(parameter.numel() for parameter in decoder_layers(model)[0].parameters())
    rest = sum(parameter.numel() for parameter in model.parameters()) - layer * model.config.num_hidden_layers
    return float(4 * (2 * rest + 3 * layer))


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
            model = MODEL.from_config(narrow, dtype=torch.float32)
            use_upswing_attention(model)
            costs.append(width * 1e9 / Fits.measure(model, lambda: compute_context("cpu", dtype), 1.0).kept)
    if len(costs) < 2:
        return None
    total = costs[0] + (layers - 1) * (costs[1] - costs[0])
    return Fits(kept=1e9 / total, recomputed=1e9 / (total / layers + 4 * layers * config.hidden_size))
