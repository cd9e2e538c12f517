"""A function's hints and docstring are its schema, and bad calls get words instead of exceptions."""

import asyncio
import dataclasses
import enum
import functools
import threading
import time
from typing import Any, Literal, Optional

import pytest
from pydantic import BaseModel

from upswing.envs.tools import Tool, ToolArgumentError, ToolFailed, tool
from upswing.errors import ConfigError, EnvironmentBroken


class Unit(enum.Enum):
    METRE = "m"
    FOOT = "ft"


class Point(BaseModel):
    x: float
    title: str = ""


def search(query: str, k: int = 5, kind: Literal["city", "country"] = "city", near: Optional[str] = None) -> list[str]:  # noqa: UP045
    """Search the passages.

    Finds by words.

    Args:
        query: What to look for;
            may have several words.
        k (int): How many.

    Returns:
        Passages.
    """
    return [query] * k


def measure(w: float, nums: list[float], unit: Unit = Unit.METRE, extra: dict[str, int] | None = None) -> str:
    """Measure."""
    return f"{w} {nums} {unit.name} {extra}"


def test_schema_of_a_function():
    schema = Tool.from_function(search).schema
    assert schema == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the passages. Finds by words.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "What to look for; may have several words."},
                    "k": {"type": "integer", "description": "How many.", "default": 5},
                    "kind": {"type": "string", "enum": ["city", "country"], "default": "city"},
                    "near": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
                },
                "required": ["query"],
            },
        },
    }


def test_schema_of_enums_and_models_is_in_place():
    def place(point: Point, unit: Unit = Unit.FOOT) -> str:
        """Place."""
        return f"{point.x}{unit.name}"

    properties = Tool.from_function(place).schema["function"]["parameters"]["properties"]
    assert properties["unit"] == {"type": "string", "enum": ["m", "ft"], "default": "ft"}
    assert properties["point"]["properties"] == {"x": {"type": "number"}, "title": {"type": "string", "default": ""}}


async def test_enums_and_models_arrive_as_such():
    def place(point: Point, unit: Unit = Unit.FOOT) -> str:
        """Place."""
        return f"{point.x} {unit.name}"

    assert await Tool.from_function(place).call({"point": {"x": 1}, "unit": "m"}) == "1.0 METRE"


def untyped(query: str, k) -> str:
    """Doc."""
    return query


def star(query: str, *more: str) -> str:
    """Doc."""
    return query


def stars(query: str, **more: str) -> str:
    """Doc."""
    return query


def undocumented(query: str) -> str:
    return query


def odd(query: threading.Lock) -> str:
    """Doc."""
    return ""


class Tree(BaseModel):
    branches: list["Tree"] = []


def endless(tree: Tree) -> str:
    """Doc."""
    return ""


def unknown_hint(query: "Qurey") -> str:  # noqa: F821
    """Doc."""
    return ""


def positional(query: str, /) -> str:
    """Doc."""
    return query


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (untyped, ["'untyped'", "'k'", "type hint"]),
        (star, ["'star'", "more"]),
        (stars, ["'stars'", "more"]),
        (positional, ["'positional'", "query"]),
        (undocumented, ["'undocumented'", "docstring"]),
        (odd, ["'odd'", "'query'", "JSON schema"]),
        (endless, ["'endless'", "'tree'", "JSON schema"]),
        (unknown_hint, ["'unknown_hint'", "type hints can't be read", "Qurey"]),
        (lambda: "", ["<lambda>"]),
        (3, ["int"]),
    ],
)
def test_functions_that_can_not_be_tools(function, words):
    with pytest.raises(ConfigError) as caught:
        Tool.from_function(function)
    assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value)


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf"), "5", True])
def test_a_timeout_must_be_a_time(timeout_s):
    with pytest.raises(ConfigError, match="timeout_s"):
        Tool.from_function(search, timeout_s=timeout_s)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"qurey": "a"}, ["'qurey'", "did you mean 'query'", "missing argument 'query'", "search(query: string"]),
        ({"query": "a", "zzz": 1}, ["unknown argument 'zzz'"]),
        ({}, ["missing argument 'query'"]),
        ({"query": 3}, ["'query'", "string", "got 3"]),
        ({"query": "a", "k": "many"}, ["'k'", "integer"]),
        ({"query": "a", "k": 2.5}, ["'k'", "integer"]),
        ({"query": "a", "k": True}, ["'k'", "integer"]),
        ({"query": "a", "kind": "town"}, ["'kind'", "city"]),
        ({"query": None}, ["'query'", "null"]),
        ({"query": object()}, ["'query'"]),
    ],
)
async def test_wrong_arguments_are_named_and_nothing_runs(arguments, words):
    ran = []

    def spy(**kwargs: Any) -> str:
        ran.append(kwargs)
        return ""

    tool = Tool.from_function(search)
    object.__setattr__(tool, "function", spy)
    with pytest.raises(ToolArgumentError) as caught:
        await tool.call(arguments)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert not ran


@pytest.mark.parametrize(
    ("arguments", "fine"),
    [
        ({"w": 7, "nums": [1.0, 2.0]}, True),
        ({"w": 7, "nums": [1, 2]}, True),
        ({"nums": [1.0, 2.0], "w": 7, "unit": "m"}, True),
        ({"w": "7", "nums": [1.0]}, True),
        ({"w": 7, "nums": [1.0], "extra": {"a": 1}}, True),
        ({"w": 7, "nums": [1.0], "zzz": 1}, False),
        ({"w": True, "nums": [1.0]}, False),
        ({"w": 7, "nums": [True]}, False),
        ({"w": 7, "nums": 1.0}, False),
        ({"w": 7, "nums": [1.0], "unit": "mile"}, False),
        ({"w": 7, "nums": [1.0], "extra": {"a": False}}, False),
    ],
)
def test_lossless_conversions_only(arguments, fine):
    tool = Tool.from_function(measure)
    if fine:
        bound = tool.bind(arguments)
        assert bound["w"] == 7.0 and all(isinstance(n, float) for n in bound["nums"])
        assert bound.get("unit", Unit.METRE) is Unit.METRE
    else:
        with pytest.raises(ToolArgumentError):
            tool.bind(arguments)


@pytest.mark.parametrize(
    ("value", "text"),
    [("é", "é"), ({"a": "é", "b": [1, None]}, '{"a": "é", "b": [1, null]}'), (None, "null"), (3, "3"), ([], "[]")],
)
async def test_results_are_text(value, text):
    def give() -> Any:
        """Give."""
        return value

    assert await Tool.from_function(give).call({}) == text


async def test_models_in_results_are_json():
    def give() -> list[Point]:
        """Give."""
        return [Point(x=1)]

    assert await Tool.from_function(give).call({}) == '[{"x": 1.0, "title": ""}]'


@pytest.mark.parametrize(
    "make", [lambda: ValueError("boom"), lambda: SystemExit(3), lambda: KeyError("k"), RecursionError]
)
@pytest.mark.parametrize("is_async", [False, True])
async def test_a_tool_that_raises_says_what(make, is_async):
    def plain() -> str:
        """Raise."""
        raise make()

    async def waiting() -> str:
        """Raise."""
        raise make()

    with pytest.raises(ToolFailed) as caught:
        await Tool.from_function(waiting if is_async else plain).call({})
    assert str(caught.value).startswith(f"Error: {type(make()).__name__}")


async def test_a_broken_environment_is_passed_on():
    def broken() -> str:
        """Break."""
        raise EnvironmentBroken("the database is gone")

    with pytest.raises(EnvironmentBroken):
        await Tool.from_function(broken).call({})


async def test_a_result_without_json_is_the_tools_failure():
    def give() -> Any:
        """Give."""
        return threading.Lock()

    with pytest.raises(ToolFailed, match="Error: "):
        await Tool.from_function(give).call({})


async def test_tools_of_other_kinds():
    async def waiting(n: int) -> int:
        """Wait."""
        await asyncio.sleep(0)
        return n + 1

    class Counter:
        """Count."""

        def __call__(self, n: int) -> int:
            """Count up."""
            return n + 2

        def method(self, n: int) -> int:
            """Count by method."""
            return n + 3

    assert await Tool.from_function(waiting).call({"n": 1}) == "2"
    assert await Tool.from_function(Counter(), name="count").call({"n": 1}) == "3"
    method = Tool.from_function(Counter().method)
    assert method.name == "method" and await method.call({"n": 1}) == "4"
    partial = Tool.from_function(functools.partial(search, k=1), name="one")
    assert await partial.call({"query": "a"}) == '["a"]'


async def test_a_slow_plain_tool_times_out_without_blocking_others():
    def slow() -> str:
        """Sleep."""
        time.sleep(0.6)
        return ""

    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    ticking = asyncio.create_task(tick())
    started = time.perf_counter()
    with pytest.raises(ToolFailed, match="timeout"):
        await Tool.from_function(slow, timeout_s=0.2).call({})
    ticking.cancel()
    assert time.perf_counter() - started < 0.5 and ticks > 5


@dataclasses.dataclass
class Box:
    width: float
    labels: dict[str, int] = dataclasses.field(default_factory=dict)


async def test_dataclasses_are_schemas_and_arrive_as_such():
    def pack(box: Box, more: tuple[int, str] = (1, "a")) -> str:
        """Pack."""
        return f"{box.width} {box.labels} {more}"

    packer = Tool.from_function(pack)
    schema = packer.schema["function"]["parameters"]["properties"]["box"]
    assert (schema["required"], schema["properties"]["width"]) == (["width"], {"type": "number"})
    assert await packer.call({"box": {"width": "2", "labels": {"a": 1}}}) == "2.0 {'a': 1} (1, 'a')"
    with pytest.raises(ToolArgumentError, match="width"):
        await packer.call({"box": {"labels": {}}})


GOOGLE = """Look it up.

    Everywhere.

    Args:
        query (str): What to look for,
            as in: words.
        k: How many.

    Returns:
        k: not a parameter.
    """
NUMPY = """Look it up.

    Everywhere.

    Parameters
    ----------
    query : str
        What to look for,
        as in: words.
    k : int, optional
        How many.

    Returns
    -------
    k : list
        Not a parameter.
    """
SPHINX = """Look it up.

    Everywhere.

    :param str query: What to look for,
        as in: words.
    :param k: How many.
    :type k: int
    :returns: Not a parameter.
    """


@pytest.mark.parametrize("text", [GOOGLE, NUMPY, SPHINX])
def test_docstrings_of_three_styles_say_the_same(text):
    def look(query: str, k: int = 1) -> str:
        return query

    look.__doc__ = text
    function = Tool.from_function(look).schema["function"]
    docs = {name: schema["description"] for name, schema in function["parameters"]["properties"].items()}
    assert function["description"] == "Look it up. Everywhere."
    assert docs == {"query": "What to look for, as in: words.", "k": "How many."}


def flaky(failures: int, error: type[BaseException] = OSError, **options):
    """A tool that raises at its first calls -> (tool, its calls)."""
    calls = []

    @tool(**options)
    def ask(query: str = "") -> str:
        """Ask."""
        calls.append(query)
        if len(calls) <= failures:
            raise error("down")
        return f"answer {len(calls)}"

    return Tool.from_function(ask), calls


async def test_retries_are_for_exceptions_and_told():
    told = []
    works, calls = flaky(1, retries=2)
    assert await works.call({}, lambda: told.append(1)) == "answer 2" and len(calls) == 2 and len(told) == 1
    fails, calls = flaky(9, retries=1)
    with pytest.raises(ToolFailed, match="OSError: down"):
        await fails.call({})
    assert len(calls) == 2
    for error, raised in ((EnvironmentBroken, EnvironmentBroken), (SystemExit, ToolFailed)):
        never, calls = flaky(9, error, retries=3)
        with pytest.raises(raised):
            await never.call({})
        assert len(calls) == 1
    with pytest.raises(ToolArgumentError):
        await works.call({"wrong": 1})


async def test_a_retry_gets_the_arguments_as_the_agent_gave_them():
    seen = []

    @tool(retries=1)
    def drain(words: list[str]) -> str:
        """Drain."""
        seen.append(list(words))
        words.clear()
        if len(seen) == 1:
            raise OSError("down")
        return "done"

    assert await Tool.from_function(drain).call({"words": ["a", "b"]}) == "done"
    assert seen == [["a", "b"], ["a", "b"]]


async def test_retries_end_with_the_calls_time_and_a_timeout_is_not_retried():
    started = time.perf_counter()
    late, calls = flaky(99, retries=50, timeout_s=0.5)
    with pytest.raises(ToolFailed, match="OSError"):
        await late.call({})
    assert 1 < len(calls) < 5 and time.perf_counter() - started < 2

    hung = []

    @tool(retries=3, timeout_s=0.05)
    async def hang() -> str:
        """Hang."""
        hung.append(1)
        await asyncio.Event().wait()
        return ""

    with pytest.raises(ToolFailed, match=r"longer than 0\.05 s"):
        await Tool.from_function(hang, timeout_s=30).call({})
    assert len(hung) == 1


async def test_the_limit_holds_over_all_tools_made_of_a_function():
    running = most = 0

    @tool(max_concurrent=2, timeout_s=5)
    async def work(n: int) -> int:
        """Work."""
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return n

    results = await asyncio.gather(*(Tool.from_function(work).call({"n": n}) for n in range(9)))
    assert results == [str(n) for n in range(9)] and most == 2


async def test_only_successes_are_cached_by_arguments():
    ask, calls = flaky(1, cache=True)
    with pytest.raises(ToolFailed):
        await ask.call({"query": "a"})
    assert [await ask.call({"query": q}) for q in "aaba"] == ["answer 2", "answer 2", "answer 3", "answer 2"]
    assert calls == ["a", "a", "b"]


class Holder:
    @tool(cache=True)
    def ask(self) -> str:
        """Ask."""
        return ""

    @tool(timeout_s=3)
    def tell(self, what: str) -> str:
        """Tell."""
        return what


async def test_methods_take_options_but_no_cache():
    telling = Tool.from_function(Holder().tell)
    assert telling.timeout_s == 3 and await telling.call({"what": "x"}) == "x" and Holder().tell("y") == "y"
    with pytest.raises(ConfigError, match="'ask': cache is for plain functions"):
        Tool.from_function(Holder().ask)


@pytest.mark.parametrize(
    "options",
    [{"retries": -1}, {"retries": 1.5}, {"max_concurrent": 0}, {"cache": 1}, {"timeout_s": 0}, {"retries": True}],
)
def test_options_that_can_not_work(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        flaky(0, **options)


class Described:
    def search(self, query: str, kinds: list[Literal["a", "b"]]) -> str:
        """Find something."""
        return query


def test_a_method_may_inherit_its_docstring_and_its_schema_is_its_own():
    class Mine(Described):
        def search(self, query: str, kinds: list[Literal["a", "b"]]) -> str:
            return query

    for kind in (Described, Mine, Described):
        made = Tool.from_function(kind().search)
        assert made.description == "Find something."
        properties = made.schema["function"]["parameters"]["properties"]
        assert properties["kinds"]["items"]["enum"] == ["a", "b"]
        properties["kinds"]["items"]["enum"].remove("a")  # in this trajectory


def test_a_docstring_set_later_is_read():
    def later(x: int) -> int:
        """One."""
        return x

    assert Tool.from_function(later).description == "One."
    later.__doc__ = "Two."
    assert Tool.from_function(later).description == "Two."
