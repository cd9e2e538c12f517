"""An engine's own weights: their number format, and loading new ones in place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch

from upswing.engine.int8 import Int8Product
from upswing.engine.linear import SharedLinear
from upswing.errors import did_you_mean


def compute_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where the device computes in it natively, else float32."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    checks = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    native = any(bool(getattr(torch.cpu, name, lambda: False)()) for name in checks)
    return torch.bfloat16 if native else torch.float32


@torch.no_grad()
def load_weights(model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> int:
    """Copy `weights` into the model's parameters, converting device and dtype; int8 layers are quantised anew. -> bytes
    written: what is in its place already (`share_memory`) isn't copied.

    A tied parameter may be given under any of its names. Raises ValueError for unknown or missing names, before
    anything is changed, and for a wrong shape. Values are read once and one at a time, because a lazy mapping makes
    each when it is read (int8 holds those of one product, up to three, until all are there); so a wrong shape is found
    after the parameters before it have been loaded.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name in weights:
        if name not in parameters:
            raise ValueError(f"the model has no parameter '{name}'{did_you_mean(name, parameters)}")
    given = {id(parameters[name]) for name in weights}
    missing = [name for name, parameter in parameters.items() if id(parameter) not in given]
    if missing:
        raise ValueError(f"{len(missing)} parameters were not given, the first is '{missing[0]}'; give all of them")
    shared = [module for module in model.modules() if isinstance(module, SharedLinear)]
    parts = {id(one.weight): (one.product, one.index) for one in shared if isinstance(one.product, Int8Product)}
    waiting: dict[Int8Product, dict[int, torch.Tensor]] = defaultdict(dict)  # until a product's layers are all there
    written = 0
    for name, value in weights.items():
        got, expected = tuple(value.shape), tuple(parameters[name].shape)
        if got != expected:
            raise ValueError(f"parameter '{name}' has shape {got}; the model's is {expected}; load all weights again")
        address = value.data_ptr()  # 0: a sharded tensor, say, which has its data elsewhere
        if not address or address != parameters[name].data_ptr():
            written += parameters[name].nbytes
            if not parameters[name].is_meta:
                parameters[name].copy_(value)
        if id(parameters[name]) in parts:
            product, index = parts[id(parameters[name])]
            waiting[product][index] = value
            if len(waiting[product]) == len(product.sizes):
                product.pack([part for _, part in sorted(waiting.pop(product).items())])
    return written


@torch.no_grad()
def share_memory(model: torch.nn.Module, learner: torch.nn.Module) -> bool:
    """Move the learner's parameters into the memory of the engine's `model`, which takes their values.

    The learner's updates are then the engine's at once, so nothing may be sampled meanwhile. False, and nothing is
    done, where a name (of an adapter, say), a shape, a format or a device differs.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    pairs = [(parameters.get(name), parameter) for name, parameter in learner.named_parameters()]
    if any(own is None or (own.shape, own.dtype, own.device) != (p.shape, p.dtype, p.device) for own, p in pairs):
        return False
    for own, parameter in pairs:
        assert own is not None
        own.copy_(parameter)
        parameter.data = own.data
    return True
