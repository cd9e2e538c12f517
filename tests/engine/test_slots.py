"""Which slot a request gets, and from which prefix it starts."""

import numpy as np

from upswing.engine import slots
from upswing.engine.slots import Slot, SlotTable, common_prefix


def seq(*parts: range | list[int]) -> np.ndarray:
    return np.array([token for part in parts for token in part], np.int32)


def fill(table: SlotTable, tokens: np.ndarray, session: str | None) -> int:
    slot, _, _ = table.place(tokens, session)
    slot.sequence, slot.length = tokens, len(tokens)
    return slot.index


def test_common_prefix() -> None:
    assert common_prefix(seq([1, 2, 3]), seq([1, 2, 4])) == 2
    assert common_prefix(seq([1, 2]), seq([1, 2, 4])) == 2
    assert common_prefix(seq([]), seq([1])) == 0
    assert common_prefix(seq([2]), seq([1])) == 0


def test_copies_from_a_busy_slot_and_leaves_the_last_token() -> None:
    table = SlotTable(4)
    fill(table, seq(range(30)), "a")
    slot, source, shared = table.place(seq(range(30)), "b")
    assert source is table.slots[0]
    assert (slot.index, slot.length, shared) == (1, 0, 29)


def test_a_free_slot_with_the_prefix_is_used_in_place() -> None:
    table = SlotTable(4)
    for start in (100, 0, 200):
        fill(table, seq(range(start, start + 30)), None)
    table.done(table.slots[0], keep_for=None)
    table.done(table.slots[1], keep_for=None)
    slot, source, shared = table.place(seq(range(20), [7]), None)
    assert (slot.index, slot.length, source, shared) == (1, 20, None, 20)


def test_short_prefixes_are_not_copied() -> None:
    table = SlotTable(4)
    fill(table, seq(range(30)), "a")
    _, source, shared = table.place(seq(range(5), range(100, 120)), "b")
    assert source is None and shared == 0


def test_own_slot_is_topped_up_from_a_better_prefix() -> None:
    table = SlotTable(4)
    fill(table, seq(range(10), range(50, 60)), "a")
    table.done(table.slots[0], keep_for="a")
    fill(table, seq(range(40)), "b")
    slot, source, shared = table.place(seq(range(35)), "a")
    assert source is table.slots[1]
    assert (slot.index, slot.length, shared) == (0, 10, 34)


def test_the_session_idle_longest_is_evicted_and_busy_ones_never() -> None:
    table = SlotTable(3)
    for i in range(3):
        fill(table, seq(range(i * 100, i * 100 + 20)), f"s{i}")
    table.done(table.slots[2], keep_for="s2")
    table.done(table.slots[1], keep_for="s1")
    slot, _, _ = table.place(seq(range(900, 920)), "new")
    assert slot.index == 2 and slot.session == "new"
    assert table.evictions == 1
    table.release("s1")
    assert fill(table, seq([5, 6]), None) == 1
    assert table.evictions == 1


def test_dropping_takes_free_slots_first_then_the_stalest_session() -> None:
    table = SlotTable(4)
    for i in range(4):
        fill(table, seq(range(i * 100, i * 100 + 20)), f"s{i}")
    for i in (3, 1, 2):
        table.done(table.slots[i], keep_for=None if i == 2 else f"s{i}")
    assert [table.drop() for _ in range(2)] == [True, True]
    assert table.evictions == 1
    assert table.renumber() == [0, 1]
    assert [slot.session for slot in table.slots] == ["s0", "s1"]
    assert [table.drop(), table.drop()] == [True, False]
    assert (len(table.slots), table.evictions) == (1, 2)


def test_the_best_prefix_is_found_with_few_whole_comparisons(monkeypatch) -> None:
    """That of plain search, whatever the order; of 64 sequences with one beginning few are compared beyond a token."""
    rng, compared = np.random.default_rng(0), []
    monkeypatch.setattr(slots, "common_prefix", lambda *two: compared.append(1) or common_prefix(*two))
    for _ in range(50):
        wanted = rng.integers(0, 3, 40).astype(np.int32)
        held = [seq(wanted[:length].tolist(), rng.integers(0, 3, 20).tolist()) for length in rng.integers(0, 36, 64)]
        table = SlotTable(64)
        table.slots = [Slot(index, sequence=tokens, length=len(tokens)) for index, tokens in enumerate(held)]
        lengths = [common_prefix(tokens, wanted) for tokens in held]
        for least in (1, 8, 39):
            compared.clear()
            best, length = slots._longest(table.slots, wanted, least)
            found = max(lengths) >= least
            assert (best, length) == ((table.slots[lengths.index(max(lengths))], max(lengths)) if found else (None, 0))
            assert len(compared) < 32
