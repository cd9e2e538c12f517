"""The agent of a `verifiers` environment as its `Env.run` sees it, with Upswing's loop behind it. Needs the package."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from verifiers.v1 import Segment
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.dialects import parse_message
from verifiers.v1.graph import MessageNode
from verifiers.v1.mcp.server import _call_state
from verifiers.v1.runtimes import SubprocessConfig, make_runtime
from verifiers.v1.session import call_hook
from verifiers.v1.state import state_cls
from verifiers.v1.trace import AgentInfo, ModelCall, Trace, TraceTask
from verifiers.v1.types import AssistantMessage, SystemMessage, ToolCall, ToolMessage, UserMessage, content_text
from verifiers.v1.utils.decorators import discover_decorated, invoke

from upswing.envs.parsing import THINK_CLOSE
from upswing.errors import EnvironmentBroken
from upswing.trajectory.types import Message, StopReason, Task

if TYPE_CHECKING:
    from upswing.envs.adapters.verifiers import Verifiers


class Agent:
    """The agent as `Env.run` sees it: `run` and `interaction`, once an episode."""

    def __init__(self, play: Verifiers, episode: Any) -> None:
        self._play, self._episode = play, episode
        self.trainable = True

    async def run(self, task: Any, **_: Any) -> Any:
        async with self.interaction(task) as exchange:
            await exchange.turn()
            exchange.trace.stop("agent_completed")
        return exchange.trace

    @contextlib.asynccontextmanager
    async def interaction(self, task: Any, **_: Any) -> AsyncIterator[Exchange]:
        if self._play.seat is not None:
            problem = "the environment runs its agent more than once an episode, which has one trajectory"
            raise EnvironmentBroken(problem)
        exchange = self._play.seat = Exchange(self._play, task)
        try:
            await exchange.open()
            yield exchange
            await exchange.close()
            self._episode.traces.append(exchange.trace)
        finally:
            await exchange.release()


class Exchange:
    """One run of the agent: what `vf.Interaction` is, with Upswing's loop behind `turn`."""

    def __init__(self, play: Verifiers, task: Any) -> None:
        self._play, self._task = play, task
        described = TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        config = AgentConfig(model="policy", runtime=SubprocessConfig())
        self.trace = Trace(task=described, state=state_cls(type(task))(), agent=AgentInfo(config=config))
        self._hooks = task.hooks("stop")
        self.stops = {hook.__name__ for hook in self._hooks}
        self._runtime = make_runtime(SubprocessConfig(), name=self.trace.id)
        self._toolsets: list[Any] = []
        self._said: list[Message] = []
        """What the agent has yet to hear."""
        self._schemas: tuple[Mapping[str, Any], ...] | None = ()
        self._closed = False

    async def open(self) -> None:
        _call_state.set(self.trace.state)  # what tools see: they are called from the episode's own asyncio task
        await self._runtime.start()
        await invoke(self._task.setup, {"trace": self.trace, "runtime": self._runtime})
        self._toolsets = self._task.toolsets(self._task.config)
        for toolset in self._toolsets:
            await toolset.setup()
            await toolset.setup_task(self._task.data)
        self._play.equip(tools_of([*self._play.shared.toolsets, *self._toolsets]))
        self._schemas = self._play._schemas()

    async def turn(self, message: Any = None) -> Any:
        """One segment: the agent speaks, calls tools and speaks, until it says something without a call."""
        data, before = self.trace.task.data, len(self.trace.nodes)
        new = [UserMessage(content=message)] if isinstance(message, str) else [*(message or ())]
        if not self.trace.nodes:
            prompt = [UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else [*(data.prompt or ())]
            system = [SystemMessage(content=data.system_prompt)] if data.system_prompt is not None else []
            new = [*system, *prompt, *new]
        for one in new:
            self._commit(parse_message(one) if isinstance(one, dict) else one)
        turns = self.trace.num_turns
        while not await self._stopped() and await self._speak():
            pass
        made = self.trace.nodes[before + len(new) :]
        return Segment(messages=[node.message for node in made], terminated=self.trace.num_turns == turns)

    async def _speak(self) -> bool:
        """One turn of the agent; whether it goes on without the environment."""
        if self._schemas is not None:
            heard = self._play._opening(Task(id="", messages=tuple(self._said)))
            schemas, self._schemas = self._schemas, None
        else:  # nothing in it may look like the protocol's own
            heard, schemas = tuple(replace(one, content=self._play._clean(one.content)) for one in self._said), ()
        self._said = []
        said = await self._play.ask(heard, schemas)
        records = await self._play.act(said)
        reasoning, closed, content = said.content.rpartition(THINK_CLOSE)
        made = [record.call for record in records or () if record.call.name]
        calls = [ToolCall(id=one.id, name=one.name, arguments=json.dumps(dict(one.arguments))) for one in made]
        thought = reasoning if closed else None
        message = AssistantMessage(content=content.strip(), reasoning_content=thought, tool_calls=calls or None)
        self._commit(message, sampled=True, cut=not said.finished)
        for record in records or ():  # a name that the agent made up could be markup
            name = record.call.name if record.call.name in self._play._tools else None
            self._commit(ToolMessage(tool_call_id=record.call.id, content=record.result, name=name))
        return bool(records)

    async def _stopped(self) -> bool:
        """Whether a limit or one of the task's stops ends the run before the next turn."""
        if self.trace.stop_condition is None and self._play.cut():
            limits = {StopReason.MAX_TOKENS: "max_output_tokens", StopReason.MAX_TURNS: "max_turns"}
            assert self._play.ended is not None
            self.trace.stop(limits.get(self._play.ended, str(self._play.ended)))
        for hook in self._hooks:
            if self.trace.stop_condition is None and await call_hook(hook, {Trace: self.trace}):
                self.trace.stop(hook.__name__)
        return self.trace.stop_condition is not None

    def _commit(self, message: Any, *, sampled: bool = False, cut: bool = False) -> None:
        number = len(self.trace.nodes)
        self.trace.nodes.append(MessageNode(parent=number - 1 if number else None, message=message, sampled=sampled))
        if sampled:
            self.trace.calls.append(ModelCall(node=number, finish_reason="length" if cut else "stop"))
        else:
            self._said.append(as_message(message))

    async def close(self) -> Any:
        """Finish the run: the task's finalize and scoring. Raises what they raise."""
        if not self._closed:
            self._closed = True
            self.trace.stop("user_closed")
            await invoke(self._task.finalize, {"trace": self.trace, "runtime": self._runtime})
            await self._task.score(self.trace, self._runtime)
            self.trace.ok = self.trace.is_completed = True
        return self.trace

    async def release(self) -> None:
        """Free what the run holds, whatever happened."""
        for toolset in self._toolsets:
            await toolset._exit_stack.aclose()
        await self._runtime.stop()


def as_message(message: Any) -> Message:
    return Message(role=message.role, content=content_text(message.content), name=getattr(message, "name", None))


def tools_of(toolsets: list[Any]) -> dict[str, Callable[..., Any]]:
    """The `@vf.tool` methods under the names that the package gives them."""
    found: dict[str, Callable[..., Any]] = {}
    for toolset in toolsets:
        for tool in discover_decorated(toolset, "tool"):
            name = getattr(tool, "tool_name", None) or tool.__name__
            prefix = f"{toolset.server_name}_" if toolset.server_name else ""
            found[prefix + name] = tool
    return found
