"""Which precision to compute in."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path

import torch


@cache
def native_bf16(device: str = "cpu") -> bool:
    """Whether the device multiplies bf16 in hardware; emulated bf16 is slower than fp32."""
    if device.startswith("cuda"):
        return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    try:
        flags = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return False  # not Linux: fp32 is always right
    return "amx_bf16" in flags or "avx512_bf16" in flags


def compute_context(device: str, dtype: torch.dtype | None) -> AbstractContextManager[object]:
    """Autocast to `dtype`, or nothing for None and float32."""
    if dtype is None or dtype == torch.float32:
        return nullcontext()
    return torch.autocast(device_type=device, dtype=dtype)
