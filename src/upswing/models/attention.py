"""One attention function for every model, so that the engine and the learner run the same modelling code.

Hugging Face models look up their attention by name. `register()` adds the name `upswing`; a model loaded with it
(`load_model` does) hands every layer's queries, keys and values to the `AttentionContext` given to its forward:

    model(input_ids=ids_1N, position_ids=positions_1N, attention=context, use_cache=False)

The context decides who attends to whom: the engine's one holds a KV cache, the learner's one knows where the packed
sequences begin. Rotary embeddings, biases and query/key norms have been applied before it is called.

Axis letters: N packed tokens, Hq query heads, Hkv key/value heads, D head size.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

NAME = "upswing"
"""Value of `attn_implementation` for models that use this function."""


class AttentionContext(Protocol):
    """Who attends to whom in one forward pass."""

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
    scaling: float | None = None,
    dropout: float = 0.0,
    attention: AttentionContext | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The function that Hugging Face calls; without a context it is plain causal attention over [B, H, N, D]."""
    scale = float(scaling if scaling is not None else query.shape[-1] ** -0.5)
    if attention is not None:
        layer: Any = module.layer_idx
        return attention.attend(int(layer), query, key, value, scale), None
    if attention_mask is not None:
        out = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=attention_mask,
            dropout_p=dropout,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out.transpose(1, 2), None
    return causal_attention(query, key, value, scale, dropout).transpose(1, 2), None


def padding_mask(*, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor | None:
    """Mask for a padded batch without a context; None without padding, so that packed forwards build no N x N mask.

    Without this, transformers drops `attention_mask` for an unknown attention and padded rows attend to padding.
    """
    if attention_mask is None:
        return None
    return sdpa_mask(attention_mask=attention_mask, **kwargs)


def causal_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, dropout: float = 0.0
) -> torch.Tensor:
    """Causal attention of the last Nq of Nk positions. `q` [B, Hq, Nq, D], `k`, `v` [B, Hkv, Nk, D] -> like `q`."""
    num_q, num_k = q.shape[2], k.shape[2]
    grouped = q.shape[1] != k.shape[1]
    if num_q == num_k:
        return F.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=grouped
        )
    # SDPA aligns is_causal to the top left; queries that continue a cached prefix align to the bottom right.
    mask = None
    if num_q > 1:
        mask = torch.ones(num_q, num_k, dtype=torch.bool, device=q.device).tril(num_k - num_q)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scaling, enable_gqa=grouped)


def register() -> None:
    """Make the name `upswing` known to transformers. Calling it again changes nothing."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, padding_mask)


def use_upswing_attention(model: PreTrainedModel) -> None:
    """Switch a loaded model to this attention, in place."""
    register()
    model.set_attn_implementation(NAME)


register()
