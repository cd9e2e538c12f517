"""The training forward: a pack in, log-probs and entropies (or a critic's values) of its loss tokens out.

Axis letters: N tokens of a pack, M its loss tokens, U the distinct ones of them, Hq and Hkv heads, D head
size, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from upswing.errors import ConfigError
from upswing.learn.in_place import embedded
from upswing.learn.logits import token_logprobs
from upswing.learn.packing import Pack, Segment
from upswing.models.attention import NAME, check_all_attended, longest_row
from upswing.models.heads import scalar_head


class PackedAttention:
    """Attention over a pack: each segment sees itself causally and all of its chain of prefixes, and nothing else.

    The same object serves every layer of one forward pass.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._lengths = [segment.end - segment.start for segment in segments]
        self._chains = [_chain(segments, index) for index in range(len(segments))]
        self._masks: dict[tuple[int, int], torch.Tensor] = {}
        self.calls = 0

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor:
        """`q` [1, Hq, N, D], `k`, `v` [1, Hkv, N, D] -> [1, N, Hq, D]."""
        # split, not slices: its backward is one concatenation instead of a zero-filled tensor a segment.
        queries, keys, values = (torch.split(tensor, self._lengths, dim=2) for tensor in (q, k, v))
        outputs = []
        for query, chain in zip(queries, self._chains, strict=True):
            if len(chain) == 1:
                key, value, mask = keys[chain[0]], values[chain[0]], None
            else:
                key = torch.cat([keys[i] for i in chain], dim=2)
                value = torch.cat([values[i] for i in chain], dim=2)
                mask = self._mask(query, key.shape[2])
            out = F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=mask,
                is_causal=mask is None,
                scale=scaling,
                enable_gqa=q.shape[1] != k.shape[1],
            )
            outputs.append(out.transpose(1, 2))
        return torch.cat(outputs, dim=1)

    def _mask(self, query: torch.Tensor, num_keys: int) -> torch.Tensor:
        """Additive [n, p + n]: causal, aligned to the last query and the last key."""
        shape = (query.shape[2], num_keys)
        if shape not in self._masks:
            visible = torch.ones(shape, dtype=torch.bool, device=query.device).tril(num_keys - shape[0])
            mask = torch.zeros(shape, dtype=query.dtype, device=query.device)
            self._masks[shape] = mask.masked_fill_(~visible, float("-inf"))
        return self._masks[shape]


def _chain(segments: Sequence[Segment], index: int) -> list[int]:
    """The segment and its prefixes, outermost first."""
    chain = [index]
    while (prefix := segments[chain[0]].prefix) is not None:
        chain.insert(0, prefix)
    return chain


def check_trainable(model: Any, *, scalar: bool = False) -> None:
    """Raises ConfigError for a model whose logits (`scalar`: values) or attention the packed forward can't do."""
    config = model.config
    for name in ("final_logit_softcapping", "attn_logit_softcapping", "logits_scaling", "logit_scale"):
        if getattr(config, name, None) not in (None, 1.0):
            raise ConfigError(
                f"model type '{config.model_type}' sets {name}, which training doesn't support; "
                "use a Llama or Qwen-family model"
            )
    layer_types = getattr(config, "layer_types", None) or []
    other = sorted({kind for kind in layer_types if kind != "full_attention"})
    if other or getattr(config, "use_sliding_window", False):
        kinds = ", ".join(other) or "sliding_attention"
        raise ConfigError(
            f"model type '{config.model_type}' uses {kinds} layers; training supports full attention only"
        )
    if (scalar_head(model) if scalar else model.get_output_embeddings()) is None:
        need = "scalar head; use scalar_model" if scalar else "language-model head; load a causal language model"
        raise ConfigError(f"model type '{config.model_type}' has no {need}")


def packed_hidden(model: Any, pack: Pack) -> torch.Tensor:
    """Last hidden states [M, H] where a loss token is predicted, each row as if it were alone, gradients included.

    Raises ValueError for a model with another attention and ConfigError for one that doesn't use it in every layer:
    rows would read each other; and ConfigError for a row beyond `longest_row`.
    """
    if model.config._attn_implementation != NAME:
        raise ValueError(f"the model's attention is '{model.config._attn_implementation}'; call use_upswing_attention")
    longest, limit = int(pack.position_ids_N.max()) + 1, longest_row(model)
    if limit is not None and longest > limit:
        raise ConfigError(
            f"a row of {longest} tokens, but the rotary positions ('longrope') of model type "
            f"'{model.config.model_type}' change for all rows beyond {limit}; set limits.context_tokens to {limit}"
        )
    device = model.get_input_embeddings().weight.device
    attention = PackedAttention(pack.segments)
    hidden_1NH = model.base_model(
        **embedded(model, pack.tokens_N.to(device)[None]),
        position_ids=pack.position_ids_N.to(device)[None],
        attention=attention,
        use_cache=False,
    ).last_hidden_state
    check_all_attended(model, attention)
    hidden_MH: torch.Tensor = hidden_1NH[0].index_select(0, pack.predict_M.to(device))
    return hidden_MH


def packed_forward(model: Any, pack: Pack, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """policy_logprobs [M] and entropy [M] of the loss tokens of `pack`, under softmax(logits / temperature).

    The head runs only where a loss token is predicted, and once for those that several rows have in common.
    """
    return head_logprobs(model, packed_hidden(model, pack), pack, temperature)


def head_logprobs(
    model: Any, hidden_MH: torch.Tensor, pack: Pack, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `packed_forward`, from the hidden states of `packed_hidden`."""
    head, device = model.get_output_embeddings(), hidden_MH.device
    first_U, which_M = (indices.to(device) for indices in pack.distinct)
    target_M = pack.target_M.to(device)
    if len(first_U) == len(which_M):
        return token_logprobs(hidden_MH, head.weight, head.bias, target_M, temperature)
    hidden_UH = hidden_MH.index_select(0, first_U)
    found = token_logprobs(hidden_UH, head.weight, head.bias, target_M.index_select(0, first_U), temperature)
    logprobs_M, entropy_M = (values_U.index_select(0, which_M) for values_U in found)
    return logprobs_M, entropy_M


def packed_values(model: Any, pack: Pack) -> torch.Tensor:
    """The scalar head [M] at the positions that predict the loss tokens: the value of the state before each of them."""
    hidden_MH, weight_H = packed_hidden(model, pack), model.score.weight[0]
    # Not a matrix product, which autocast would round to bf16.
    values_M: torch.Tensor = (hidden_MH.to(weight_H.dtype) * weight_H).sum(-1)
    return values_M
