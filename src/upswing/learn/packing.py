"""Rows into packs: token sequences laid end to end, with shared beginnings stored once.

A pack is a forest of segments. A segment attends to itself causally and to the whole chain of its prefixes; nothing
else in the pack is visible to it. What all rows of a pack begin with (a system prompt) is one segment. What the rows
of one group begin with beyond that is a tree: the question, and as far as some of them go on alike (the same first
call, and its result) each stretch once, trained tokens too; the rest of each row is its own. Only what some loss token
needs is kept: a row ends just before its last loss token, since that token itself predicts nothing that is trained.

Axis letters: N tokens of a pack, M loss tokens predicted in a pack, U distinct ones.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

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

    @cached_property
    def distinct(self) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 [U], [M]: a loss token of each predicting position and target; which of these each loss token is.

        Attempts that are alike have many in common.
        """
        pairs = np.stack([self.predict_M.numpy(), self.target_M.numpy()])
        _, first, which = np.unique(pairs, axis=1, return_index=True, return_inverse=True)
        return torch.from_numpy(first), torch.from_numpy(which.reshape(-1))

    @property
    def num_copied(self) -> int:
        """Tokens whose keys and values attention copies: the whole chain's, for each segment with a prefix."""
        return sum(int(self.position_ids_N[one.end - 1]) + 1 for one in self.segments if one.prefix is not None)


@dataclass(kw_only=True, eq=False)
class _Item:
    """A row as the packer sees it."""

    index: int
    group: int
    tokens: np.ndarray
    """int32: all tokens of the row; the first `needed` are the model's input."""
    loss_positions: np.ndarray
    slot: int
    path: tuple[_Stretch, ...] = ()
    """Of its group's tree: from the beginning to its own last token."""

    @property
    def needed(self) -> int:
        return int(self.loss_positions[-1])


@dataclass(frozen=True, kw_only=True, eq=False)
class _Stretch:
    """Tokens `start:end` of the rows that share them."""

    start: int
    end: int


@dataclass(kw_only=True, eq=False)
class _Unit:
    """Rows of one group that go into one pack together."""

    items: list[_Item]
    size: int
    """Tokens that they take. Units that meet in a pack never need more than their sum: trees are whole groups'."""


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
    groups = _by_group(items).values()
    units = [unit for members in groups for unit in _split_group(_grow(members), largest)]
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


def _shared_length(items: Sequence[_Item], start: int = 0) -> int:
    """Length of what all items begin with; that they share their first `start` tokens is known."""
    limit = min(item.needed for item in items)
    first = items[0].tokens
    for item in items[1:]:
        differs = np.flatnonzero(first[start:limit] != item.tokens[start:limit])
        limit = start + int(differs[0]) if len(differs) else limit
    return limit


def _grow(items: Sequence[_Item]) -> list[_Item]:
    """Give the rows of a group their paths; returns them branch by branch."""
    grown: list[_Item] = []
    growing: list[tuple[Sequence[_Item], int, tuple[_Stretch, ...]]] = [(items, 0, ())]
    while growing:  # not by recursion: an agent of a thousand turns may have a row for each, all nested
        members, start, path = growing.pop()
        if len(members) == 1:
            members[0].path = (*path, _Stretch(start=start, end=members[0].needed))
            grown.append(members[0])
            continue
        end = _shared_length(members, start)
        if end >= start + MIN_SHARED:
            path, start = (*path, _Stretch(start=start, end=end)), end
        branches: dict[object, list[_Item]] = {}
        for item in members:
            following = item.tokens[start : min(start + MIN_SHARED, item.needed)]
            # Too little to share: on its own.
            branches.setdefault(following.tobytes() if len(following) == MIN_SHARED else item.index, []).append(item)
        growing += [(branch, start, path) for branch in reversed(branches.values())]
    return grown


def _split_group(items: list[_Item], max_tokens: int) -> list[_Unit]:
    """Cut a group into units that fit a pack, in order."""
    units: list[_Unit] = []
    held: set[_Stretch] = set()  # by the last unit
    for item in items:
        more = sum(stretch.end - stretch.start for stretch in item.path if stretch not in held)
        if units and units[-1].size + more <= max_tokens:
            units[-1].items.append(item)
            units[-1].size += more
            held.update(item.path)
        else:
            units.append(_Unit(items=[item], size=item.needed))
            held = {*item.path}
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


@dataclass(frozen=True, kw_only=True, eq=False)
class _Chain:
    """A segment with all its prefixes."""

    last: int | None
    """Its index; None: nothing yet."""
    places: np.ndarray
    """int64: where in the pack each of its tokens is, prefixes included."""


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

    def add(self, tokens: np.ndarray, chain: _Chain) -> _Chain:
        """Append tokens that continue a chain of segments; returns the longer chain."""
        if not len(tokens):
            return chain
        before, count = len(chain.places), len(tokens)
        self.tokens.append(tokens.astype(np.int64))
        self.positions.append(np.arange(before, before + count, dtype=np.int64))
        self.segments.append(Segment(start=self.length, end=self.length + count, prefix=chain.last))
        places = np.concatenate([chain.places, np.arange(self.length, self.length + count, dtype=np.int64)])
        self.length += count
        return _Chain(last=len(self.segments) - 1, places=places)

    def add_row(self, item: _Item, chain: _Chain) -> None:
        """Append what a row has beyond its chain, and where its loss tokens are predicted."""
        places = self.add(item.tokens[len(chain.places) : item.needed], chain).places
        self.predict.append(places[item.loss_positions - 1])
        self.target.append(item.tokens[item.loss_positions].astype(np.int64))
        self.slot.append(np.arange(item.slot, item.slot + len(item.loss_positions), dtype=np.int64))
        self.rows.append(item.index)

    def add_tree(self, items: Sequence[_Item], root: _Chain) -> None:
        """Append rows of one group, which share what the root has."""
        waiting: list[tuple[Sequence[_Item], int, _Chain]] = [(items, 0, root)]
        while waiting:
            members, level, chain = waiting.pop()  # which share the first `level` stretches of their paths
            if len(members) == 1:
                self.add_row(members[0], chain)
                continue
            branches: dict[_Stretch, list[_Item]] = {}
            for item in members:
                branches.setdefault(item.path[level], []).append(item)
            if len(branches) > 1 and level:  # no further together
                shared = members[0].path[level - 1].end
                chain = self.add(members[0].tokens[len(chain.places) : shared], chain)
            waiting += [(branch, level + 1, chain) for branch in reversed(branches.values())]

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
    common = _shared_length(items) if len(items) > 1 else 0
    root = _Chain(last=None, places=np.empty(0, np.int64))
    if common >= MIN_SHARED:
        root = layout.add(items[0].tokens[:common], root)
    for members in _by_group(items).values():
        layout.add_tree(members, root)
    return layout.finish()
