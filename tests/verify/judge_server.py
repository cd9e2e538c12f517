"""A real HTTP server in the part of an OpenAI-compatible judge, which behaves as a test says."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Asked:
    """One request as the judge sees it."""

    def __init__(self, body: dict[str, Any], headers: Any) -> None:
        self.body, self.headers, self.at = body, headers, time.monotonic()
        self.system, self.user = (message["content"] for message in body["messages"])
        self.nonce = re.findall(r"The nonce is ([0-9a-f]{8})\.", self.user)[-1]

    def part(self, name: str) -> str:
        """What stands between this request's tags."""
        (found,) = re.findall(rf"<{name}-{self.nonce}>\n(.*?)\n</{name}-{self.nonce}>", self.user, re.DOTALL)
        return found

    def verdict(self, **keys: Any) -> str:
        return json.dumps({"reason": "because", **keys, "nonce": self.nonce})


Behaviour = Callable[[Asked], Any]
"""-> the reply's text; a `message` and more of the choice as a dict; or (status, headers, raw body)."""


class JudgeServer:
    def __init__(self, behave: Behaviour) -> None:
        self.behave, self.asked, self.most, self._now = behave, list[Asked](), 0, 0
        self._lock, owner = threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                assert self.path == "/v1/chat/completions"
                self.answer(*owner.reply(Asked(body, self.headers)))

            def answer(self, status: int, headers: dict[str, str], raw: bytes) -> None:
                try:
                    self.send_response(status)
                    for key, value in {**headers, "Content-Length": str(len(raw))}.items():
                        self.send_header(key, value)
                    self.end_headers()
                    self.wfile.write(raw)
                except OSError:
                    pass  # the client has left

            def log_message(self, *args: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}/v1"
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def reply(self, asked: Asked) -> tuple[int, dict[str, str], bytes]:
        with self._lock:
            self.asked.append(asked)
            self._now += 1
            self.most = max(self.most, self._now)
        try:
            given = self.behave(asked)
        finally:
            with self._lock:
                self._now -= 1
        if isinstance(given, tuple):
            return given
        choice = {"message": {"content": given}, "finish_reason": "stop"} if isinstance(given, str) else given
        return 200, {"Content-Type": "application/json"}, json.dumps({"choices": [choice]}).encode()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
