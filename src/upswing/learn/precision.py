"""Where to compute, and in which precision."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch

from upswing.engine.weights import compute_dtype


def learner_device() -> torch.device:
    """Where this process computes updates: the current GPU if it has one, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


@cache
def native_bf16(device: str = "cpu") -> bool:
    """Whether the device multiplies bf16 in hardware; emulated bf16 is slower than fp32."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        return False
    return compute_dtype(torch.device(device)) is torch.bfloat16


def compute_context(device: str, dtype: torch.dtype | None) -> AbstractContextManager[object]:
    """Autocast to `dtype`, or nothing for None and float32."""
    if dtype is None or dtype == torch.float32:
        return nullcontext()
    # A forward uses each weight once: a cache would only hold all of them through one that recomputes.
    return torch.autocast(device_type=device, dtype=dtype, cache_enabled=False)
