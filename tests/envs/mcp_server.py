"""A real MCP server with every behaviour that tests need: `python mcp_server.py` serves it over stdio."""

from __future__ import annotations

import os
import sys
import time
from typing import Literal

import anyio
from mcp.server.mcpserver import MCPServer
from mcp_types import ImageContent, TextContent
from pydantic import BaseModel

calls = 0


class Size(BaseModel):
    width: int
    unit: Literal["cm", "mm"] = "cm"


def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


def echo(text: str) -> str:
    """Say it again."""
    return text


def fail(reason: str) -> str:
    """Fail by itself."""
    raise ValueError(reason)


async def wait(seconds: float) -> str:
    """Wait."""
    await anyio.sleep(seconds)
    return f"waited {seconds}"


async def freeze() -> str:
    """Block the whole server."""
    time.sleep(60)
    return "never"


def crash() -> str:
    """End the server."""
    print("disk on fire", file=sys.stderr, flush=True)
    os._exit(3)


def large(size: int) -> str:
    """Return a long text."""
    return "é" * size


def parts() -> list[TextContent | ImageContent]:
    """Return a text and an image."""
    return [TextContent(text="one"), ImageContent(data="aGk=", mime_type="image/png"), TextContent(text="two")]


def box(kind: Literal["open", "shut"], size: Size, tags: list[str] | None = None) -> dict[str, str]:
    """Describe a box."""
    return {"kind": kind, "size": f"{size.width} {size.unit}", "tags": ",".join(tags or [])}


def count() -> int:
    """Count the calls of this server."""
    global calls
    calls += 1
    return calls


def pid() -> str:
    """The server's process."""
    return str(os.getpid())


def secret() -> str:
    """What the environment variable holds."""
    return os.environ.get("TEST_SECRET", "none")


def make() -> MCPServer:
    server = MCPServer("test", log_level="ERROR")
    for function in (add, echo, fail, wait, freeze, crash, large, parts, box, count, pid, secret):
        server.tool()(function)
    return server


if __name__ == "__main__":
    make().run()
