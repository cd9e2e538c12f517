"""The training proxy: OpenAI's chat completions over HTTP, in front of the engine that is being trained.

It runs on the event loop that has the engine, on a free port of 127.0.0.1. Every trajectory has a URL of its own,
`http://127.0.0.1:PORT/s/TOKEN/v1`, so that any client works as it is: the URL says which session a request belongs to.
A turn is sampled whole before anything is sent, also when it is streamed: calls can only be read from a whole turn, and
an error must still be able to be an HTTP status.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import secrets
import socket
import time
from collections.abc import Awaitable, Iterator, Mapping
from typing import Any, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from upswing.envs.parsing import storable
from upswing.rollout.sessions import ChatMessage, ChatRequest, ChatTurn, Refused, Session
from upswing.trajectory.render import ChatRenderer
from upswing.trajectory.types import ToolCall

T = TypeVar("T")

MODEL = "policy"
"""What the served model is called; requests may name any."""
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "functions": ([],),
    "function_call": (),
}
"""What would change the answer and isn't done -> the values that may be sent all the same, beside null."""
READ = {
    *("model", "messages", "tools", "tool_choice", "max_tokens", "max_completion_tokens", "stop"),
    *("logprobs", "stream", "stream_options"),
}
"""Any other parameter is ignored, and the trajectory says so. Temperature and the like are the stage's, or the learner
would train on another distribution than the one that was sampled."""


class Proxy:
    """Serves sessions. It starts with the first one, and again on another event loop."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: uvicorn.Server | None = None
        self._task: asyncio.Task[None] | None = None
        self._port = 0

    def open(self, session: Session) -> tuple[str, str]:
        """Serve a session -> (base URL, API key)."""
        self._start()
        token = secrets.token_urlsafe(16)
        self._sessions[token] = session
        return f"http://127.0.0.1:{self._port}/s/{token}/v1", token

    def drop(self, token: str) -> None:
        """From now on its URL answers 404."""
        self._sessions.pop(token, None)

    async def close(self) -> None:
        """Stop serving."""
        if self._server is not None and self._task is not None and self._loop is asyncio.get_running_loop():
            self._server.should_exit = True
            await asyncio.gather(self._task, return_exceptions=True)
        self._loop = self._server = self._task = None

    def _start(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is loop and self._task is not None and not self._task.done():
            return
        listening = socket.create_server(("127.0.0.1", 0), backlog=2048)  # from here on, clients are kept waiting
        self._loop, self._port = loop, listening.getsockname()[1]
        routes = [
            Route("/s/{token}/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/s/{token}/v1/models", self._models),
            Route("/{path:path}", _nothing_here, methods=["GET", "POST", "PUT", "DELETE"]),
        ]
        config = uvicorn.Config(
            Starlette(routes=routes),
            log_config=None,
            log_level="error",
            access_log=False,
            lifespan="off",
            timeout_keep_alive=3600,  # clients must never find a kept connection closed under a request
            timeout_graceful_shutdown=1,
        )
        self._server = _Server(config)
        self._task = loop.create_task(self._server.serve(sockets=[listening]))

    async def _models(self, http: Request) -> Response:
        if http.path_params["token"] not in self._sessions:
            return refusal(Refused("there is no such session, or it is over", status=404))
        return JSONResponse({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "upswing"}]})

    async def _chat(self, http: Request) -> Response:
        session = self._sessions.get(http.path_params["token"])
        if session is None:
            return refusal(Refused("there is no such session, or it is over", status=404))
        try:
            raw = await http.body()
            body = parse_body(raw)
            request = read_request(body)
            retry = http.headers.get("x-stainless-retry-count", "0") != "0"
            asked = session.ask(request, digest=hashlib.blake2b(raw).digest(), retry=retry)
            turn = await while_connected(http, asked)
        except Refused as refused:
            return refusal(refused)
        except ClientDisconnect:
            turn = None
        if turn is None:
            return Response(status_code=499)  # nobody reads it
        scored = token_logprobs(session.renderer, turn) if body.get("logprobs") else None
        if body.get("stream"):
            return StreamingResponse(stream(body, turn, scored), media_type="text/event-stream")
        return JSONResponse(whole(body, turn, scored))


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """An interrupt is the run's business."""
        yield


async def while_connected(http: Request, work: Awaitable[T]) -> T | None:
    """The work's result; None, and the work cancelled, when the client hangs up before."""

    async def hung_up() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(hung_up())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        gone.cancel()
        task.cancel()


def refusal(refused: Refused) -> JSONResponse:
    kind = "invalid_request_error" if refused.status < 500 else "server_error"
    error = {"message": str(refused), "type": kind, "param": None, "code": refused.code}
    # Asked again, a refusal would be the same.
    return JSONResponse({"error": error}, status_code=refused.status, headers={"x-should-retry": "false"})


async def _nothing_here(http: Request) -> Response:
    words = f"{http.method} {http.url.path} isn't served: the training proxy has /v1/chat/completions and /v1/models"
    return refusal(Refused(words, status=404))


# -- requests ---------------------------------------------------------------------------------------------------------


def parse_body(raw: bytes) -> dict[str, Any]:
    """Raises Refused unless it is a JSON object."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as problem:
        raise Refused(f"the body is not JSON: {problem}") from problem
    if not isinstance(body, dict):
        raise Refused(f"the body is {type(body).__name__}; it must be an object")
    return body


def read_request(body: Mapping[str, Any]) -> ChatRequest:
    """`_read_request`, with Refused for whatever isn't of the kind that it should be."""
    try:
        return _read_request(body)
    except (TypeError, ValueError, AttributeError, RecursionError) as problem:
        raise Refused(f"the body is not as OpenAI's API has it ({type(problem).__name__}: {problem})") from problem


def _read_request(body: Mapping[str, Any]) -> ChatRequest:
    """A body of `chat/completions`, checked. Raises Refused for what is wrong or would be ignored to the answer's
    cost."""
    for name, harmless in UNSUPPORTED.items():
        if (value := body.get(name)) is not None and value not in harmless:
            allowed = f"; allowed: {', '.join(map(json.dumps, harmless))}" if harmless else "; use tools"
            raise Refused(f"{name} {json.dumps(value):.80} isn't supported by the training proxy{allowed}")
    if (choice := body.get("tool_choice") or "auto") not in ("auto", "none"):
        raise Refused(
            f"tool_choice {json.dumps(choice):.80} isn't supported: a policy is sampled as it is, and a call can't be "
            'forced on it; allowed: "auto", "none"'
        )
    said = body.get("messages")
    if not isinstance(said, list) or not said:
        raise Refused("messages must be a list of at least one message")
    tools = body.get("tools") or []
    for tool in tools if isinstance(tools, list) else [None]:
        found = tool.get("function") if isinstance(tool, dict) else None
        function = found if isinstance(found, dict) else {}
        schema = function.get("parameters") or {}
        properties = schema.get("properties", {}) if isinstance(schema, dict) else None
        if not isinstance(properties, dict) or not isinstance(function.get("name"), str):
            raise Refused('tools must be a list of {"type": "function", "function": {"name": …, "parameters": …}}')
    return ChatRequest(
        messages=tuple(_message(one, f"messages[{index}]") for index, one in enumerate(said)),
        tools=tuple(tools),
        may_call=bool(tools) and choice != "none",
        max_tokens=_max_tokens(body),
        stop=_stop(body.get("stop")),
        ignored=frozenset(k for k, v in body.items() if v is not None and k not in READ and k not in UNSUPPORTED),
    )


def _max_tokens(body: Mapping[str, Any]) -> int | None:
    found = [body[name] for name in ("max_completion_tokens", "max_tokens") if body.get(name) is not None]
    for value in found:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise Refused(f"max_tokens must be a whole number of at least 1, got {value!r}")
    return min(found, default=None)


def _stop(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or not all(isinstance(one, str) and one for one in stops):
        raise Refused(f"stop must be text or a list of texts, none empty, got {value!r:.80}")
    return tuple(stops)


def _message(value: Any, where: str) -> ChatMessage:
    role = value.get("role") if isinstance(value, dict) else None
    if role not in ROLES:
        raise Refused(f"{where}: role {role!r}; allowed: {', '.join(ROLES)}")
    answers = value.get("tool_call_id") or ""
    if not isinstance(answers, str):
        raise Refused(f"{where}: tool_call_id must be text")
    calls = value.get("tool_calls") or [] if role == "assistant" else []
    return ChatMessage(
        role=ROLES[role],
        content=_text(value.get("content"), where),
        calls=tuple(_call(call, where) for call in calls),
        answers=answers if role == "tool" else "",
    )


def _text(content: Any, where: str) -> str:
    """Text, or the texts of parts. Raises Refused for images and sounds."""
    if content is None or isinstance(content, str):
        return storable(content or "")
    parts = content if isinstance(content, list) else [None]
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text"]
    if len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
        raise Refused(f"{where}: content must be text, or a list of parts of type 'text'")
    return storable("".join(map(str, texts)))


def _call(value: Any, where: str) -> ToolCall:
    try:
        function = value["function"]
        arguments = json.loads(function.get("arguments") or "{}")
        if not isinstance(arguments, dict) or not isinstance(function["name"], str):
            raise TypeError
        return ToolCall(name=function["name"], arguments=arguments, id=str(value.get("id") or ""))
    except (TypeError, KeyError, AttributeError, ValueError):
        raise Refused(
            f"{where}: a tool call must have a function with a name and, as JSON text, an object of arguments"
        ) from None


# -- answers ----------------------------------------------------------------------------------------------------------


def whole(body: Mapping[str, Any], turn: ChatTurn, scored: Any) -> dict[str, Any]:
    """The answer in one piece."""
    content = turn.reply.content or (None if turn.reply.calls else "")
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if turn.reasoning:
        message["reasoning_content"] = turn.reasoning
    if turn.reply.calls:
        message["tool_calls"] = _calls(turn)
    choice = {"index": 0, "message": message, "finish_reason": turn.finish_reason, "logprobs": scored}
    return {**_head(body, turn, "chat.completion"), "choices": [choice], "usage": _usage(turn)}


def stream(body: Mapping[str, Any], turn: ChatTurn, scored: Any) -> Iterator[str]:
    """The answer as server-sent events, as a client expects them."""
    head = _head(body, turn, "chat.completion.chunk")

    def event(choices: list[dict[str, Any]], **more: Any) -> str:
        return f"data: {json.dumps({**head, 'choices': choices, **more})}\n\n"

    def delta(finish: str | None = None, **fields: Any) -> str:
        beside = scored if fields.get("content") else None
        return event([{"index": 0, "delta": fields, "finish_reason": finish, "logprobs": beside}])

    yield delta(role="assistant", content="")
    if turn.reasoning:
        yield delta(reasoning_content=turn.reasoning)
    if turn.reply.content:
        yield delta(content=turn.reply.content)
    for index, call in enumerate(_calls(turn)):
        yield delta(tool_calls=[{"index": index, **call}])
    yield delta(finish=turn.finish_reason)
    if isinstance(options := body.get("stream_options"), dict) and options.get("include_usage"):
        yield event([], usage=_usage(turn))
    yield "data: [DONE]\n\n"


def _head(body: Mapping[str, Any], turn: ChatTurn, kind: str) -> dict[str, Any]:
    model = storable(str(body.get("model") or MODEL))
    return {"id": f"chatcmpl-{turn.index}", "object": kind, "created": int(time.time()), "model": model}


def _calls(turn: ChatTurn) -> list[dict[str, Any]]:
    def function(call: ToolCall) -> dict[str, str]:
        return {"name": call.name, "arguments": json.dumps(dict(call.arguments), ensure_ascii=False)}

    return [{"id": call.id, "type": "function", "function": function(call)} for call in turn.reply.calls]


def _usage(turn: ChatTurn) -> dict[str, int]:
    sampled = len(turn.completion.tokens)
    return {
        "prompt_tokens": turn.num_prompt,
        "completion_tokens": sampled,
        "total_tokens": turn.num_prompt + sampled,
    }


def token_logprobs(renderer: ChatRenderer, turn: ChatTurn) -> dict[str, Any]:
    """Of everything sampled, calls and the end of the turn included. Half a character has no bytes."""

    def one(token: int, value: float) -> dict[str, Any]:
        text = renderer.decode([token])
        data = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": value, "bytes": data, "top_logprobs": []}

    return {"content": list(map(one, turn.completion.tokens, turn.completion.engine_logprobs))}
