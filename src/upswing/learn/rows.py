"""What the learner trains on: rows, and the flat view of a batch's loss tokens.

Axis letters: B rows, T tokens of one row, N loss tokens of the batch in row order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from upswing.trajectory.types import BoolT, Branch, Float32T, Int16T, Int32T


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainRow:
    """One branch as a training sample. There is no padding anywhere: a token's value never decides its role."""

    tokens: Int32T
    """[T] everything the model saw."""
    loss_mask: BoolT
    """[T] True on the tokens that are trained. Position 0 never is: nothing predicts it."""
    advantage: float | Float32T = 0.0
    """One for the whole row, or [T] per token (read at loss tokens only). Unused by SFT."""
    engine_logprobs: Float32T | None = None
    """[T] the sampler's log-probs, NaN where there is none; None: nowhere."""
    turn: Int16T | None = None
    """[T] turn index; None: all of it is turn 0."""
    policy_version: Int32T | None = None
    """[T] weight version that sampled the token; None: unknown."""
    returns: Float32T | None = None
    """[T] what a value head should say before each loss token."""
    old_values: Float32T | None = None
    """[T] what it said when the batch was sampled."""
    group: int = 0
    """Rows of one group are packed together, so that what they have alike (a prompt, a call) is computed once."""
    trajectory: int = -1
    """Rows of one trajectory count as one sequence in the `seq-mean-*` aggregations; -1: the row is its own."""

    def __post_init__(self) -> None:
        length = len(self.tokens)
        names = ("loss_mask", "engine_logprobs", "turn", "policy_version", "returns", "old_values")
        arrays = {name: getattr(self, name) for name in names}
        if isinstance(self.advantage, np.ndarray):
            arrays["advantage"] = self.advantage
        for name, array in arrays.items():
            if array is not None and array.shape != (length,):
                raise ValueError(f"a row's {name} has shape {array.shape}, its tokens ({length},); they must be equal")
        if self.loss_mask.dtype != np.bool_:
            raise ValueError(f"a row's loss_mask has dtype {self.loss_mask.dtype}; it must be bool")

    @classmethod
    def from_branch(
        cls, branch: Branch, *, advantage: float | Float32T = 0.0, group: int = 0, trajectory: int = -1
    ) -> TrainRow:
        """The row that trains on everything the agent said in `branch` and on nothing else."""
        return cls(
            tokens=branch.tokens,
            loss_mask=branch.sampled,
            advantage=advantage,
            engine_logprobs=branch.engine_logprobs,
            turn=branch.turn,
            policy_version=branch.policy_version,
            group=group,
            trajectory=trajectory,
        )

    @cached_property
    def loss_positions(self) -> np.ndarray:
        """int64, ascending: where the row is trained."""
        positions = np.flatnonzero(self.loss_mask)
        return positions[positions > 0]


@dataclass(frozen=True, kw_only=True, eq=False)
class FlatBatch:
    """The loss tokens of a batch in row order, as tensors [N]. A token's index here is its *slot*."""

    row_N: torch.Tensor
    """int64: index of the row."""
    position_N: torch.Tensor
    """int64: position within the row."""
    sequence_N: torch.Tensor
    """int64: which trajectory, for aggregation."""
    advantages_N: torch.Tensor
    """float32."""
    engine_logprobs_N: torch.Tensor
    """float32, NaN where unknown."""
    turn_N: torch.Tensor
    """int64: turn index."""
    policy_version_N: torch.Tensor
    """int64: -1 where unknown."""
    returns_N: torch.Tensor
    """float32, NaN where unknown, as in `old_values_N`."""
    old_values_N: torch.Tensor

    @property
    def num_tokens(self) -> int:
        return len(self.row_N)

    def at(self, slot_M: torch.Tensor) -> FlatBatch:
        """The tokens at these slots (indices or a bool mask), in that order."""
        return FlatBatch(**{name: values_N[slot_M] for name, values_N in vars(self).items()})

    def to(self, device: torch.device) -> FlatBatch:
        """The same with its tensors on `device`."""
        return FlatBatch(**{name: values_N.to(device) for name, values_N in vars(self).items()})


def flatten(rows: Sequence[TrainRow]) -> FlatBatch:
    """Collect the loss tokens of `rows`.

    Values at masked positions are never read, NaN there included. Raises ValueError for an advantage at a loss token
    that isn't finite: a trajectory that could not be scored has advantage 0.
    """
    positions = [row.loss_positions for row in rows]
    counts = np.array([len(found) for found in positions], dtype=np.int64)
    position_N = np.concatenate([*positions, np.zeros(0, np.int64)])
    row_N = np.repeat(np.arange(len(rows), dtype=np.int64), counts)
    advantage_N = _column(rows, positions, "advantage", np.float32, 0.0)
    bad = np.flatnonzero(~np.isfinite(advantage_N))
    if len(bad):
        raise ValueError(f"row {row_N[bad[0]]} has advantage {advantage_N[bad[0]]}; it must be finite (unscored: 0)")
    return FlatBatch(
        row_N=torch.from_numpy(row_N),
        position_N=torch.from_numpy(position_N),
        sequence_N=torch.from_numpy(_sequence_ids(rows)[row_N]),
        advantages_N=torch.from_numpy(advantage_N),
        engine_logprobs_N=torch.from_numpy(_column(rows, positions, "engine_logprobs", np.float32, np.nan)),
        turn_N=torch.from_numpy(_column(rows, positions, "turn", np.int64, 0)),
        policy_version_N=torch.from_numpy(_column(rows, positions, "policy_version", np.int64, -1)),
        returns_N=torch.from_numpy(_column(rows, positions, "returns", np.float32, np.nan)),
        old_values_N=torch.from_numpy(_column(rows, positions, "old_values", np.float32, np.nan)),
    )


def _column(
    rows: Sequence[TrainRow], positions: Sequence[np.ndarray], name: str, dtype: Any, missing: float
) -> np.ndarray:
    """[N]: one of the rows' arrays at the loss tokens; a number stands for every token, None for `missing`."""
    values = [missing if (value := getattr(row, name)) is None else value for row in rows]
    if not any(isinstance(value, np.ndarray) for value in values):
        counts = np.array([len(found) for found in positions], np.int64)
        return np.repeat(np.array(values, np.float64), counts).astype(dtype)
    parts = [
        value[found] if isinstance(value, np.ndarray) else np.full(len(found), value)
        for value, found in zip(values, positions, strict=True)
    ]
    return np.concatenate([*parts, np.zeros(0)]).astype(dtype)


def at_loss(rows: Sequence[TrainRow], arrays: Sequence[np.ndarray]) -> np.ndarray:
    """[T] a row at the loss tokens, float32 [N]."""
    found = [array[row.loss_positions] for row, array in zip(rows, arrays, strict=True)]
    return np.concatenate([*found, np.zeros(0)]).astype(np.float32)


def spread(rows: Sequence[TrainRow], values_N: np.ndarray) -> list[Float32T]:
    """[N] in row order -> float32 [T] a row, NaN where nothing is trained."""
    out, start = [], 0
    for row in rows:
        at = row.loss_positions
        array = np.full(len(row.tokens), np.nan, np.float32)
        array[at] = values_N[start : start + len(at)]
        start += len(at)
        out.append(array)
    return out


def _sequence_ids(rows: Sequence[TrainRow]) -> np.ndarray:
    """int64 [B]: equal for rows of one trajectory; a row without one gets a number of its own."""
    return np.array([r.trajectory if r.trajectory >= 0 else -1 - i for i, r in enumerate(rows)], dtype=np.int64)
