"""A model behind OpenAI's chat completions: the training proxy's reading and writing, one session a request.

Between requests the engine's cache is kept, and the ids of the newest turns by what had been said up to them: a client
that sends its history again has the model see its own turns as it said them, as in training.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import math
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from upswing.engine.base import Engine, Sampling
from upswing.rollout.limits import Limits
from upswing.rollout.proxy import (
    parse_body,
    read_request,
    refusal,
    stream,
    token_logprobs,
    while_connected,
    whole,
)
from upswing.rollout.sessions import ChatMessage, ChatRequest, ChatTurn, Refused, Session
from upswing.trajectory.render import ChatRenderer
from upswing.verify.deadline import to_its_end

MAX_N = 64
MAX_HELD = 4096
"""Turns whose ids are kept."""


@dataclass(kw_only=True)
class Serving:
    """Answers requests. `name` is what the model is called; requests may name any."""

    name: str
    engine: Engine
    renderer: ChatRenderer
    end_tokens: tuple[int, ...]
    limits: Limits
    protocol: str = "hermes"
    tools_in: str = "template"
    system: str = ""
    """The system message that the model is used to: it stands first where messages lack it."""
    # At random, or calls of before a restart could have the ids of new ones.
    _numbers: Any = field(default_factory=lambda: itertools.count(random.getrandbits(40)))
    _held: dict[bytes, tuple[int, ...]] = field(default_factory=dict)

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/health", lambda http: Response()),
            ]
        )

    async def _models(self, http: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": self.name, "object": "model", "owned_by": "upswing"}]})

    async def _chat(self, http: Request) -> Response:
        sessions: list[Session] = []
        try:
            body = parse_body(await http.body())
            sampling, count = read_sampling(body, self.limits.turn_tokens)
            request = self._opened(read_request({key: value for key, value in body.items() if key != "n"}))
            keys = [message.key for message in request.messages]
            known = [
                (key, ids) for key, so_far in zip(keys, _digests(keys), strict=True) if (ids := self._held.get(so_far))
            ]
            sessions = [self._session(replace(sampling, seed=sampling.seed + i), known) for i in range(count)]
            asked = asyncio.gather(*(one.ask(request, digest=b"", retry=False) for one in sessions))
            turns = await while_connected(http, asked)
        except Refused as refused:
            return refusal(refused)
        except ClientDisconnect:
            turns = None
        finally:
            await to_its_end(_close(sessions))
        if turns is None:
            return Response(status_code=499)  # nobody reads it
        for turn in turns:
            *_, so_far = _digests([*keys, turn.reply.key])
            self._held[so_far] = turn.completion.tokens
        while len(self._held) > MAX_HELD:
            del self._held[next(iter(self._held))]
        scored = [token_logprobs(self.renderer, turn) if body.get("logprobs") else None for turn in turns]
        if body.get("stream"):
            return StreamingResponse(stream(body, turns[0], scored[0]), media_type="text/event-stream")
        return JSONResponse(_merged(body, turns, scored))

    def _opened(self, request: ChatRequest) -> ChatRequest:
        """With the system message that the model is used to."""
        said = request.messages
        first = said[0].content if said[0].role == "system" else ""
        if self.system in first:
            return request
        opening = ChatMessage(role="system", content="\n\n".join(part for part in (self.system, first) if part))
        return replace(request, messages=(opening, *said[said[0].role == "system" :]))

    def _session(self, sampling: Sampling, known: Iterable[tuple[str, tuple[int, ...]]]) -> Session:
        number = next(self._numbers)
        session = Session(
            name=f"chat-{number}",
            engine=self.engine,
            sampling=replace(sampling, stop_tokens=self.end_tokens),
            renderer=self.renderer,
            end_tokens=self.end_tokens,
            limits=self.limits,
            seed=sampling.seed,
            protocol=self.protocol,
            tools_in=self.tools_in,
            first_turn=number,
        )
        for key, ids in known:
            session.hold(key, ids)
        return session


def _digests(keys: Iterable[str]) -> Iterator[bytes]:
    """Of each message with all before it."""
    digest = hashlib.blake2b(digest_size=16)
    for key in keys:
        digest.update(key.encode() + b"\0")
        yield digest.digest()


async def _close(sessions: Iterable[Session]) -> None:
    for session in sessions:
        await session.close()


def _merged(body: Mapping[str, Any], turns: list[ChatTurn], scored: list[Any]) -> dict[str, Any]:
    """Several samples as the choices of one answer."""
    answers = [whole(body, turn, one) for turn, one in zip(turns, scored, strict=True)]
    choices = [{**answer["choices"][0], "index": index} for index, answer in enumerate(answers)]
    usage = dict(answers[0]["usage"])
    usage["completion_tokens"] = sum(answer["usage"]["completion_tokens"] for answer in answers)
    usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
    return {**answers[0], "choices": choices, "usage": usage}


def read_sampling(body: Mapping[str, Any], max_tokens: int) -> tuple[Sampling, int]:
    """(how to sample, how many times). Raises Refused for what is out of range."""

    def number(name: str, default: float, low: float, high: float) -> float:
        value = default if body.get(name) is None else body[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise Refused(f"{name} must be a number from {low:g} to {high:g}, got {value!r:.80}")
        return value

    def whole_number(name: str, default: int, low: int, high: int) -> int:
        value = number(name, default, low, high)
        if value != int(value):
            raise Refused(f"{name} must be a whole number, got {value!r}")
        return int(value)

    count = whole_number("n", 1, 1, MAX_N)
    if count > 1 and body.get("stream"):
        raise Refused("n above 1 can't be streamed")
    top_p = number("top_p", 1.0, 0.0, 1.0)
    if top_p == 0:
        raise Refused("top_p must be above 0; temperature 0 takes the likeliest token")
    sampling = Sampling(
        max_tokens=max_tokens,
        temperature=number("temperature", 1.0, 0.0, math.inf),
        top_p=top_p,
        top_k=whole_number("top_k", 0, 0, 2**31),
        min_p=number("min_p", 0.0, 0.0, 1.0),
        seed=whole_number("seed", random.getrandbits(48), 0, 2**62),
    )
    return sampling, count
