"""Keys and values of many sequences in slots, and the attention over them in one packed forward.

Axis letters: S slots, T cached positions, N packed tokens, Hq query heads, Hkv key/value heads, G = Hq / Hkv,
D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

_MIN_POSITIONS = 128
_MAX_GAP = 1
"""Unused slots between two used ones that are cheaper to attend over than to split the call at."""


class KVCache:
    """Per layer of `model`, keys and values [2, S, Hkv, T, D]; S and T grow when needed, up to the maxima."""

    def __init__(self, model: PreTrainedModel, *, max_slots: int, max_positions: int) -> None:
        config = model.config
        num_heads = config.num_attention_heads
        num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
        self.max_slots, self.max_positions = max_slots, max_positions
        empty = torch.zeros(2, 0, num_kv_heads, 0, head_dim, dtype=model.dtype, device=model.device)
        self.layers = [empty] * config.num_hidden_layers

    def reserve(self, slots: int, positions: int) -> None:
        """Make room for that many slots and positions, growing by at least half so that copies stay rare."""
        _, old_slots, num_heads, old_positions, head_dim = self.layers[0].shape
        if slots <= old_slots and positions <= old_positions:
            return
        if slots > old_slots:
            slots = min(max(slots, old_slots + old_slots // 2, 4), self.max_slots)
        if positions > old_positions:
            positions = min(max(positions, old_positions + old_positions // 2, _MIN_POSITIONS), self.max_positions)
        shape = (2, max(slots, old_slots), num_heads, max(positions, old_positions), head_dim)
        for i, old in enumerate(self.layers):
            # Zeros, not empty memory: masked positions get weight 0, and 0 times NaN would still be NaN.
            self.layers[i] = old.new_zeros(shape)
            self.layers[i][:, :old_slots, :, :old_positions] = old

    def copy_prefix(self, source: int, target: int, start: int, stop: int) -> None:
        """Copy positions [start, stop) from one slot to another."""
        for layer in self.layers:
            layer[:, target, :, start:stop] = layer[:, source, :, start:stop]


@dataclass(frozen=True)
class Segment:
    """Consecutive new tokens of one sequence in the packed input."""

    slot: int
    start: int
    """Position of the first one: how many tokens the slot holds already."""
    count: int
    offset: int
    """Where they begin in the packed input."""


@dataclass(frozen=True)
class _Run:
    """Single-token rows whose slots lie (almost) side by side: one SDPA call."""

    rows: slice
    slots: slice
    inside: torch.Tensor | None
    """Index of each row within `slots`; None when the slots have no gaps."""
    mask: torch.Tensor
    """[slots, 1, 1, T] additive; T is the longest row's length."""


class CachedAttention:
    """`AttentionContext` of one engine step: writes new keys and values to the cache, attends over each slot.

    The packed input is the segments of two or more tokens, then the single-token rows ascending by slot.
    """

    def __init__(self, cache: KVCache, segments: Sequence[Segment]) -> None:
        self._cache = cache
        self._long = [segment for segment in segments if segment.count > 1]
        singles = [segment for segment in segments if segment.count == 1]
        self._single_offset = sum(segment.count for segment in self._long)
        like = cache.layers[0]
        slots = [segment.slot for segment in segments for _ in range(segment.count)]
        self._slots = torch.tensor(slots, device=like.device)
        positions = [torch.arange(segment.start, segment.start + segment.count) for segment in segments]
        self.positions_N = torch.cat(positions).to(like.device)
        self._runs = [_make_run(rows, singles, like) for rows in _split_runs([segment.slot for segment in singles])]
        self._masks = {segment: _continuation_mask(segment, like) for segment in self._long}

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor:
        """`q` [1, Hq, N, D], `k`, `v` [1, Hkv, N, D] -> [1, N, Hq, D]."""
        cached = self._cache.layers[layer]
        keys, values = cached
        keys[self._slots, :, self.positions_N] = k[0].transpose(0, 1)
        values[self._slots, :, self.positions_N] = v[0].transpose(0, 1)
        out = q.new_empty(q.shape[2], q.shape[1], q.shape[3])
        for segment in self._long:
            self._attend_segment(cached, segment, q, scaling, out)
        if self._runs:
            self._attend_singles(cached, q, scaling, out)
        return out[None]

    def _attend_segment(
        self, cached: torch.Tensor, segment: Segment, q: torch.Tensor, scaling: float, out: torch.Tensor
    ) -> None:
        rows = slice(segment.offset, segment.offset + segment.count)
        stop = segment.start + segment.count
        keys, values = cached[:, segment.slot]
        num_kv = keys.shape[0]
        group = q.shape[1] // num_kv
        # Key heads as the batch and the group as heads: shared keys are expanded by stride, not copied.
        mask = self._masks[segment]
        attended = F.scaled_dot_product_attention(
            q[0, :, rows].reshape(num_kv, group, segment.count, -1),
            keys[:, None, :stop].expand(-1, group, -1, -1),
            values[:, None, :stop].expand(-1, group, -1, -1),
            attn_mask=mask,
            is_causal=mask is None,
            scale=scaling,
        )
        out[rows] = attended.flatten(0, 1).transpose(0, 1)

    def _attend_singles(self, cached: torch.Tensor, q: torch.Tensor, scaling: float, out: torch.Tensor) -> None:
        first = self._single_offset
        _, _, num_kv, _, head_dim = cached.shape
        queries = q[0, :, first:].transpose(0, 1).reshape(-1, num_kv, q.shape[1] // num_kv, head_dim)
        for run in self._runs:
            rows_q = queries[run.rows]
            if run.inside is not None:
                spread = rows_q.new_zeros(run.slots.stop - run.slots.start, *rows_q.shape[1:])
                spread[run.inside] = rows_q
                rows_q = spread
            # A group's queries share their keys, so they stand as query positions of one key head.
            keys, values = cached[:, run.slots, :, : run.mask.shape[-1]]
            attended = F.scaled_dot_product_attention(rows_q, keys, values, attn_mask=run.mask, scale=scaling)
            if run.inside is not None:
                attended = attended[run.inside]
            out[first + run.rows.start : first + run.rows.stop] = attended.flatten(1, 2)


def _split_runs(slots: Sequence[int]) -> list[slice]:
    """Row ranges whose ascending slots lie side by side, small gaps allowed."""
    starts = [i for i, slot in enumerate(slots) if i == 0 or slot - slots[i - 1] > 1 + _MAX_GAP]
    stops = [*starts[1:], len(slots)]
    return [slice(start, stop) for start, stop in zip(starts, stops, strict=False)]


def _make_run(rows: slice, singles: Sequence[Segment], like: torch.Tensor) -> _Run:
    held = singles[rows]
    first, last = held[0].slot, held[-1].slot
    count = last - first + 1
    lengths = torch.ones(count, dtype=torch.long)  # a gap's slot reads position 0, so that no row is all masked
    inside = torch.tensor([segment.slot - first for segment in held])
    lengths[inside] = torch.tensor([segment.start + 1 for segment in held])
    mask = _additive(torch.arange(int(lengths.max())) < lengths[:, None], like)
    return _Run(
        rows=rows,
        slots=slice(first, last + 1),
        inside=inside.to(like.device) if count > len(held) else None,
        mask=mask[:, None, None, :],
    )


def _continuation_mask(segment: Segment, like: torch.Tensor) -> torch.Tensor | None:
    """Causal mask [count, start + count] of tokens that continue a cached prefix; None without one."""
    if segment.start == 0:
        return None
    seen = torch.ones(segment.count, segment.start + segment.count, dtype=torch.bool, device=like.device)
    return _additive(seen.tril(segment.start), like)


def _additive(seen: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """0 where seen, else -inf, in the dtype and on the device of `like`."""
    seen = seen.to(like.device)
    return torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill_(~seen, float("-inf"))
