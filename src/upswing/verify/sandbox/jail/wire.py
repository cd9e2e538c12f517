"""Messages over a stream socket: a JSON header, then raw parts. Nothing is ever unpickled."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

_SIZE = struct.Struct("!I")
_MOST_HEADER = 1 << 24


def send(sock: socket.socket, header: dict[str, Any], parts: Sequence[bytes | bytearray] = ()) -> None:
    text = json.dumps({**header, "sizes": [len(part) for part in parts]}).encode()
    sock.sendall(b"".join((_SIZE.pack(len(text)), text, *parts)))


def receive(
    sock: socket.socket, most: int = 1 << 31, timeout_s: float | None = None
) -> tuple[dict[str, Any], list[bytes]]:
    """Raises EOFError when the other side is gone, TimeoutError, and ValueError above `most` bytes."""
    end = None if timeout_s is None else time.monotonic() + timeout_s
    size = _SIZE.unpack(_read(sock, _SIZE.size, end))[0]
    if size > _MOST_HEADER:
        raise ValueError(f"a header of {size} bytes")
    header = json.loads(_read(sock, size, end))
    sizes = [int(one) for one in header.pop("sizes")]
    if min(sizes, default=0) < 0 or sum(sizes) > most:
        raise ValueError(f"parts of {sum(sizes)} bytes, more than {most}")
    return header, [_read(sock, one, end) for one in sizes]


def _read(sock: socket.socket, size: int, end: float | None) -> bytes:
    held = bytearray(size)
    left = memoryview(held)
    while left:
        if end is not None:
            sock.settimeout(max(end - time.monotonic(), 1e-3))
        got = sock.recv_into(left)
        if not got:
            raise EOFError("the other side is gone")
        left = left[got:]
    return bytes(held)
