"""The engine's linear layers compute what `nn.Linear` does: few rows, many, and several layers in one product."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from upswing.engine.linear import (
    MAX_ROWS,
    FewRowsLinear,
    FewRowsProduct,
    Product,
    SharedLinear,
    linear_groups,
    speed_up_linears,
)
from upswing.engine.torch import TorchEngine
from upswing.engine.weights import load_weights
from upswing.models.load import LoadedModel


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 0), (1, 1), (1, 7), (2, 5), (1, MAX_ROWS), (1, MAX_ROWS + 1)])
def test_equals_the_plain_layer(shape: tuple[int, int], bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(16, 24, bias=bias)
    input = torch.randn(*shape, 16)
    expected = layer(input)
    speed_up_linears(layer)
    assert type(layer) is FewRowsLinear
    torch.testing.assert_close(layer(input), expected)
    assert layer(input).is_contiguous()


def attention(bias: bool = True) -> nn.ModuleDict:
    torch.manual_seed(1)
    sizes = {"q_proj": 24, "k_proj": 8, "v_proj": 8, "o_proj": 16}
    return nn.ModuleDict({name: nn.Linear(16, size, bias=bias) for name, size in sizes.items()})


@pytest.mark.parametrize("kind", [Product, FewRowsProduct])
@pytest.mark.parametrize("bias", [True, False])
def test_layers_that_read_the_same_input_are_one_product(bias: bool, kind: type[Product]) -> None:
    model = attention(bias)
    plain, names = copy.deepcopy(model), list(model.state_dict())
    for layers in linear_groups(model):
        if len(layers) > 1:
            kind(layers)
    assert [type(layer) for layer in model.values()] == [*[SharedLinear] * 3, nn.Linear]
    assert list(model.state_dict()) == names
    counts = []
    product = model["q_proj"].product
    product.compute = lambda input, compute=product.compute: counts.append(1) or compute(input)
    for _ in range(2):  # a later step's input is another tensor
        input = torch.randn(1, 5, 16)
        for name in model:
            torch.testing.assert_close(model[name](input), plain[name](input))
    assert len(counts) == 2
    # Taken in another order, twice, and with inputs of their own: still right.
    one, two = torch.randn(2, 1, 3, 16).unbind(0)
    for name, given in [("k_proj", one), ("k_proj", one), ("v_proj", two), ("q_proj", one), ("q_proj", two)]:
        torch.testing.assert_close(model[name](given), plain[name](given))


def test_nothing_of_a_step_is_kept_after_it() -> None:
    model = attention()
    product = Product([model["q_proj"], model["k_proj"], model["v_proj"]])
    input = torch.randn(1, 5, 16)
    outs = [weakref.ref(model[name](input)) for name in ("q_proj", "k_proj", "v_proj")]
    gone = weakref.ref(input)
    del input
    gc.collect()
    assert gone() is None and all(out() is None for out in outs) and not product._parts


def test_new_weights_reach_the_product() -> None:
    model, other = attention(), attention()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.normal_()
    Product([model["q_proj"], model["k_proj"], model["v_proj"]])
    load_weights(model, dict(other.named_parameters()))
    input = torch.randn(1, 5, 16)
    for name in model:
        torch.testing.assert_close(model[name](input), other[name](input))


def test_layers_that_differ_in_bias_or_input_stay_apart() -> None:
    model = attention()
    model["k_proj"] = nn.Linear(16, 8, bias=False)
    assert [len(layers) for layers in linear_groups(model)] == [1, 1, 1, 1]


def test_an_engines_model_is_not_copied(tiny: LoadedModel) -> None:
    """Its copy's weights would be views of nothing: updates would pass by the products."""
    made = [TorchEngine.from_model(tiny.model, device="cpu", quantize=quantize) for quantize in (None, "int8")]
    for engine in made:
        with pytest.raises(TypeError, match="engine's model can't be copied; copy the one that the engine was made"):
            TorchEngine.from_model(engine.model, device="cpu")


QKV, GATED = ["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"]


@pytest.mark.parametrize(
    ("dtype", "together", "close"),
    [
        (torch.float32, QKV, {"atol": 2e-5, "rtol": 1e-5}),
        (torch.bfloat16, QKV + GATED, {"atol": 0.05, "rtol": 0.02}),  # sums in another order
    ],
)
@torch.inference_mode()
def test_a_whole_model_is_the_same_with_them(
    tiny: LoadedModel, dtype: torch.dtype, together: list[str], close: dict[str, float]
) -> None:
    plain = copy.deepcopy(tiny.model).to(dtype)
    fast = copy.deepcopy(plain)
    speed_up_linears(fast)
    shared = [name.rpartition(".")[2] for name, module in fast.named_modules() if isinstance(module, SharedLinear)]
    assert shared == together * fast.config.num_hidden_layers
    assert list(fast.state_dict()) == list(plain.state_dict())
    ids = torch.arange(20, 60)[None]
    torch.testing.assert_close(fast(ids).logits, plain(ids).logits, **close)
