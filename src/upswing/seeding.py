"""Seeds derived from what they are for, so that a resumed run draws what an uninterrupted one would have drawn."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: object) -> int:
    """A 63-bit seed from any printable parts, such as `derive_seed(run_seed, 'rl', step, task.id, index)`."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
