"""The report's findings: what began, when it was over, why it happens and what to change; and what safeguards did."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from upswing.view.html import Html, h, join


def overrides(change: Mapping[str, Any], stage: str) -> str:
    """A remedy as overrides of the command line: `rl.clip_high=0.28 limits.turn_tokens=64`."""
    named = ((key if "." in key else f"{stage}.{key}", value) for key, value in change.items())
    return " ".join(f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in named)


def render(rows: Sequence[Mapping[str, Any]], events: Sequence[Html] = ()) -> Html:
    """Rows of `findings.jsonl` in their order, then list items of other origin."""
    items = [*map(_item, _merged(rows)), *events]
    if not items:
        return h("p", "None recorded.", class_="card muted")
    return h("div", h("ul", *items, class_="findings"), class_="card")


def _merged(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A finding once, as it was at its worst, with the step at which it was over."""
    shown: list[dict[str, Any]] = []
    present: dict[tuple[Any, Any], dict[str, Any]] = {}
    for row in rows:
        which = (row.get("stage"), row.get("mode"))
        if row.get("kind") == "over":
            present.pop(which, {})["over"] = row.get("step")
        elif "mode" in row and row.get("kind") != "action" and which in present:
            present[which] |= {**row, "step": present[which].get("step"), "since": present[which].get("since")}
        else:
            shown.append(dict(row))
            if "mode" in row and row.get("kind") != "action":
                present[which] = shown[-1]
    return shown


def _item(row: Mapping[str, Any]) -> Html:
    severity, is_action = str(row.get("severity", "warning")), row.get("kind") == "action"
    look = "good" if is_action else {"error": "bad", "critical": "bad", "info": ""}.get(severity, "warn")
    parts = [f"{key} {row[key]}" for key in ("stage", "step") if row.get(key) is not None]
    parts += [f"since step {row['since']}"] if row.get("since") is not None else []
    parts += [f"over at step {row['over']}"] if row.get("over") is not None else []
    return h(
        "li",
        h("span", "safeguard" if is_action else severity, class_=f"chip {look}".rstrip()),
        " ",
        h("b", row.get("title", "finding")),
        h("span", " " + ", ".join(parts), class_="muted") if parts else None,
        _action(row) if is_action else _finding(row),
    )


def _finding(row: Mapping[str, Any]) -> Html:
    evidence, shown = row.get("evidence"), row.get("trajectories")
    return join([
        *(h("p", text) for text in ([evidence] if isinstance(evidence, str) else evidence or ()) if text),
        h("p", "Likely causes: ", "; ".join(map(str, row["causes"]))) if row.get("causes") else "",
        h("p", "What to do: ", row["remedy"]) if row.get("remedy") else "",
        *(h("p", "What to do: ", *_remedy(one, str(row.get("stage")))) for one in row.get("remedies") or ()),
        h("p", f"See trajectories {', '.join(map(str, shown))}.", class_="muted") if shown else "",
        h("pre", "\n".join(row["shown"]), tabindex="0") if row.get("shown") else "",
    ])  # fmt: skip


def _remedy(remedy: Mapping[str, Any], stage: str) -> list[Any]:
    change = remedy.get("overrides") or overrides(remedy.get("change") or {}, stage)
    return [remedy.get("text", ""), *([" ", h("code", change)] if change else [])]


def _action(row: Mapping[str, Any]) -> Html:
    taken = "taken back: " if row.get("takes_back") else ""
    until = f" It is {row['until']}." if row.get("until") else ""
    return h("p", f"{row.get('safeguard')}, {taken}for {row.get('mode')}: {row.get('why', '')}.{until}")
