"""The headline of a report: base -> SFT -> RL with intervals, the strict/normalised figure, and results by tag.

Reads `results.json` entries (see `upswing.evals.summary.result_entry`) as plain dicts, so an old run stays readable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from upswing.view.charts import match_figure
from upswing.view.html import Html, h, join, table
from upswing.view.text import DASH, difference, interval, number, p_value, readable, share

Entry = Mapping[str, Any]
MAX_TAG_VALUES = 30
"""A tag with more values than this, such as a row's id, has no table."""


def _scores(entry: Entry) -> Mapping[str, Any]:
    """Intervals by component, and that of the reward; those without a mean are left out."""
    summary = entry.get("summary") or {}
    found = {**summary.get("components", {}), "reward": summary.get("reward")}
    return {name: score for name, score in found.items() if score and score.get("mean") is not None}


def _main(names: Mapping[str, Any]) -> str:
    """What an evaluation is judged by: strict match, else the normalised one (SQuAD's), else the reward."""
    return next((name for name in ("strict_match", "exact_match") if name in names), "reward")


def render(results: Sequence[Entry]) -> Html:
    """All evaluations, one block for those of a stage on the same questions; the test split, greedy, comes first."""
    groups: dict[tuple[str, str, str], list[Entry]] = {}
    for entry in results:
        key = (str(entry.get("split", "")), str(entry.get("mode", "")), str(entry.get("stage", "")))
        groups.setdefault(key, []).append(entry)
    order = sorted(groups, key=lambda key: (key[0] != "test", key[1] != "greedy"))
    return join(_group(key, groups[key], first=index == 0) for index, key in enumerate(order))


def _group(key: tuple[str, str, str], entries: Sequence[Entry], first: bool) -> Html:
    split, mode, stage = key
    name = ", ".join(filter(None, (f"{split} questions" if split else "", f"{mode} decoding" if mode else "", stage)))
    tiles = h("div", *map(_tile, entries), class_="tiles") if first else ""
    card = h("div", h("h3", name or "Evaluation"), _score_table(entries), _cost_table(entries), class_="card")
    body = join([tiles, card, _figure(entries), _by_tag(entries)])
    return body if first else h("details", h("summary", f"More: {name}"), body, class_="more")


def _cell(found: Mapping[str, Any] | None, note: str | None = None) -> Html:
    """A mean with its interval, or with another note, below it."""
    mean, low, high = interval(found)
    return join([mean, h("small", note or f"{low} – {high}") if low else ""])


def _against(paired: Mapping[str, Any]) -> str:
    return f"vs {paired.get('against') or 'previous'}, p {p_value(paired.get('p'))}"


def _tile(entry: Entry) -> Html:
    scores, paired = _scores(entry), entry.get("paired") or {}
    name = _main(scores)
    found = scores.get(name)
    mean, low, high = interval(found)
    change = None
    if paired.get("diff") is not None:
        clear = paired.get("p") is not None and paired["p"] < 0.05  # colour only what is more than noise
        tone = "muted" if not clear else "up" if paired["diff"] > 0 else "down"
        change = h("p", f"{difference(paired)[0]} {_against(paired)}", class_=tone)
    return h(
        "div",
        h("span", entry.get("label", "?"), class_="name"),
        h("b", mean),
        h("p", f"{readable(name)}, n = {found['n']}" if found else "no score", class_="muted"),
        h("p", f"95 % interval {low} – {high}" if found else "", class_="muted"),
        change,
        class_="card tile",
    )


def _score_table(entries: Sequence[Entry]) -> Html:
    names = dict.fromkeys(name for entry in entries for name in _scores(entry) if name != "reward")
    columns = ["", "n", *map(readable, names), "reward", "vs previous"]
    return table(columns, (_score_row(entry, [*names, "reward"]) for entry in entries), "Scores, with 95 % intervals")


def _score_row(entry: Entry, names: Sequence[str]) -> list[Any]:
    scores, paired = _scores(entry), entry.get("paired") or {}
    against: Any = DASH
    if paired.get("diff") is not None:
        text, low, high = difference(paired)
        against = join([f"{text} [{low}, {high}]", h("small", _against(paired))])
    count = (entry.get("summary") or {}).get("num_counted", DASH)
    return [entry.get("label", "?"), count, *(_cell(scores.get(name)) for name in names), against]


def _cost_table(entries: Sequence[Entry]) -> Html:
    columns = ["", "turns", "tool calls", "invalid", "repeated", "sampled tokens", "truncated", "recovered", "errored"]
    return table(columns, map(_cost_row, entries), "Behaviour, means of a trajectory")


def _cost_row(entry: Entry) -> list[Any]:
    summary = entry.get("summary") or {}
    recovery = summary.get("recovery") or {}
    turns, calls, tokens = (
        number((summary.get("costs", {}).get(name) or {}).get("mean"))
        for name in ("turns", "tool_calls", "sampled_tokens")
    )
    shares = [share(summary.get(f"{name}_frac")) for name in ("invalid_call", "duplicate_call", "truncated")]
    recovered = _cell(recovery, f"of {recovery.get('n')}")
    errored = summary.get("outcomes", {}).get("errored", 0)
    return [entry.get("label", "?"), turns, calls, *shares[:2], tokens, shares[2], recovered, errored]


def _figure(entries: Sequence[Entry]) -> Html:
    rows = []
    for entry in entries:
        scores = _scores(entry)
        if strict := scores.get("strict_match"):
            lenient = scores.get("exact_match", {}).get("mean")
            rows.append((str(entry.get("label", "?")), strict, lenient))
    return match_figure(rows) if rows else Html("")


def _by_tag(entries: Sequence[Entry]) -> Html:
    """One table a tag (kind, hops, ...): a row a value, a column an evaluation."""
    by_entry = [(entry.get("summary") or {}).get("by_tag", {}) for entry in entries]
    tables = [_tag_table(tag, entries, by_entry) for tag in dict.fromkeys(tag for tags in by_entry for tag in tags)]
    return h("div", *tables, class_="grid2") if any(tables) else Html("")


def _tag_table(tag: str, entries: Sequence[Entry], by_entry: Sequence[Mapping[str, Any]]) -> Html:
    values = sorted({value for tags in by_entry for value in tags.get(tag, {})})
    if len(values) > MAX_TAG_VALUES:
        return Html("")
    rows = [[value, *(_tag_cell(tags.get(tag, {}).get(value, {})) for tags in by_entry)] for value in values]
    columns = [tag, *(entry.get("label", "?") for entry in entries)]
    caption = f"{readable(_main(_scores(entries[-1])))}, by {tag}"
    return h("div", h("h3", f"By {tag}"), table(columns, rows, caption), class_="card")


def _tag_cell(scores: Mapping[str, Any]) -> Html:
    scored = {name: score for name, score in scores.items() if score and score.get("n")}
    found = scored.get(_main(scored))
    cell = _cell(found, f"n = {found['n']}" if found else None)
    if not found or found["low"] < 0 or found["high"] > 1:
        return cell
    bar = h("i", style=f"width:{100 * found['mean']:.1f}%")
    return join([cell, h("span", bar, class_="meter", aria_hidden="true")])
