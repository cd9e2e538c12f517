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
from upswing.learn.packing import Pack, pack
from upswing.learn.rows import TrainRow

PROBES = ((1, 16, 16), (1, 48, 48), (2, 36, 24))
"""Rows, tokens of each and how many they share, of the forwards compared: what doesn't grow with tokens (cast weights)
drops out between the first two, and the last, of as many tokens as the second, shows what copies take."""
RECOMPUTE_COST = 4 / 3
"""What recomputation multiplies work by: a forward more, where a backward is two."""


@dataclass(frozen=True, kw_only=True)
class Fits:
    """Tokens of a pack whose activations fit."""

    kept: float = math.inf
    """All kept for the backward pass."""
    recomputed: float = math.inf
    """Each layer's recomputed in it: the layers' inputs are kept, and one layer's activations at a time."""
    copied: float = 0.0
    """What a copy of one token's keys and values in all layers takes, in tokens whose activations are kept."""

    def recomputes(self, one: Pack) -> bool:
        """Whether all activations of `one` are more than fits."""
        return one.num_tokens + self.copied * one.num_copied > self.kept

    @classmethod
    def measure(cls, model: Any, autocast: Callable[[], AbstractContextManager[object]], budget_gb: float) -> Self:
        """Short training forwards of `model`, before it recomputes; a GB is 10^9 bytes.

        Temporary tensors and the head's chunk come on top.
        """
        probes = [_probe(*sizes) for sizes in PROBES]
        with torch.random.fork_rng(), mode(model, training=True), autocast():  # dropout keeps its masks
            few, many, shared = (_saved_bytes(model, one) for one in probes)
        kept = (many - few) / (probes[1].num_tokens - probes[0].num_tokens)
        layers, hidden = model.config.num_hidden_layers, model.config.hidden_size
        return cls(
            kept=budget_gb * 1e9 / kept,
            recomputed=budget_gb * 1e9 / (kept / layers + 4 * layers * hidden),
            copied=(shared - many) / probes[2].num_copied / kept,
        )


def _probe(rows: int, length: int, shared: int) -> Pack:
    trained = np.arange(length + 1) >= shared
    tokens = [np.where(trained, index, rows).astype(np.int32) for index in range(rows)]  # alike where they share
    [one] = pack([TrainRow(tokens=own, loss_mask=trained) for own in tokens], rows * length)
    return one


def _saved_bytes(model: Any, one: Pack) -> int:
    """Of the storages that a forward of `one` keeps for its backward, parameters left out."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    sizes: dict[int, int] = {}

    def count(tensor: torch.Tensor) -> torch.Tensor:
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(count, lambda tensor: tensor):
        hidden_MH = packed_hidden(model, one)  # keeps what was saved alive, so that no address comes twice
    del hidden_MH
    return sum(size for address, size in sizes.items() if address not in parameters)
