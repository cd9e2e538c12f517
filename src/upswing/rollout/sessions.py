"""A session: what one agent program and the policy said to each other over one task, as exact tokens.

A program sends its whole history with every request. A request continues the longest *strand* that it begins with,
message by message as the program got them; the policy's turns stay the ids that were sampled, whatever the program was
told of them. A request that continues none (another system prompt or other tools, a summary in place of old messages, a
history that is still being answered) opens a new strand. Turns of the policy that it repeats come in as their exact ids
too, but as context: each is trained once, where it was sampled. The strands are the branches of one trajectory.

Asking again. The same request once more is a wish for another sample: it gets a strand of its own, both are trained.
A client's automatic retry (header `x-stainless-retry-count`) gets the very sample that was made for the same body, or
is still being made. Sampling that nobody waits for any more is stopped and leaves no trace but a count.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NoReturn

import numpy as np

from upswing.engine.base import Completion, Engine, FinishReason, Sampling, reason_of
from upswing.envs.parsers import HermesParser, LlamaJsonParser, PythonParser, QwenXmlParser, TagsParser
from upswing.envs.parsing import CALL_OPEN, THINK_CLOSE, THINK_OPEN, CallParser, neutralize
from upswing.envs.tool_env import INVALID_PREFIX
from upswing.envs.tools import takes_text
from upswing.errors import ConfigError
from upswing.rollout.limits import Limits
from upswing.seeding import derive_seed
from upswing.trajectory.conversation import Conversation
from upswing.trajectory.render import ChatRenderer
from upswing.trajectory.types import Branch, DriftEvent, Message, StopReason, ToolCall, ToolRecord


class Refused(Exception):
    """What a program is answered instead of a turn: an HTTP status, OpenAI's error code and the words."""

    def __init__(self, message: str, *, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(frozen=True, kw_only=True)
class ChatMessage:
    """One message as the program sees it."""

    role: str
    content: str = ""
    calls: tuple[ToolCall, ...] = ()
    answers: str = ""
    """Of a tool's message: the id of the call."""

    @cached_property
    def key(self) -> str:
        """Equal for messages that say the same: clients change how arguments are spelled, and white space around an
        assistant's text; most drop its reasoning, and some what it says beside calls, which are no part of it."""
        content = self.content.strip() if self.role == "assistant" else self.content
        content = "" if self.calls else content
        calls = [(call.id, call.name, call.arguments) for call in self.calls]
        return json.dumps([self.role, content, calls, self.answers], sort_keys=True)


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """One request, checked."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    """Schemas in OpenAI's format."""
    may_call: bool = True
    """False: a call in the turn stays text."""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignored: frozenset[str] = frozenset()
    """Parameters without effect here: those that the stage decides, and all that are unknown."""


@dataclass(frozen=True, kw_only=True)
class ChatTurn:
    """One turn of the policy, and what the program is told of it."""

    index: int
    """From `Session.first_turn` on, over all strands, in the order in which turns were finished."""
    completion: Completion
    num_prompt: int
    reply: ChatMessage
    reasoning: str
    finish_reason: str
    """`stop`, `length` or `tool_calls`."""
    cut: bool
    """Cut by the run's limits and not by the program's own."""
    at: float = field(default_factory=time.perf_counter)


def parser_for(protocol: str, tools: Sequence[Mapping[str, Any]]) -> CallParser:
    """The reader of a protocol's calls. Raises ConfigError for a tool that the protocol can't call."""
    functions = [tool["function"] for tool in tools]
    parameters = {f["name"]: dict((f.get("parameters") or {}).get("properties") or {}) for f in functions}
    texts = {name: [key for key, schema in each.items() if takes_text(schema)] for name, each in parameters.items()}
    if protocol == "llama3_json":
        return LlamaJsonParser()
    if protocol == "qwen_coder_xml":
        return QwenXmlParser(texts)
    if protocol == "python":
        return PythonParser({name: list(each) for name, each in parameters.items()})
    if protocol == "tags":
        if reserved := next((name for name in ("answer", "think") if name in texts), None):
            raise ConfigError(f"a tool can't be called '{reserved}' in protocol tags")
        if bad := next((name for name, keys in texts.items() if not keys), None):
            raise ConfigError(f"tool '{bad}' takes no string, which is all that protocol tags can pass; use hermes")
        return TagsParser({name: keys[0] for name, keys in texts.items()})
    return HermesParser()


def tools_place(renderer: ChatRenderer, asked: str | None, protocol: str, key: str) -> str:
    """Where tools are told: as `asked` for under `key`; None: in the chat template if it can, else the system message.
    Raises ConfigError when the template is asked for and doesn't show tools."""
    if asked is not None and asked != "template":
        return asked
    try:
        renderer.require_tools()
    except ConfigError as problem:
        if asked is None:
            return "system"
        why = str(problem).partition(";")[0]  # without the remedy, which is an environment's
        raise ConfigError(f"{key}: got 'template', but {why}; allowed: system, nowhere, or another template") from None
    return "system" if asked is None and protocol in ("tags", "python") else "template"


Shown = tuple[tuple[Mapping[str, Any], ...], str]
"""(schemas for the chat template, text for the system message)."""


@dataclass(kw_only=True, eq=False)
class _Strand:
    """Requests that continue each other."""

    conversation: Conversation
    shown: Shown
    session: str
    """Of the engine: its cached prefix."""
    keys: list[str] = field(default_factory=list)
    """What has been said, as the program knows it."""
    turns: list[int] = field(default_factory=list)
    answered: bool = False
    """The policy spoke last; otherwise it is its turn."""
    busy: bool = True
    """Being answered. It stays so when that fails half way: nothing may continue such a strand."""

    def leads_to(self, keys: Sequence[str]) -> bool:
        return keys[: len(self.keys)] == self.keys and (self.answered or len(keys) == len(self.keys))


@dataclass(eq=False)
class _Job:
    task: asyncio.Task[ChatTurn]
    waiters: int = 0

    @property
    def failed(self) -> bool:
        return self.task.done() and (self.task.cancelled() or self.task.exception() is not None)


@dataclass(kw_only=True)
class Session:
    """One trajectory of an agent program while it is played; all of it on one event loop."""

    name: str
    """The trajectory's id."""
    engine: Engine
    sampling: Sampling
    renderer: ChatRenderer
    end_tokens: tuple[int, ...]
    limits: Limits
    seed: int
    protocol: str = "hermes"
    tools_in: str = "template"
    """Where the policy reads of its tools: `template`, `system` or `nowhere`."""
    max_turns: int = 50
    first_turn: int = 0
    """The number of its first turn; a trajectory's is 0. Ids of calls are made of them."""
    turns: list[ChatTurn] = field(default_factory=list)
    records: list[ToolRecord] = field(default_factory=list)
    refusal: tuple[StopReason, str] | None = None
    """The limit that the newest request ran into, and the words."""
    fault: str | None = None
    """What broke on this side; whatever the program makes of it, the trajectory is errored."""
    engine_s: float = 0.0
    idle_s: float = 0.0
    """For how long the program had asked nothing when the session was closed."""
    counts: Counter[str] = field(default_factory=Counter)
    ignored: set[str] = field(default_factory=set)
    closed: bool = False
    _strands: list[_Strand] = field(default_factory=list)
    _held: dict[str, list[tuple[int, ...]]] = field(default_factory=dict)
    """The policy's turns by what the program was told: the ids, the newest last."""
    _unanswered: dict[str, tuple[ToolCall, ChatTurn]] = field(default_factory=dict)
    _jobs: dict[bytes, _Job] = field(default_factory=dict)
    _running: set[asyncio.Task[ChatTurn]] = field(default_factory=set)
    _asked: int = 0
    _heard: float = field(default_factory=time.perf_counter)

    def hold(self, key: str, ids: tuple[int, ...]) -> None:
        """Take the message with this key for a turn that the policy said in these ids."""
        self._held.setdefault(key, []).append(ids)

    # -- asking -------------------------------------------------------------------------------------------------------

    async def ask(self, request: ChatRequest, *, digest: bytes, retry: bool) -> ChatTurn:
        """One turn of the policy. `digest`: of the body, by which a `retry` finds its first attempt. Raises Refused."""
        if self.closed:
            raise Refused("this session is over", status=410)
        job = self._jobs.get(digest) if retry else None
        if job is None or job.failed:
            job = self._jobs[digest] = _Job(asyncio.ensure_future(self._answer(request)))
            self._running.add(job.task)
            job.task.add_done_callback(self._running.discard)
        job.waiters += 1
        try:
            return await asyncio.shield(job.task)
        except asyncio.CancelledError:
            if self.closed:
                raise Refused("this session is over", status=410) from None
            raise
        finally:
            self._heard = time.perf_counter()
            job.waiters -= 1
            if not job.waiters and not job.task.done():
                job.task.cancel()
                if self._jobs.get(digest) is job:
                    del self._jobs[digest]

    async def close(self) -> None:
        """Stop what is being sampled and refuse whatever comes; what was said stays."""
        self.closed = True
        running = list(self._running)
        self.idle_s = 0.0 if running else time.perf_counter() - self._heard
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for strand in self._strands:
            self.engine.release(strand.session)

    async def _answer(self, request: ChatRequest) -> ChatTurn:
        self.ignored |= request.ignored
        self._note_results(request)
        if len(self.turns) >= self.max_turns:
            self._refuse(StopReason.MAX_TURNS, f"this session has had its {self.max_turns} turns (agent.max_turns)")
        try:
            strand = self._strand_for(request)
        except Exception as problem:
            raise Refused(f"these messages can't be shown to the model: {problem}") from problem
        try:
            turn = await self._sample(strand, request)
        except asyncio.CancelledError:
            self.counts["abandoned_requests"] += not self.closed
            raise
        finally:
            strand.busy = False
        return turn

    def _refuse(self, reason: StopReason, words: str) -> NoReturn:
        self.refusal = reason, words
        raise Refused(words, code="context_length_exceeded" if reason is StopReason.CONTEXT_OVERFLOW else str(reason))

    async def _sample(self, strand: _Strand, request: ChatRequest) -> ChatTurn:
        prompt = strand.conversation.prompt_ids()
        room = min(self.limits.turn_tokens, self.limits.context_tokens - len(prompt))
        if room <= 0:
            self._refuse(
                StopReason.CONTEXT_OVERFLOW,
                f"This model's maximum context length is {self.limits.context_tokens} tokens (limits.context_tokens); "
                f"the messages resulted in {len(prompt)} tokens.",
            )
        sampling = replace(
            self.sampling,
            max_tokens=min(room, request.max_tokens or room),
            stop_strings=(*self.sampling.stop_strings, *request.stop),
            seed=derive_seed(self.seed, self._asked),
        )
        self._asked += 1
        started = time.perf_counter()
        try:
            generated = self.engine.generate(prompt, sampling, session=strand.session)
            completion = await asyncio.wait_for(generated, self.limits.turn_timeout_s)
            if completion.finish_reason is FinishReason.CANCELLED:
                raise RuntimeError("the engine was closed")
            if not completion.tokens:
                raise RuntimeError("the engine sampled nothing, not even the end of a turn")
            text = strand.conversation.add_completion(completion)
            ended = completion.finish_reason is FinishReason.STOP or strand.conversation.ended(completion.tokens)
            return self._add(strand, request, completion, text, len(prompt), ended, sampling.max_tokens == room)
        except TimeoutError:
            self._break(f"sampling a turn took longer than {self.limits.turn_timeout_s:g} s{reason_of(self.engine)}")
        except Exception as problem:
            self._break(f"{type(problem).__name__}: {problem}")
        finally:
            self.engine_s += time.perf_counter() - started

    def _break(self, words: str) -> NoReturn:
        self.fault = words
        raise Refused(words, status=500)

    def _add(
        self,
        strand: _Strand,
        request: ChatRequest,
        completion: Completion,
        text: str,
        num_prompt: int,
        ended: bool,
        own_limit: bool,
    ) -> ChatTurn:
        index = self.first_turn + len(self.turns)
        reply, reasoning = self._read(text, request, index) if ended else (_said(text), "")
        finish = "length" if not ended else "tool_calls" if reply.calls else "stop"
        turn = ChatTurn(
            index=index,
            completion=completion,
            num_prompt=num_prompt,
            reply=reply,
            reasoning=reasoning,
            finish_reason=finish,
            cut=not ended and own_limit,
        )
        self.turns.append(turn)
        strand.turns.append(index)
        strand.keys.append(reply.key)
        strand.answered = True
        self.hold(reply.key, completion.tokens)
        self._unanswered.update({call.id: (call, turn) for call in reply.calls})
        self.refusal = None
        return turn

    def _read(self, text: str, request: ChatRequest, index: int) -> tuple[ChatMessage, str]:
        """(what the program is told, reasoning apart from it) of a finished turn. A turn that can't be read is text."""
        for stop in request.stop:
            text = text.partition(stop)[0]
        parsed = parser_for(self.protocol, request.tools).parse(text)
        before, found, _ = text.rpartition(THINK_CLOSE)
        reasoning = before.strip().removeprefix(THINK_OPEN).strip() if found else ""
        if parsed.calls and not parsed.call_errors and request.may_call:
            calls = tuple(replace(call, id=f"call_{index}_{n}") for n, call in enumerate(parsed.calls))
            return ChatMessage(role="assistant", content=self._aloud(text, calls[0]), calls=calls), reasoning
        if parsed.answer is not None:
            return _said(parsed.answer), reasoning
        self.counts["invalid_calls"] += request.may_call
        return _said(text), ""

    def _aloud(self, text: str, call: ToolCall) -> str:
        """What a turn says before its first call, the reasoning aside."""
        marks = {"tags": f"<{call.name}>", "llama3_json": "<|python_tag|>", "python": None}
        mark = marks.get(self.protocol, CALL_OPEN)
        before, found, _ = text.rpartition(THINK_CLOSE)[2].partition(mark) if mark else ("", "", "")
        return before if found else ""

    def _note_results(self, request: ChatRequest) -> None:
        """Records of the calls that this request answers for the first time."""
        for message in request.messages:
            if message.answers in self._unanswered:
                call, turn = self._unanswered.pop(message.answers)
                ok = not message.content.startswith(("Error", INVALID_PREFIX))
                took = time.perf_counter() - turn.at
                record = ToolRecord(call=call, result=message.content, ok=ok, turn=turn.index, duration_s=took)
                self.records.append(record)

    # -- strands ------------------------------------------------------------------------------------------------------

    def _strand_for(self, request: ChatRequest) -> _Strand:
        """The strand that this request continues, or a new one: its prompt is ready, and it is busy."""
        keys, shown = [message.key for message in request.messages], self._shown(request)
        parser = parser_for(self.protocol, request.tools)
        pairs = zip(self._ids_of(keys), request.messages, strict=True)
        said = [ids or self._message(message, request, parser) for ids, message in pairs]
        found = [s for s in reversed(self._strands) if not s.busy and s.shown == shown and s.leads_to(keys)]
        strand = max(found, key=lambda each: len(each.keys), default=None)
        if strand is None:
            start = next((n for n, each in enumerate(said) if not isinstance(each, Message)), len(said))
            opening = [each for each in said[:start] if isinstance(each, Message)]
            conversation = Conversation(
                self.renderer, _opening(opening, shown[1]), shown[0], end_tokens=self.end_tokens
            )
            session = self.name + (f"#{len(self._strands)}" if self._strands else "")
            strand = _Strand(conversation=conversation, shown=shown, session=session)
            self._strands.append(strand)
        else:
            start = len(strand.keys)
        strand.busy = True
        self._extend(strand, said[start:])
        strand.keys, strand.answered = keys, False
        return strand

    def _ids_of(self, keys: Sequence[str]) -> list[tuple[int, ...] | None]:
        """Of every message that is a turn of the policy its ids; not of the first, as a prompt is needed before a turn.

        Turns that read the same may hide different reasoning: the last in the history is the one sampled last.
        """
        left = {key: list(self._held.get(key, ())) for key in keys}
        found = [ids.pop() if len(ids := left[key]) > 1 else next(iter(ids), None) for key in reversed(keys)]
        return [None, *found[-2::-1]]

    def _extend(self, strand: _Strand, said: Sequence[Message | tuple[int, ...]]) -> None:
        """Append messages, turns of the policy among them as the ids that it sampled."""
        conversation, spoke, added = strand.conversation, strand.answered, list[Message]()
        for each in said:
            if isinstance(each, Message):
                added.append(each)
                continue
            if spoke:
                conversation.add_messages(added)
            conversation.add_context(each)
            spoke, added = True, []
        if spoke:
            conversation.add_messages(added)

    def _shown(self, request: ChatRequest) -> Shown:
        if self.tools_in == "template":
            return request.tools, ""
        if self.tools_in == "nowhere" or not request.tools:
            return (), ""
        usage = parser_for(self.protocol, request.tools).usage
        lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in request.tools]
        answer = "" if self.protocol == "tags" else " A turn without a call is your final answer."
        return (), "\n".join(["Tools:", *lines, f"Call a tool with {usage}.{answer}"])

    def _message(self, said: ChatMessage, request: ChatRequest, parser: CallParser) -> Message:
        """As the model sees it. Nothing in a tool's result may look like the protocol's own."""
        if said.role == "tool":
            names = {call.id: call.name for message in request.messages for call in message.calls}
            known = {tool["function"]["name"] for tool in request.tools}
            name = names.get(said.answers)
            content = neutralize(said.content, parser.markers)
            return Message(role="tool", content=content, name=name if name in known else None)
        calls = parser.render(said.calls) if said.calls else ""
        between = "\n" if calls and said.content and not said.content[-1].isspace() else ""
        return Message(role=said.role, content=said.content + between + calls)

    # -- what it comes to ---------------------------------------------------------------------------------------------

    @property
    def messages(self) -> tuple[Message, ...]:
        """Of the main strand: the one in which the policy spoke last. Empty when it never spoke."""
        main = max(self._strands, key=lambda strand: strand.turns[-1:], default=None)
        return main.conversation.messages if main is not None and main.turns else ()

    def branches(self) -> tuple[tuple[Branch, ...], tuple[DriftEvent, ...]]:
        """(every branch in which the policy spoke, drift): turns are counted over the whole session."""
        kept: list[tuple[Branch, DriftEvent]] = []
        notes: list[DriftEvent] = []
        for strand in (each for each in self._strands if each.turns):
            number = np.array([*strand.turns, strand.turns[-1] + 1], dtype=np.int16)
            detail = "the program's messages continue no earlier ones"
            first = DriftEvent(kind="rewritten", turn=strand.turns[0], forked=True, detail=detail)
            events = [replace(each, turn=int(number[each.turn])) for each in strand.conversation.drift]
            notes += [each for each in events if not each.forked]
            openings = [first, *(each for each in events if each.forked)]
            branches = [replace(each, turn=number[each.turn]) for each in strand.conversation.branches()]
            kept += [(b, o) for b, o in zip(branches, openings, strict=True) if b.sampled.any()]
        return tuple(branch for branch, _ in kept), (*notes, *(opening for _, opening in kept[1:]))


def _said(text: str) -> ChatMessage:
    return ChatMessage(role="assistant", content=text)


def _opening(messages: Sequence[Message], about_tools: str) -> list[Message]:
    """The first messages, with what there is to say of the tools in the system message."""
    if not about_tools:
        return list(messages)
    if messages and messages[0].role == "system":
        first = replace(messages[0], content=f"{messages[0].content}\n\n{about_tools}")
        return [first, *messages[1:]]
    return [Message(role="system", content=about_tools), *messages]
