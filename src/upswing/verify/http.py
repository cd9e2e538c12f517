"""The reward from somewhere else: the episode is POSTed as JSON to a URL, which answers with the score."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from upswing.errors import ConfigError
from upswing.trajectory.store import plain
from upswing.trajectory.types import Score
from upswing.verify.base import Episode
from upswing.verify.options import Options

if TYPE_CHECKING:
    import httpx2

MAX_ANSWER = 1 << 20
"""Bytes read of an answer."""


@functools.cache
def _tls() -> Any:
    """Made once: reading the certificates takes longer than a request."""
    import httpx2

    return httpx2.create_ssl_context()


def http_client(**options: Any) -> httpx2.AsyncClient:
    """Of the running event loop, without a time limit of its own; redirects are not followed."""
    import httpx2

    return httpx2.AsyncClient(timeout=None, verify=_tls(), **options)


@dataclass(frozen=True, kw_only=True)
class Http(Options):
    """POSTs every field of the Episode; the answer is `{"score": number or null, "components": {…}, "reason": "…"}`,
    the last two optional. Any failure (status, time, what isn't such an answer) is not scored, never 0."""

    url: Annotated[str, Field(pattern="^https?://")]
    headers: Mapping[str, str] = field(default_factory=dict)
    """Such as `Authorization: Bearer ${TOKEN}`."""
    timeout_s: Annotated[float, Field(gt=0, le=25)] = 25.0

    def __post_init__(self) -> None:
        super().__post_init__()
        from_environment(self.headers, "headers")

    async def __call__(self, episode: Episode) -> Score:
        headers = {"Content-Type": "application/json", **from_environment(self.headers, "headers")}
        data, found = json.dumps(plain(episode, "episode")), b""
        try:
            async with (
                asyncio.timeout(self.timeout_s),
                http_client(headers=headers) as client,
                client.stream("POST", self.url, content=data) as reply,
            ):
                reply.raise_for_status()
                async for part in reply.aiter_bytes():
                    found += part[: MAX_ANSWER - len(found)]
        except TimeoutError:
            raise TimeoutError(f"no answer within {self.timeout_s:g} s") from None
        answer = json.loads(found)
        if not isinstance(answer, dict) or "score" not in answer:
            raise ValueError(f'{self.url} answered {json.dumps(answer):.100}, not {{"score": …}}')
        parts, reason = answer.get("components") or {}, str(answer.get("reason") or "")
        components = {str(name): _number(value, name) for name, value in parts.items()}
        return Score(value=_number(answer["score"], "score"), components=components, reason=reason)


def from_environment(values: Mapping[str, str], where: str) -> dict[str, str]:
    """`values` with every `${NAME}` replaced by the environment variable, so that no recipe or run folder holds a
    secret. Raises ConfigError for one that isn't set."""

    def read(match: re.Match[str]) -> str:
        if match[1] not in os.environ:
            raise ConfigError(f"{where}: the environment variable {match[1]} is not set")
        return os.environ[match[1]]

    return {key: re.sub(r"\$\{(\w+)\}", read, value) for key, value in values.items()}


def _number(value: Any, name: str) -> float | None:
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return value
    raise ValueError(f"{name} is {value!r:.80}; it must be a number or null")
