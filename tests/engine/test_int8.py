"""int8 products against integers and float64 by hand, and an engine that samples with them."""

from __future__ import annotations

import copy
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from upswing.engine.base import Sampling
from upswing.engine.int8 import LEVELS, Int8Product, _hadamard, check_int8, quantize_linears
from upswing.engine.torch import TorchEngine
from upswing.engine.weights import load_weights
from upswing.errors import ConfigError
from upswing.models.load import LoadedModel

from .conftest import MakeEngine, reference, sharpen
from .test_torch_engine import all_of, hf_logprobs, prompts

SAMPLED = Sampling(max_tokens=24, seed=5)


@pytest.fixture(params=["fbgemm", "onednn"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(Int8Product, "onednn", request.param == "onednn")
    return str(request.param)


def hadamard(columns: int) -> torch.Tensor:
    """[columns, columns] float64 with Sylvester's matrix on the diagonal: (-1)^(bits that i and j share) / sqrt."""
    size = min(64, columns & -columns)
    signs = [[(-1.0) ** (i & j).bit_count() for j in range(size)] for i in range(size)]
    return torch.block_diag(*[torch.tensor(signs, dtype=torch.float64) / size**0.5] * (columns // size))


def quantised(*weights: torch.Tensor, bias: torch.Tensor | None = None) -> Int8Product:
    layers = [nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None) for weight in weights]
    for layer, weight in zip(layers, weights, strict=True):
        layer.weight.data = weight.float()
        if bias is not None:
            layer.bias.data = bias[: len(weight)].float()
    return Int8Product(layers)


@pytest.mark.parametrize("columns", [64, 192])
@pytest.mark.parametrize("extreme", [False, True])
def test_values_on_the_grid_are_multiplied_exactly(kernel: str, columns: int, extreme: bool) -> None:
    """Integers after the rotation, the largest ones too, which 16-bit sums of two products must hold."""
    torch.manual_seed(0)
    weight = torch.randint(-LEVELS, LEVELS + 1, (40, columns)).double()
    rows = torch.randint(-127, 128, (33, columns)).double()
    if extreme:
        weight, rows = weight.sign() * LEVELS, rows.sign() * 127
        weight[0], rows[0] = LEVELS, 127
    weight[:, 3], rows[:, 5] = LEVELS, -127
    rotation = hadamard(columns)
    product = quantised(weight @ rotation)
    torch.testing.assert_close(
        product.compute((rows @ rotation).float()).double(), rows @ weight.T, atol=0.02, rtol=1e-6
    )


@pytest.mark.parametrize("columns", [48, 64, 576])
def test_the_error_is_that_of_two_roundings(kernel: str, columns: int) -> None:
    torch.manual_seed(1)
    weight = torch.randn(30, columns) * torch.rand(30, 1)
    rows = torch.randn(2, 7, columns) * 10 ** torch.randn(2, 7, 1)
    rows[..., 5] *= 30  # an outlier
    rows[0, 0] = 0
    weight[3] = 0
    bias = torch.randn(30)
    exact = rows.double() @ weight.T.double() + bias.double()
    got = quantised(weight, bias=bias).compute(rows)
    rotation = hadamard(columns)
    w, x = (weight.double() @ rotation).abs(), (rows.double() @ rotation).abs()
    half_w = w.amax(-1, keepdim=True).expand_as(w) / LEVELS / 2
    half_x = x.amax(-1, keepdim=True).expand_as(x) / 127 / 2
    bound = x @ half_w.T + half_x @ w.T + half_x @ half_w.T
    assert (got.double() - exact).abs().le(bound * 1.001 + 1e-4).all()
    assert got.shape == exact.shape and torch.equal(got[0, 0], bias) and (got[..., 3] == bias[3]).all()
    # The roundings are independent, so that errors are far below the bound: 1 % of the outputs' size.
    assert (got - exact)[1].norm() < 0.03 * (exact - bias)[1].norm()


def test_a_row_depends_on_no_other_and_dtype_and_nan_pass_through(kernel: str) -> None:
    torch.manual_seed(2)
    product = quantised(torch.randn(24, 64))
    rows = torch.randn(9, 64)
    alone = product.compute(rows[:1])
    rows[3] *= 1000
    rows[4, 7] = torch.nan
    together = product.compute(rows)
    assert torch.equal(together[:1], alone)
    assert together[4].isnan().all() and together[[0, 1, 2, 3, 5, 6, 7, 8]].isfinite().all()
    assert product.compute(rows.bfloat16()).dtype == torch.bfloat16
    assert quantised(torch.full((8, 64), torch.nan)).compute(rows).isnan().all()
    assert product.compute(rows[None, :0]).shape == (1, 0, 24)


def test_nothing_depends_on_the_defaults_nor_changes_the_filters(kernel: str) -> None:
    torch.manual_seed(2)
    layer, rows = nn.Linear(64, 24), torch.randn(9, 64)
    expected = Int8Product([copy.deepcopy(layer)]).compute(rows)
    _hadamard.cache_clear()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("error")
            before = list(warnings.filters)
            product = Int8Product([layer])
            assert warnings.filters == before
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(product.compute(rows), expected)


def test_bfloat16_layers_with_biases(kernel: str) -> None:
    model = untied().to(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    held, layer = copy.deepcopy(model), model.model.layers[1].self_attn.q_proj
    quantize_linears(held)
    rows = torch.randn(1, 5, 48, dtype=torch.bfloat16)
    got = held.model.layers[1].self_attn.q_proj(rows)
    exact = nn.functional.linear(rows.double(), layer.weight.double(), layer.bias.double())
    assert got.dtype == torch.bfloat16
    assert (got - exact).norm() < 0.03 * (exact - layer.bias).norm()
    load_weights(held, {name: parameter.detach() + 1 for name, parameter in model.named_parameters()})
    torch.testing.assert_close(held.model.layers[1].self_attn.q_proj(rows * 0)[0, 0], layer.bias + 1)


def untied() -> PreTrainedModel:
    """With biases, and an output layer of its own."""
    torch.manual_seed(3)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=928, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=6,
            num_key_value_heads=2, tie_word_embeddings=False, max_position_embeddings=256,
        )
    )  # fmt: skip
    return sharpen(model)


@pytest.fixture(params=["tied", "untied"])
def model(request: pytest.FixtureRequest, tiny: LoadedModel) -> PreTrainedModel:
    return tiny.model if request.param == "tied" else untied()


async def test_engine_logprobs_are_of_the_int8_distribution(make_engine: MakeEngine, model: PreTrainedModel) -> None:
    engine = make_engine(model, quantize="int8")
    work = prompts(6, seed=31)
    done = await all_of(engine, work, SAMPLED)
    int8 = reference(model)
    quantize_linears(int8)
    gaps = []
    for other in (int8, reference(model)):
        pairs = [(hf_logprobs(other, p, c, SAMPLED), c.engine_logprobs) for p, c in zip(work, done, strict=True)]
        gaps.append(torch.cat([(ours - torch.tensor(theirs)).abs() for ours, theirs in pairs]).mean())
    # Float noise moves some activation over a rounding edge, so that the first isn't quite 0.
    assert gaps[0] < gaps[1] / 20


async def test_updates_quantise_anew_and_fail_as_before(make_engine: MakeEngine, model: PreTrainedModel) -> None:
    new = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.add_(torch.randn_like(parameter) * parameter.std() * 0.3)
    work = prompts(4, seed=32)
    expected = await all_of(make_engine(new, quantize="int8"), work, SAMPLED)
    engine = make_engine(model, quantize="int8")
    before = await all_of(engine, work, SAMPLED)
    weights = {name: parameter.detach() for name, parameter in new.named_parameters()}
    key = "model.layers.0.self_attn.k_proj.weight"
    with pytest.raises(ValueError, match=r"no parameter 'model.layers.0.self_attn.k_prj.weight'; did you mean"):
        await engine.update_weights({**weights, key.replace("k_proj", "k_prj"): weights[key]}, 1)
    with pytest.raises(ValueError, match=rf"1 parameters were not given, the first is '{key}'"):
        await engine.update_weights({name: value for name, value in weights.items() if name != key}, 1)
    assert await all_of(engine, work, SAMPLED) == before
    with pytest.raises(ValueError, match=r"k_proj.weight' has shape \(3, 3\)"):
        await engine.update_weights({**weights, key: torch.zeros(3, 3)}, 1)
    await engine.update_weights(dict(reversed(weights.items())), 0)
    assert await all_of(engine, work, SAMPLED) == expected != before


def test_weights_are_held_once(model: PreTrainedModel) -> None:
    held = copy.deepcopy(model)
    quantize_linears(held)
    embedding = held.get_input_embeddings().weight
    for name, parameter in held.named_parameters():
        assert parameter.is_meta == (parameter.dim() == 2 and parameter is not embedding), name
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    assert {name: parameter.shape for name, parameter in held.named_parameters()} == shapes
    load_weights(held, {name: parameter.detach() for name, parameter in model.named_parameters()})


def test_other_devices_are_refused(tiny: LoadedModel) -> None:
    with pytest.raises(ConfigError, match=r"engine.quantize: got 'int8' on cuda; it is for CPUs only; leave it out"):
        TorchEngine.from_model(tiny.model, device="cuda", quantize="int8")
    check_int8(torch.device("cpu"))


def test_a_pytorch_without_the_kernel_is_refused(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel that is used, not another one."""
    other = {"fbgemm": "onednn", "onednn": "fbgemm"}[kernel]
    monkeypatch.setattr(torch.backends, "quantized", SimpleNamespace(supported_engines=["none", other]))
    with pytest.raises(ConfigError, match=f"got 'int8', but this PyTorch was built without {kernel}; leave it out"):
        check_int8(torch.device("cpu"))
    monkeypatch.setattr(torch.backends, "quantized", SimpleNamespace(supported_engines=["none", kernel]))
    check_int8(torch.device("cpu"))
