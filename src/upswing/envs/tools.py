"""A tool is a typed function with a docstring: its schema, its argument check and its call.

Arguments are checked against the type hints. What converts without loss is converted (`"3"` for an int, 3 for a
float); a boolean is never a number; unknown arguments are refused. What is wrong with a call raises ToolArgumentError,
worded for the agent (the agent's fault); what goes wrong inside a tool raises ToolFailed (the tool's).
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from upswing.errors import ConfigError, EnvironmentBroken, did_you_mean
from upswing.verify.deadline import DeadlineExceeded, call_with_deadline

DEFAULT_TIMEOUT_S = 30.0
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
_MAX_ERROR_CHARS = 500


class ToolArgumentError(Exception):
    """The agent called a tool wrongly; the message says how to do it right."""


class ToolFailed(Exception):
    """The tool raised or took too long; the message is what the agent sees."""


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter of a tool."""

    name: str
    adapter: TypeAdapter[Any]
    schema: Mapping[str, Any]
    required: bool
    is_text: bool
    """True when it takes a string."""


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A function that the agent may call. Make one with `Tool.from_function`."""

    name: str
    description: str
    parameters: tuple[Parameter, ...]
    function: Callable[..., Any]
    timeout_s: float = DEFAULT_TIMEOUT_S
    """Seconds a call may take."""

    @classmethod
    def from_function(
        cls, f: Callable[..., Any] | Tool, *, timeout_s: float | None = None, name: str | None = None
    ) -> Tool:
        """A tool from a plain or async function with type hints and a (Google-style) docstring.

        Raises ConfigError when the name, a hint, the docstring or the signature can't make a schema.
        """
        if isinstance(f, Tool):
            return f
        if not callable(f):
            raise ConfigError(f"a tool must be a function, got {type(f).__name__} {f!r}")
        target = f.func if isinstance(f, functools.partial) else f
        called = name or str(getattr(target, "__name__", type(target).__name__))
        if not _NAME.fullmatch(called):
            raise ConfigError(f"tool name {called!r} is not allowed: use letters, digits, _ and - (pass name=…)")
        limit_s = DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
        if isinstance(limit_s, bool) or not isinstance(limit_s, int | float) or not 0 < limit_s < math.inf:
            raise ConfigError(f"tool '{called}': timeout_s must be a positive number of seconds, got {limit_s!r}")
        description, docs = _read_docstring(inspect.getdoc(target) or "")
        if not description:
            raise ConfigError(f"tool '{called}' has no docstring; its first lines tell the agent what it does")
        parameters = _read_parameters(f, target, called, docs)
        return cls(name=called, description=description, parameters=parameters, function=f, timeout_s=float(limit_s))

    @property
    def schema(self) -> dict[str, Any]:
        """The tool in OpenAI's function format, for chat templates."""
        parameters = {
            "type": "object",
            "properties": {p.name: dict(p.schema) for p in self.parameters},
            "required": [p.name for p in self.parameters if p.required],
        }
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}

    @property
    def usage(self) -> str:
        """One line such as `search(query: string, k: integer = 5)`."""
        return f"{self.name}({', '.join(_usage_of(p) for p in self.parameters)})"

    def bind(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Checked and converted arguments. Raises ToolArgumentError with a corrective message."""
        names = [p.name for p in self.parameters]
        unknown = [key for key in arguments if key not in names]
        missing = [p.name for p in self.parameters if p.required and p.name not in arguments]
        problems = [f"unknown argument {key!r}{did_you_mean(str(key), names)}".rstrip("?") for key in unknown]
        problems += [f"missing argument {key!r}" for key in missing]
        bound = {}
        for parameter in self.parameters:
            if parameter.name in arguments:
                try:
                    bound[parameter.name] = _convert(parameter.adapter, arguments[parameter.name])
                except (ValueError, TypeError, RecursionError) as error:  # ValidationError is a ValueError
                    problems.append(f"argument {parameter.name!r}: {_first_problem(error)}")
        if problems:
            raise ToolArgumentError(f"{'; '.join(problems)}. Usage: {self.usage}")
        return bound

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """Run the tool; the result as text (JSON when it isn't a string).

        Raises ToolArgumentError (nothing was run), ToolFailed (it raised, took too long or returned something that is
        no JSON) and EnvironmentBroken when the tool says that the environment can't go on.
        """
        bound = self.bind(arguments)
        try:
            result = await call_with_deadline(self.function, bound, self.timeout_s)
            return result if isinstance(result, str) else dump_result(result)
        except DeadlineExceeded as error:
            raise ToolFailed(f"Error: timeout: '{self.name}' took longer than {self.timeout_s:g} s ({error})") from None
        except (EnvironmentBroken, KeyboardInterrupt):
            raise
        except (Exception, SystemExit, GeneratorExit) as error:
            text = f"Error: {type(error).__name__}: {error}" if str(error) else f"Error: {type(error).__name__}"
            raise ToolFailed(text[:_MAX_ERROR_CHARS]) from error


def dump_result(result: Any) -> str:
    """A non-string result as JSON text, non-ASCII kept. Raises TypeError for what has no JSON form."""
    return json.dumps(result, ensure_ascii=False, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    return TypeAdapter(type(value)).dump_python(value, mode="json")


def _usage_of(parameter: Parameter) -> str:
    schema = parameter.schema
    text = f"{parameter.name}: {'any of ' + str(schema['enum']) if 'enum' in schema else schema.get('type', 'any')}"
    return text if parameter.required else f"{text} = {json.dumps(schema.get('default'), ensure_ascii=False)}"


def _read_parameters(
    f: Callable[..., Any], target: Callable[..., Any], tool: str, docs: Mapping[str, str]
) -> tuple[Parameter, ...]:
    hinted = target if inspect.isroutine(target) else type(target).__call__
    try:
        hints = typing.get_type_hints(hinted, include_extras=True)
    except Exception as error:
        raise ConfigError(f"tool '{tool}': its type hints can't be read ({type(error).__name__}: {error})") from None
    parameters = []
    for parameter in inspect.signature(f).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ConfigError(
                f"tool '{tool}': parameter '{parameter}' must be a plain named one, so that it has a schema"
            )
        if parameter.name not in hints:
            raise ConfigError(
                f"tool '{tool}': parameter '{parameter.name}' has no type hint; write '{parameter.name}: str', say"
            )
        parameters.append(_read_parameter(parameter, hints[parameter.name], tool, docs.get(parameter.name, "")))
    return tuple(parameters)


def _read_parameter(parameter: inspect.Parameter, hint: Any, tool: str, doc: str) -> Parameter:
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(hint)
        schema = adapter.json_schema()
        schema = _simplify(schema, schema.pop("$defs", {}), ())
    except Exception as error:
        raise ConfigError(
            f"tool '{tool}': parameter '{parameter.name}' has type {hint!r}, which has no JSON schema "
            f"({type(error).__name__}); use str, int, float, bool, list, dict, Literal, Enum or a pydantic model"
        ) from None
    if doc:
        schema["description"] = doc
    required = parameter.default is inspect.Parameter.empty
    if not required:
        try:
            schema["default"] = json.loads(dump_result(parameter.default))
        except Exception:
            schema.pop("default", None)  # no JSON form: the agent just leaves it out
    text = schema.get("type") == "string" or any(s.get("type") == "string" for s in schema.get("anyOf", ()))
    return Parameter(name=parameter.name, adapter=adapter, schema=schema, required=required, is_text=text)


def _simplify(node: Any, definitions: Mapping[str, Any], inside: tuple[str, ...]) -> Any:
    """References put in place and titles dropped: small models read the schema, so it has to be short."""
    if isinstance(node, list):
        return [_simplify(item, definitions, inside) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        key = str(node["$ref"]).removeprefix("#/$defs/")
        if key in inside:
            raise RecursionError(f"{key} holds itself")
        rest = {k: v for k, v in node.items() if k != "$ref"}
        return _simplify({**definitions[key], **rest}, definitions, (*inside, key))
    simple: dict[str, Any] = {}
    for name, value in node.items():
        if name == "properties":
            simple[name] = {k: _simplify(v, definitions, inside) for k, v in value.items()}
        elif name in ("enum", "default", "const"):
            simple[name] = value
        elif name != "title":
            simple[name] = _simplify(value, definitions, inside)
    return simple


def _convert(adapter: TypeAdapter[Any], value: Any) -> Any:
    """Strict first; then the lossless conversions, except where a boolean would become a number."""
    text = json.dumps(value)
    try:
        return adapter.validate_json(text, strict=True)
    except ValidationError:
        if _holds_bool(value):
            raise
    return adapter.validate_json(text)


def _holds_bool(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_holds_bool(item) for item in value.values())
    if isinstance(value, list | tuple):
        return any(_holds_bool(item) for item in value)
    return isinstance(value, bool)


def _first_problem(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
    first = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    got = json.dumps(first["input"], ensure_ascii=False, default=str)[:60]
    message = str(first["msg"]).removeprefix("Input should be ").rstrip(".")
    return f"{'at ' + where + ': ' if where else ''}expected {message}, got {got}"


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """(description, documentation by parameter) of a Google-style docstring."""
    sections = re.split(r"(?m)^(Args|Arguments|Parameters|Returns|Return|Yields|Raises|Examples?|Notes?):[ \t]*$", text)
    description = " ".join(sections[0].split())
    docs: dict[str, str] = {}
    for title, body in zip(sections[1::2], sections[2::2], strict=True):
        if title in ("Args", "Arguments", "Parameters"):
            docs.update(_read_args(inspect.cleandoc("\n" + body.strip("\n"))))
    return description, docs


def _read_args(body: str) -> dict[str, str]:
    docs: dict[str, str] = {}
    name = ""
    for line in body.splitlines():
        found = re.match(r"\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)", line)
        if found:
            name = found.group(1)
            docs[name] = found.group(2).strip()
        elif name and line.strip():
            docs[name] = f"{docs[name]} {line.strip()}".strip()
    return docs
