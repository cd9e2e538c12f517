"""Which tokens each cache slot holds, who may use it, and which cached prefix a new request can start from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from upswing.trajectory.types import Int32T

MIN_SHARED = 8
"""Tokens: shorter common prefixes are computed again rather than waited for or copied."""


def common_prefix(a: Int32T, b: Int32T) -> int:
    """How many leading tokens two sequences share."""
    count = min(len(a), len(b))
    differs = a[:count] != b[:count]
    first = int(differs.argmax()) if count else 0
    return first if count and differs[first] else count


@dataclass(eq=False)
class Slot:
    """One row of the cache. Free when neither busy nor kept for a session; its tokens stay readable until reuse."""

    index: int
    busy: bool = False
    session: str | None = None
    """The trajectory it is kept for between turns."""
    last_used: int = 0
    sequence: Int32T = field(default_factory=lambda: np.empty(0, np.int32))
    """Begins with the tokens whose keys and values are in the cache."""
    length: int = 0
    """How many these are."""

    @property
    def tokens(self) -> Int32T:
        return self.sequence[: self.length]


class SlotTable:
    """All slots. New ones are made while there are fewer than `max_slots`, which may change, low numbers first."""

    def __init__(self, max_slots: int) -> None:
        self.max_slots = max_slots
        self.slots: list[Slot] = []
        self.evictions = 0
        self._clock = 0

    def longest_match(self, sequence: Int32T) -> int:
        """How many tokens of `sequence` are cached somewhere, the last one not counted."""
        return _longest(self.slots, sequence[:-1], 1)[1]

    def place(self, sequence: Int32T, session: str | None) -> tuple[Slot, Slot | None, int]:
        """Take a slot for `sequence` and mark it busy. Only when fewer than `max_slots` are busy.

        Returns it, holding what it has of the sequence already; a slot to copy more from, if any; and how many tokens
        both have together. At least the last token is left to compute: its logits are what the first sampled token
        needs.
        """
        known = sequence[:-1]
        own = [] if session is None else self._idle(session)
        slot = max(own, key=lambda slot: common_prefix(slot.tokens, known), default=None)
        kept = common_prefix(slot.tokens, known) if slot else 0
        source, shared = _longest(self.slots, known, kept + MIN_SHARED)
        if slot is None and source is not None and not source.busy and source.session is None:
            slot = source
        slot = slot or self._free_slot()
        if slot is source:
            source, kept = None, shared
        slot.busy, slot.session, slot.sequence, slot.length = True, session, sequence, kept
        return slot, source, shared if source else kept

    def done(self, slot: Slot, *, keep_for: str | None) -> None:
        """The slot's request ended. `keep_for` a session: kept until released or evicted; None: free."""
        self._clock += 1
        slot.busy, slot.session, slot.last_used = False, keep_for, self._clock

    def release(self, session: str) -> None:
        """Free what is kept for a session."""
        for slot in self._idle(session):
            slot.session = None

    def drop(self) -> bool:
        """Give up a slot: a free one, else the one whose session waited longest; False when all are busy."""
        idle = [slot for slot in self.slots if not slot.busy]
        if idle:
            self.slots.remove(self._stalest(idle))
        return bool(idle)

    def renumber(self) -> list[int]:
        """Number the slots from 0 on; returns the numbers that they had."""
        rows = [slot.index for slot in self.slots]
        for index, slot in enumerate(self.slots):
            slot.index = index
        return rows

    def clear(self) -> None:
        """Forget every cached token and every session. No slot may be in use afterwards."""
        self.slots.clear()

    def _idle(self, session: str | None) -> list[Slot]:
        return [slot for slot in self.slots if not slot.busy and slot.session == session]

    def _free_slot(self) -> Slot:
        """A free slot, else a new one, else the idle session that waited longest loses its slot."""
        free = self._idle(None)
        if free:
            return free[0]
        if len(self.slots) < self.max_slots:
            self.slots.append(Slot(len(self.slots)))
            return self.slots[-1]
        return self._stalest([slot for slot in self.slots if not slot.busy])

    def _stalest(self, idle: list[Slot]) -> Slot:
        slot = min(idle, key=lambda slot: (slot.session is not None, slot.last_used))
        self.evictions += slot.session is not None
        return slot


def _longest(slots: Iterable[Slot], sequence: Int32T, least: int) -> tuple[Slot | None, int]:
    """The slot that shares most of the sequence, the lowest of equals, and how much; (None, 0) below `least` >= 1."""
    if least > len(sequence):
        return None, 0
    best, most, following = None, least - 1, sequence.item(least - 1)
    for slot in slots:
        # Who shares more than the best so far has the token that follows too, which tells most slots apart.
        if slot.length > most and slot.sequence.item(most) == following:
            length = common_prefix(slot.tokens, sequence)
            if length > most:
                best, most = slot, length
                if most == len(sequence):
                    break
                following = sequence.item(most)
    return (best, most) if best else (None, 0)
