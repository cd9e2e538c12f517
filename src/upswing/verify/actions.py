"""Verifiers of what an agent did: its tool calls, what it found, and the state that it left."""

from __future__ import annotations

import fnmatch
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from upswing.errors import ConfigError
from upswing.trajectory.types import Score, ToolRecord
from upswing.verify.options import Number, Options
from upswing.verify.text import same_value, unscored

_MISSING = object()


@dataclass(frozen=True, kw_only=True)
class ToolCalls(Options):
    """The calls made against `data['calls']`, a list of {name, arguments, defaults}, in any order.

    With `partial`, ToolRL's correctness reward (arXiv 2504.13958), from `low` to `high`: the overlap of names, and for
    each accepted call the one made under its name that it is matched with, so that the total is the highest: overlap of
    parameter names plus the number of right values. Without, 1 for exactly these calls, else 0. `defaults` are what
    parameters are when left out. Values as JSON: 1 is 1.0, true is not 1. A turn whose calls could not be read gets the
    lowest score.
    """

    partial: bool = True
    low: Number = -3.0
    high: Number = 3.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.high < self.low:
            raise ConfigError(f"high: got {self.high}; allowed: at least low ({self.low})")

    def __call__(self, data: Mapping[str, Any], tool_records: Sequence[ToolRecord]) -> float | Score:
        wanted: Any = data.get("calls")
        listed = isinstance(wanted, Sequence) and not isinstance(wanted, str)
        if not listed or not all(isinstance(one, Mapping) and "name" in one for one in wanted):
            return unscored("the task's data has no 'calls', a list of {name, arguments}")
        low, high = (self.low, self.high) if self.partial else (0.0, 1.0)
        made = [(record.call.name, record.call.arguments) for record in tool_records]
        if any(not name for name, _ in made):
            return low
        share = _call_share(wanted, made)
        return low + (high - low) * share if self.partial else float(share == 1)


def _call_share(wanted: Sequence[Mapping[str, Any]], made: Sequence[tuple[str, Mapping[str, Any]]]) -> float:
    """In [0, 1]; 1 only when the calls are the same."""
    names = _overlap([call["name"] for call in wanted], [name for name, _ in made])
    most = 1 + sum(1 + len(call.get("arguments") or {}) for call in wanted)
    return (names + best_matching([[_call_score(call, *one) for one in made] for call in wanted])) / most


def _call_score(wanted: Mapping[str, Any], name: str, given: Mapping[str, Any]) -> float:
    """What a call is worth for a wanted one: overlap of parameter names plus the number of right values."""
    if name != wanted["name"]:
        return 0.0
    arguments = wanted.get("arguments") or {}
    said = _with_defaults(given, arguments, wanted.get("defaults") or {})
    right = sum(same_value(said.get(key, _MISSING), value) for key, value in arguments.items())
    return _overlap(list(arguments), list(said)) + right


def best_matching(worth: Sequence[Sequence[float]]) -> float:
    """The largest sum of entries, none below 0, of which no two share a row or a column.

    The Hungarian method: row by row, the cheapest augmenting path (Dijkstra's, under prices that no entry exceeds).
    """
    rows = [[*row, *[0.0] * len(worth)] for row in worth]  # free columns: a row may go without
    columns = range(len(rows[0]) if rows else 0)
    row_price, price, row_of = [max(row) for row in rows], [0.0] * len(columns), dict[int, int]()
    for start in range(len(rows)):
        cost, before, left = [math.inf] * len(columns), [-1] * len(columns), set(columns)
        at, spent, row = -1, 0.0, start
        while row >= 0:
            for column in left:
                reached = spent + row_price[row] + price[column] - rows[row][column]
                if reached < cost[column]:
                    cost[column], before[column] = reached, at
            at = min(left, key=cost.__getitem__)
            left.remove(at)
            spent, row = cost[at], row_of.get(at, -1)
        row_price[start] -= spent
        for column in set(columns) - left - {at}:
            price[column] += spent - cost[column]
            row_price[row_of[column]] -= spent - cost[column]
        while at >= 0:
            row_of[at] = row_of[before[at]] if before[at] >= 0 else start
            at = before[at]
    return sum(rows[row][column] for column, row in row_of.items())


def _with_defaults(said: Mapping[str, Any], wanted: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """`said`, with a default either left out or written out as in `wanted`."""
    kept = {k: v for k, v in said.items() if k in wanted or not same_value(v, defaults.get(k, _MISSING))}
    return {**{key: value for key, value in defaults.items() if key in wanted}, **kept}


def _overlap(a: Sequence[str], b: Sequence[str]) -> float:
    """Shared over all, counted with repetition; two empty lists are the same."""
    shared = (Counter(a) & Counter(b)).total()
    return shared / (len(a) + len(b) - shared) if a or b else 1.0


@dataclass(frozen=True, kw_only=True)
class State(Options):
    """1 when the environment's final state is `data['final_state']`: every key named there must be equal as a whole;
    the environment's other keys don't count. With `partial`, the share of its keys that are. `ignore`: dotted paths
    left out, such as `orders.*.updated_at`; `*` stands for anything.

    Where `data['start_state']` is given too, the component `passes_idle` is 1 when doing nothing would pass.
    """

    ignore: Sequence[str] = ()
    partial: bool = False

    def __call__(self, state: Mapping[str, Any], data: Mapping[str, Any]) -> Score:
        gold = data.get("final_state")
        if not isinstance(gold, Mapping) or not (wanted := self._pruned(gold)):
            return unscored("the task's data has no 'final_state', or all of it is ignored")
        if not state:
            return unscored("the environment reported no state")
        right = self._share(state, wanted)
        start = data.get("start_state")
        idle = {} if start is None else {"passes_idle": float(self._share(start, wanted) == 1)}
        return Score(value=right if self.partial else float(right == 1), components=idle)

    def _share(self, state: Mapping[str, Any], wanted: Mapping[str, Any]) -> float:
        found = self._pruned(state)
        return sum(same_value(found.get(key, _MISSING), value) for key, value in wanted.items()) / len(wanted)

    def _pruned(self, value: Any, path: str = "") -> Any:
        if not isinstance(value, Mapping | list | tuple):
            return value
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        kept = {key: self._pruned(one, f"{path}{key}.") for key, one in pairs if not self._ignored(f"{path}{key}")}
        return kept if isinstance(value, Mapping) else list(kept.values())

    def _ignored(self, path: str) -> bool:
        return any(fnmatch.fnmatchcase(path, pattern) for pattern in self.ignore)


@dataclass(frozen=True, kw_only=True)
class RetrievalHit(Options):
    """The share of `data['evidence']` (texts or ids) that stands, as whole words, in a result of the agent's tools.

    Case and spaces don't count. A result says nothing when its call failed, or when this call or an earlier one held
    the evidence: many tools repeat what they were told. `tools`: only results of these.
    """

    tools: Sequence[str] = ()

    def __call__(self, data: Mapping[str, Any], tool_records: Sequence[ToolRecord]) -> float | Score:
        given = data.get("evidence")
        evidence = [_plain(str(one)) for one in ([given] if isinstance(given, str) else given or ())]
        if not all(evidence) or not evidence:
            return unscored("the task's data has no 'evidence', a list of texts")
        found, asked = list[tuple[str, str]](), ""
        for record in tool_records:
            asked += "\n" + _plain(" ".join(map(str, record.call.arguments.values())))
            if record.ok and (not self.tools or record.call.name in self.tools):
                found.append((_plain(record.result), asked))
        hits = [any(_holds(result, one) and not _holds(asked, one) for result, asked in found) for one in evidence]
        return sum(hits) / len(hits)


def _plain(text: str) -> str:
    return " ".join(unicodedata.normalize("NFC", text).casefold().split())


def _holds(text: str, part: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(part)}(?!\w)", text) is not None
