"""Any server with OpenAI's chat completions: messages in, a message out. It can evaluate and make data, never train.

No such server promises the ids that it read or sampled, nor the log-probs of the distribution that it sampled from, and
none takes new weights. `ChatSpeaker` (rollout) lets it take an agent's turns, marked as text that no policy sampled.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import httpx2

from upswing.engine.base import Capabilities, EngineStats, Sampling
from upswing.engine.http import Server
from upswing.errors import ConfigError, UpswingError, did_you_mean
from upswing.trajectory.types import ToolCall

NAME = "OpenAI-compatible"
NOT_JSON = "(not JSON)"
"""The argument that a call is given whose arguments can't be read: no tool takes it, so the call is invalid."""
_LENGTH = ("max_tokens", "max_completion_tokens")
"""Newer models refuse the old name, and most servers don't know the new one."""
_FINISHED = {"stop": True, "tool_calls": True, "function_call": True, "length": False}


@dataclass(frozen=True, kw_only=True)
class Reply:
    """One turn."""

    text: str
    calls: tuple[ToolCall, ...]
    """With the server's ids."""
    message: Mapping[str, Any]
    """As the server is to be told again that it said so."""
    finished: bool
    """False: cut by the limit of tokens."""


class OpenAIEngine:
    """A server of text. `connect` asks it for a few tokens, to find out how it is asked and whether it tells ids."""

    best = Capabilities(
        token_in=False,
        token_out=False,
        exact_logprobs=False,
        weight_updates=False,
        versions=False,
        prefix_cache=False,
        cancel=False,
        seeds=False,
    )
    kv_tokens = max_request = sys.maxsize

    def __init__(
        self,
        url: str,
        *,
        model: str,
        capabilities: Capabilities = best,
        length: str = _LENGTH[0],
        **server: Any,
    ) -> None:
        """`server`: as `Server` takes it."""
        self.server = Server(NAME, url, **server)
        self.model, self.capabilities, self._length = model, capabilities, length
        self.version = 0
        self.stats = EngineStats()

    @classmethod
    def connect(cls, url: str, *, model: str, temperatures: Collection[float] = (), **server: Any) -> OpenAIEngine:
        """`server`: as `Server` takes it.

        Raises ConfigError, with what the server says and the models that it has, when it answers nothing, and with what
        to do when it refuses one of `temperatures`.
        """
        body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": "Hello"}]}
        problem = ""
        with Server(NAME, url, **server).probe() as client:
            for length, more in ((_LENGTH[0], {"return_token_ids": True}), *((name, {}) for name in _LENGTH)):
                try:
                    answer = client.post("/chat/completions", json={**body, length: 16, **more})
                    if answer.status_code < 400:
                        told = "token_ids" in answer.json()["choices"][0]
                        capabilities = replace(cls.best, token_out=told)
                        for one in temperatures:
                            _takes(client, {**body, length: 16, "temperature": one})
                        return cls(url, model=model, capabilities=capabilities, length=length, **server)
                    problem = f"status {answer.status_code}: {answer.text[:300]}"
                except ConfigError:
                    raise
                except (httpx2.HTTPError, LookupError, TypeError, ValueError) as error:
                    problem = f"{type(error).__name__}: {error}"
            raise ConfigError(
                f"engine.url: no chat completions of '{model}' at '{url}' ({problem}){_models(client, model)}; give "
                "the address with its /v1, a model that it has, and engine.api_key_env where it asks for a key"
            )

    async def reply(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], sampling: Sampling
    ) -> Reply:
        """The next turn of a conversation. A busy server, or one that is away, is waited for.

        Raises UpswingError when that takes too long, and when it refuses or withholds the turn.
        """
        body: dict[str, Any] = {"model": self.model, "messages": list(messages), "temperature": sampling.temperature}
        body[self._length] = sampling.max_tokens
        if tools:
            body["tools"] = list(tools)
        ask = partial(self.server.call, "/chat/completions", timeout_s=math.inf, json=body)
        answer = await self.server.persist(ask, sampling=True)
        try:
            choice = answer["choices"][0]
            message, reason = choice["message"], choice["finish_reason"]
            text = message.get("content") or message.get("refusal") or ""
            asked = message.get("tool_calls") or []
            calls = tuple(_call(one["id"], one["function"]["name"], one["function"]["arguments"]) for one in asked)
        except (LookupError, TypeError, AttributeError) as problem:
            raise UpswingError(f"the {NAME} server's answer has no message ({problem!r})") from None
        if reason not in _FINISHED or not isinstance(text, str):
            raise UpswingError(f"the {NAME} server gave no whole turn (finish_reason {reason!r})")
        if not text and not calls and _FINISHED[reason]:
            raise UpswingError(f"the {NAME} server said nothing")
        self.stats.decode_tokens += int((answer.get("usage") or {}).get("completion_tokens") or 0)
        told = {"role": "assistant", "content": text, **({"tool_calls": asked} if asked else {})}
        return Reply(text=text, calls=calls, message=told, finished=_FINISHED[reason])

    def request_limit(self, total: int) -> str:
        return "what the server takes"

    async def generate(self, prompt: Sequence[int], sampling: Sampling, *, session: str | None = None) -> NoReturn:
        """An `Engine`'s, which this can't be. Raises UpswingError."""
        raise UpswingError(f"the {NAME} server takes no token ids; it can only play whole conversations")

    def release(self, session: str) -> None:
        """Nothing is kept."""

    async def update_weights(self, weights: Mapping[str, Any], version: int) -> None:
        """Raises UpswingError: it samples with its own."""
        raise UpswingError(f"the {NAME} server takes no new weights; use engine.kind torch, vllm or sglang")

    async def close(self) -> None:
        await self.server.close()


def _call(id: str, name: str, arguments: str) -> ToolCall:
    try:
        read = json.loads(arguments or "{}")
    except ValueError:
        read = None
    return ToolCall(name=name, arguments=read if isinstance(read, dict) else {NOT_JSON: str(arguments)}, id=id)


def _takes(client: httpx2.Client, body: Mapping[str, Any]) -> None:
    """Raises ConfigError for a temperature that the model refuses, as many do that reason."""
    answer = client.post("/chat/completions", json=body)
    if answer.status_code in (400, 422):
        raise ConfigError(
            f"engine.model: '{body['model']}' refuses temperature {body['temperature']:g} (greedy is 0): status "
            f"{answer.status_code}: {answer.text[:300]}; give each eval stage greedy: false (upswing eval: "
            "--sampled) and a temperature that it takes, which is often 1 alone"
        )


def _models(client: httpx2.Client, model: str) -> str:
    """What it has instead, if it says so; for a message."""
    try:
        names = [str(one["id"]) for one in client.get("/models").raise_for_status().json()["data"]]
    except (httpx2.HTTPError, LookupError, TypeError, ValueError):
        return ""
    return "" if model in names else f"; models there: {', '.join(names[:8])}{did_you_mean(model, names)}"
