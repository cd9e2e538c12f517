"""When a completion ends: stop tokens, stop strings, the token limit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from upswing.engine.base import FinishReason, Sampling

_SLACK_TOKENS = 4
"""Tokens decoded in front of the window, so that a character of several tokens isn't cut in half at its start."""


class StopChecker:
    """Decides after each sampled token of one completion. A token that stops is kept, always."""

    def __init__(self, sampling: Sampling, tokenizer: Any) -> None:
        if sampling.stop_strings and tokenizer is None:
            raise ValueError("stop_strings need an engine with a tokenizer: TorchEngine(model, tokenizer=...)")
        if isinstance(sampling.stop_strings, str):
            raise ValueError(f"stop_strings is the text {sampling.stop_strings!r}; give a tuple of texts")
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
        self._piece = cache(lambda token: _decode(tokenizer, [token]))

    def check(self, sampled: Sequence[int]) -> FinishReason | None:
        """Reason to stop after `sampled` (never empty), or None. A stop exactly at the limit is a STOP."""
        if sampled[-1] in self._tokens or (self._strings and self._ends_in_stop_string(sampled)):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(sampled) >= self._max_tokens else None

    def _ends_in_stop_string(self, sampled: Sequence[int]) -> bool:
        # The last token must have a stop's last character, or half a character that may become one.
        piece = self._piece(sampled[-1])
        if self._shortcut and "�" not in piece and self._last_chars.isdisjoint(piece):
            return False
        text = _decode(self._tokenizer, sampled[-self._window :])
        return any(stop in text for stop in self._strings)


def _decode(tokenizer: Any, tokens: Sequence[int]) -> str:
    return str(tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))
