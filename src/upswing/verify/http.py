"""The reward from somewhere else: the episode is POSTed as JSON to a URL, which answers with the score."""

from __future__ import annotations

import json
import os
import re
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any

from upswing.errors import ConfigError
from upswing.trajectory.store import plain
from upswing.trajectory.types import Score
from upswing.verify.base import Episode
from upswing.verify.deadline import call_with_deadline

MAX_ANSWER = 1 << 20
"""Bytes read of an answer."""


class _Stay(urllib.request.HTTPRedirectHandler):
    """A redirect is an error: followed, it would be a GET without the episode, with the headers, to anywhere."""

    def redirect_request(self, *_: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_Stay)


class Http:
    """POSTs every field of the Episode; the answer is `{"score": number or null, "components": {…}, "reason": "…"}`,
    the last two optional. Any failure (status, time, what isn't such an answer) is not scored, never 0."""

    def __init__(self, url: str, *, headers: Mapping[str, str] | None = None, timeout_s: float = 25.0) -> None:
        """`headers`: such as `Authorization: Bearer ${TOKEN}`. Raises ConfigError for what is no http(s) URL."""
        if not isinstance(url, str) or urllib.parse.urlsplit(url).scheme not in ("http", "https"):
            raise ConfigError(f"url is {url!r}; allowed: http://… or https://…")
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s <= 25:
            raise ConfigError(f"timeout_s is {timeout_s!r}; allowed: above 0, up to 25 seconds")
        self.url, self.timeout_s = url, timeout_s
        self.headers = {"Content-Type": "application/json", **from_environment(headers or {}, "headers")}

    async def __call__(self, episode: Episode) -> Score:
        found: Score = await call_with_deadline(self._post, {"episode": episode}, self.timeout_s + 1)
        return found

    def _post(self, episode: Episode) -> Score:
        data = json.dumps(plain(episode, "episode")).encode()
        request = urllib.request.Request(self.url, data=data, headers=self.headers, method="POST")
        with _OPENER.open(request, timeout=self.timeout_s) as reply:
            answer = json.loads(reply.read(MAX_ANSWER))
        if not isinstance(answer, dict) or "score" not in answer:
            raise ValueError(f'{self.url} answered {json.dumps(answer):.100}, not {{"score": …}}')
        parts = answer.get("components") or {}
        components = {str(name): _number(value, name) for name, value in parts.items()}
        return Score(
            value=_number(answer["score"], "score"), components=components, reason=str(answer.get("reason") or "")
        )


def from_environment(values: Mapping[str, str], where: str) -> dict[str, str]:
    """`values` with every `${NAME}` replaced by the environment variable, so that no recipe or run folder holds a
    secret. Raises ConfigError for one that isn't set, and for what is no text."""

    def read(match: re.Match[str]) -> str:
        if match[1] not in os.environ:
            raise ConfigError(f"{where}: the environment variable {match[1]} is not set")
        return os.environ[match[1]]

    if not isinstance(values, Mapping) or not all(isinstance(value, str) for value in values.values()):
        raise ConfigError(f"{where} must be names with texts, such as {{Authorization: Bearer ${{TOKEN}}}}")
    return {key: re.sub(r"\$\{(\w+)\}", read, value) for key, value in values.items()}


def _number(value: Any, name: str) -> float | None:
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return value
    raise ValueError(f"{name} is {value!r:.80}; it must be a number or null")
