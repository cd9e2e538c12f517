"""How many tokens' activations fit a memory budget.

What the backward pass needs is measured, not derived: it differs by architecture, precision, and what is frozen.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch.autograd.graph import saved_tensors_hooks

from upswing.learn.forward import packed_hidden
from upswing.learn.modes import mode
from upswing.learn.packing import pack
from upswing.learn.rows import TrainRow

PROBES = (16, 48)
"""Tokens of the two forwards that are compared, so that what doesn't grow with tokens (cast weights) drops out."""
RECOMPUTE_COST = 4 / 3
"""What recomputation multiplies work by: a forward more, where a backward is two."""


@dataclass(frozen=True, kw_only=True)
class Fits:
    """Tokens of a pack whose activations fit."""

    kept: float = math.inf
    """All kept for the backward pass."""
    recomputed: float = math.inf
    """Each layer's recomputed in it: the layers' inputs are kept, and one layer's activations at a time."""

    @classmethod
    def measure(cls, model: Any, autocast: Callable[[], AbstractContextManager[object]], budget_gb: float) -> Self:
        """Two short forwards of `model`; a GB is 10^9 bytes. Temporary tensors and the head's chunk come on top."""
        with mode(model, training=False), autocast():
            few, many = (_saved_bytes(model, count) for count in PROBES)
        kept = (many - few) / (PROBES[1] - PROBES[0])
        layers, hidden = model.config.num_hidden_layers, model.config.hidden_size
        return cls(kept=budget_gb * 1e9 / kept, recomputed=budget_gb * 1e9 / (kept / layers + 4 * layers * hidden))


def _saved_bytes(model: Any, num_tokens: int) -> int:
    """Of the storages that a forward of `num_tokens` tokens keeps for its backward, parameters left out."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    sizes: dict[int, int] = {}

    def count(tensor: torch.Tensor) -> torch.Tensor:
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    tokens = np.zeros(num_tokens + 1, np.int32)
    [one] = pack([TrainRow(tokens=tokens, loss_mask=np.arange(num_tokens + 1) == num_tokens)], num_tokens)
    with saved_tensors_hooks(count, lambda tensor: tensor):
        hidden_MH = packed_hidden(model, one)  # keeps what was saved alive, so that no address comes twice
    del hidden_MH
    return sum(size for address, size in sizes.items() if address not in parameters)
