"""A tool is a typed function with a docstring: its schema, its argument check and its call.

Arguments are checked against the type hints. What converts without loss is converted (`"3"` for an int, 3 for a
float); a boolean is never a number; unknown arguments are refused. What is wrong with a call raises ToolArgumentError,
worded for the agent (the agent's fault); what goes wrong inside a tool raises ToolFailed (the tool's).
`@tool(...)` gives a function a timeout of its own, retries, a limit of calls at a time or a cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import inspect
import json
import re
import time
import types
import typing
import weakref
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from upswing.errors import ConfigError, EnvironmentBroken, did_you_mean
from upswing.verify.deadline import DeadlineExceeded, call_with_deadline
from upswing.verify.options import Count, CountOrZero, Positive, check_options

DEFAULT_TIMEOUT_S = 30.0
TOOL_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
MAX_ERROR_CHARS = 500
_BACKOFF_S, _MAX_BACKOFF_S = 0.1, 2.0
"""The pause before the first retry, doubled for each further one, and its longest."""
_CACHED_RESULTS = 10_000
"""Results kept of one tool; the oldest goes first."""
_OPTIONS = "_upswing_tool_options"
F = TypeVar("F", bound=Callable[..., Any])


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

    @property
    def usage(self) -> str:
        kind = f"any of {self.schema['enum']}" if "enum" in self.schema else self.schema.get("type", "any")
        default = "" if self.required else f" = {json.dumps(self.schema.get('default'), ensure_ascii=False)}"
        return f"{self.name}: {kind}{default}"


@dataclass(frozen=True, kw_only=True, eq=False)
class ToolOptions:
    """What `@tool` says, with what all tools made of the function share in this process (a tool is made anew for every
    trajectory)."""

    fixed: ClassVar[frozenset[str]] = frozenset({"results", "semaphores"})
    timeout_s: Positive | None = None
    retries: CountOrZero = 0
    max_concurrent: Count | None = None
    cache: bool = False
    results: dict[str, str] = field(default_factory=dict)
    """Successful results by arguments, while `cache` is on."""
    semaphores: MutableMapping[asyncio.AbstractEventLoop, asyncio.Semaphore] = field(
        default_factory=weakref.WeakKeyDictionary
    )

    def check(self, tool: str, function: Any) -> None:
        """Raises ConfigError for an option that can't work."""
        check_options(self, f"tool '{tool}'")
        if self.cache and not inspect.isfunction(function):
            why = "this one may hold state that its key misses"
            raise ConfigError(f"tool '{tool}': cache is for plain functions; {why}")

    def slot(self) -> contextlib.AbstractAsyncContextManager[None]:
        """One of `max_concurrent` places, waited for without end: the turn's own time limit covers the wait."""
        if self.max_concurrent is None:
            return contextlib.nullcontext()
        return self.semaphores.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.max_concurrent))

    def keep(self, key: str, result: str) -> None:
        if self.cache:
            self.results[key] = result
            if len(self.results) > _CACHED_RESULTS:
                del self.results[next(iter(self.results))]


def tool(
    *, timeout_s: float | None = None, retries: int = 0, max_concurrent: int | None = None, cache: bool = False
) -> Callable[[F], F]:
    """Options of a function (or method) that is used as a tool; the function itself stays as it is.

    timeout_s: seconds a call may take, retries and their pauses included, waiting for a place not; None: the
    environment's. retries: how often it is tried again when it raises (not after a timeout). max_concurrent: calls at a
    time in this process. cache: the same arguments get the same result for as long as the process lives; errors aren't
    kept. Wrong values raise ConfigError when a tool is made of it.
    """

    def mark(f: F) -> F:
        options = ToolOptions(timeout_s=timeout_s, retries=retries, max_concurrent=max_concurrent, cache=cache)
        setattr(f, _OPTIONS, options)
        return f

    return mark


def is_marked(f: Any) -> bool:
    """Whether `tool` gave it options."""
    return isinstance(getattr(f, _OPTIONS, None), ToolOptions)


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A function that the agent may call. Make one with `Tool.from_function`."""

    name: str
    description: str
    parameters: tuple[Parameter, ...]
    function: Callable[..., Any]
    timeout_s: float = DEFAULT_TIMEOUT_S
    """Seconds a call may take."""
    options: ToolOptions = field(default_factory=ToolOptions)

    @classmethod
    def from_function(
        cls, f: Callable[..., Any] | Tool, *, timeout_s: float | None = None, name: str | None = None
    ) -> Tool:
        """A tool from a plain or async function with type hints and a docstring (Google, NumPy or Sphinx style).

        timeout_s: unless the function's `@tool` says otherwise.
        Raises ConfigError when the name, a hint, the docstring or the signature can't make a schema.
        """
        if isinstance(f, Tool):
            return f
        if not callable(f):
            raise ConfigError(f"a tool must be a function, got {type(f).__name__} {f!r}")
        target = f.func if isinstance(f, functools.partial) else f
        name = name or str(getattr(target, "__name__", type(target).__name__))
        if not TOOL_NAME.fullmatch(name):
            raise ConfigError(f"tool name {name!r} is not allowed: use letters, digits, _ and - (pass name=…)")
        options: ToolOptions = getattr(target, _OPTIONS, ToolOptions())
        limit_s = DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
        limit_s = limit_s if options.timeout_s is None else options.timeout_s
        replace(options, timeout_s=limit_s).check(name, f)
        function = getattr(f, "__func__", f)
        # What a closure holds is not kept alive; a docstring may be inherited by way of the instance.
        known = inspect.isfunction(function) and function.__closure__ is None and function.__doc__ is not None
        key = (function, f is not function, name, function.__doc__)
        text, parameters = _read_once(*key) if known else _read(f, target, name)
        return cls(name=name, description=text, parameters=parameters, function=f, timeout_s=limit_s, options=options)

    @property
    def schema(self) -> dict[str, Any]:
        """The tool in OpenAI's function format, for chat templates."""
        properties = {p.name: copy.deepcopy(dict(p.schema)) for p in self.parameters}
        required = [p.name for p in self.parameters if p.required]
        parameters = {"type": "object", "properties": properties, "required": required}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}

    @property
    def usage(self) -> str:
        """One line such as `search(query: string, k: integer = 5)`."""
        return f"{self.name}({', '.join(parameter.usage for parameter in self.parameters)})"

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

    async def call(self, arguments: Mapping[str, Any], on_retry: Callable[[], None] | None = None) -> str:
        """Run the tool; the result as text (JSON when it isn't a string). `on_retry` is called before every retry.

        Raises ToolArgumentError (nothing was run), ToolFailed (it raised, took too long or returned something that is
        no JSON) and EnvironmentBroken when the tool says that the environment can't go on.
        """
        bound = self.bind(arguments)
        key = json.dumps(arguments, sort_keys=True) if self.options.cache else ""
        if (held := self.options.results.get(key)) is not None:
            return held
        left_s, pause_s, tries_left = self.timeout_s, _BACKOFF_S, self.options.retries
        while True:
            try:
                async with self.options.slot():
                    started = time.perf_counter()
                    result = await self._run(bound, left_s)
                self.options.keep(key, result)
                return result
            except ToolFailed as failed:
                left_s -= time.perf_counter() - started + pause_s
                if not tries_left or left_s <= 0 or not isinstance(failed.__cause__, Exception):
                    raise
            if on_retry:
                on_retry()
            await asyncio.sleep(pause_s)
            pause_s, tries_left = min(2 * pause_s, _MAX_BACKOFF_S), tries_left - 1
            bound = self.bind(arguments)  # anew: the try before may have changed its arguments

    async def _run(self, bound: dict[str, Any], limit_s: float) -> str:
        """One try."""
        try:
            result = await call_with_deadline(self.function, bound, limit_s)
            return result if isinstance(result, str) else dump_result(result)
        except DeadlineExceeded as error:
            raise ToolFailed(f"Error: timeout: '{self.name}' took longer than {self.timeout_s:g} s ({error})") from None
        except (EnvironmentBroken, ToolFailed, KeyboardInterrupt):
            raise
        except (Exception, SystemExit, GeneratorExit) as error:
            text = f"Error: {type(error).__name__}: {error}" if str(error) else f"Error: {type(error).__name__}"
            raise ToolFailed(text[:MAX_ERROR_CHARS]) from error


def dump_result(result: Any) -> str:
    """A non-string result as JSON text, non-ASCII kept. Raises TypeError for what has no JSON form."""
    return json.dumps(result, ensure_ascii=False, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    return TypeAdapter(type(value)).dump_python(value, mode="json")


def _read(f: Callable[..., Any], target: Callable[..., Any], tool: str) -> tuple[str, tuple[Parameter, ...]]:
    """(description, parameters)."""
    description, docs = _read_docstring(inspect.getdoc(target) or "")
    if not description:
        raise ConfigError(f"tool '{tool}' has no docstring; its first lines tell the agent what it does")
    return description, _read_parameters(f, target, tool, docs)


@functools.lru_cache(maxsize=256)
def _read_once(f: Callable[..., Any], bound: bool, tool: str, doc: str) -> tuple[str, tuple[Parameter, ...]]:
    """`_read`, kept: environments make their tools anew for every trajectory."""
    f = types.MethodType(f, object()) if bound else f
    return _read(f, f, tool)


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
            why = "must be a plain named one, so that it has a schema"
            raise ConfigError(f"tool '{tool}': parameter '{parameter}' {why}")
        name = parameter.name
        if name not in hints:
            raise ConfigError(f"tool '{tool}': parameter '{name}' has no type hint; write '{name}: str', say")
        parameters.append(_read_parameter(parameter, hints[name], tool, docs.get(name, "")))
    return tuple(parameters)


def _read_parameter(parameter: inspect.Parameter, hint: Any, tool: str, doc: str) -> Parameter:
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(hint)
        schema = adapter.json_schema()
        schema = simplify_schema(schema, schema.pop("$defs", {}), ())
    except Exception as error:
        why = f"has type {hint!r}, which has no JSON schema ({type(error).__name__})"
        use = "use str, int, float, bool, list, dict, Literal, Enum or a pydantic model"
        raise ConfigError(f"tool '{tool}': parameter '{parameter.name}' {why}; {use}") from None
    if doc:
        schema["description"] = doc
    required = parameter.default is inspect.Parameter.empty
    if not required:
        try:
            schema["default"] = json.loads(dump_result(parameter.default))
        except Exception:
            schema.pop("default", None)  # no JSON form: the agent just leaves it out
    is_text = takes_text(schema)
    return Parameter(name=parameter.name, adapter=adapter, schema=schema, required=required, is_text=is_text)


def takes_text(schema: Any) -> bool:
    """Whether a parameter of this schema takes a string."""
    options = [schema, *(schema.get("anyOf") or ())] if isinstance(schema, Mapping) else []
    kinds = [each.get("type") for each in options if isinstance(each, Mapping)]
    return any("string" in kind if isinstance(kind, list) else kind == "string" for kind in kinds)


def simplify_schema(node: Any, definitions: Mapping[str, Any], inside: tuple[str, ...]) -> Any:
    """References put in place and titles dropped: small models read the schema, so it has to be short."""
    if isinstance(node, list):
        return [simplify_schema(item, definitions, inside) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        key = re.sub(r"^#/(\$defs|definitions)/", "", str(node["$ref"]))
        if key in inside:
            raise RecursionError(f"{key} holds itself")
        rest = {k: v for k, v in node.items() if k != "$ref"}
        return simplify_schema({**definitions[key], **rest}, definitions, (*inside, key))
    simple: dict[str, Any] = {}
    for name, value in node.items():
        if name == "properties":
            simple[name] = {k: simplify_schema(v, definitions, inside) for k, v in value.items()}
        elif name in ("enum", "default", "const"):
            simple[name] = value
        elif name != "title":
            simple[name] = simplify_schema(value, definitions, inside)
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
    """(description, documentation by parameter) of a Google, NumPy or Sphinx docstring."""
    # Sphinx: (kind, type and name, body) after each other
    text, *fields = re.split(r"(?m)^:(\w+)[ \t]*([^:\n]*):", text)
    docs = {
        label.split()[-1]: " ".join(body.split())
        for kind, label, body in zip(fields[::3], fields[1::3], fields[2::3], strict=True)
        if kind in ("param", "parameter", "arg", "argument") and label.split()
    }
    titles = "Args|Arguments|Parameters|Other Parameters|Returns?|Yields?|Raises|Examples?|Notes?|See Also|References"
    sections = re.split(rf"(?m)^({titles})(:[ \t]*|[ \t]*\n-{{3,}}[ \t]*)$", text)
    for title, mark, body in zip(sections[1::3], sections[2::3], sections[3::3], strict=True):
        if title in ("Args", "Arguments", "Parameters", "Other Parameters"):
            docs.update(_read_args(inspect.cleandoc("\n" + body.strip("\n")), numpy="-" in mark))
    return " ".join(sections[0].split()), docs


def _read_args(body: str, numpy: bool) -> dict[str, str]:
    """Google: `name (type): text`; NumPy: `name, other : type`, the text indented below."""
    entry = r"([\w*, ]+?)\s*(?::.*)?()$" if numpy else r"\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)"
    docs: dict[str, str] = {}
    names: list[str] = []
    for line in body.splitlines():
        found = None if line.startswith((" ", "\t")) else re.match(entry, line)
        if found:
            names = [name.strip("* ") for name in found.group(1).split(",")]
            docs.update(dict.fromkeys(names, found.group(2).strip()))
        elif line.strip():
            docs.update({name: f"{docs[name]} {line.strip()}".strip() for name in names})
    return docs
