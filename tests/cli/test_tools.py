"""`upswing tools serve`: a real process, asked over HTTP."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner, Result

from upswing.cli.main import app

TOOLS = '''
def double(n: int) -> int:
    """Double a number."""
    return 2 * n
'''
CALL = '<tool_call>{"name": "double", "arguments": {"n": 21}}</tool_call>'


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(TOOLS)
    return tmp_path / "mine.py"


def serve(*args: str | Path) -> Result:
    return CliRunner().invoke(app, ["tools", "serve", *map(str, args)])


@pytest.mark.parametrize("kind", ["functions", "recipe"])
def test_tools_are_served_until_interrupted(kind: str, tools: Path, echo: Path):
    source = [f"{tools}:double"] if kind == "functions" else [str(echo), "env.args.word=oslo"]
    command = [sys.executable, "-m", "upswing.cli.main", "tools", "serve", *source, "--port", "0"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )
    try:
        assert process.stdout is not None
        lines = [process.stdout.readline().strip()]
        while lines[-1] and not lines[-1].startswith("http://127.0.0.1:"):
            lines.append(process.stdout.readline().strip())
        action = CALL if kind == "functions" else "hello"
        reply = httpx.post(lines[-1], json={"trajectory_ids": ["a"], "actions": [action]}).json()
        if kind == "functions":
            assert "double(n: integer): Double a number." in lines
            assert (reply["observations"], reply["dones"], reply["valids"]) == (["42"], [False], [True])
        else:  # Echo ends with any answer, worth 0.25
            assert (reply["observations"], reply["dones"]) == ([{"obs": "", "reward": 0.25}], [True])
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
        assert process.returncode == 130 and errors == "interrupted\n"
    finally:
        process.kill()
        process.wait()


def test_what_cannot_be_served_is_refused_on_one_line(tools: Path, echo: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        cases = {
            ("mine",): "'mine' is no recipe (.yaml) and no function",
            (f"{tools}:doubel",): "did you mean 'double'?",
            (f"{tools}:double", "--protocol", "hermse"): "did you mean 'hermes'?",
            (f"{tools}:double", "--port", str(taken.getsockname()[1])): "choose another --port",
            (str(echo), "env.args.wrd=x"): "did you mean 'word'?",
            (str(echo), "--protocol", "tags"): "set env.args.protocol",
            ("no.yaml",): "no.yaml",
        }
        for args, why in cases.items():
            result = serve(*args)
            assert result.exit_code == 2, (args, result.output)
            assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1 and why in result.stderr
