"""Reads the agent's turns: tool calls and answers, and nothing that only looks like one. The formats are in `parsers`.

Rules, the same for every format, in training and in evaluation:
- Reasoning is cut first: what is inside `<think>…</think>`, and everything before a `</think>` without its opening tag
  (some templates open it in the prompt). Calls and answers inside count for nothing. An unclosed `<think>` is an error.
- A *structural* error (`ParsedTurn.error`: unclosed, stray or nested tag, several answers, over MAX_CALLS calls,
  nothing at all) makes the whole turn invalid: no call of it runs. A *content* error (`ParsedTurn.call_errors`: bad
  JSON or Python, arguments that are no object) concerns one call, which is answered with the error; the others run.
- Nothing is repaired or guessed. Missing, null and empty arguments mean `{}`; arguments given as a string are decoded
  once; a key that occurs twice, NaN, an infinite number and half of a surrogate pair are errors.
- Time is linear in the text, whatever it holds.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from upswing.trajectory.types import ToolCall
from upswing.verify.strict_json import FLOATS

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
# Single tokens of many tokenizers, so no tool may return them, whichever format is in use.
COMMON_MARKERS = (CALL_OPEN, CALL_CLOSE, "<tool_response>", "</tool_response>", THINK_OPEN, THINK_CLOSE)
MAX_CALLS = 64
"""Calls that one turn may hold."""
MAX_DEPTH = 64
"""Levels that arguments may be nested; a fixed number, as the interpreter's own limit depends on who calls."""
_MAX_RESTS = 8
EMPTY = "the turn is empty: call a tool or write the answer."
UNFINISHED = "the reasoning is not finished: close <think> with </think>, then call or answer"

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
    text = storable(text)
    known = sorted({marker for marker in markers if marker}, key=len, reverse=True)
    if known:
        text = any_of(known, re.IGNORECASE).sub(_defuse, text)
    return _SPECIAL_TOKENS.sub(_defuse, text)


def storable(text: str) -> str:
    """`text` with lone surrogates as `?`."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _defuse(match: re.Match[str]) -> str:
    found = match.group(0)
    return _VISIBLE.get(found[0], found[0] + "·") + found[1:]


def any_of(texts: Iterable[str], flags: int = 0) -> re.Pattern[str]:
    return _any_of(tuple(texts), flags)


@functools.lru_cache(maxsize=256)
def _any_of(texts: tuple[str, ...], flags: int) -> re.Pattern[str]:
    """Kept: a tool's every result is looked at with the same."""
    return re.compile("|".join(map(re.escape, texts)), flags)


class Turn:
    """What has been read so far; a stray `</think>` throws it away."""

    def __init__(self) -> None:
        self.calls: list[ToolCall] = []
        self.call_errors: dict[str, str] = {}
        self.answers: list[str] = []
        self.error: str | None = None
        self.text: list[str] = []

    def fail(self, error: str) -> None:
        """A structural error; the first one is told."""
        self.error = self.error or error

    def add_call(self, name: str, arguments: Mapping[str, Any], error: str | None = None) -> None:
        if len(self.calls) == MAX_CALLS:
            return self.fail(f"more than {MAX_CALLS} calls in one turn")
        call = ToolCall(name=name, arguments=arguments, id=f"call_{len(self.calls)}")
        self.calls.append(call)
        if error is not None:
            self.call_errors[call.id] = error

    def result(self) -> ParsedTurn:
        """The error, else the calls."""
        if self.error is not None:
            return ParsedTurn(error=f"{self.error}. Nothing was run.")
        return ParsedTurn(calls=tuple(self.calls), call_errors=self.call_errors)


class CallParser:
    """Turns a text into calls or an answer, and calls into text."""

    markers: tuple[str, ...] = COMMON_MARKERS
    """The protocol's tags: neutralised in whatever a tool returns."""
    usage: str
    """How a call is written, for a system message that explains it."""

    def parse(self, text: str) -> ParsedTurn:
        """Read one finished assistant turn. Never raises."""
        raise NotImplementedError

    def render(self, calls: Sequence[ToolCall]) -> str:
        """The calls as an agent writes them; `parse` reads them back (as far as the format can express them)."""
        raise NotImplementedError

    def guess_name(self, text: str) -> str:
        """The tool's name in a broken call (here: JSON), only to report it; such a call is never run."""
        found = re.search(r'"name"\s*+:\s*+"([^"\\]{1,100})"', text)
        return found.group(1) if found else ""


class TaggedParser(CallParser):
    """Calls in tags, anywhere outside the reasoning: subclasses say what a tag holds and what the turn comes to."""

    _next: re.Pattern[str]
    """The tags that mean something, those of reasoning among them."""
    _thinking = any_of((THINK_OPEN, THINK_CLOSE))

    def parse(self, text: str) -> ParsedTurn:
        text, turn, at = storable(text), Turn(), 0
        # After an error only one thing can matter: whether all of it was reasoning.
        while (found := (self._thinking if turn.error else self._next).search(text, at)) is not None:
            turn.text.append(text[at : found.start()])
            tag, at = found.group(0), found.end()
            if tag == THINK_OPEN:
                close = text.find(THINK_CLOSE, at)
                if close < 0:
                    return ParsedTurn(error=f"{UNFINISHED}. Nothing was run.")
                at = close + len(THINK_CLOSE)
            elif tag == THINK_CLOSE:
                turn = Turn()
            elif tag.startswith("</"):
                turn.fail(f"a {tag} without its opening tag")
            else:
                at = self._read(text, at, tag, turn)
        turn.text.append(text[at:])
        return turn.result() if turn.error else self._result(turn)

    def _read(self, text: str, at: int, tag: str, turn: Turn) -> int:
        """Read what the opening `tag` that ends at `at` holds; returns where to go on."""
        raise NotImplementedError

    def _result(self, turn: Turn) -> ParsedTurn:
        """Of a turn without structural error; unless overridden, a turn without calls is the answer."""
        if turn.calls:
            return turn.result()
        answer = "".join(turn.text).strip()
        return ParsedTurn(answer=answer) if answer else ParsedTurn(error=EMPTY)


class WholeTurnParser(CallParser):
    """A turn is either calls, with no mark of where they end, or the answer."""

    def parse(self, text: str) -> ParsedTurn:
        text = storable(text).strip()
        lead = text.partition(THINK_CLOSE)[2] if text.startswith(THINK_OPEN) else text
        # Reasoning ends at one `</think>`; others may stand in a call's strings. So: the first rest that is all calls.
        *rests, last = lead.split(THINK_CLOSE, _MAX_RESTS)
        bodies = [THINK_CLOSE.join([*rests[n:], last]) for n in range(len(rests) + 1)]
        body, problem = "", None
        for body in dict.fromkeys(each.strip() for each in (*bodies, text.rpartition(THINK_CLOSE)[2])):
            turn, problem = Turn(), None
            try:
                if self._read(body, turn):
                    return turn.result()
            except ValueError as error:
                problem = str(error)
        if THINK_OPEN in body:
            return ParsedTurn(error=f"{UNFINISHED}. Nothing was run.")
        if problem is not None:
            turn = Turn()
            turn.add_call(self.guess_name(body), {}, problem)
            return turn.result()
        return ParsedTurn(answer=body) if body else ParsedTurn(error=EMPTY)

    def _read(self, body: str, turn: Turn) -> bool:
        """Read the calls that `body` consists of; False when it is no call. Raises ValueError for a broken one."""
        raise NotImplementedError


# -- JSON -------------------------------------------------------------------------------------------------------------


def decode_json(text: str, at: int = 0) -> tuple[Any, int]:
    """(the JSON value that starts at `at`, where it ends). Raises ValueError, worded for the agent."""
    try:
        value, end = FLOATS.raw_decode(text, at)
        dump_plain(value)
    except RecursionError:
        raise ValueError("JSON error: nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"JSON error: {error}") from None
    return value, end


def dump_plain(value: Any) -> str:
    """`value` as JSON. Raises ValueError or TypeError for what can't be stored, or is nested over MAX_DEPTH levels."""
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, _CONTAINERS)]
        level = [item for items in inner for item in items]
    if level:
        raise ValueError(f"nested more than {MAX_DEPTH} levels deep")
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if text != storable(text):
        raise ValueError("half of a surrogate pair is no text")
    return text


_CONTAINERS = (dict, list, tuple)


def read_call_object(value: Any, key: str = "arguments") -> tuple[str, Mapping[str, Any], str | None]:
    """(name, arguments, content error or None) of a decoded call object whose arguments stand under `key`."""
    if not isinstance(value, dict):
        return "", {}, f"the call must be an object with 'name' and '{key}', not {_json_type(value)}"
    name = value.get("name")
    if not isinstance(name, str) or not name.strip():
        return "", {}, f'the call has no \'name\': write {{"name": …, "{key}": {{…}}}}'
    extra = [other for other in value if other not in ("name", key, "id") and (other, value[other]) != _TYPE]
    if extra:
        return name, {}, f"unknown key {extra[0]!r} in the call; the arguments go under '{key}'"
    arguments, error = _read_arguments(value.get(key), key)
    return name, arguments, error


_TYPE = ("type", "function")
"""Says nothing, and models that were trained on API logs write it."""


def _read_arguments(value: Any, key: str) -> tuple[Mapping[str, Any], str | None]:
    """(arguments, content error or None). None and '' mean {}; a string is decoded once and must hold an object."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return {}, None
    if isinstance(value, str):
        text = value.strip()
        try:
            value, end = decode_json(text)
            if text[end:]:
                raise ValueError("JSON error: text after the object")
        except ValueError as error:
            return {}, f"'{key}': {error}"
    if not isinstance(value, dict):
        return {}, f"'{key}' must be an object such as {{\"key\": value}}, not {_json_type(value)}"
    return value, None


def _json_type(value: Any) -> str:
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list"}
    return names.get(type(value), type(value).__name__)
