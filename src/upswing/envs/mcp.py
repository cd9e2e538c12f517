"""Tools of MCP servers, over stdio or streamable HTTP, through the official client (the extra `mcp`).

A server is shared by all trajectories of the process, or is one trajectory's own (`per_trajectory`). Sessions live in
one background thread with its own event loop, so that environments may call from any thread and loop; at exit they are
closed and the processes ended. What goes wrong with a call is told apart:
- The tool says that it failed, refuses its arguments or takes too long: ToolFailed, the agent reads `Error: …`.
- The server is gone, answers nothing any more or answers rubbish: EnvironmentBroken, so that no trajectory is blamed.
  The call isn't repeated, as it may have had its effect; the next one finds a server started or connected to anew
  (not with `per_trajectory`, whose state is lost).
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import os
import shlex
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from upswing.envs.adapters import library
from upswing.envs.tools import (
    MAX_ERROR_CHARS,
    TOOL_NAME,
    Parameter,
    Tool,
    ToolArgumentError,
    ToolFailed,
    dump_result,
    simplify_schema,
    takes_text,
)
from upswing.errors import ConfigError, EnvironmentBroken, did_you_mean
from upswing.verify.http import from_environment
from upswing.verify.options import problem

CONNECT_S = 50.0
"""A server must have started and told its tools by then; below the default `limits.env_timeout_s`."""
ALIVE_S = 5.0
"""After a call that took too long: what a server that still works needs at most to list its tools."""
CLOSE_S = 10.0
_KEPT_WORDS = 4000
_TYPES = {"string": str, "integer": int, "number": float, "boolean": bool, "array": list, "object": dict}
_ADAPTERS = {kind: TypeAdapter[Any](python) for kind, python in _TYPES.items()}
_ANY = TypeAdapter[Any](Any)


class McpSpec(BaseModel):
    """One entry of `mcp:`: a program to run or an address, and which of its tools to take."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    command: list[str] = Field(default_factory=list)
    """The program and its arguments. It sees HOME, PATH and a few more variables, and those in `env`."""
    env: dict[str, str] = Field(default_factory=dict)
    cwd: str | None = None
    url: str = ""
    """Of a streamable HTTP server, such as `http://127.0.0.1:8000/mcp`."""
    headers: dict[str, str] = Field(default_factory=dict)
    include: list[str] | None = None
    exclude: list[str] = Field(default_factory=list)
    prefix: str = ""
    """Put in front of the tools' names."""
    per_trajectory: bool = False
    """Every trajectory gets a server (over HTTP: a session) of its own, for servers that keep state."""

    @property
    def label(self) -> str:
        return f"MCP server '{self.url or shlex.join(self.command)}'"


def read_spec(given: Any, where: str) -> McpSpec:
    """An entry of `mcp:`; `${NAME}` in `env` and `headers` is the environment variable, so that no recipe holds a
    secret. Raises ConfigError."""
    try:
        spec = McpSpec.model_validate(given)
    except ValidationError as error:
        raise ConfigError(f"{where}: {problem(error, known=McpSpec.model_fields)}") from None
    if bool(spec.command) == bool(spec.url):
        raise ConfigError(f"{where} needs command: [program, argument, …] or url: http://…, one of the two")
    if spec.url and not spec.url.startswith(("http://", "https://")):
        raise ConfigError(f"{where}: url is {spec.url!r}; it must start with http:// or https://")
    stray = [key for key in (("env", "cwd") if spec.url else ("headers",)) if getattr(spec, key)]
    if stray:
        raise ConfigError(f"{where}: {stray[0]} has no effect with {'url' if spec.url else 'command'}; take it out")
    from_environment({**spec.env, **spec.headers}, where)
    return spec


# -- sessions: everything here runs in the background loop -----------------------------------------------------------


class _Background:
    """The thread and loop that all sessions live in."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.servers = weakref.WeakSet[McpServer]()
        threading.Thread(target=self.loop.run_forever, name="upswing-mcp", daemon=True).start()
        atexit.register(self.close)

    def submit(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def close(self) -> None:
        async def close_all() -> None:
            await asyncio.gather(*(server.close() for server in list(self.servers)))

        with contextlib.suppress(Exception):
            self.submit(close_all()).result(CLOSE_S + 1)


@functools.cache
def background() -> _Background:
    return _Background()


@dataclass(frozen=True, kw_only=True, eq=False)
class _Session:
    client: Any
    """An open `mcp.Client`."""
    tools: tuple[Any, ...]
    """As the server lists them."""
    stop: asyncio.Event
    """Set to end the session."""
    words: bytearray
    """The last that the process wrote to standard error."""


class McpServer:
    """A server with at most one open session; `reopens` False: only ever one. Raises EnvironmentBroken."""

    def __init__(self, spec: McpSpec, *, reopens: bool = True) -> None:
        self.spec, self._reopens = spec, reopens
        self._session: _Session | None = None
        self._opening: asyncio.Task[_Session] | None = None
        self._owners: dict[asyncio.Task[None], asyncio.Event] = {}
        self._lost = False
        background().servers.add(self)

    async def session(self) -> _Session:
        """The open session, or a new one: those who ask at the same time wait for the same start."""
        if self._lost:
            raise EnvironmentBroken(f"{self.spec.label} is gone, and what it kept for the trajectory with it")
        if self._session is not None:
            return self._session
        if self._opening is None or self._opening.done():
            self._opening = asyncio.create_task(self._open())
        return await asyncio.shield(self._opening)

    async def call(self, name: str, arguments: dict[str, Any], timeout_s: float) -> str:
        """A tool's result as text. Raises ToolFailed when the tool is at fault."""
        from mcp import MCPError
        from mcp_types import jsonrpc

        session = await self.session()
        try:
            async with asyncio.timeout(timeout_s):
                result = await session.client.call_tool(name, arguments)
        except TimeoutError:
            await self._check_alive(session, name)
            raise ToolFailed(f"Error: timeout: '{name}' took longer than {timeout_s:g} s") from None
        except MCPError as error:
            faults = (jsonrpc.INTERNAL_ERROR, jsonrpc.METHOD_NOT_FOUND, jsonrpc.PARSE_ERROR)
            gone = (jsonrpc.CONNECTION_CLOSED, jsonrpc.REQUEST_TIMEOUT, jsonrpc.INVALID_REQUEST)  # the session ended
            if error.code in gone:
                self._drop(session)
            elif error.code not in faults:
                raise ToolFailed(f"Error: {error}"[:MAX_ERROR_CHARS]) from None
            raise EnvironmentBroken(f"{self.spec.label} broke in '{name}': {error}{_tail(session.words)}") from None
        except Exception as error:
            text = f"{type(_leaf(error)).__name__}: {_leaf(error)}"
            raise EnvironmentBroken(f"{self.spec.label} broke in '{name}': {text[:MAX_ERROR_CHARS]}") from None
        text = result_text(result)
        if result.is_error:
            raise ToolFailed(f"Error: {text}"[:MAX_ERROR_CHARS])
        return text

    async def close(self) -> None:
        """End the sessions and wait until they have ended."""
        self._lost = not self._reopens
        if self._opening is not None:
            self._opening.cancel()
        owners, self._session, self._opening = dict(self._owners), None, None
        for stop in owners.values():
            stop.set()
        if owners:
            await asyncio.wait(owners, timeout=CLOSE_S)

    async def _check_alive(self, session: _Session, name: str) -> None:
        """After a timeout: is it the tool that hangs, or the server?"""
        try:
            async with asyncio.timeout(ALIVE_S):
                await session.client.list_tools()
        except Exception as error:
            self._drop(session)
            why = "took too long and the server answers nothing else either"
            raise EnvironmentBroken(f"{self.spec.label} hangs: '{name}' {why}{_tail(session.words)}") from error

    def _drop(self, session: _Session) -> None:
        session.stop.set()
        if self._session is session:
            self._session, self._lost = None, not self._reopens

    async def _open(self) -> _Session:
        ready, stop = asyncio.get_running_loop().create_future(), asyncio.Event()
        owner = asyncio.create_task(self._own(ready, stop))
        self._owners[owner] = stop
        owner.add_done_callback(self._owners.pop)
        try:
            async with asyncio.timeout(CONNECT_S):
                self._session = await ready
        except TimeoutError:
            owner.cancel()
            raise EnvironmentBroken(f"{self.spec.label} did not tell its tools within {CONNECT_S:g} s") from None
        except asyncio.CancelledError:
            owner.cancel()
            raise
        return self._session

    async def _own(self, ready: asyncio.Future[_Session], stop: asyncio.Event) -> None:
        """Hold a session open until `stop`: the task that entered its contexts must be the one that leaves them."""
        from mcp import Client

        words, session = bytearray(), None
        try:
            async with contextlib.AsyncExitStack() as stack:
                client = Client(await self._transport(stack, words), cache=None)
                await stack.enter_async_context(client)
                page = await client.list_tools()
                tools = list(page.tools)
                while page.next_cursor:
                    page = await client.list_tools(cursor=page.next_cursor)
                    tools += page.tools
                session = _Session(client=client, tools=tuple(tools), stop=stop, words=words)
                ready.set_result(session)
                await stop.wait()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            if not ready.done():
                ready.set_exception(EnvironmentBroken(self._why(_leaf(error), words)))
        finally:
            if session is not None:
                self._drop(session)

    async def _transport(self, stack: contextlib.AsyncExitStack, words: bytearray) -> Any:
        from mcp import StdioServerParameters, stdio_client
        from mcp.client.streamable_http import streamable_http_client

        spec = self.spec
        if spec.url:
            import httpx2

            http = httpx2.AsyncClient(
                headers=from_environment(spec.headers, spec.label),
                follow_redirects=True,
                timeout=httpx2.Timeout(30.0, read=None),  # calls have a limit of their own
            )
            return streamable_http_client(spec.url, http_client=await stack.enter_async_context(http))
        env = from_environment(spec.env, spec.label)
        program = StdioServerParameters(command=spec.command[0], args=spec.command[1:], env=env, cwd=spec.cwd)
        reading, writing = os.pipe()  # our end stays open, so reading never meets an end of file
        os.set_blocking(reading, False)
        asyncio.get_running_loop().add_reader(reading, _hear, reading, words)
        stack.callback(_stop_hearing, asyncio.get_running_loop(), reading, words)
        return stdio_client(program, errlog=stack.enter_context(os.fdopen(writing, "w")))

    def _why(self, error: BaseException, words: bytearray) -> str:
        text = f"{type(error).__name__}: {error}"
        if self.spec.url:
            return f"{self.spec.label} can't be used ({text}); is it running, is this its address (often …/mcp)?"
        if isinstance(error, OSError) and not words:
            return f"{self.spec.label} can't be started ({text}); is the program installed and cwd right?"
        return f"{self.spec.label} ended or refused before it told its tools ({text}){_tail(words)}"


def _hear(reading: int, words: bytearray) -> None:
    with contextlib.suppress(BlockingIOError):
        words += os.read(reading, 65536)
        del words[:-_KEPT_WORDS]


def _stop_hearing(loop: asyncio.AbstractEventLoop, reading: int, words: bytearray) -> None:
    loop.remove_reader(reading)
    _hear(reading, words)
    os.close(reading)


def _tail(words: bytearray) -> str:
    lines = words.decode("utf-8", "replace").strip().splitlines()
    return f"; its last words: {lines[-1][-300:]}" if lines else ""


def _leaf(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def result_text(result: Any) -> str:
    """A `CallToolResult` as text: its parts line by line; what is no text is named; structured content if all else is
    missing (servers repeat it as text)."""
    parts = [_part_text(part) for part in result.content]
    if not parts and result.structured_content is not None:
        return dump_result(result.structured_content)
    return "\n".join(parts)


def _part_text(part: Any) -> str:
    if part.type == "text":
        return str(part.text)
    if part.type == "resource":
        return str(getattr(part.resource, "text", f"[resource {part.resource.uri}, not text]"))
    if part.type == "resource_link":
        return f"[resource {part.name}: {part.uri}]"
    return f"[{part.type}, {part.mime_type}: not shown]"


# -- tools -----------------------------------------------------------------------------------------------------------


async def _call(server: McpServer, name: str, timeout_s: float, /, **arguments: Any) -> str:
    """What a tool runs."""
    result: str = await asyncio.wrap_future(background().submit(server.call(name, arguments, timeout_s)))
    return result


@dataclass(frozen=True, kw_only=True)
class McpTool(Tool):
    """A tool with a JSON schema of the server's. `timeout_s` is only the last resort: the call keeps its own."""

    problem_of: Callable[[Mapping[str, Any]], str | None]
    """What is wrong with all arguments together, by the schema."""
    takes_more: bool
    """The schema says that it takes other arguments too."""

    def bind(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments converted where nothing is lost and checked against the schema. Raises ToolArgumentError."""
        names = {p.name for p in self.parameters}
        more = {key: value for key, value in arguments.items() if self.takes_more and key not in names}
        bound = super().bind({key: value for key, value in arguments.items() if key not in more}) | more
        problem = self.problem_of(bound)
        if problem is not None:
            raise ToolArgumentError(f"{problem}. Usage: {self.usage}")
        return bound


class McpTools:
    """The tools of one entry of `mcp:`, for one environment. Raises ConfigError when they can't be used."""

    def __init__(self, given: Any, where: str, timeout_s: float) -> None:
        spec = read_spec(given, where)
        self.tools = _tools_of(spec.model_dump_json(), timeout_s)
        self._own = McpServer(spec, reopens=False) if spec.per_trajectory else None
        if own := self._own:
            again = ((tool, functools.partial(_call, own, *tool.function.args[1:])) for tool in self.tools)
            self.tools = tuple(replace(tool, function=function) for tool, function in again)

    async def close(self) -> None:
        if self._own is not None:
            await asyncio.wrap_future(background().submit(self._own.close()))


@functools.cache
def _shared(command_json: str) -> McpServer:
    return McpServer(McpSpec.model_validate_json(command_json))


@functools.cache
def _tools_of(spec_json: str, timeout_s: float) -> tuple[Any, ...]:
    """The chosen tools, made once for all environments, on the server that they share."""
    library("mcp", "mcp")
    spec = McpSpec.model_validate_json(spec_json)
    server = _shared(spec.model_dump_json(exclude={"include", "exclude", "prefix"}))
    try:
        listed = background().submit(server.session()).result().tools
        if spec.per_trajectory:
            background().submit(server.close()).result()
    except EnvironmentBroken as error:
        raise ConfigError(str(error)) from None
    return tuple(_tool(server, each, spec, timeout_s) for each in _chosen(listed, spec))


def _chosen(listed: Iterable[Any], spec: McpSpec) -> list[Any]:
    by_name = {tool.name: tool for tool in listed}
    for name in (*(spec.include or ()), *spec.exclude):
        if name not in by_name:
            there = ", ".join(by_name) or "none"
            raise ConfigError(f"{spec.label} has no tool '{name}'{did_you_mean(name, by_name)} (there: {there})")
    wanted = by_name if spec.include is None else spec.include
    chosen = [by_name[name] for name in wanted if name not in spec.exclude]
    if not chosen:
        raise ConfigError(f"{spec.label} has no tools" + (" left by include and exclude" if by_name else ""))
    return chosen


def _tool(server: McpServer, listed: Any, spec: McpSpec, timeout_s: float) -> McpTool:
    from jsonschema import SchemaError
    from jsonschema.exceptions import best_match
    from jsonschema.validators import Draft202012Validator, validator_for

    name, schema = spec.prefix + listed.name, dict(listed.input_schema)
    if not TOOL_NAME.fullmatch(name):
        raise ConfigError(f"{spec.label}: tool name {name!r} can't be used; exclude it, or set a prefix")
    definitions = {**schema.pop("definitions", {}), **schema.pop("$defs", {})}
    try:
        schema = simplify_schema(schema, definitions, ())
        kind = validator_for(schema, default=Draft202012Validator)
        kind.check_schema(schema)
        validator = kind(schema)
    except (KeyError, RecursionError, SchemaError) as error:
        what = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise ConfigError(f"{spec.label}: tool '{listed.name}' has no usable schema ({what}); exclude it") from None

    def problem_of(arguments: Mapping[str, Any]) -> str | None:
        error = best_match(validator.iter_errors(arguments))
        return None if error is None else f"{error.json_path.removeprefix('$.')}: {error.message}"[:MAX_ERROR_CHARS]

    required = schema.get("required", ())
    parameters = schema.get("properties", {}).items()
    return McpTool(
        name=name,
        description=(listed.description or listed.title or listed.name).strip(),
        parameters=tuple(_parameter(key, part, key in required) for key, part in parameters),
        function=functools.partial(_call, server, listed.name, timeout_s),
        timeout_s=timeout_s + CONNECT_S + 2 * ALIVE_S,
        problem_of=problem_of,
        takes_more=bool(schema.get("additionalProperties", False)),
    )


def _parameter(name: str, given: Any, required: bool) -> Parameter:
    schema = given if isinstance(given, Mapping) else {}
    kind = schema.get("type")
    adapter = _ADAPTERS.get(kind, _ANY) if isinstance(kind, str) else _ANY
    return Parameter(name=name, adapter=adapter, schema=schema, required=required, is_text=takes_text(schema))
