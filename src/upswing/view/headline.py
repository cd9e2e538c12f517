"""The headline of a report: base -> SFT -> RL with intervals, the strict/normalised figure, and results by tag.

Reads `results.json` entries (see `upswing.evals.summary.result_entry`) as plain dicts, so an old run stays readable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from upswing.view.charts import MatchRow, match_figure, number
from upswing.view.html import Html, escape, h, join, table

STRICT = ("strict_match",)
LENIENT = ("exact_match", "normalised_match")
"""Names a component may have, first found first. `exact_match` is that of SQuAD: normalised before comparing."""


def readable(name: str) -> str:
    """A component's name as a person reads it."""
    known = {"exact_match": "normalised match", "f1": "F1", "format": "format valid"}
    return known.get(name, name.replace("_", " "))


Entry = Mapping[str, Any]


def component(entry: Entry, names: Sequence[str]) -> Mapping[str, Any] | None:
    """The interval of the first of `names` that an entry has, with a mean."""
    found = entry.get("summary", {}).get("components", {})
    return next((found[name] for name in names if name in found and found[name].get("mean") is not None), None)


def main_score(entry: Entry) -> tuple[str, Mapping[str, Any] | None]:
    """What an evaluation is judged by: strict match, else the normalised one, else the reward."""
    for title, names in (("strict match", STRICT), ("normalised match", LENIENT)):
        found = component(entry, names)
        if found is not None:
            return title, found
    reward = entry.get("summary", {}).get("reward")
    return "reward", reward if reward and reward.get("mean") is not None else None


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
    figure = _figure(entries)
    parts = [
        h("div", *(_tile(entry) for entry in entries), class_="tiles") if first else None,
        h("div", h("h3", name or "Evaluation"), _score_table(entries), _cost_table(entries), class_="card"),
        figure if figure else None,
        _by_tag(entries),
    ]
    body = join(part for part in parts if part is not None)
    return body if first else h("details", h("summary", f"More: {name}"), body, class_="more")


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}\u00a0%"


def _interval(found: Mapping[str, Any] | None) -> Html:
    if found is None or found.get("mean") is None:
        return escape("–")
    low, high = found["low"], found["high"]
    if low >= 0 and high <= 1:
        return join([_share(found["mean"]), h("small", f"{100 * low:.1f} – {100 * high:.1f}")])
    return join([number(found["mean"]), h("small", f"{number(low)} – {number(high)}")])


def _tile(entry: Entry) -> Html:
    title, found = main_score(entry)
    paired = entry.get("paired")
    change = None
    if paired and paired.get("diff") is not None:
        points = 100 * paired["diff"]
        text = f"{points:+.1f} points vs {paired.get('against') or 'previous'}, p\u00a0{_p(paired.get('p'))}"
        clear = paired.get("p") is not None and paired["p"] < 0.05  # colour only what is more than noise
        change = h("p", text, class_="muted" if not clear else "up" if points > 0 else "down")
    spread = ""
    if found is not None:
        spread = f"95\u00a0% interval {100 * found['low']:.1f} – {100 * found['high']:.1f}"
        title = f"{title}, n = {found['n']}"
    return h(
        "div",
        h("span", entry.get("label", "?"), class_="name"),
        h("b", _share(None if found is None else found["mean"])),
        h("p", title, class_="muted"),
        h("p", spread, class_="muted"),
        change,
        class_="card tile",
    )


def _p(p: float | None) -> str:
    return "–" if p is None else "<\u00a00.001" if p < 0.001 else f"=\u00a0{p:.3f}"


def _score_table(entries: Sequence[Entry]) -> Html:
    names = list(dict.fromkeys(name for entry in entries for name in entry.get("summary", {}).get("components", {})))
    columns = ["", "n", *(readable(name) for name in names), "reward", "vs previous"]
    return table(columns, (_score_row(entry, names) for entry in entries), "Scores, with 95 % bootstrap intervals")


def _score_row(entry: Entry, names: Sequence[str]) -> list[Any]:
    summary = entry.get("summary", {})
    components = summary.get("components", {})
    paired = entry.get("paired") or {}
    against: Any = "–"
    if paired.get("diff") is not None:
        text = f"{100 * paired['diff']:+.1f} [{100 * paired['low']:.1f}, {100 * paired['high']:.1f}]"
        against = join([text, h("small", f"vs {paired.get('against') or 'previous'}, p {_p(paired.get('p'))}")])
    return [
        entry.get("label", "?"),
        summary.get("num_counted", "–"),
        *(_interval(components.get(name)) for name in names),
        _interval(summary.get("reward")),
        against,
    ]


def _cost_table(entries: Sequence[Entry]) -> Html:
    columns = ["", "turns", "tool calls", "invalid", "repeated", "sampled tokens", "truncated", "recovered", "errored"]
    return table(columns, (_cost_row(entry) for entry in entries), "Behaviour, means of a trajectory")


def _cost_row(entry: Entry) -> list[Any]:
    summary = entry.get("summary", {})
    costs, recovery = summary.get("costs", {}), summary.get("recovery") or {}
    recovered: Any = "–"
    if recovery.get("n"):
        recovered = join([_share(recovery["mean"]), h("small", f"of {recovery['n']}")])
    means = [number((costs.get(name) or {}).get("mean")) for name in ("turns", "tool_calls", "sampled_tokens")]
    return [
        entry.get("label", "?"),
        means[0],
        means[1],
        _share(summary.get("invalid_call_frac")),
        _share(summary.get("duplicate_call_frac")),
        means[2],
        _share(summary.get("truncated_frac")),
        recovered,
        summary.get("outcomes", {}).get("errored", 0),
    ]


def _figure(entries: Sequence[Entry]) -> Html:
    rows = []
    for entry in entries:
        strict, lenient = component(entry, STRICT), component(entry, LENIENT)
        if strict is not None:
            mean = lenient["mean"] if lenient else None
            rows.append(MatchRow(str(entry.get("label", "?")), strict["mean"], strict["low"], strict["high"], mean))
    return match_figure(rows) if rows else Html("")


def _by_tag(entries: Sequence[Entry]) -> Html | None:
    """One table a tag (kind, hops, ...): a row a value, a column an evaluation."""
    tags = list(dict.fromkeys(tag for entry in entries for tag in entry.get("summary", {}).get("by_tag", {})))
    tables = [_tag_table(tag, entries) for tag in tags]
    return h("div", *tables, class_="grid2") if tables else None


def _tag_table(tag: str, entries: Sequence[Entry]) -> Html:
    by_entry = [entry.get("summary", {}).get("by_tag", {}).get(tag, {}) for entry in entries]
    values = sorted({value for found in by_entry for value in found})
    title = main_score(entries[-1])[0]
    rows = [[value, *(_tag_cell(found.get(value, {})) for found in by_entry)] for value in values]
    labels = [entry.get("label", "?") for entry in entries]
    return h("div", h("h3", f"By {tag}"), table([tag, *labels], rows, f"{title}, by {tag}"), class_="card")


def _tag_cell(scores: Mapping[str, Any]) -> Html:
    found = next((scores[name] for name in (*STRICT, *LENIENT, "reward") if (scores.get(name) or {}).get("n")), None)
    if found is None:
        return escape("–")
    width = max(0.0, min(100.0, 100 * found["mean"]))
    meter = h("span", h("i", style=f"width:{width:.1f}%"), class_="meter", aria_hidden="true")
    return join([_share(found["mean"]), h("small", f"n = {found['n']}"), meter])
