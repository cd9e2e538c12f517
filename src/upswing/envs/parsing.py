"""Reads the agent's turns: tool calls and answers, and nothing that only looks like one.

Rules, the same in training and evaluation:
- Reasoning is cut first: what is inside `<think>…</think>`, and everything before a `</think>` without its opening tag
  (some templates open it in the prompt). Calls and answers inside count for nothing. An unclosed `<think>` is an error.
- A *structural* error (`ParsedTurn.error`: unclosed, stray or nested tag, several answers, nothing at all) makes the
  whole turn invalid: no call of it runs. A *content* error (`ParsedTurn.call_errors`: bad JSON, arguments that are no
  object) concerns one call, which is answered with the error instead of being run; the others run.
- Nothing is repaired. Missing, null and empty arguments mean `{}`; arguments given as a string are decoded once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from upswing.trajectory.types import ToolCall

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
RESPONSE_TAGS = ("<tool_response>", "</tool_response>")

_SPECIAL_TOKENS = re.compile(
    r"<[|｜][^<>|｜\n]{1,60}[|｜]>|</?s>|</?(?:start|end)_of_turn>|<(?:bos|eos|pad|unk)>|\[/?INST\]", re.IGNORECASE
)
_VISIBLE = {"<": "‹", "[": "［"}


@dataclass(frozen=True, kw_only=True)
class ParsedTurn:
    """What one assistant turn asks for: calls, an answer or an error, never two of them."""

    calls: tuple[ToolCall, ...] = ()
    """In order, ids `call_0`, `call_1`, …; those in `call_errors` must not be run."""
    answer: str | None = None
    error: str | None = None
    """The turn's structural error, worded for the agent; None (not the empty string) when there is none."""
    call_errors: Mapping[str, str] = field(default_factory=dict)
    """Content error by call id, worded for the agent."""


def neutralize(text: str, markers: Iterable[str] = ()) -> str:
    """`text` with protocol tags and chat special tokens made harmless.

    The first character of each is replaced by a look-alike (`<` by `‹`, `[` by `［`), which the agent can still read
    and no parser or tokenizer takes for the real thing. Lone surrogates become `?`: they can't be stored or tokenised.
    """
    text = text.encode("utf-8", "replace").decode("utf-8")
    known = sorted({marker for marker in markers if marker}, key=len, reverse=True)
    if known:
        text = _any_of(known, re.IGNORECASE).sub(_defuse, text)
    return _SPECIAL_TOKENS.sub(_defuse, text)


def _defuse(match: re.Match[str]) -> str:
    found = match.group(0)
    return _VISIBLE.get(found[0], found[0] + "·") + found[1:]


def _any_of(texts: Iterable[str], flags: int = 0) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, texts)), flags)


class _Turn:
    """What has been read so far; a stray `</think>` throws it away."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.calls: list[ToolCall] = []
        self.call_errors: dict[str, str] = {}
        self.answers: list[str] = []
        self.errors: list[str] = []
        self.text: list[str] = []

    def add_call(self, name: str, arguments: Mapping[str, Any], error: str | None = None) -> None:
        call = ToolCall(name=name, arguments=arguments, id=f"call_{len(self.calls)}")
        self.calls.append(call)
        if error is not None:
            self.call_errors[call.id] = error

    def skip_thinking(self, text: str, opened_at: int) -> int:
        """Position after the reasoning block opened at `opened_at`; the end of the text when it isn't closed."""
        close = text.find(THINK_CLOSE, opened_at)
        if close < 0:
            self.reset()
            self.errors.append("the reasoning is not finished: close <think> with </think>, then call or answer")
            return len(text)
        return close + len(THINK_CLOSE)


class CallParser:
    """Turns a text into calls or an answer, tag by tag: subclasses say what a tag holds and what it comes to."""

    markers: tuple[str, ...]
    """The protocol's tags: neutralised in whatever a tool returns."""
    _next: re.Pattern[str]
    """The tags that mean something."""

    def parse(self, text: str) -> ParsedTurn:
        """Read one finished assistant turn. Never raises."""
        turn, at = _Turn(), 0
        while (found := self._next.search(text, at)) is not None:
            turn.text.append(text[at : found.start()])
            tag, at = found.group(0), found.end()
            if tag == THINK_OPEN:
                at = turn.skip_thinking(text, at)
            elif tag == THINK_CLOSE:
                turn.reset()
            elif tag.startswith("</"):
                turn.errors.append(f"a {tag} without its opening tag")
            else:
                at = self._read(text, at, tag, turn)
        turn.text.append(text[at:])
        if turn.errors:
            return ParsedTurn(error=f"{turn.errors[0]}. Nothing was run.")
        return self._result(turn)

    def _read(self, text: str, at: int, tag: str, turn: _Turn) -> int:
        """Read what the opening `tag` that ends at `at` holds; returns where to go on."""
        raise NotImplementedError

    def _result(self, turn: _Turn) -> ParsedTurn:
        raise NotImplementedError


class HermesParser(CallParser):
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, several a turn; a turn without any is the answer."""

    markers = (CALL_OPEN, CALL_CLOSE, *RESPONSE_TAGS, THINK_OPEN, THINK_CLOSE)
    _next = _any_of((CALL_OPEN, CALL_CLOSE, THINK_OPEN, THINK_CLOSE))

    def _result(self, turn: _Turn) -> ParsedTurn:
        if turn.calls:
            return ParsedTurn(calls=tuple(turn.calls), call_errors=turn.call_errors)
        answer = "".join(turn.text).strip()
        if not answer:
            return ParsedTurn(error="the turn is empty: call a tool or write the answer.")
        return ParsedTurn(answer=answer)

    def _read(self, text: str, at: int, tag: str, turn: _Turn) -> int:
        start = at + len(text[at:]) - len(text[at:].lstrip())
        try:
            value, end = _DECODER.raw_decode(text, start)
            problem = None
        except (ValueError, RecursionError) as error:
            value, end, problem = None, start, f"the call is not valid JSON ({_short(error)})"
        close = text.find(CALL_CLOSE, end)
        reopened = text.find(CALL_OPEN, end)
        if close < 0 or 0 <= reopened < close:
            turn.errors.append(f"a {CALL_OPEN} is not closed with {CALL_CLOSE}")
            return end  # what follows may still turn out to be reasoning, or a complete call
        if problem is None and text[end:close].strip():
            problem = f"there is text after the call's JSON object: {text[end:close].strip()[:40]!r}"
        if problem is not None:
            turn.add_call(_guess_name(text[at:close]), {}, problem)
        else:
            turn.add_call(*read_call_object(value))
        return close + len(CALL_CLOSE)


class TagsParser(CallParser):
    """`<search>…</search>` for a tool named search, `<answer>…</answer>` for the answer; other text is thinking aloud.

    first_params: tool name -> the parameter that takes the tag's text (stripped).
    """

    def __init__(self, first_params: Mapping[str, str]) -> None:
        self.first_params = dict(first_params)
        names = [*self.first_params, "answer"]
        tags = [tag for name in names for tag in (f"<{name}>", f"</{name}>")]
        self.markers = (*tags, "<information>", "</information>", *RESPONSE_TAGS, THINK_OPEN, THINK_CLOSE)
        self._next = _any_of((*tags, THINK_OPEN, THINK_CLOSE))
        self._usage = " or ".join(f"<{name}>…</{name}>" for name in names)

    def _read(self, text: str, at: int, tag: str, turn: _Turn) -> int:
        name = tag[1:-1]
        close = self._next.search(text, at)
        if close is None or close.group(0) != f"</{name}>":
            turn.errors.append(f"a {tag} is not closed with </{name}>" + (f" before {close.group(0)}" if close else ""))
            return at
        content = text[at : close.start()].strip()
        if name == "answer":
            turn.answers.append(content)
        else:
            turn.add_call(name, {self.first_params[name]: content} if content else {})
        return close.end()

    def _result(self, turn: _Turn) -> ParsedTurn:
        if len(turn.answers) > 1:
            return ParsedTurn(error="more than one <answer>: give exactly one.")
        if turn.answers and turn.calls:
            return ParsedTurn(error="a tool call and an <answer> in one turn: call first, answer when you know.")
        if turn.answers:
            return ParsedTurn(answer=turn.answers[0])
        if turn.calls:
            return ParsedTurn(calls=tuple(turn.calls))
        return ParsedTurn(error=f"neither a call nor an answer: write {self._usage}.")


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def read_call_object(value: Any) -> tuple[str, Mapping[str, Any], str | None]:
    """(name, arguments, content error or None) of a decoded call object."""
    if not isinstance(value, dict):
        return "", {}, f"the call must be an object with 'name' and 'arguments', not {_json_type(value)}"
    raw_name = value.get("name")
    name = raw_name if isinstance(raw_name, str) else ""
    if not name.strip():
        return "", {}, 'the call has no \'name\': write {"name": …, "arguments": {…}}'
    extra = [key for key in value if key not in ("name", "arguments", "id")]
    if extra:
        return name, {}, f"unknown key {extra[0]!r} in the call; the arguments go under 'arguments'"
    arguments, error = read_arguments(value.get("arguments"))
    return name, arguments, error


def read_arguments(value: Any) -> tuple[Mapping[str, Any], str | None]:
    """(arguments, content error or None). None and '' mean {}; a string is decoded once and must hold an object."""
    if value is None:
        return {}, None
    if isinstance(value, str):
        if not value.strip():
            return {}, None
        try:
            value = json.loads(value, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            return {}, f"'arguments' is not valid JSON ({_short(error)})"
    if not isinstance(value, dict):
        return {}, f"'arguments' must be an object such as {{\"key\": value}}, not {_json_type(value)}"
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return {}, "'arguments' holds half of a surrogate pair, which is no text"
    return value, None


def _json_type(value: Any) -> str:
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list"}
    return names.get(type(value), type(value).__name__)


def _guess_name(text: str) -> str:
    """The tool's name in a broken call, only to report it; such a call is never run."""
    found = re.search(r'"name"\s*:\s*"([^"\\]{1,100})"', text)
    return found.group(1) if found else ""


def _short(error: BaseException) -> str:
    return str(error) if not isinstance(error, RecursionError) else "nested too deeply"
