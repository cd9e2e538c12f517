"""int8 sampling on a CPU: weights and activations of the linear layers in 8 bits, their products in integers.

A row of a weight becomes round(w / s), s = max|w| / LEVELS, whenever weights are loaded; a row of activations becomes
round(127 x / max|x|) at each product: both symmetric, and a token's result depends on no other token. Sums are exact,
so the error is that of the two roundings. Both sides are first rotated by blocks (QuaRot, arXiv 2404.00456), which
spreads outliers: SmolLM2-135M's KL from fp32 falls from 0.081 to 0.020 nats a token for 7 % of the products' time.

The engine samples from the distribution that comes out and reports its log-probs. The learner's differ, which a
correction (`algo.correction`) must make up for.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from functools import lru_cache

import torch

from upswing.engine.linear import Product, linear_groups
from upswing.errors import ConfigError

VNNI = bool(getattr(torch.cpu, "_is_vnni_supported", lambda: False)())
"""Whether the processor adds four int8 products at once in 32 bits; one with AMX has it too."""
LEVELS = 127 if VNNI else 64
"""Steps of a weight on either side of 0. Without VNNI two products are added in 16 bits: 2 * 255 * 64 just fits."""
BLOCK = 64
"""Columns that are rotated together."""
_SMALLEST = 1e-30
"""Stands for the largest value of a row that is all zero."""


def check_int8(device: torch.device) -> None:
    """Raises ConfigError where int8 products can't be computed."""
    if device.type != "cpu":
        raise ConfigError(f"engine.quantize: got 'int8' on {device}; it is for CPUs only; leave it out")
    needed = "onednn" if Int8Product.onednn else "fbgemm"
    if needed not in torch.backends.quantized.supported_engines:
        raise ConfigError(f"engine.quantize: got 'int8', but this PyTorch was built without {needed}; leave it out")


class Int8Product(Product):
    """`Product` with the stacked weights in int8 only."""

    onednn = VNNI or not hasattr(torch, "_make_per_channel_quantized_tensor")
    """oneDNN uses VNNI and AMX; without them FBGEMM measured up to 1.8 times as fast, but newer PyTorch may lose it."""

    def hold(self, layers: Sequence[torch.nn.Linear]) -> None:
        self.pack([layer.weight for layer in layers])

    def pack(self, weights: Sequence[torch.Tensor]) -> None:
        """Quantise the layers' weights, each [out, in]."""
        parts = [_rotated(one.detach().to("cpu", torch.float32)) for one in weights]
        scaled = parts[0] if len(parts) == 1 else torch.cat(parts)  # no second copy of a large output layer
        self.scales = torch.stack(scaled.aminmax(dim=1)).abs().amax(0).clamp(min=_SMALLEST) / LEVELS
        rounded = scaled.div_(self.scales[:, None]).round_().to(torch.int8)
        self.zeros = torch.zeros(len(rounded), dtype=torch.int32, device="cpu")
        if self.onednn:
            self.packed = torch.ops.onednn.qlinear_prepack(rounded, None)
        else:
            with warnings.catch_warnings():  # deprecated, but FBGEMM takes nothing else
                warnings.filterwarnings("ignore", "torch.quantize_per_tensor, torch.quantize_per_channel")
                tagged = torch._make_per_channel_quantized_tensor(rounded, self.scales, self.zeros, 0)
                self.packed = torch.ops.quantized.linear_prepack(tagged, None)

    def compute(self, input: torch.Tensor) -> torch.Tensor:
        unit = _rotated(input.reshape(-1, input.shape[-1]).float())
        peak = unit.abs().amax(-1, keepdim=True).clamp_(min=_SMALLEST)
        unit.div_(peak)
        if self.onednn:
            levels = unit.mul_(127.0).add_(128.5).to(torch.uint8)  # cuts off, so that it rounds
            out = torch.ops.onednn.qlinear_pointwise(
                levels, 1 / 127, 128, self.packed, self.scales, self.zeros, None, 1.0, 0, torch.float32, "none", [], ""
            )
        else:
            out = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(unit, 1 / 127, 128, self.packed)
        out = out.mul_(peak) if self.bias is None else torch.addcmul(self.bias, out, peak)
        return out.to(input.dtype).reshape(*input.shape[:-1], len(self.scales))


def quantize_linears(model: torch.nn.Module) -> None:
    """Switch the plain linear layers to int8, in place; their `weight` becomes a shape without values (meta).

    The output layer too: in fp32 it would be a third of the products' time, and it adds a quarter to the gap. A weight
    that is tied to the embedding stays there as it is, for the look-up.
    """
    tied = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    for layers in linear_groups(model):
        Int8Product(layers)
        for layer in layers:
            if id(layer.weight) not in tied:
                layer.weight = torch.nn.Parameter(torch.empty_like(layer.weight, device="meta"), requires_grad=False)


def _rotated(rows: torch.Tensor) -> torch.Tensor:
    """A copy with each block of columns rotated by a Hadamard matrix; the products of two rotated rows are theirs."""
    block = math.gcd(rows.shape[-1], BLOCK)
    return (rows.reshape(-1, block) @ _hadamard(block)).view(rows.shape)


@lru_cache
def _hadamard(size: int) -> torch.Tensor:
    """Orthogonal, [size, size], +-1 / sqrt(size); `size` is a power of 2."""
    matrix = torch.ones(1, 1, dtype=torch.float32, device="cpu")  # cached: whatever the defaults are just now
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)]) / math.sqrt(2)
    return matrix
