"""The `http` verifier: what it sends, what it takes for a score, and that a failure is never a zero."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from upswing.errors import ConfigError
from upswing.trajectory.types import Message, Outcome, StopReason, Task, ToolCall, ToolRecord
from upswing.verify.base import Episode
from upswing.verify.functions import verifier_from

CALL = ToolCall(name="look", arguments={"q": 1}, id="call_0_0")
EPISODE = Episode(
    task=Task(id="t", messages=(Message(role="user", content="Né?"),), gold=("7",)),
    messages=(Message(role="assistant", content="7"),),
    answer="7",
    gold=("7",),
    data={"a": [1]},
    tool_records=(ToolRecord(call=CALL, result="7", ok=True, turn=0),),
    state={},
    outcome=Outcome.COMPLETED,
    stop_reason=StopReason.ANSWERED,
    num_turns=1,
)


class Answering(BaseHTTPRequestHandler):
    reply: Any = ""
    status = 200
    delay_s = 0.0
    seen: dict[str, Any]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        Answering.seen = {**json.loads(body), "key": self.headers.get("Authorization")}
        time.sleep(self.delay_s)
        self.send_response(self.status)
        self.send_header("Location", "/elsewhere")
        self.end_headers()
        self.wfile.write(self.reply.encode())

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"score": 1}')

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Answering) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/score"
        server.shutdown()


async def score(url: str, monkeypatch: pytest.MonkeyPatch, reply: str, status: int = 200, **args: Any) -> Any:
    monkeypatch.setattr(Answering, "reply", reply)
    monkeypatch.setattr(Answering, "status", status)
    return await verifier_from("http", {"url": url, **args})(EPISODE)


async def test_the_whole_episode_is_sent_and_the_score_taken(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reply = '{"score": 0.25, "components": {"style": 1, "facts": null}, "reason": "short"}'
    monkeypatch.setenv("MY_KEY", "k")
    found = await score(url, monkeypatch, reply, headers={"Authorization": "Bearer ${MY_KEY}"})
    assert (found.value, found.components, found.reason) == (0.25, {"style": 1.0, "facts": None}, "short")
    seen = Answering.seen
    assert seen["task"]["messages"] == [{"role": "user", "content": "Né?", "name": None}]
    assert (seen["answer"], seen["gold"], seen["outcome"], seen["key"]) == ("7", ["7"], "completed", "Bearer k")
    assert seen["tool_records"][0]["call"] == {"name": "look", "arguments": {"q": 1}, "id": "call_0_0"}


@pytest.mark.parametrize(
    ("reply", "status"),
    [
        ('{"score": null}', 200),
        ('{"score": "1"}', 200),
        ('{"score": true}', 200),
        ('{"score": NaN}', 200),
        ('{"value": 1}', 200),
        ("1", 200),
        ("oops", 200),
        ('{"score": 1}', 500),
        ('{"score": 1}', 302),
        ('{"score": 1e999}', 200),
        (f'{{"score": {10**400}}}', 200),
        ('{"score": 1, "components": [1]}', 200),
    ],
)
async def test_anything_else_is_not_scored(url: str, monkeypatch: pytest.MonkeyPatch, reply: str, status: int) -> None:
    assert (await score(url, monkeypatch, reply, status)).value is None


async def test_neither_is_a_server_that_hangs_or_is_not_there(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Answering, "delay_s", 1.0)
    started = time.perf_counter()
    late = await score(url, monkeypatch, '{"score": 1}', timeout_s=0.2)
    assert late.value is None and time.perf_counter() - started < 0.9
    gone = await verifier_from("http", {"url": "http://127.0.0.1:9/"})(EPISODE)
    assert gone.value is None and "connect" in gone.reason.lower()


@pytest.mark.parametrize(
    "args",
    [
        {"url": "ftp://x"},
        {"url": 3},
        {"url": "http://x", "timeout_s": 0},
        {},
        {"url": "http://x", "headers": {"A": "${NO_SUCH_KEY}"}},
    ],
)
def test_wrong_arguments_are_said(args: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        verifier_from("http", args)
