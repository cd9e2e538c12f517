"""Preference pairs from JSON Lines: one prompt with a better and a worse continuation a row, checked row by row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from upswing.envs.dataset import messages_from, prompt_from, read_rows
from upswing.errors import ConfigError, did_you_mean
from upswing.trajectory.types import Message

KEYS = ("prompt", "chosen", "rejected", "tools", "id")
SIDES = ("chosen", "rejected")


@dataclass(frozen=True, kw_only=True)
class PairRow:
    """One line of a file."""

    where: str
    """`file:line`, for messages."""
    prompt: tuple[Message, ...]
    chosen: tuple[Message, ...]
    """What follows the prompt, assistant messages and what they were answered; empty when the row has no such side."""
    rejected: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    """Schemas for the chat template."""


def read_pairs(path: str | Path, *, paired: bool = True) -> list[PairRow]:
    """The rows of a file: `prompt`, `chosen` and `rejected`, each a string or a list of messages; `tools` and `id` may
    be there too.

    `paired`: every row needs both sides; otherwise one is enough. Raises ConfigError naming file, line and key for
    anything that is wrong, and for a file without rows.
    """
    rows = [_pair(row, where, paired) for where, row in read_rows(Path(path))]
    if not rows:
        raise ConfigError(f'{path} has no rows; write one {{"prompt": "…", "chosen": "…", "rejected": "…"}} a line')
    return rows


def _pair(row: dict[str, Any], where: str, paired: bool) -> PairRow:
    for key in row:
        if key not in KEYS:
            raise ConfigError(f"{where}: unknown key '{key}'{did_you_mean(key, KEYS)} (allowed: {', '.join(KEYS)})")
    present = [side for side in SIDES if row.get(side) is not None]
    if row.get("prompt") is None or not present or (paired and len(present) < 2):
        lacking = "prompt" if row.get("prompt") is None else next(side for side in SIDES if side not in present)
        raise ConfigError(f"{where}: the row has no '{lacking}'; a row needs prompt, chosen and rejected")
    prompt = prompt_from(row["prompt"], f"{where}: 'prompt'")
    sides = {side: _answer(row[side], f"{where}: '{side}'") if side in present else () for side in SIDES}
    if sides["chosen"] == sides["rejected"]:
        raise ConfigError(f"{where}: 'chosen' and 'rejected' are the same, so neither is better")
    tools = row.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ConfigError(f"{where}: 'tools' must be a list of tool schemas, got {str(tools)[:80]}")
    return PairRow(where=where, prompt=prompt, tools=tuple(tools), **sides)


def _answer(value: Any, where: str) -> tuple[Message, ...]:
    """What the agent said, with what it was answered in between."""
    messages = messages_from(value, where, "assistant")
    roles = [message.role for message in messages]
    if roles[0] != "assistant" or roles[-1] != "assistant":
        raise ConfigError(f"{where} must begin and end with an assistant message; its roles: {', '.join(roles)}")
    if any(first == second == "assistant" for first, second in pairwise(roles)):
        raise ConfigError(f"{where} has two assistant messages in a row; join them, or put the tool's answer between")
    return messages
