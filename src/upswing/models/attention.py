"""One attention function for every model, so that the engine and the learner run the same modelling code.

Hugging Face models look up their attention by name. This module adds the name `upswing`; a model loaded with it
(`load_model` does) hands every layer's queries, keys and values to the `AttentionContext` given to its forward:

    model(input_ids=ids_1N, position_ids=positions_1N, attention=context, use_cache=False)

The context decides who attends to whom: the engine's one holds a KV cache, the learner's one knows where the packed
sequences begin. Rotary embeddings, biases and query/key norms have been applied before it is called.

Axis letters: N packed tokens, Hq query heads, Hkv key/value heads, D head size.
"""

from __future__ import annotations

from typing import Any, Protocol, cast

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from upswing.errors import ConfigError

NAME = "upswing"
"""Value of `attn_implementation` for models that use this function."""


class AttentionContext(Protocol):
    """Who attends to whom in one forward pass."""

    calls: int
    """Layers that have called it; 0 at first."""

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor:
        """Attention of one layer.

        `q` [1, Hq, N, D]; `k`, `v` [1, Hkv, N, D]; query head h reads key head h // (Hq // Hkv). `scaling` multiplies
        the scores before the softmax. Returns [1, N, Hq, D].
        """
        ...


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    attention: AttentionContext | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The function that Hugging Face calls; without a context it is Hugging Face's own SDPA over [B, H, N, D].

    Raises ConfigError for attention that is more than a softmax of scaled products.
    """
    extras = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    if extras:
        raise ConfigError(f"the model's attention has '{extras[0]}', which is not supported; use a Llama or Qwen model")
    if attention is None:
        plain: tuple[torch.Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        return plain
    attention.calls += 1
    scaling, layer = kwargs.get("scaling"), cast(int, module.layer_idx)
    return attention.attend(layer, query, key, value, query.shape[-1] ** -0.5 if scaling is None else scaling), None


def check_all_attended(model: Any, attention: AttentionContext) -> None:
    """After a forward with `attention`: raises ConfigError where not every layer asked it.

    Models that never look up their attention by name (BLOOM, MPT, XGLM) swallow the context and ignore it, and layers
    without attention carry a state along: rows would read each other, with finite and plausible numbers.
    """
    if attention.calls != model.config.num_hidden_layers:
        raise ConfigError(
            f"model type '{model.config.model_type}': {attention.calls} of its {model.config.num_hidden_layers} layers "
            "use the attention that keeps rows apart; use a Llama or Qwen-family model"
        )


def longest_row(model: Any) -> int | None:
    """Tokens up to which a row's rotary positions don't depend on the other rows beside it; None: always.

    `longrope` (Phi-3 and 4 with 128k) takes other frequencies for all rows as soon as one is longer.
    """
    rope = getattr(model.config, "rope_parameters", None) or {}
    layers = rope.values() if all(isinstance(value, dict) for value in rope.values()) else [rope]
    limits = [one.get("original_max_position_embeddings") for one in layers if one.get("rope_type") == "longrope"]
    return min((int(limit) for limit in limits if limit), default=None)


def context_limit(model: Any) -> int:
    """Tokens that a sequence may have: `longest_row`, or what the model was made for. Raises ConfigError if unknown."""
    limit = longest_row(model) or getattr(model.config, "max_position_embeddings", None)
    if not limit:
        kind = model.config.model_type
        raise ConfigError(
            f"model type '{kind}' doesn't say how long a context may be; use a Llama or Qwen-family model"
        )
    return int(limit)


def padding_mask(*, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor | None:
    """Mask for forwards without a context; None when there is neither padding nor a cache.

    Without this, transformers drops `attention_mask` for an unknown attention and padded rows attend to padding;
    with its own, packed forwards build an N x N mask that no context reads.
    """
    if attention_mask is None and kwargs.get("q_length") == kwargs.get("kv_length"):
        return None
    return sdpa_mask(attention_mask=attention_mask, **kwargs)


AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, padding_mask)


def use_upswing_attention(model: PreTrainedModel) -> None:
    """Switch a loaded model to this attention, in place."""
    model.set_attn_implementation(NAME)
