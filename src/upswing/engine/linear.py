"""Matrix products of an engine's linear layers: few rows on a CPU, and one product for layers that read the same input.

A decode step multiplies some tens of rows with every weight. Written as weight x rows^T, BLAS cuts the work along the
weight's many rows; written as rows x weight^T (what `nn.Linear` does) along the few. The first way measured 1.3 to 1.9
times as fast in fp32 at 32 to 64 rows, and about as fast at 128.

q, k and v, and gate and up, can be one product each (`Product`). Measured in fp32 on a CPU at SmolLM2-135M's shapes,
against separate `FewRowsLinear`s, alternating, at 1, 16 and 64 rows: q, k, v 1.35, 1.23, 1.17 times as fast with two
threads and 1.08, 1.04, 0.98 with one; gate/up 1.09, 1.03, 0.99 and 1.03, 0.91, 0.90, so that stays two. Elsewhere a
call costs more than the arithmetic of a thin matrix and both are one: on a GPU (7 launches a layer become 4; reasoned,
not measured), in bf16 on a CPU (not measured either) and in int8 (activations are quantised once: 1.8 times as fast
for q, k, v, 1.2 for gate/up).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

MAX_ROWS = 128
"""With more rows both ways are alike, and `nn.Linear`'s needs no transposed copy of the result."""

TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers of one module that are called on the same tensor, in the Llama and Qwen families."""


class FewRowsLinear(torch.nn.Linear):
    """`nn.Linear` for inference, fast for few rows. Same parameters, same names."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _few_rows(input, self.weight, self.bias)


class Product:
    """One product for linear layers that read the same input; the layers' parameters become views of the stacked ones.

    For inference. Loading values in place works as before; moving or copying the model does not, so do it first.
    """

    def __init__(self, layers: Sequence[torch.nn.Linear]) -> None:
        self.sizes = [layer.out_features for layer in layers]
        self.bias = None if layers[0].bias is None else _stacked(layers, "bias")
        self.hold(layers)
        self._input: torch.Tensor | None = None
        self._parts: dict[int, torch.Tensor] = {}
        for index, layer in enumerate(layers):
            layer.__class__ = SharedLinear
            layer.product, layer.index = self, index  # type: ignore[assignment]

    def __deepcopy__(self, memo: object) -> Product:
        raise TypeError("an engine's model can't be copied; copy the one that the engine was made from")

    def hold(self, layers: Sequence[torch.nn.Linear]) -> None:
        self.weight = _stacked(layers, "weight")

    def compute(self, input: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., sum of the layers' outs]."""
        return F.linear(input, self.weight, self.bias)

    def take(self, index: int, input: torch.Tensor) -> torch.Tensor:
        """The output of layer `index`. The first layer called with a tensor computes all; each output is kept until
        its layer, called with that very tensor, has taken it."""
        if input is not self._input or index not in self._parts:
            self._input, self._parts = input, dict(enumerate(torch.split(self.compute(input), self.sizes, -1)))
        part = self._parts.pop(index)
        if not self._parts:
            self._input = None
        return part


class FewRowsProduct(Product):
    """`Product`, fast for few rows."""

    def compute(self, input: torch.Tensor) -> torch.Tensor:
        return _few_rows(input, self.weight, self.bias)


class SharedLinear(torch.nn.Linear):
    """A layer that takes its part of a `Product`. Same parameters, same names."""

    product: Product
    index: int

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.product.take(self.index, input)


def linear_groups(model: torch.nn.Module) -> Iterator[list[torch.nn.Linear]]:
    """The plain linear layers inside `model`, those that read the same input together."""
    for parent in model.modules():
        plain = {name: child for name, child in parent.named_children() if type(child) is torch.nn.Linear}
        for names in TOGETHER:
            layers = [plain[name] for name in names if name in plain]
            if len(layers) == len(names) and len({(one.in_features, one.bias is None) for one in layers}) == 1:
                yield [plain.pop(name) for name in names]
        yield from ([layer] for layer in plain.values())


def speed_up_linears(model: torch.nn.Module) -> None:
    """Switch the plain linear layers to what is faster where the model is, in place."""
    weight = next(model.parameters())
    few_rows = weight.device.type == "cpu" and weight.dtype == torch.float32
    fewest = 3 if few_rows else 2  # q, k and v, but not gate and up where the pair gains nothing
    for layers in linear_groups(model):
        if len(layers) >= fewest:
            (FewRowsProduct if few_rows else Product)(layers)
    for module in model.modules():
        if few_rows and type(module) is torch.nn.Linear:
            module.__class__ = FewRowsLinear


def _few_rows(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    *shape, width = input.shape
    rows = input.numel() // width
    if rows > MAX_ROWS:
        return F.linear(input, weight, bias)
    out = torch.mm(weight, input.reshape(rows, width).t()).t().contiguous()
    if bias is not None:
        out = out + bias
    return out.view(*shape, weight.shape[0])


def _stacked(layers: Sequence[torch.nn.Linear], name: str) -> torch.Tensor:
    """The parameters `name` in one tensor, of which each layer's becomes a view."""
    whole = torch.cat([getattr(layer, name).detach() for layer in layers])
    for layer, rows in zip(layers, torch.split(whole, [layer.out_features for layer in layers]), strict=True):
        setattr(layer, name, torch.nn.Parameter(rows, requires_grad=False))
    return whole
