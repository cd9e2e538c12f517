"""When a completion ends: stop tokens, stop strings, the token limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from upswing.engine.base import FinishReason, Sampling

_SLACK_TOKENS = 4
"""Tokens decoded in front of the window, so that a character of several tokens isn't cut in half at its start."""


class StopChecker:
    """Decides after each sampled token of one completion. A token that stops is kept, always."""

    def __init__(self, sampling: Sampling, tokenizer: Any) -> None:
        if sampling.stop_strings and tokenizer is None:
            raise ValueError("stop_strings need an engine with a tokenizer: TorchEngine(model, tokenizer=...)")
        if "" in sampling.stop_strings:
            raise ValueError("stop_strings has an empty string, which would stop everything")
        self._tokens = frozenset(sampling.stop_tokens)
        self._strings = sampling.stop_strings
        self._max_tokens = sampling.max_tokens
        self._tokenizer = tokenizer
        longest = max((len(text.encode()) for text in self._strings), default=0)
        self._window = longest + _SLACK_TOKENS  # every token is at least one byte of text
        self._last_chars = frozenset(text[-1] for text in self._strings)
        # Decoding one token alone may drop a blank, so the shortcut below is not safe for stops that end in one.
        self._shortcut = not any(char.isspace() for char in self._last_chars)
        self._pieces: dict[int, str] = {}

    def check(self, sampled: Sequence[int]) -> FinishReason | None:
        """Reason to stop after `sampled` (never empty), or None. A stop exactly at the limit is a STOP."""
        if sampled[-1] in self._tokens or (self._strings and self._ends_in_stop_string(sampled)):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(sampled) >= self._max_tokens else None

    def _ends_in_stop_string(self, sampled: Sequence[int]) -> bool:
        if self._shortcut and not self._may_end_stop_string(sampled[-1]):
            return False
        text = self._decode(sampled[-self._window :])
        return any(stop in text for stop in self._strings)

    def _may_end_stop_string(self, token: int) -> bool:
        """Whether the token's text has a stop's last character, or half a character that may become one."""
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._decode([token])
        return "�" in piece or not self._last_chars.isdisjoint(piece)

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))
