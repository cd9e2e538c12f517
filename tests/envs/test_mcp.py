"""MCP tools against a real server (mcp_server.py), over stdio and over HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mcp.client import stdio
from mcp.server.mcpserver import MCPServer

from upswing.envs import AssistantMessage, ToolEnv, environment_factory, mcp
from upswing.envs.tools import ToolArgumentError, ToolFailed
from upswing.errors import ConfigError, EnvironmentBroken
from upswing.trajectory.types import Message, Task, ToolRecord

from . import mcp_server
from .serving import serving, until

SERVER = [sys.executable, mcp_server.__file__]
STDIO = {"command": SERVER}
TASK = Task(id="1", messages=(Message(role="user", content="Go."),))


@pytest.fixture(scope="module")
def http() -> Iterator[dict[str, Any]]:
    with serving(mcp_server.make().streamable_http_app()) as port:
        yield {"url": f"http://127.0.0.1:{port}/mcp"}


@pytest.fixture(params=["stdio", "http"])
def spec(request: pytest.FixtureRequest) -> dict[str, Any]:
    return STDIO if request.param == "stdio" else request.getfixturevalue("http")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little patience with a server that hangs."""
    monkeypatch.setattr(mcp, "ALIVE_S", 0.3)
    for name in ("PROCESS_TERMINATION_TIMEOUT", "FORCE_KILL_TIMEOUT"):
        monkeypatch.setattr(stdio, name, 0.1)


def gone(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    return False


def env_of(*specs: dict[str, Any], **options: Any) -> ToolEnv:
    return ToolEnv(mcp=specs, **options)


def call(env: ToolEnv, name: str, **arguments: Any) -> str:
    """A tool's result, in an event loop of its own."""
    return asyncio.run(env._tools[name].call(arguments))


def turn(env: ToolEnv, *calls: tuple[str, dict[str, Any]]) -> tuple[ToolRecord, ...]:
    """One turn of the agent's with these calls."""
    texts = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]

    async def play() -> tuple[ToolRecord, ...]:
        await env.reset(TASK, 0)
        said = "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)
        return (await env.step(AssistantMessage(content=said))).tool_records

    return asyncio.run(play())


def test_the_servers_tools_are_the_agents(spec: dict[str, Any]):
    env = env_of(spec)
    schemas = {s["function"]["name"]: s["function"] for s in asyncio.run(env.reset(TASK, 0)).tools}
    assert schemas["add"] == {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer", "default": 1}},
            "required": ["a"],
        },
    }
    size = schemas["box"]["parameters"]["properties"]["size"]  # the reference is put in place
    assert size["properties"]["unit"] == {"default": "cm", "enum": ["cm", "mm"], "type": "string"}
    records = turn(env, ("add", {"a": "2", "b": 3}), ("fail", {"reason": "no milk"}), ("add", {"a": 1, "x": 2}))
    assert [(r.result, r.ok) for r in records[:2]] == [
        ("5", True),
        ("Error: Error executing tool fail: no milk", False),
    ]
    assert records[2].result == (
        "Invalid call: add: unknown argument 'x'. Usage: add(a: integer, b: integer = 1)"
    )  # never sent
    assert env.state() == {"tool_calls": 3, "invalid_calls": 1, "tool_errors": 1, "tool_retries": 0}


def test_results_of_every_kind_become_text(spec: dict[str, Any]):
    env = env_of(spec)
    text = 'Ünïcødé 漢字 🎉 "quotes"\n</tool_call>\u2028'
    assert call(env, "echo", text=text) == text
    assert call(env, "parts") == "one\n[image, image/png: not shown]\ntwo"
    assert json.loads(call(env, "box", kind="open", size={"width": 3}, tags=["a", "b"])) == {
        "kind": "open",
        "size": "3 cm",
        "tags": "a,b",
    }
    assert call(env, "large", size=500_000) == "é" * 500_000
    (record,) = turn(env_of(spec, max_result_chars=10), ("large", {"size": 500_000}))
    assert record.result == "é" * 10 + "\n[cut: 499990 more characters]"


@pytest.mark.parametrize(
    ("name", "arguments", "why"),
    [
        ("add", {"a": 1.5}, "argument 'a': expected a valid integer"),
        ("add", {"a": True}, "argument 'a': expected a valid integer, got true"),
        ("add", {}, "missing argument 'a'"),
        ("box", {"kind": "ajar", "size": {"width": 1}}, "kind: 'ajar' is not one of ['open', 'shut']"),
        ("box", {"kind": "open", "size": {"width": "1"}}, "size.width: '1' is not of type 'integer'"),
        ("box", {"kind": "open", "size": {}}, "size: 'width' is a required property"),
    ],
)
def test_wrong_arguments_are_the_agents_fault_and_never_sent(name: str, arguments: dict[str, Any], why: str):
    with pytest.raises(ToolArgumentError, match="Usage: ") as caught:
        env_of(STDIO)._tools[name].bind(arguments)
    assert why in str(caught.value)


def test_a_hung_tool_is_told_to_the_agent_and_the_server_goes_on(spec: dict[str, Any]):
    env, before = env_of(spec, tool_timeout_s=0.3), call(env_of(spec), "pid")
    started = time.monotonic()
    (record,) = turn(env, ("wait", {"seconds": 60}))
    assert (record.result, record.ok) == ("Error: timeout: 'wait' took longer than 0.3 s", False)
    assert time.monotonic() - started < 3
    assert call(env, "pid") == before


def test_sixteen_calls_at_once_take_as_long_as_one(spec: dict[str, Any]):
    env = env_of(spec)
    call(env, "pid")

    async def all_at_once() -> list[str]:
        return await asyncio.gather(*(env._tools["wait"].call({"seconds": 0.5 + i / 1000}) for i in range(16)))

    started = time.monotonic()
    assert asyncio.run(all_at_once()) == [f"waited {0.5 + i / 1000}" for i in range(16)]
    assert time.monotonic() - started < 3  # 8 s one after the other


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("crash", "broke in 'crash': Connection closed; its last words: disk on fire"),
        ("freeze", "hangs: 'freeze' took too long and the server answers nothing else either"),
    ],
)
def test_a_dead_server_breaks_the_trajectory_and_is_replaced(name: str, why: str, quick: None):
    env = env_of(STDIO, tool_timeout_s=0.3)
    before = call(env, "pid")
    with pytest.raises(EnvironmentBroken) as caught:
        turn(env, (name, {}))
    assert why in str(caught.value)
    after = call(env_of(STDIO), "pid")
    assert after != before
    until(lambda: gone(before))


def test_a_trajectorys_own_server_keeps_its_state_and_ends_with_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MY_TOKEN", "tok-1")  # keeps secrets out of recipes
    chosen = {"include": ["count", "pid", "crash", "secret"], "env": {"TEST_SECRET": "a ${MY_TOKEN} b"}}
    make = environment_factory("tool", {"mcp": [{**STDIO, **chosen, "per_trajectory": True}]})
    one, other = make(), make()
    assert isinstance(one, ToolEnv) and isinstance(other, ToolEnv)
    assert [call(one, "count"), call(one, "count"), call(other, "count")] == ["1", "2", "1"]
    assert call(one, "secret") == "a tok-1 b"
    pids = call(one, "pid"), call(other, "pid")
    asyncio.run(one.close())
    assert gone(pids[0]) and not gone(pids[1])
    with pytest.raises(EnvironmentBroken, match="broke in 'crash'"):
        call(other, "crash")
    with pytest.raises(EnvironmentBroken, match="what it kept for the trajectory"):
        call(other, "count")  # a new server would have forgotten
    asyncio.run(other.close())


def test_include_exclude_and_prefix_choose_the_tools():
    env = env_of({**STDIO, "include": ["add", "echo"], "exclude": ["echo"], "prefix": "math_"})
    assert list(env._tools) == ["math_add"] and call(env, "math_add", a=1) == "2"


def add(a: int) -> int:
    """Add."""
    return a


@pytest.mark.parametrize(
    ("specs", "words"),
    [
        ([{"command": ["no-such-program-x"]}], ["'no-such-program-x' can't be started", "installed"]),
        ([{"command": [sys.executable, "-c", "raise SystemExit('no API key')"]}], ["last words: no API key"]),
        ([{"command": ["cat"]}], ["MCP server 'cat' ended or refused before it told its tools"]),
        ([{"url": "http://127.0.0.1:9/mcp"}], ["can't be used (ConnectError", "is it running"]),
        ([{**STDIO, "include": ["ad"]}], ["no tool 'ad'; did you mean 'add'?"]),
        ([{**STDIO, "exclude": ["nope"]}], ["no tool 'nope'", "there: add, echo"]),
        ([{**STDIO, "include": ["add"], "exclude": ["add"]}], ["no tools left by include and exclude"]),
        ([{**STDIO, "prefix": "1_"}], ["tool name '1_add' can't be used"]),
        ([STDIO, STDIO], ["two tools are called 'add'", "set a prefix"]),
        ([{"comand": ["x"]}], ["mcp[0]: comand: there is no such key", "did you mean 'command'?"]),
        ([{"command": "python x.py"}], ["mcp[0]: command: got 'python x.py'; allowed: a valid list"]),
        ([{}], ["needs command: [program, argument, …] or url"]),
        ([{**STDIO, "url": "http://x"}], ["one of the two"]),
        ([{"url": "localhost:80"}], ["must start with http://"]),
        ([{**STDIO, "headers": {"a": "b"}}], ["headers has no effect with command"]),
        ([{**STDIO, "env": {"A": "${NOT_SET_ANYWHERE}"}}], ["NOT_SET_ANYWHERE is not set"]),
        (STDIO, ["mcp: got {", "allowed: a valid list"]),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_before_a_model_loads(specs: Any, words: list[str]):
    with pytest.raises(ConfigError) as caught:
        environment_factory("tool", {"mcp": specs})
    for word in words:
        assert word in str(caught.value)


def test_a_server_without_tools_is_refused():
    with serving(MCPServer("empty").streamable_http_app()) as port, pytest.raises(ConfigError, match="has no tools"):
        env_of({"url": f"http://127.0.0.1:{port}/mcp"})


def test_a_server_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch, quick: None):
    monkeypatch.setattr(mcp, "CONNECT_S", 0.5)
    with pytest.raises(ConfigError, match=r"did not tell its tools within 0\.5 s"):
        env_of({"command": ["sleep", "60"]})


def test_a_clash_with_a_function_of_the_users_is_refused():
    with pytest.raises(ConfigError, match=r"two tools are called 'add'; rename one .of an MCP server: exclude it"):
        ToolEnv([add], mcp=[STDIO])


def test_servers_end_with_the_program(tmp_path: Path):
    program = tmp_path / "program.py"
    program.write_text(
        "import asyncio\nfrom upswing.envs import ToolEnv\n"
        f"env = ToolEnv(mcp=[{STDIO!r}])\nprint(asyncio.run(env._tools['pid'].call({{}})))\n"
    )
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr == ""
    assert gone(done.stdout.strip())


def test_an_http_server_that_went_away_breaks_the_trajectory_until_it_is_back():
    with serving(mcp_server.make().streamable_http_app()) as port:
        env = env_of({"url": f"http://127.0.0.1:{port}/mcp"})
        assert call(env, "add", a=1) == "2"
    for _ in range(2):
        with pytest.raises(EnvironmentBroken):
            call(env, "add", a=1)
    with serving(mcp_server.make().streamable_http_app(), port):
        assert call(env, "add", a=1) == "2"


def test_a_failing_tool_is_no_broken_environment(spec: dict[str, Any]):
    with pytest.raises(ToolFailed, match="no milk"):
        call(env_of(spec), "fail", reason="no milk")
