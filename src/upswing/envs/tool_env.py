"""An environment out of plain functions: the agent calls tools for a few turns, then answers."""

from __future__ import annotations

import asyncio
import copy
import functools
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

from upswing.envs.base import AssistantMessage, Environment, Observation
from upswing.envs.dataset import load_tasks
from upswing.envs.parsers import HermesParser, LlamaJsonParser, PythonParser, QwenXmlParser, TagsParser
from upswing.envs.parsing import CallParser, ParsedTurn, neutralize
from upswing.envs.tools import Tool, ToolArgumentError, ToolFailed, is_marked
from upswing.errors import ConfigError, did_you_mean
from upswing.plugins import load_object
from upswing.trajectory.types import Message, StopReason, Task, ToolCall, ToolRecord
from upswing.verify.deadline import inline
from upswing.verify.options import Count, Positive

Protocol = Literal["hermes", "tags", "llama3_json", "qwen_coder_xml", "python"]
PROTOCOLS = get_args(Protocol)
Many = list[Any] | tuple[Any, ...]
_NOT_IN_TEMPLATES = ("tags", "python")
"""Formats that chat templates don't explain: the system message does."""
INVALID_PREFIX = "Invalid call: "
"""What an agent's own mistake is answered with; a tool's failure starts with `Error: `."""


@functools.cache
def _marked(kind: type) -> tuple[str, ...]:
    """Names of the methods that `tool` marks, those of base classes first."""
    return tuple(dict.fromkeys(n for cls in reversed(kind.__mro__) for n, f in vars(cls).items() if is_marked(f)))


@functools.lru_cache(maxsize=64)
def _tags_parser(parameters: tuple[tuple[str, str], ...]) -> TagsParser:
    """Kept, as its pattern takes longest: it is the same for every trajectory."""
    return TagsParser(dict(parameters))


class ToolEnv(Environment):
    """Plays tasks with tools. Give the parts to the constructor, or subclass and set them as class attributes; methods
    that `@tool()` marks are tools too.

    `protocol` is how calls are written (see `parsers`). `hermes`: JSON in `<tool_call>` tags; `llama3_json`: bare JSON;
    `qwen_coder_xml`: `<function=…>` in `<tool_call>`; for these three the chat template describes the tools. `python`:
    `f(a=1)`. In all of them a turn without calls is the final answer. `tags`: `<tool>text</tool>` calls and an
    `<answer>`. `python` and `tags` are explained by the system message.
    A turn cut by its token limit ends the trajectory (MAX_TOKENS); so do `max_turns` turns without an answer
    (MAX_TURNS) and `max_invalid_calls` invalid calls in a row (INVALID_CALLS). A call that is valid resets that count,
    also when its tool then fails: a failing tool is not the agent's fault.
    """

    name = "tool"
    tools: Many = ()
    """Functions, Tools or import paths of functions (`my_pkg.tools:search`)."""
    mcp: Many = ()
    """MCP servers whose tools the agent may call too; see `upswing.envs.mcp`."""
    max_turns: Count = 6
    """Turns that the agent may take, the answer included."""
    protocol: Protocol = "hermes"
    system: str | None = None
    """What the system message starts with."""
    max_invalid_calls: Count = 3
    tool_timeout_s: Positive = 30.0
    tools_in_system: bool = False
    """Describe the tools in the system message also where the chat template could: not all have a place for them."""
    max_result_chars: Count = 20_000
    """A longer result is cut, and says so."""
    in_order: bool = False
    """Run a turn's calls one after the other, up to the end of the episode, and not in parallel."""
    source: Any = None
    """What `tasks` streams (the constructor's `tasks`): tasks, a JSONL path, or either by split."""

    def __init__(self, tools: Sequence[Any] | None = None, **options: Any) -> None:
        if "tasks" in options:
            options["source"] = options.pop("tasks")
        super().__init__(**({} if tools is None else {"tools": tools}), **options)
        if options.get("max_turns") is None:
            self.max_turns = self.enough_turns()
        self._tools: dict[str, Tool] = {}
        methods = [getattr(self, name) for name in _marked(type(self))]
        given = [*self.tools, *(method for method in methods if method not in self.tools)]
        loaded = [load_object(each, "tool", {}) if isinstance(each, str) else each for each in given]
        own = [Tool.from_function(each, timeout_s=self.tool_timeout_s) for each in loaded]
        self._mcp: tuple[Any, ...] = ()
        if self.mcp:
            from upswing.envs.mcp import McpTools

            self._mcp = tuple(McpTools(each, f"mcp[{n}]", self.tool_timeout_s) for n, each in enumerate(self.mcp))
        for tool in [*own, *(tool for server in self._mcp for tool in server.tools)]:
            if tool.name in self._tools:
                how = "rename one" + (" (of an MCP server: exclude it, or set a prefix)" if self._mcp else "")
                raise ConfigError(f"{type(self).__name__}: two tools are called '{tool.name}'; {how}")
            self._tools[tool.name] = tool
        self.equip({})
        self._turns = self._invalid_in_row = 0
        self._counts = {"tool_calls": 0, "invalid_calls": 0, "tool_errors": 0, "tool_retries": 0}

    def equip(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        """Take more tools, or others, by their names. Raises ConfigError."""
        limit_s = self.tool_timeout_s
        self._tools |= {name: Tool.from_function(f, name=name, timeout_s=limit_s) for name, f in functions.items()}
        self.parser = self._make_parser()

    @inline
    def close(self) -> Any:
        """End the MCP servers that are this trajectory's own (a coroutine, where there are MCP servers)."""
        return self._close_mcp() if self._mcp else None

    def enough_turns(self) -> int:
        """Override to make `max_turns`, where none is given, depend on the other options."""
        return self.max_turns

    def is_done(self) -> bool:
        """Override to end the episode (ENV_DONE) after a turn's calls, whatever the agent says."""
        return False

    def tasks(self, split: str, seed: int = 0) -> Iterator[Task]:
        """The given tasks of a split, in their order."""
        if self.source is None:
            return super().tasks(split, seed)
        return iter(load_tasks(self.source, env=self.name, split=split))

    @inline
    def state(self) -> Mapping[str, Any]:
        """Counts: `tool_calls`, `invalid_calls` (the agent's fault), `tool_errors` (the tool's), `tool_retries`."""
        return dict(self._counts)

    async def reset(self, task: Task, seed: int) -> Observation:
        """Start a task: the conversation so far, and the tools' schemas where the chat template shows them."""
        self._turns = self._invalid_in_row = 0
        self._counts = dict.fromkeys(self._counts, 0)
        return Observation(messages=self._opening(task), tools=self._schemas())

    async def step(self, message: AssistantMessage) -> Observation:
        """Take a turn: run its calls, or end with its answer."""
        turn, self._turns = self._turns, self._turns + 1
        if not message.finished:
            return Observation(done=True, stop_reason=StopReason.MAX_TOKENS)
        parsed = self.parser.parse(message.content)
        if parsed.answer is not None:
            return Observation(done=True, stop_reason=StopReason.ANSWERED, answer=parsed.answer)
        records = await self._play(parsed, turn)
        reason = self._end_reason()
        if reason is not None:
            return Observation(done=True, stop_reason=reason, tool_records=records)
        # A name that the agent made up is not repeated: it could be markup.
        names = [r.call.name if r.call.name in self._tools else None for r in records]
        answers = tuple(Message(role="tool", content=r.result, name=n) for r, n in zip(records, names, strict=True))
        return Observation(messages=answers, tool_records=records)

    async def _play(self, parsed: ParsedTurn, turn: int) -> tuple[ToolRecord, ...]:
        """The records of a turn's calls, in the order in which they were asked for."""
        if parsed.error is not None:
            self._count_invalid()
            text = self._clean(INVALID_PREFIX + parsed.error)
            return (ToolRecord(call=ToolCall(name=""), result=text, ok=False, turn=turn),)
        jobs: list[Coroutine[Any, Any, ToolRecord]] = []
        gate = asyncio.Semaphore(1 if self.in_order else len(parsed.calls))
        for call in parsed.calls:
            problem = parsed.call_errors.get(call.id) or self._problem_of(call)
            if problem is not None:
                self._count_invalid()
            elif self._invalid_in_row < self.max_invalid_calls:
                self._invalid_in_row = 0
            self._counts["tool_calls"] += 1
            name = "" if call.id in parsed.call_errors else call.name  # what can't be read must not pass for a call
            jobs.append(self._run(replace(call, name=name, id=f"call_{turn}_{len(jobs)}"), problem, turn, gate))
        if len(jobs) == 1:
            return (await jobs[0],)
        try:
            async with asyncio.TaskGroup() as group:  # a broken environment or a cancellation ends the others too
                running = [group.create_task(job) for job in jobs]
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from None  # the log must name what broke, not the group
        return tuple(task.result() for task in running)

    async def _run(self, call: ToolCall, problem: str | None, turn: int, gate: asyncio.Semaphore) -> ToolRecord:
        async with gate:
            started, failed = time.perf_counter(), list[None]()
            if problem is None and self.is_done():
                problem = "the episode is over"
            if problem is not None:
                result, ok = f"{INVALID_PREFIX}{problem}", False
            else:
                try:
                    result, ok = await self._tools[call.name].call(call.arguments, lambda: failed.append(None)), True
                except ToolFailed as error:
                    result, ok = str(error), False
                    self._counts["tool_errors"] += 1
        self._counts["tool_retries"] += len(failed)
        duration_s = time.perf_counter() - started
        text = self._clean(result)
        return ToolRecord(call=call, result=text, ok=ok, turn=turn, duration_s=duration_s, retries=len(failed))

    def _problem_of(self, call: ToolCall) -> str | None:
        """What is wrong with a call, worded for the agent; None when it can run."""
        tool = self._tools.get(call.name)
        if tool is None:
            names = ", ".join(self._tools) or "none"
            return f"there is no tool {call.name!r}{did_you_mean(call.name, self._tools)} Tools: {names}"
        try:
            tool.bind(call.arguments)
        except ToolArgumentError as error:
            return f"{call.name}: {error}"
        return None

    def _count_invalid(self) -> None:
        self._invalid_in_row += 1
        self._counts["invalid_calls"] += 1

    def _end_reason(self) -> StopReason | None:
        if self.is_done():
            return StopReason.ENV_DONE
        if self._invalid_in_row >= self.max_invalid_calls:
            return StopReason.INVALID_CALLS
        return StopReason.MAX_TURNS if self._turns >= self.max_turns else None

    def _clean(self, text: str) -> str:
        """A result as the agent may see it: cut to size, and with nothing in it that looks like the protocol's own."""
        if len(text) > self.max_result_chars:
            text = f"{text[: self.max_result_chars]}\n[cut: {len(text) - self.max_result_chars} more characters]"
        return neutralize(text, self.parser.markers)

    def _schemas(self) -> tuple[Mapping[str, Any], ...]:
        """Where the chat template shows them."""
        in_system = self.tools_in_system or self.protocol in _NOT_IN_TEMPLATES
        return () if in_system else tuple(tool.schema for tool in self._tools.values())

    def _opening(self, task: Task) -> tuple[Message, ...]:
        """The task's messages, with one system message in front if there is anything to say in it."""
        messages = task.messages
        parts = [part for part in (self.system, self._instructions()) if part]
        if messages and messages[0].role == "system":
            parts.append(messages[0].content)
            messages = messages[1:]
        return (Message(role="system", content="\n\n".join(parts)), *messages) if parts else messages

    def _instructions(self) -> str:
        """The protocol in words, where the chat template doesn't say it."""
        if self.protocol == "tags":
            lines = [f"<{t.name}>{self._tag_parameter(t)}</{t.name}>: {t.description}" for t in self._tools.values()]
            return "\n".join([*lines, "<answer>the answer</answer>: your final answer. It ends the task."])
        if not self.tools_in_system and self.protocol not in _NOT_IN_TEMPLATES:
            return ""
        lines = [f"{tool.usage}: {tool.description}" for tool in self._tools.values()]
        how = f"Call a tool with {self.parser.usage}. A turn without a call is your final answer."
        return "\n".join(["Tools:", *lines, how])

    async def _close_mcp(self) -> None:
        for server in self._mcp:
            await server.close()

    def _make_parser(self) -> CallParser:
        tools = self._tools
        if self.protocol == "hermes":
            return HermesParser()
        if self.protocol == "llama3_json":
            return LlamaJsonParser()
        if self.protocol == "qwen_coder_xml":
            return QwenXmlParser({name: {p.name for p in t.parameters if p.is_text} for name, t in tools.items()})
        if self.protocol == "python":
            return PythonParser({name: [p.name for p in tool.parameters] for name, tool in tools.items()})
        for reserved in ("answer", "think"):
            if reserved in tools:
                raise ConfigError(f"{type(self).__name__}: a tool can't be called '{reserved}' in protocol tags")
        return copy.copy(_tags_parser(tuple((name, self._tag_parameter(tool)) for name, tool in tools.items())))

    def _tag_parameter(self, tool: Tool) -> str:
        """The parameter that a tag's text goes to: the first that takes a string."""
        texts = [p.name for p in tool.parameters if p.is_text]
        others = [p.name for p in tool.parameters if p.required and p.name not in texts[:1]]
        if not texts or others:
            what = f"also requires '{others[0]}'" if texts else "takes no string"
            how = "protocol tags passes one string: give the others defaults or use hermes"
            raise ConfigError(f"tool '{tool.name}' {what}; {how}")
        return texts[0]
