"""Keys and values of many sequences in slots, and the attention over them in one packed forward.

Axis letters: S slots, T cached positions, N packed tokens, Hq query heads, Hkv key/value heads, G = Hq / Hkv,
D head size.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

Int64N: TypeAlias = npt.NDArray[np.int64]

_MIN_POSITIONS = 128
_GAP_BYTES = 2**18
"""Keys and values of unused slots between two used ones that are cheaper to attend over than to split the call at."""


class KVCache:
    """Per layer of `model`, keys and values [2, S, Hkv, T, D]; S and T change when needed, up to the maxima.

    S x T is at most `budget`: the tokens that `memory_gb` (1e9 bytes each, all layers; None: no limit) holds.
    `expected` is an S and T to begin with: the `most` of an earlier cache, so that this one needn't grow there again.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_slots: int,
        max_positions: int,
        memory_gb: float | None = None,
        expected: tuple[int, int] = (0, 0),
    ) -> None:
        config = model.config
        num_heads = config.num_attention_heads
        num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
        self.max_slots, self.max_positions = max_slots, max_positions
        self._expected, self._asked = expected, (0, 0)
        empty = torch.zeros(2, 0, num_kv_heads, 0, head_dim, dtype=model.dtype, device=model.device)
        self.layers = [empty] * config.num_hidden_layers
        self.token_bytes = 2 * num_kv_heads * head_dim * empty.itemsize * len(self.layers)
        self.budget = sys.maxsize if memory_gb is None else round(memory_gb * 1e9) // self.token_bytes

    @property
    def num_slots(self) -> int:
        return self.layers[0].shape[1]

    @property
    def most(self) -> tuple[int, int]:
        """Most slots and most positions that were needed so far; of a cache that was never used those expected."""
        return self._asked if self._asked[0] else self._expected

    def reserve(self, rows: Sequence[int], positions: int) -> None:
        """Hold the slots `rows` as 0, 1, ..., each with that many positions; those from S on are new.

        `rows` ascends, and len(rows) x positions is within the budget. What must grow grows by half where the budget
        allows, so that copies stay rare. One layer is replaced at a time, so old and new never stand side by side.
        """
        self._asked = max(self._asked[0], len(rows)), max(self._asked[1], positions)
        _, old_slots, num_heads, old_positions, head_dim = self.layers[0].shape
        if len(rows) <= old_slots and positions <= old_positions and rows[-1] < len(rows):
            return
        slots = _grown(len(rows), old_slots, max(4, self._expected[0]), self.max_slots)
        longest = _grown(positions, old_positions, max(_MIN_POSITIONS, self._expected[1]), self.max_positions)
        if len(rows) > old_slots:
            slots = min(slots, self.budget // positions)
            longest = min(longest, self.budget // slots)
        else:
            longest = min(longest, self.budget // len(rows))
            slots = min(slots, self.budget // longest)
        kept = min(longest, old_positions)
        for i, old in enumerate(self.layers):
            # Zeros, not empty memory: masked positions get weight 0, and 0 times NaN would still be NaN.
            self.layers[i] = old.new_zeros(2, slots, num_heads, longest, head_dim)
            for new, row in enumerate(rows):
                if row < old_slots:
                    self.layers[i][:, new, :, :kept] = old[:, row, :, :kept]

    def copy_prefix(self, source: int, target: int, start: int, stop: int) -> None:
        """Copy positions [start, stop) from one slot to another."""
        for layer in self.layers:
            layer[:, target, :, start:stop] = layer[:, source, :, start:stop]


def _grown(needed: int, held: int, least: int, most: int) -> int:
    """`held` where it is enough, else half as much again, or what is needed."""
    return held if needed <= held else min(max(needed, held + held // 2, least), most)


class Segment(NamedTuple):
    """Consecutive new tokens of one sequence, or of several that are the same, in the packed input."""

    slot: int
    start: int
    """Position of the first one: how many tokens the slot holds already."""
    num_tokens: int
    offset: int
    """Where they begin in the packed input."""
    twins: Sequence[int] = ()
    """Slots of other sequences with the very same tokens, which get the same keys and values."""


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
        self._cache, self.calls = cache, 0
        like = cache.layers[0]
        self._long = [(segment, _continuation_mask(segment, like)) for segment in segments if segment.num_tokens > 1]
        slots, starts, counts, offsets = (np.array(column) for column in zip(*(s[:4] for s in segments), strict=True))
        num_tokens = int(counts.sum())
        positions = np.arange(num_tokens) + np.repeat(starts - offsets, counts)
        # Where each token is written: to its own slot, and single ones to their twins' too.
        index = np.stack([np.arange(num_tokens), np.repeat(slots, counts), positions])
        twins = [(s.offset, twin, s.start) for s in segments if s.num_tokens == 1 for twin in s.twins]
        if twins:
            index = np.concatenate([index, np.array(twins).T], 1)
        self._tokens, self._slots, self._positions = torch.from_numpy(index).to(like.device)  # one transfer
        self.positions_N = self._positions[:num_tokens]
        slots, starts = slots[len(self._long) :], starts[len(self._long) :]
        self._single_offset = num_tokens - len(slots)
        slot_bytes = like[:, :1, :, : int(starts.max(initial=0)) + 1].nbytes
        runs = _split_runs(slots.tolist(), max_gap=max(1, _GAP_BYTES // slot_bytes))
        self._runs = [_make_run(rows, slots, starts, like) for rows in runs]

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor:
        """`q` [1, Hq, N, D], `k`, `v` [1, Hkv, N, D] -> [1, N, Hq, D]."""
        cached = self._cache.layers[layer]
        new = torch.stack((k[0], v[0])).permute(2, 0, 1, 3)
        cached[:, self._slots, :, self._positions] = new if len(new) == len(self._tokens) else new[self._tokens]
        for segment, _ in self._long:  # copied, since an index would first gather twins x tokens of them
            span = slice(segment.start, segment.start + segment.num_tokens)
            for twin in segment.twins:
                cached[:, twin, :, span] = cached[:, segment.slot, :, span]
        outs = [self._attend_segment(cached, segment, mask, q, scaling) for segment, mask in self._long]
        outs += self._attend_singles(cached, q, scaling)
        return (outs[0] if len(outs) == 1 else torch.cat(outs))[None]

    def _attend_segment(
        self, cached: torch.Tensor, segment: Segment, mask: torch.Tensor | None, q: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """Of its tokens [n, Hq, D]."""
        rows = slice(segment.offset, segment.offset + segment.num_tokens)
        stop = segment.start + segment.num_tokens
        keys, values = cached[:, segment.slot].unbind()
        num_kv = keys.shape[0]
        group = q.shape[1] // num_kv
        # Key heads as the batch and the group as heads: shared keys are expanded by stride, not copied.
        attended = F.scaled_dot_product_attention(
            q[0, :, rows].reshape(num_kv, group, segment.num_tokens, -1),
            keys[:, None, :stop].expand(-1, group, -1, -1),
            values[:, None, :stop].expand(-1, group, -1, -1),
            attn_mask=mask,
            is_causal=mask is None,
            scale=scaling,
        )
        return attended.flatten(0, 1).transpose(0, 1)

    def _attend_singles(self, cached: torch.Tensor, q: torch.Tensor, scaling: float) -> Iterator[torch.Tensor]:
        """Of each run's tokens [rows, Hq, D]."""
        _, _, num_kv, _, head_dim = cached.shape
        queries = q[0, :, self._single_offset :].transpose(0, 1).reshape(-1, num_kv, q.shape[1] // num_kv, head_dim)
        for run in self._runs:
            rows_q = queries[run.rows]
            if run.inside is not None:
                spread = rows_q.new_zeros(run.slots.stop - run.slots.start, *rows_q.shape[1:])
                spread[run.inside] = rows_q
                rows_q = spread
            # A group's queries share their keys, so they stand as query positions of one key head.
            keys, values = cached[:, run.slots, :, : run.mask.shape[-1]].unbind()
            attended = F.scaled_dot_product_attention(rows_q, keys, values, attn_mask=run.mask, scale=scaling)
            if run.inside is not None:
                attended = attended[run.inside]
            yield attended.flatten(1, 2)


def _split_runs(slots: Sequence[int], max_gap: int) -> list[slice]:
    """Row ranges whose ascending slots lie side by side, gaps of `max_gap` slots allowed."""
    starts = [i for i, slot in enumerate(slots) if i == 0 or slot - slots[i - 1] > 1 + max_gap]
    stops = [*starts[1:], len(slots)]
    return [slice(start, stop) for start, stop in zip(starts, stops, strict=False)]


def _make_run(rows: slice, slots: Int64N, starts: Int64N, like: torch.Tensor) -> _Run:
    inside = slots[rows] - slots[rows.start]
    first, count = int(slots[rows.start]), int(inside[-1]) + 1
    lengths = np.ones(count, np.int64)  # a gap's slot reads position 0, so that no row is all masked
    lengths[inside] = starts[rows] + 1
    unseen = torch.arange(int(lengths.max()), device=like.device) >= torch.from_numpy(lengths).to(like.device)[:, None]
    return _Run(
        rows=rows,
        slots=slice(first, first + count),
        inside=torch.from_numpy(inside).to(like.device) if count > len(inside) else None,
        mask=like.new_zeros(unseen.shape).masked_fill_(unseen, float("-inf"))[:, None, None, :],
    )


def _continuation_mask(segment: Segment, like: torch.Tensor) -> torch.Tensor | None:
    """Additive causal mask [num_tokens, start + num_tokens] of tokens that continue a cached prefix; None without."""
    if segment.start == 0:
        return None
    shape = (segment.num_tokens, segment.start + segment.num_tokens)
    return like.new_full(shape, float("-inf")).triu_(segment.start + 1)
