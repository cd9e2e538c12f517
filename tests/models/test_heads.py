"""Scalar heads on the backbones of language models."""

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForSequenceClassification,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from upswing.errors import ConfigError, ModelNotFound
from upswing.models.heads import load_scalar_model, scalar_head, scalar_model
from upswing.models.tiny import tiny_model

SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
         "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip


def causal(kind: str):
    if kind == "llama":
        return tiny_model()
    if kind == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**SIZES))
    return GPT2LMHeadModel(GPT2Config(vocab_size=61, n_embd=32, n_layer=1, n_head=4, resid_pdrop=0.4)).train()


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
def test_a_backbone_is_taken_over_and_survives_a_folder(kind: str, tmp_path: Path) -> None:
    source = causal(kind)
    backbone = source.base_model
    model = scalar_model(source)
    assert model.base_model is backbone, "no second copy of the weights"
    own = {id(p) for p in model.parameters()}
    hidden = model.config.hidden_size
    assert len(own - {id(p) for p in backbone.parameters()}) == 1
    assert model.score.weight.shape == (1, hidden) and not model.score.weight.any()
    assert model.score.weight.dtype == torch.float32 and not any(p.is_meta for p in model.parameters())
    assert not any(b.is_meta for b in model.buffers())
    nn.init.normal_(model.score.weight)
    model.save_pretrained(tmp_path / "saved")
    loaded = load_scalar_model(tmp_path / "saved")
    others = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    again = type(model).from_pretrained(tmp_path / "saved", dtype=model.dtype)
    for other in (loaded, others, again):
        assert type(other) is type(model) and other.config.num_labels == 1
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, other.state_dict()[name]), name
    for one in (model, loaded):
        assert all(m.p == 0 for m in one.modules() if isinstance(m, nn.Dropout)) and not one.training
        assert scalar_head(one) is one.score
    assert scalar_head(source) is None


def test_what_has_no_scalar_head_is_refused(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "causal")
    LlamaForSequenceClassification(LlamaConfig(**SIZES, num_labels=2)).save_pretrained(tmp_path / "two")
    for name in (str(tmp_path / "causal"), str(tmp_path / "two"), "tiny"):
        with pytest.raises(ConfigError, match="has no scalar head"):
            load_scalar_model(name)
    with pytest.raises(ModelNotFound):
        load_scalar_model(tmp_path / "nowhere")
