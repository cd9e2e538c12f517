"""The registered attention, with and without a context."""

import copy

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, PreTrainedModel

from upswing.errors import ConfigError
from upswing.models.attention import check_all_attended, use_upswing_attention
from upswing.models.tiny import tiny_model


@pytest.fixture(scope="module")
def pair() -> tuple[PreTrainedModel, PreTrainedModel]:
    ours = tiny_model()
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.mul_(4.0)
    theirs = copy.deepcopy(ours)
    theirs.set_attn_implementation("eager")
    return ours, theirs


IDS = torch.randint(20, 900, (3, 17), generator=torch.Generator().manual_seed(0))


def test_without_context_it_is_causal_attention(pair: tuple[PreTrainedModel, PreTrainedModel]) -> None:
    ours, theirs = pair
    torch.testing.assert_close(ours(IDS).logits, theirs(IDS).logits, atol=1e-4, rtol=1e-4)


def test_padded_batches_respect_their_mask(pair: tuple[PreTrainedModel, PreTrainedModel]) -> None:
    ours, theirs = pair
    mask = torch.ones_like(IDS)
    mask[1, :9] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    got, want = (m(IDS, attention_mask=mask, position_ids=positions).logits for m in (ours, theirs))
    torch.testing.assert_close(got[1, 9:], want[1, 9:], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(got[1, 9:], ours(IDS).logits[1, 9:], atol=1e-2)


def test_generate_with_a_cache(pair: tuple[PreTrainedModel, PreTrainedModel]) -> None:
    got, want = (m.generate(IDS, max_new_tokens=8, do_sample=False, eos_token_id=None) for m in pair)
    assert torch.equal(got, want)


def test_several_tokens_continue_a_cached_prefix_without_a_mask(pair: tuple[PreTrainedModel, PreTrainedModel]) -> None:
    ours, theirs = pair
    past = ours(IDS[:, :9], use_cache=True).past_key_values
    got = ours(IDS[:, 9:], past_key_values=past).logits
    torch.testing.assert_close(got, theirs(IDS).logits[:, 9:], atol=1e-4, rtol=1e-4)


def test_attention_that_is_more_than_a_softmax_is_refused() -> None:
    """Gemma 2 caps its scores; leaving that out would sample from another model without a word."""
    sizes = {"vocab_size": 99, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    model = Gemma2ForCausalLM(Gemma2Config(**sizes, num_attention_heads=2, num_key_value_heads=2))
    use_upswing_attention(model)
    with pytest.raises(ConfigError, match="'softcap', which is not supported"):
        model(torch.tensor([[1, 2]]))


def test_context_gets_every_layer_and_decides(pair: tuple[PreTrainedModel, PreTrainedModel]) -> None:
    ours, _ = pair
    seen: list[tuple[int, tuple[int, ...], tuple[int, ...], float]] = []

    class Recorder:
        calls = 0

        def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor:
            seen.append((layer, tuple(q.shape), tuple(k.shape), scaling))
            return torch.zeros_like(q).transpose(1, 2)

    row = IDS[:1]
    recorder = Recorder()
    logits = ours(row, attention=recorder, use_cache=False).logits
    check_all_attended(ours, recorder)
    assert seen == [(layer, (1, 4, 17, 16), (1, 2, 17, 16), 0.25) for layer in (0, 1)]
    assert not torch.allclose(logits, ours(row).logits, atol=1e-2)
