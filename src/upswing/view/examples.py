"""Example trajectories for the report: how they are stored and shown.

`examples.json` is a list of `example_entry`, whose trajectories are of `example_from`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from upswing.trajectory.types import Branch, Trajectory
from upswing.view.html import Html, h, join
from upswing.view.run_folder import EXAMPLES, json_safe, write_json
from upswing.view.text import number, readable

Decode = Callable[[list[int]], str]
"""Token ids to text, special tokens kept: `lambda ids: tokenizer.decode(ids, skip_special_tokens=False)`."""

_MAX_BYTES = 4
"""Longest UTF-8 character: more tokens than this can't be parts of one."""


def token_texts(tokens: Sequence[int], decode: Decode) -> list[str]:
    """Text of every token, so that joined they read as the whole.

    A character may span several tokens: its text then stands at its last one and the others are empty. Tokens are
    decoded behind the previous ones, because some tokenizers drop a leading space at the start.
    """
    texts, pending, before = [], list[int](), list[int]()
    for index, token in enumerate(tokens):
        pending.append(int(token))
        prefix = decode(before) if before else ""
        whole = decode(before + pending)
        text = whole[len(prefix) :] if whole.startswith(prefix) else decode(pending)
        cut = text.endswith("\ufffd") and len(pending) < _MAX_BYTES and index + 1 < len(tokens)
        texts.append("" if cut else text)
        if not cut:
            before, pending = pending, []
    return texts


def _branch_tokens(branch: Branch, decode: Decode) -> list[dict[str, Any]]:
    texts = token_texts(branch.tokens.tolist(), decode)
    columns = (branch.tokens, branch.sampled, branch.engine_logprobs, branch.turn, branch.policy_version)
    rows = zip(texts, *(column.tolist() for column in columns), strict=True)
    names = ("text", "id", "sampled", "logprob", "turn", "version")
    return [dict(zip(names, row, strict=True)) for row in rows]


def example_from(trajectory: Trajectory, decode: Decode, label: str, stage: str = "") -> dict[str, Any]:
    """One entry of an example's `trajectories`; `label` says whose it is, such as `base` or `RL`."""
    records = [
        {"name": r.call.name, "arguments": r.call.arguments, "result": r.result, "ok": r.ok, "turn": r.turn}
        for r in trajectory.tool_records
    ]
    question = next((m.content for m in reversed(trajectory.task.messages) if m.role == "user"), "")
    example = {
        "label": label,
        "stage": stage,
        "question": question,
        "gold": list(trajectory.task.gold),
        "answer": trajectory.answer,
        "reward": trajectory.reward,
        "components": dict(trajectory.score.components) if trajectory.score else {},
        "outcome": str(trajectory.outcome),
        "stop_reason": str(trajectory.stop_reason),
        "num_turns": trajectory.num_turns,
        "messages": [asdict(message) for message in trajectory.messages],
        "tool_records": records,
        "branches": [_branch_tokens(branch, decode) for branch in trajectory.branches],
    }
    return dict(json_safe(example))


def example_entry(
    trajectories: Sequence[Mapping[str, Any]], *, task_id: str, title: str, kind: str = "before_after"
) -> dict[str, Any]:
    """An entry of `examples.json` from `example_from` dicts of one task; `kind`: `before_after` or `recovery`."""
    return {"title": title, "task_id": task_id, "kind": kind, "trajectories": list(trajectories)}


def write_examples(run_dir: Path, examples: Sequence[Mapping[str, Any]]) -> Path:
    """Write `examples.json` atomically."""
    return write_json(Path(run_dir) / EXAMPLES, examples)


def render_example(example: Mapping[str, Any]) -> Html:
    """One task, its trajectories side by side."""
    items = example.get("trajectories") or []
    gold = [str(answer) for answer in next((item["gold"] for item in items if item.get("gold")), [])]
    accepted = h("p", "Accepted: ", join((h("b", answer) for answer in gold), " or "), class_="gold") if gold else None
    question = next((item["question"] for item in items if item.get("question")), None)
    return h(
        "article",
        h("h3", example.get("title") or "Example", " ", h("small", example.get("task_id", ""))),
        h("p", question, class_="question") if question else None,
        accepted,
        h("div", *(_column(item) for item in items), class_="columns"),
        class_="card example" + (" recovery" if example.get("kind") == "recovery" else ""),
    )


def _column(item: Mapping[str, Any]) -> Html:
    reward = item.get("reward")
    verdict = "not scored" if reward is None else f"reward {number(reward)}"
    good = "" if reward is None else " good" if reward >= 1 - 1e-9 else " bad" if reward <= 0 else ""
    answer = item.get("answer")
    head = h(
        "header",
        h("b", item.get("label", "?")),
        h("span", verdict, class_="chip" + good),
        h("span", str(item.get("stop_reason", "")).replace("_", " "), class_="chip"),
        class_="row",
    )
    components = item.get("components") or {}
    scores = "  ·  ".join(f"{readable(name)} {number(value)}" for name, value in components.items())
    branches = item.get("branches") or []
    streams = [_stream(tokens, index, len(branches), item) for index, tokens in enumerate(branches)]
    if not streams:  # no tokens were kept
        messages = item.get("messages") or []
        streams = [h("p", h("b", m.get("role", "?"), ": "), m.get("content", ""), class_="stream") for m in messages]
    return h(
        "section",
        head,
        h("p", "Answer: ", h("b", answer) if answer is not None else h("i", "none given"), class_="answer"),
        h("p", scores, class_="muted") if scores else None,
        _calls(item.get("tool_records") or []),
        *streams,
        class_="trajectory",
    )


def _calls(records: Sequence[Mapping[str, Any]]) -> Html | None:
    if not records:
        return None
    rows = []
    for record in records:
        arguments = record.get("arguments") or {}
        text = ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in arguments.items())
        name, failed = record.get("name", "tool"), h("span", "failed", class_="chip bad")
        made = [h("code", f"{name}({text})"), " ", None if record.get("ok", True) else failed]
        rows.append(h("li", *made if name else [h("span", "malformed turn", class_="chip bad")]))
    return h("ol", *rows, class_="calls")


def _stream(tokens: Sequence[Mapping[str, Any]], index: int, num: int, item: Mapping[str, Any]) -> Html:
    """The exact tokens; the prompt before the first sampled one is folded."""
    parts: list[Html] = []
    for sampled, run in groupby(tokens, key=lambda token: bool(token.get("sampled"))):
        spans = [_token(token) for token in run]
        part = h("span", *spans, class_="run sampled" if sampled else "run given")
        if not parts and not sampled:
            part = h("details", h("summary", f"prompt, {len(spans)} tokens"), part)
        parts.append(part)
    name = f"branch {index + 1} of {num}, " if num > 1 else ""
    sampled_count = sum(bool(token.get("sampled")) for token in tokens)
    caption = f"{name}{len(tokens)} tokens, {sampled_count} sampled by the agent"
    label = f"Tokens of {item.get('label', '?')}: {caption}. Arrow keys walk through the tokens."
    return h(
        "div",
        h("p", caption, class_="muted"),
        h("div", *parts, class_="stream", tabindex="0", role="group", aria_label=label),
    )


def _token(token: Mapping[str, Any]) -> Html:
    logprob = token.get("logprob")
    known = isinstance(logprob, int | float) and math.isfinite(logprob)
    facts = (token.get("id", "?"), f"{logprob:.3f}" if known else "", token.get("turn", ""), token.get("version", ""))
    text = str(token.get("text", ""))
    surprise = " low" if token.get("sampled") and known and float(logprob or 0) < -1.6 else ""
    return h("span", text or "\u00b7", class_=("t" if text else "t part") + surprise, data_t="|".join(map(str, facts)))
