"""The formats in which agents write calls, one class each; the rules that they share stand in `parsing`."""

from __future__ import annotations

import ast
import json
import re
import tokenize
import warnings
from collections.abc import Collection, Mapping, Sequence
from io import StringIO
from typing import Any

from upswing.envs.parsing import (
    CALL_CLOSE,
    CALL_OPEN,
    COMMON_MARKERS,
    THINK_CLOSE,
    THINK_OPEN,
    ParsedTurn,
    TaggedParser,
    Turn,
    WholeTurnParser,
    any_of,
    decode_json,
    dump_plain,
    read_call_object,
)
from upswing.errors import ConfigError
from upswing.trajectory.types import ToolCall

MAX_PYTHON_CHARS = 100_000
"""A longer turn isn't read as Python: its syntax tree would take gigabytes."""
_SPACE = re.compile(r"\s*+")


def _skip_space(text: str, at: int) -> int:
    return _SPACE.match(text, at).end()  # type: ignore[union-attr]


class HermesParser(TaggedParser):
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, several a turn; a turn without any is the answer."""

    usage = f'{CALL_OPEN}{{"name": "…", "arguments": {{…}}}}{CALL_CLOSE}'
    _next = any_of((CALL_OPEN, CALL_CLOSE, THINK_OPEN, THINK_CLOSE))
    # JSON up to the first tag outside its strings. Outside them a backslash ends it too: otherwise readings that start
    # at different tags could both run on for ever, and the time would be quadratic.
    _json = re.compile(rf'(?:[^"<\\]++|"(?:[^"\\]++|\\.)*+"|<(?!{_next.pattern.replace("<", "")}))*+', re.DOTALL)

    def _read(self, text: str, at: int, tag: str, turn: Turn) -> int:
        start, end = _skip_space(text, at), self._json.match(text, at).end()  # type: ignore[union-attr]
        problem = ""
        try:
            value, length = decode_json(text[start:end])
            if text[start + length : end].strip():
                raise ValueError("JSON error: text after the object")
        except ValueError as error:
            end, problem = at, str(error)  # its strings can't be trusted: the first tag in sight ends it
        close = self._next.search(text, end)
        if close is None or close.group(0) != CALL_CLOSE:
            turn.fail(f"a {CALL_OPEN} is not closed with {CALL_CLOSE}")
            return end  # what follows may still turn out to be reasoning
        if not problem and text[end : close.start()].strip():
            problem = "JSON error: text after the object"
        if problem:
            turn.add_call(self.guess_name(text[at : close.start()]), {}, problem)
        else:
            turn.add_call(*read_call_object(value))
        return close.end()

    def render(self, calls: Sequence[ToolCall]) -> str:
        return "\n".join(f"{CALL_OPEN}\n{_call_json(call, 'arguments')}\n{CALL_CLOSE}" for call in calls)


class TagsParser(TaggedParser):
    """`<search>…</search>` for a tool named search, `<answer>…</answer>` for the answer; other text is thinking aloud.

    first_params: tool name -> the parameter that takes the tag's text (stripped).
    """

    def __init__(self, first_params: Mapping[str, str]) -> None:
        self.first_params = dict(first_params)
        names = [*self.first_params, "answer"]
        tags = [tag for name in names for tag in (f"<{name}>", f"</{name}>")]
        self.markers = (*tags, "<information>", "</information>", *COMMON_MARKERS)
        self._next = any_of((*tags, THINK_OPEN, THINK_CLOSE))
        self.usage = " or ".join(f"<{name}>…</{name}>" for name in names)

    def _read(self, text: str, at: int, tag: str, turn: Turn) -> int:
        name = tag[1:-1]
        close = self._next.search(text, at)
        if close is None or close.group(0) != f"</{name}>":
            turn.fail(f"a {tag} is not closed with </{name}>" + (f" before {close.group(0)}" if close else ""))
            return at
        content = text[at : close.start()].strip()
        if name == "answer":
            turn.answers.append(content)
        else:
            turn.add_call(name, {self.first_params[name]: content} if content else {})
        return close.end()

    def _result(self, turn: Turn) -> ParsedTurn:
        if len(turn.answers) > 1:
            return ParsedTurn(error="more than one <answer>: give exactly one.")
        if turn.answers and turn.calls:
            return ParsedTurn(error="a tool call and an <answer> in one turn: call first, answer when you know.")
        if turn.answers:
            return ParsedTurn(answer=turn.answers[0])
        return turn.result() if turn.calls else ParsedTurn(error=f"neither a call nor an answer: write {self.usage}.")

    def render(self, calls: Sequence[ToolCall]) -> str:
        texts = [(call.name, call.arguments.get(self.first_params[call.name], "")) for call in calls]
        return "\n".join(f"<{name}>{text}</{name}>" for name, text in texts)


class QwenXmlParser(TaggedParser):
    """`<tool_call><function=name><parameter=x>value</parameter></function></tool_call>`, as Qwen3-Coder writes it.

    A value is raw text, one line break at either end dropped; nothing in it is escaped, so it can't hold `</parameter>`
    nor `</think>`. Text stays text; for a parameter that takes no string it is read as JSON where it is JSON.
    text_params: tool name -> its parameters that take a string.
    """

    usage = f"{CALL_OPEN}<function=name><parameter=key>value</parameter></function>{CALL_CLOSE}"
    markers = (*COMMON_MARKERS, "<function=", "</function>", "<parameter=", "</parameter>")
    _next = any_of((CALL_OPEN, CALL_CLOSE, "<function=", "</function>", THINK_OPEN, THINK_CLOSE))
    _function = re.compile(r"\s*+<function=([^<>\n]*+)>\s*+")
    _parameter = re.compile(r"<parameter=([^<>\n]*+)>")
    _value_end = any_of(("</parameter>", THINK_CLOSE))
    _end = re.compile(r"</function>\s*+</tool_call>")

    def __init__(self, text_params: Mapping[str, Collection[str]]) -> None:
        self.text_params = text_params

    def _read(self, text: str, at: int, tag: str, turn: Turn) -> int:
        head = self._function.match(text, at)
        if tag != CALL_OPEN or head is None:
            turn.fail(f"write {CALL_OPEN}, then <function=name>: one stands without the other")
            return at
        name, at = head[1].strip(), head.end()
        arguments: dict[str, Any] = {}
        problem = None if name else "the call has no name: write <function=name>"
        while found := self._parameter.match(text, at):
            key, close = found[1].strip(), self._value_end.search(text, found.end())
            if close is None or close[0] == THINK_CLOSE:
                turn.fail(f"a <parameter={key[:40]}> is not closed with </parameter>")
                return close.start() if close else len(text)
            if key in arguments:
                problem = f"parameter {key!r} is given twice"
            arguments[key] = self._value(name, key, text[found.end() : close.start()])
            at = _skip_space(text, close.end())
        end = self._end.match(text, at)
        if end is None:
            ends = f"</function>{CALL_CLOSE}"
            turn.fail(f"<function={name[:40]}> is not closed with {ends}, or holds more than parameters")
            return at
        turn.add_call(name, {} if problem else arguments, problem)
        return end.end()

    def _value(self, name: str, key: str, raw: str) -> Any:
        raw = raw.removeprefix("\n").removesuffix("\n")
        if key not in self.text_params.get(name, ()):
            text = raw.strip()
            try:
                value, end = decode_json(text)
                return raw if text[end:] else value
            except ValueError:
                pass  # the tool's own check says what it must be
        return raw

    def render(self, calls: Sequence[ToolCall]) -> str:
        return "\n".join(self._render(call) for call in calls)

    def _render(self, call: ToolCall) -> str:
        texts = self.text_params.get(call.name, ())
        values = {k: v if k in texts and isinstance(v, str) else dump_plain(v) for k, v in call.arguments.items()}
        lines = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
        return f"{CALL_OPEN}\n<function={call.name}>\n{lines}</function>\n{CALL_CLOSE}"


class LlamaJsonParser(WholeTurnParser):
    """`{"name": …, "parameters": {…}}`, several separated by `;` or line breaks, or in one list.

    The turn begins with it, or writes `<|python_tag|>` before it (what stands before that is thinking aloud). Any other
    turn is the answer.
    """

    usage = '{"name": "…", "parameters": {…}}'
    _begin = re.compile(r'\[?\s*+\{\s*+"(?:name|parameters|type)"\s*+:')
    _tag = "<|python_tag|>"
    _separator = re.compile(r"[\s;]*+")

    def _read(self, body: str, turn: Turn) -> bool:
        if not self._begin.match(body):
            _, tag, body = body.partition(self._tag)
            if not tag:
                return False
        body, at = body.strip(), 0
        values: list[Any] = []
        while at < len(body) or not values:
            value, end = decode_json(body, at)
            values += value if isinstance(value, list) and value else [value]
            at = self._separator.match(body, end).end()  # type: ignore[union-attr]
        for value in values:
            turn.add_call(*read_call_object(value, "parameters"))
        return True

    def render(self, calls: Sequence[ToolCall]) -> str:
        return "; ".join(_call_json(call, "parameters") for call in calls)


class PythonParser(WholeTurnParser):
    """`search(query="a")`, several as `[f(a=1), g(b=2)]` or line by line: literals only, and nothing is evaluated.

    A turn of nothing but such calls is calls; one that starts like a call of a known tool and isn't is a broken call;
    any other is the answer. parameters: tool name -> its parameters in order, for arguments given without a name.
    """

    usage = 'name(key="value", other=3), several as [f(a=1), g(b=2)]'
    _head = re.compile(r"\[?\s*+([^\W\d][\w.]*+)\(")

    def __init__(self, parameters: Mapping[str, Sequence[str]]) -> None:
        self.parameters = parameters
        for name in parameters:
            try:
                _python_calls(f"{name}()")
            except ValueError:
                raise ConfigError(f"tool name {name!r} can't be called in protocol python; pass another name") from None

    def _read(self, body: str, turn: Turn) -> bool:
        name = self.guess_name(body)
        if not name:  # "Paris (7)" is Python too
            return False
        try:
            calls = _python_calls(body)
        except ValueError:
            if name in self.parameters:
                raise
            return False
        for name, call in calls:
            turn.add_call(name, *self._arguments(name, call))
        return True

    def _arguments(self, name: str, call: ast.Call) -> tuple[dict[str, Any], str | None]:
        order, known = self.parameters.get(name, ()), name in self.parameters
        if known and len(call.args) > len(order):
            return {}, f"{name} takes {len(order)} arguments, {len(call.args)} were given"
        arguments: dict[str, Any] = {}
        for key, node in [*zip(order, call.args, strict=False), *((each.arg, each.value) for each in call.keywords)]:
            if key is None or isinstance(node, ast.Starred):
                return {}, "* and ** can't be used: name every argument"
            if key in arguments:
                return {}, f"argument {key!r} is given twice"
            try:
                arguments[key] = decode_json(dump_plain(ast.literal_eval(node)))[0]
            except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
                return {}, f"argument {key!r} is no plain literal, such as 'text', 3, -0.5, True, None or ['a', 'b']"
        return arguments, None

    def guess_name(self, text: str) -> str:
        found = self._head.match(text)
        return found[1] if found else ""

    def render(self, calls: Sequence[ToolCall]) -> str:
        texts = [f"{c.name}({', '.join(f'{key}={value!r}' for key, value in c.arguments.items())})" for c in calls]
        return texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]"


# An agent's odd escapes ("\d") are its own business: no warning, which a strict filter would make an error of.
_SOURCE = "<tool call>"
warnings.filterwarnings("ignore", module=re.escape(_SOURCE))


def _python_calls(text: str) -> list[tuple[str, ast.Call]]:
    """(name, call) of a text that is nothing but Python calls. Raises ValueError for any other."""
    if len(text) > MAX_PYTHON_CHARS:
        raise ValueError(f"the call is longer than {MAX_PYTHON_CHARS} characters")
    try:
        statements = ast.parse(text, filename=_SOURCE).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        message = error.msg if isinstance(error, SyntaxError) else type(error).__name__
        raise ValueError(f"the call is not valid Python ({message})") from None
    found: list[tuple[str, ast.Call]] = []
    for statement in statements:
        value = statement.value if isinstance(statement, ast.Expr) else None
        for node in value.elts if isinstance(value, ast.List | ast.Tuple) else [value]:
            if not isinstance(node, ast.Call) or not (name := _dotted(node.func)):
                raise ValueError("the call can't be read: write only calls such as f(a=1), and nothing around them")
            found.append((name, node))
    if not found:
        raise ValueError("there is no call")
    # In one, a `</think>` would go unseen, and the draft before it would run.
    if "#" in text and any(each.type == tokenize.COMMENT for each in tokenize.generate_tokens(StringIO(text).readline)):
        raise ValueError("the call can't be read: write no comments")
    return found


def _dotted(node: ast.expr) -> str:
    """`a.b` of the expression a.b; empty for any that is no dotted name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def _call_json(call: ToolCall, key: str) -> str:
    return json.dumps({"name": call.name, key: dict(call.arguments)}, ensure_ascii=False)
