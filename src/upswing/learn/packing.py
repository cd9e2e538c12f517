"""Rows into packs: token sequences laid end to end, with shared beginnings stored once.

A pack is a forest of segments. A segment attends to itself causally and to the whole chain of its prefixes; nothing
else in the pack is visible to it. What all rows of a pack begin with (a system prompt) is one segment, what the rows
of one group begin with beyond that (the question) another, and the rest of each row its own. Only what some loss token
needs is kept: a row ends just before its last loss token, since that token itself predicts nothing that is trained.

Axis letters: N tokens of a pack, M loss tokens predicted in a pack.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from upswing.learn.rows import TrainRow

MIN_SHARED = 8
"""Shorter common beginnings aren't worth a segment."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Tokens `start:end` of a pack."""

    start: int
    end: int
    prefix: int | None
    """Index of the earlier segment that this one continues; None: it begins a sequence."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Pack:
    """One micro-batch."""

    tokens_N: torch.Tensor
    """int64."""
    position_ids_N: torch.Tensor
    """int64: position within the row, prefixes included."""
    segments: tuple[Segment, ...]
    predict_M: torch.Tensor
    """int64: the position of the pack whose hidden state predicts the loss token."""
    target_M: torch.Tensor
    """int64: the loss token itself."""
    slot_M: torch.Tensor
    """int64: the loss token's index in the batch's FlatBatch."""
    row_indices: tuple[int, ...]
    """The rows in this pack, in the order in which they were laid out."""

    @property
    def num_tokens(self) -> int:
        return len(self.tokens_N)

    @property
    def num_copied(self) -> int:
        """Tokens whose keys and values attention copies: the whole chain's, for each segment with a prefix."""
        return sum(int(self.position_ids_N[one.end - 1]) + 1 for one in self.segments if one.prefix is not None)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Item:
    """A row as the packer sees it."""

    index: int
    group: int
    tokens: np.ndarray
    """int32: all tokens of the row; the first `needed` are the model's input."""
    loss_positions: np.ndarray
    slot: int

    @property
    def needed(self) -> int:
        return int(self.loss_positions[-1])

    @property
    def shareable(self) -> int:
        """How many tokens precede the first loss token."""
        return int(self.loss_positions[0])


@dataclass(frozen=True, kw_only=True, eq=False)
class _Unit:
    """Rows of one group that go into one pack together."""

    items: tuple[_Item, ...]
    size: int
    """An upper bound on the tokens that they take."""


def pack(
    rows: Sequence[TrainRow], max_tokens: int, include: Sequence[int] | None = None, *, keep_groups: bool = False
) -> list[Pack]:
    """Lay out `rows` in packs of at most `max_tokens` tokens; a longer row gets a pack to itself.

    `include`: indices of the rows to lay out, all by default; slots always count the loss tokens of all `rows`. Rows
    without loss tokens are left out. `keep_groups`: a group is never cut, for losses that compare its rows; one that is
    longer than `max_tokens` gets a pack to itself. The result depends on nothing but the arguments.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}; it must be at least 1")
    items = _items(rows, include)
    largest = sys.maxsize if keep_groups else max_tokens
    units = [unit for members in _by_group(items).values() for unit in _split_group(members, largest)]
    return [_build(members) for members in _first_fit(units, max_tokens)]


def _items(rows: Sequence[TrainRow], include: Sequence[int] | None) -> list[_Item]:
    wanted = set(range(len(rows)) if include is None else include)
    items, slot = [], 0
    for index, row in enumerate(rows):
        found = row.loss_positions
        if index in wanted and len(found):
            items.append(_Item(index=index, group=row.group, tokens=row.tokens, loss_positions=found, slot=slot))
        slot += len(found)
    return items


def _by_group(items: Sequence[_Item]) -> dict[int, list[_Item]]:
    groups: dict[int, list[_Item]] = {}
    for item in items:
        groups.setdefault(item.group, []).append(item)
    return groups


def _shared_length(items: Sequence[_Item], least: int = MIN_SHARED) -> int:
    """Length of what all items begin with, before any one's first loss token; 0 when less than `least`."""
    if len(items) < 2:
        return 0
    limit = min(item.shareable for item in items)
    first = items[0].tokens[:limit]
    for item in items[1:]:
        differs = np.flatnonzero(first[:limit] != item.tokens[:limit])
        limit = int(differs[0]) if len(differs) else limit
    return limit if limit >= least else 0


def _split_group(items: list[_Item], max_tokens: int) -> list[_Unit]:
    """Cut a group into units that fit a pack, in order.

    Sizes count what the *whole* group shares: units that meet again in a pack then never need more than their sum.
    """
    shared = _shared_length(items)
    units: list[_Unit] = []
    for item in items:
        extra = item.needed - shared
        if units and units[-1].size + extra <= max_tokens:
            units[-1] = _Unit(items=(*units[-1].items, item), size=units[-1].size + extra)
        else:
            units.append(_Unit(items=(item,), size=item.needed))
    return units


def _first_fit(units: list[_Unit], max_tokens: int) -> list[list[_Item]]:
    """First-fit decreasing; the sort is stable, so equal sizes keep their order."""
    bins: list[list[_Item]] = []
    room: list[int] = []
    for unit in sorted(units, key=lambda unit: -unit.size):
        place = next((b for b, left in enumerate(room) if left >= unit.size), None)
        if place is None:
            bins.append([])
            room.append(max_tokens)
            place = len(bins) - 1
        bins[place].extend(unit.items)
        room[place] -= unit.size
    return bins


@dataclass(kw_only=True)
class _Layout:
    """A pack being written."""

    tokens: list[np.ndarray] = field(default_factory=list)
    positions: list[np.ndarray] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    predict: list[np.ndarray] = field(default_factory=list)
    target: list[np.ndarray] = field(default_factory=list)
    slot: list[np.ndarray] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    length: int = 0

    def add_segment(self, tokens: np.ndarray, first_position: int, prefix: int | None) -> int | None:
        """Append tokens; returns the new segment's index, or `prefix` when there is nothing to append."""
        if not len(tokens):
            return prefix
        self.tokens.append(tokens.astype(np.int64))
        self.positions.append(np.arange(first_position, first_position + len(tokens), dtype=np.int64))
        self.segments.append(Segment(start=self.length, end=self.length + len(tokens), prefix=prefix))
        self.length += len(tokens)
        return len(self.segments) - 1

    def add_row(self, item: _Item, shared: int, prefix: int | None) -> None:
        """Append what follows the first `shared` tokens of a row, and where its loss tokens are predicted."""
        own_start = self.length
        self.add_segment(item.tokens[shared : item.needed], shared, prefix)
        before = item.loss_positions - 1
        # A loss token right after the shared part is predicted by the last token of the prefix.
        last_of_prefix = self.segments[prefix].end - 1 if prefix is not None else -1
        self.predict.append(np.where(before >= shared, own_start + before - shared, last_of_prefix))
        self.target.append(item.tokens[item.loss_positions].astype(np.int64))
        self.slot.append(np.arange(item.slot, item.slot + len(item.loss_positions), dtype=np.int64))
        self.rows.append(item.index)

    def finish(self) -> Pack:
        return Pack(
            tokens_N=torch.from_numpy(np.concatenate(self.tokens)),
            position_ids_N=torch.from_numpy(np.concatenate(self.positions)),
            segments=tuple(self.segments),
            predict_M=torch.from_numpy(np.concatenate(self.predict)),
            target_M=torch.from_numpy(np.concatenate(self.target)),
            slot_M=torch.from_numpy(np.concatenate(self.slot)),
            row_indices=tuple(self.rows),
        )


def _build(items: list[_Item]) -> Pack:
    layout = _Layout()
    common = _shared_length(items)
    root = layout.add_segment(items[0].tokens[:common], 0, None)
    for members in _by_group(items).values():
        # Below a common beginning even one more shared token is worth it: a unit's size counts on it.
        shared = max(common, _shared_length(members, least=1 if common else MIN_SHARED))
        parent = layout.add_segment(members[0].tokens[common:shared], common, root)
        for item in members:
            layout.add_row(item, shared, parent)
    return layout.finish()
