"""Architectures whose rows the engine or the packed forward couldn't keep apart are refused."""

import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM, Phi3Config, Phi3ForCausalLM, XGLMConfig, XGLMForCausalLM

from upswing.engine.base import Sampling
from upswing.engine.torch import TorchEngine
from upswing.errors import ConfigError
from upswing.learn.forward import packed_hidden
from upswing.learn.packing import pack
from upswing.models.attention import NAME, context_limit, longest_row, use_upswing_attention

from .helpers import row


def ignoring(kind):
    """Architectures that swallow the context: they never look their attention up by name."""
    if kind == "bloom":
        return BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=16, n_layer=2, n_head=2)).eval()
    sizes = {"d_model": 16, "ffn_dim": 16, "num_layers": 2, "attention_heads": 2, "max_position_embeddings": 64}
    return XGLMForCausalLM(XGLMConfig(vocab_size=64, **sizes)).eval()


@pytest.mark.parametrize("kind", ["bloom", "xglm"])
async def test_models_that_ignore_the_context_are_refused(kind):
    """PAD-02's kind: rows would read each other, and the future, with plausible numbers."""

    model = ignoring(kind)
    model.config._attn_implementation = NAME  # as `load_model` leaves it: transformers takes any registered name
    [one] = pack([row([5, 6, 7], [2]), row([8, 9, 10], [1, 2], group=1)], 100)
    with pytest.raises(ConfigError, match="0 of its 2 layers use the attention that keeps rows apart"):
        packed_hidden(model, one)
    with pytest.raises(ConfigError, match="use a Llama or Qwen"):
        engine = TorchEngine(model)
        await engine.generate([5, 6, 7], Sampling(max_tokens=2))


def longrope(original):
    half = [1.0 + i for i in range(4)]
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": half}
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "pad_token_id": 0}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.5}
    limits = {"max_position_embeddings": 64, "original_max_position_embeddings": original}
    torch.manual_seed(0)
    config = Phi3Config(**sizes, **heads, **limits, rope_parameters={**rope, **limits})
    model = Phi3ForCausalLM(config).eval()
    use_upswing_attention(model)
    return model


def test_a_row_that_would_change_the_positions_of_others_is_refused():
    """Phi-3's long factors hold for a whole batch as soon as one row of it is long."""

    model = longrope(8)
    assert longest_row(model) == 8 and context_limit(model) == 8
    short, long = row([5, 6, 7, 8], [2, 3]), row(range(5, 25), [18, 19], group=1)
    with torch.no_grad():
        alone = packed_hidden(model, pack([short], 100)[0])
        beside = packed_hidden(model, pack([short, row([9, 8, 7], [2], group=1)], 100)[0])
    torch.testing.assert_close(beside[:2], alone, atol=1e-5, rtol=1e-5)
    with pytest.raises(ConfigError, match=r"a row of 19 tokens.*limits.context_tokens to 8"):
        packed_hidden(model, pack([short, long], 100)[0])
    with pytest.raises(ConfigError, match="max_context is 9; allowed: 2 to 8"):
        TorchEngine(model, max_context=9)
    assert TorchEngine(model).max_context == 8
