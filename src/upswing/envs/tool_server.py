"""Tools behind HTTP by VerlTool's protocol: `RemoteTools` plays against such a server, `ToolService` is one.

A request is POST `/get_observation` with `{trajectory_ids, actions, extra_fields, finish, is_last_step}`, lists of one
length; the reply is `{observations, dones, valids}`. An action is what the agent said, as text; an observation is text
or `{obs, reward?, error?, invalid_reason?}`. The server keeps state by trajectory id, until an action is `done`,
`finish` or `is_last_step`. See https://github.com/TIGER-AI-Lab/verl-tool, `verl_tool/servers/tool_server.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import socket
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import BaseModel, BeforeValidator, Field, TypeAdapter, ValidationError, model_validator

from upswing.envs.adapters import library
from upswing.envs.base import AssistantMessage, Environment, Observation
from upswing.envs.parsers import TagsParser
from upswing.envs.parsing import THINK_CLOSE, storable
from upswing.envs.tool_env import INVALID_PREFIX, ToolEnv
from upswing.errors import ConfigError, EnvironmentBroken
from upswing.seeding import derive_seed
from upswing.trajectory.types import Message, StopReason, Task, ToolCall, ToolRecord
from upswing.verify.deadline import call_env
from upswing.verify.http import from_environment, http_client
from upswing.verify.options import REQUIRED, Positive, problem

PATH = "/get_observation"
RETRY_S = (0.2, 1.0, 3.0)
"""Pauses before another try where no connection came about; whatever was sent is never repeated."""
_FINISH_S = 5.0
_TASK = "upswing_task"
"""The extra field of a trajectory's first action that holds its task, for servers that play whole environments."""
_TASKS = TypeAdapter(Task)


# -- client -----------------------------------------------------------------------------------------------------------


class _Seen(BaseModel):
    """An observation; as text it is `obs` alone."""

    obs: str
    reward: Annotated[float, Field(strict=True, allow_inf_nan=False)] | None = None
    invalid_reason: Any = None
    error: Any = None
    image: Any = None
    audio: Any = None


class _Reply(BaseModel):
    """A server's reply to one action."""

    observations: list[Annotated[_Seen, BeforeValidator(lambda it: {"obs": it} if isinstance(it, str) else it)]] = (
        Field(min_length=1, max_length=1)
    )
    dones: list[bool] = Field(min_length=1, max_length=1)
    valids: list[bool] = Field(min_length=1, max_length=1)


class RemoteTools(ToolEnv):
    """Plays tasks with the tools of a server that speaks VerlTool's protocol.

    Every turn goes to the server as it is; where `action_ends` are given (VerlTool's `action_stop_tokens`), only one
    with such a text in it, and any other is the final answer. Without them a turn is the answer when the server says
    nothing to it (not valid, no observation). An `<answer>` in the answer is what counts of it. A turn that is cut ends
    the trajectory (MAX_TOKENS), as do `max_turns` (MAX_TURNS) and `max_invalid_calls` invalid actions in a row
    (INVALID_CALLS).
    A request holds one action: VerlTool's router chooses the worker by the first id of a request, and one slow or
    broken action would hold up or break the others.

    `timeout_s`: of one action; keep it below `limits.env_timeout_s`. Raises ConfigError, also when nothing listens at
    `url`.
    """

    answers_as_tool = True

    name = "tool_server"
    fixed = ToolEnv.fixed | {
        "tools", "mcp", "source", "protocol", "tools_in_system", "in_order", "tool_timeout_s"
    }  # fmt: skip
    url: str = REQUIRED
    action_ends: Sequence[Annotated[str, Field(min_length=1)]] = ()
    timeout_s: Positive = 50.0
    headers: Mapping[str, str] = {}
    _http: Any = None
    _held = False

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(url=url, **options)
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{self.name}: url is {url!r}; expected something like http://127.0.0.1:5000{PATH}")
        _check_reachable(parts.hostname, parts.port or (443 if parts.scheme == "https" else 80))
        self.url = url if parts.path.strip("/") else url.rstrip("/") + PATH
        self.headers = from_environment(self.headers, f"{self.name}: headers")
        self._counts = {"tool_calls": 0, "invalid_calls": 0}

    async def reset(self, task: Task, seed: int) -> Observation:
        """Start a trajectory under a new id; the server hears of it with the first action."""
        self._http = http_client(headers=self.headers)
        self._id, self._task = uuid.uuid4().hex, _TASKS.dump_python(task, mode="json")
        self._fields = {key: value for key, value in task.data.items() if key not in ("finish", "is_last_step")}
        return await super().reset(task, seed)

    async def step(self, message: AssistantMessage) -> Observation:
        """Take a turn: hand it to the server, or end with its answer. Raises EnvironmentBroken."""
        turn, self._turns = self._turns, self._turns + 1
        if not message.finished:
            return Observation(done=True, stop_reason=StopReason.MAX_TOKENS)
        said = message.content.rpartition(THINK_CLOSE)[2]
        if self.action_ends and not any(end in said for end in self.action_ends):
            return _answered(said)
        started, last = time.perf_counter(), self._turns >= self.max_turns
        seen, done, valid = await self._post(message.content, last=last)
        text, why, reward = seen.obs, str(seen.invalid_reason or ""), seen.reward or 0.0
        if not (valid or text) and not (why if done else self.action_ends):
            return _answered(said)
        self._counts["tool_calls"] += 1
        self._counts["invalid_calls"] += not valid
        self._invalid_in_row = 0 if valid else self._invalid_in_row + 1
        if not (valid or text):
            text = INVALID_PREFIX + (why or "the tools found no action in it")
        record = ToolRecord(
            call=ToolCall(name=self.name, arguments={"action": storable(message.content)}, id=f"call_{turn}_0"),
            result=self._clean(text),
            ok=valid,
            turn=turn,
            duration_s=time.perf_counter() - started,
        )
        reason = self._end_reason()
        if done:
            reason = StopReason.ENV_DONE if valid else StopReason.INVALID_CALLS
        if reason is not None:
            return Observation(done=True, stop_reason=reason, tool_records=(record,), reward=reward)
        answer = Message(role="tool", content=record.result)
        return Observation(messages=(answer,), tool_records=(record,), reward=reward)

    async def close(self) -> None:
        """Tell the server, where it still holds the trajectory, that it is over."""
        if self._http is None:
            return
        try:
            if self._held:
                with contextlib.suppress(EnvironmentBroken):  # a courtesy: servers forget idle ones
                    await self._post("", finish=True)
        finally:
            await self._http.aclose()

    async def _post(self, action: str, *, finish: bool = False, last: bool = False) -> tuple[_Seen, bool, bool]:
        """(what is seen, done, valid) of one action. Raises EnvironmentBroken for whatever is no proper answer."""
        first = {} if self._held else {_TASK: self._task}
        body = {
            "trajectory_ids": [self._id],
            "actions": [storable(action)],
            "extra_fields": [{**self._fields, **first}],
            "finish": [finish],
            "is_last_step": [last],
        }
        self._held, limit_s = True, _FINISH_S if finish else self.timeout_s
        try:
            async with asyncio.timeout(limit_s):
                response = await self._send(body)
        except TimeoutError:
            raise EnvironmentBroken(f"tool server {self.url} took longer than {limit_s:g} s") from None
        if response.status_code != 200:
            text = " ".join(response.text.split())[:200]
            raise EnvironmentBroken(f"tool server {self.url} answered {response.status_code}: {text}")
        try:
            reply = _Reply.model_validate_json(response.content)
        except ValidationError as error:
            raise EnvironmentBroken(f"tool server {self.url} sent no proper reply ({problem(error)})") from None
        self._held = not (reply.dones[0] or finish or last)
        (seen,) = reply.observations
        if seen.error:
            raise EnvironmentBroken(f"tool server {self.url} says that a tool broke: {seen.error}")
        if seen.image or seen.audio:
            raise EnvironmentBroken(f"tool server {self.url} sent an image or a sound; only text can be shown")
        return seen, reply.dones[0], reply.valids[0]

    async def _send(self, body: Mapping[str, Any]) -> Any:
        import httpx2

        for pause_s in (*RETRY_S, None):
            try:
                return await self._http.post(self.url, json=body)
            except httpx2.ConnectError as error:
                if pause_s is None:
                    raise EnvironmentBroken(f"tool server {self.url} can't be reached: {error}") from None
                await asyncio.sleep(pause_s)
            except (httpx2.HTTPError, httpx2.InvalidURL) as error:
                text = f"{type(error).__name__}: {error}"
                raise EnvironmentBroken(f"tool server {self.url} broke the connection ({text})") from None


def _answered(said: str) -> Observation:
    answer = TagsParser({}).parse(said).answer
    text = storable(said).strip() if answer is None else answer
    return Observation(done=True, stop_reason=StopReason.ANSWERED, answer=text or None)


@functools.cache
def _check_reachable(host: str, port: int) -> None:
    """Once for each address. Raises ConfigError."""
    try:
        socket.create_connection((host, port), timeout=5).close()
    except OSError as error:
        raise ConfigError(f"no tool server at {host}:{port} ({error}); start it first, see docs/tools.md") from None


# -- server -----------------------------------------------------------------------------------------------------------


class ActionRequest(BaseModel):
    """A request of VerlTool's: every list has an entry for each trajectory."""

    trajectory_ids: list[str] = Field(min_length=1)
    actions: list[str]
    extra_fields: list[dict[str, Any]] | None = None
    finish: list[bool] | None = None
    is_last_step: list[bool] | None = None

    @model_validator(mode="after")
    def _one_length(self) -> ActionRequest:
        for name in ("actions", "extra_fields", "finish", "is_last_step"):
            given = getattr(self, name)
            if given is not None and len(given) != len(self.trajectory_ids):
                raise ValueError(f"{name} has {len(given)} entries, trajectory_ids {len(self.trajectory_ids)}")
        return self

    def fields_of(self, index: int) -> dict[str, Any]:
        """The extra fields of one action; the lists beside them count where they don't hold the key."""
        beside = {"finish": self.finish, "is_last_step": self.is_last_step}
        own = self.extra_fields[index] if self.extra_fields else {}
        return {**{name: given[index] for name, given in beside.items() if given}, **own}


_Answer = tuple[str | dict[str, Any], bool, bool]
"""(observation, done, valid)."""


@dataclass(kw_only=True, eq=False)
class _Episode:
    env: Environment
    started: bool = False
    used: float = field(default_factory=time.monotonic)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class ToolService:
    """Plays environments for others, one for each trajectory id, all at once.

    An action that breaks its environment, or takes longer than `step_timeout_s`, is answered with `{obs: "", error}`,
    done and not valid; its neighbours are not touched. A final answer is done, not valid and without an observation.
    `valid` is an action with a call that could be run, whatever the tool then made of it.
    """

    def __init__(
        self, make_env: Callable[[], Environment], *, step_timeout_s: float = 60.0, idle_timeout_s: float = 600.0
    ) -> None:
        self.make_env, self.step_timeout_s, self.idle_timeout_s = make_env, step_timeout_s, idle_timeout_s
        self._episodes: dict[str, _Episode] = {}
        self._ending: set[asyncio.Future[Any]] = set()

    async def observe(self, request: ActionRequest) -> dict[str, Any]:
        """Play a batch: trajectories in parallel, the actions of one in their order."""
        started = time.perf_counter()
        answers: list[_Answer] = [("", True, False)] * len(request.actions)
        turns: dict[str, list[int]] = {}
        for index, trajectory_id in enumerate(request.trajectory_ids):
            turns.setdefault(trajectory_id, []).append(index)

        async def play(trajectory_id: str, indices: list[int]) -> None:
            for index in indices:
                answers[index] = await self._act(trajectory_id, request.actions[index], request.fields_of(index))

        await asyncio.gather(*(play(*each) for each in turns.items()))
        observations, dones, valids = (list(column) for column in zip(*answers, strict=True))
        took_ms = 1000 * (time.perf_counter() - started)
        return {"observations": observations, "dones": dones, "valids": valids, "processing_time_ms": took_ms}

    async def _act(self, trajectory_id: str, action: str, fields: Mapping[str, Any]) -> _Answer:
        episode = self._episodes.get(trajectory_id)
        if fields.get("finish"):
            if episode is not None:
                async with episode.lock:
                    await self._end(trajectory_id, episode)
            return "", True, True
        try:
            if episode is None:
                episode = self._episodes[trajectory_id] = _Episode(env=self.make_env())
            async with episode.lock:
                answer = await self._step(episode, trajectory_id, action, fields)
                if answer[1] or fields.get("is_last_step"):
                    await self._end(trajectory_id, episode)
                return answer
        except Exception as error:
            if episode is not None:
                await self._end(trajectory_id, episode)
            return {"obs": "", "error": storable(f"{type(error).__name__}: {error}")[:500]}, True, False

    async def _step(self, episode: _Episode, trajectory_id: str, action: str, fields: Mapping[str, Any]) -> _Answer:
        if self._episodes.get(trajectory_id) is not episode:
            raise EnvironmentBroken("the trajectory ended while this action waited")
        if not episode.started:
            task = _TASKS.validate_python(fields.get(_TASK) or {"id": trajectory_id, "messages": (), "data": fields})
            seed = derive_seed("tool_server", trajectory_id)
            await call_env(episode.env.reset, task, seed, timeout_s=self.step_timeout_s)
            episode.started = True
        seen = await call_env(episode.env.step, AssistantMessage(content=action), timeout_s=self.step_timeout_s)
        episode.used = time.monotonic()
        return _answer_of(seen)

    async def _end(self, trajectory_id: str, episode: _Episode) -> None:
        """Close it; to the end, also when who asked is cancelled, as requests are that a server stops in."""
        if self._episodes.get(trajectory_id) is episode:
            del self._episodes[trajectory_id]
            ending = asyncio.ensure_future(call_env(episode.env.close, timeout_s=self.step_timeout_s))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)
            with contextlib.suppress(Exception):  # it is over whatever its close says
                await asyncio.shield(ending)

    async def _forget_idle(self) -> None:
        while True:
            await asyncio.sleep(min(30.0, self.idle_timeout_s / 4))
            oldest = time.monotonic() - self.idle_timeout_s
            idle = [(i, e) for i, e in self._episodes.items() if e.used < oldest and not e.lock.locked()]
            await asyncio.gather(*(self._end(*each) for each in idle))

    def app(self) -> Any:
        """A Starlette application: POST /get_observation and GET /health. Raises ConfigError without the extra."""
        library("starlette", "serve")
        from starlette.applications import Starlette
        from starlette.requests import Request
        from starlette.responses import JSONResponse
        from starlette.routing import Route

        async def observe(request: Request) -> JSONResponse:
            if "origin" in request.headers:  # no login stands between a page that the user looks at and the tools
                return JSONResponse({"detail": "requests of web pages are refused"}, 403)
            try:
                actions = ActionRequest.model_validate_json(await request.body())
            except ValidationError as error:
                detail = error.errors(include_url=False, include_context=False, include_input=False)
                return JSONResponse({"detail": detail}, 422)
            return JSONResponse(await self.observe(actions))

        async def health(request: Request) -> JSONResponse:
            return JSONResponse({"status": "healthy", "trajectories": len(self._episodes)})

        @contextlib.asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            forgetting = asyncio.create_task(self._forget_idle())
            yield
            forgetting.cancel()
            await asyncio.gather(*(self._end(*each) for each in list(self._episodes.items())))
            await asyncio.gather(*self._ending, return_exceptions=True)

        routes = [Route(PATH, observe, methods=["POST"]), Route("/health", health)]
        return Starlette(routes=routes, lifespan=lifespan)


def _answer_of(seen: Observation) -> _Answer:
    """What the protocol says of an observation. Raises EnvironmentBroken for one that it has no words for."""
    if seen.rewrite:
        raise EnvironmentBroken("this environment rewrites the conversation, which VerlTool's protocol can't say")
    texts = [m.content for m in seen.messages] or [r.result for r in seen.tool_records]  # when done, only the latter
    invalid = [not r.ok and r.result.startswith(INVALID_PREFIX) for r in seen.tool_records]
    valid = not all(invalid) if invalid else seen.stop_reason is not StopReason.ANSWERED
    text = storable("\n".join(texts))
    if not math.isfinite(seen.reward):
        raise EnvironmentBroken(f"the environment gave reward {seen.reward}")
    return ({"obs": text, "reward": seen.reward} if seen.reward else text), seen.done, valid
