"""The critic of PPO, and what it shares with reward models: training a model with a scalar head.

Axis letters: B rows, T tokens of one row, N loss tokens of a batch, M loss tokens of a pack.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from upswing.algo.value import check_value_clip, explained_variance, value_loss
from upswing.learn.forward import check_trainable, packed_values
from upswing.learn.metrics import Tally
from upswing.learn.modes import mode
from upswing.learn.packing import Pack, pack
from upswing.learn.rows import TrainRow, at_loss, spread
from upswing.learn.trainer import Trainer
from upswing.trajectory.types import Float32T


class ScalarTrainer(Trainer):
    """Trains a model with a scalar head (`models.heads`), which is taken over, not copied."""

    def __init__(self, model: Any, **options: Any) -> None:
        """`options` are the Trainer's. Raises ConfigError for a model that the packed forward can't train."""
        check_trainable(model, scalar=True)
        super().__init__(model, **options)

    def forward(self, one: Pack) -> torch.Tensor:
        """The scalar [M] at the positions that predict the pack's loss tokens, with gradient."""
        with self.autocast():
            return packed_values(self.model, one)

    @torch.no_grad()
    def predict(self, rows: Sequence[TrainRow]) -> Float32T:
        """[N] in row order, in evaluation mode."""
        values_N = np.full(sum(len(row.loss_positions) for row in rows), np.nan, np.float32)
        with mode(self.model, training=False):
            for one in pack(rows, self.max_tokens_per_pack):
                values_N[one.slot_M.numpy()] = self.forward(one).float().cpu().numpy()
        return values_N


class Critic(ScalarTrainer):
    """V(state before a loss token), regressed on returns."""

    def values(self, rows: Sequence[TrainRow]) -> list[Float32T]:
        """Per row [T]: at each loss token the value of the state before it (what stands there doesn't enter it)."""
        return spread(rows, self.predict(rows))

    def value_update(
        self,
        rows: Sequence[TrainRow],
        returns: Sequence[Float32T],
        old_values: Sequence[Float32T],
        *,
        clip: float | None = None,
        updates_per_batch: int = 1,
        minibatches: int = 1,
    ) -> dict[str, float]:
        """`updates_per_batch` passes of `minibatches` steps on the mean squared error of the minibatch's loss tokens.

        `returns` and `old_values` (those of `values` before the update) are [T] a row, read at loss tokens only.
        Returns the update's metrics. Raises ValueError where one of them isn't finite, ConfigError for a bad `clip`.
        """
        check_value_clip(clip)
        returns_N, old_N = _at_loss(rows, returns, "returns"), _at_loss(rows, old_values, "old_values")
        by_row = list(zip(rows, _by_row(rows, returns_N), _by_row(rows, old_N), strict=True))
        with self.update() as tally:
            tally.add("returns", returns_N)
            tally.add("values", old_N)
            for _ in range(updates_per_batch):
                for chosen in self._minibatches(rows, minibatches):
                    part, part_returns, part_old = zip(*(by_row[i] for i in chosen), strict=True)
                    self._value_step(part, torch.cat(part_returns), torch.cat(part_old), clip, tally)
        return {**tally_values(tally), "explained_variance": explained_variance(old_N, returns_N)}

    def _value_step(
        self, rows: Sequence[TrainRow], returns_N: torch.Tensor, old_N: torch.Tensor, clip: float | None, tally: Tally
    ) -> None:
        returns_N, old_N = returns_N.to(self.device), old_N.to(self.device)

        def objective(one: Pack) -> torch.Tensor:
            slot_M = one.slot_M.to(self.device)
            loss_M, clipped_M = value_loss(self.forward(one), returns_N[slot_M], old_N[slot_M], clip=clip)
            tally.add("clipped", clipped_M)
            return loss_M.sum() / len(returns_N)

        self.step(self.packs(rows), objective, tally)

    def _minibatches(self, rows: Sequence[TrainRow], count: int) -> list[np.ndarray]:
        """Row indices: groups in random order, each kept together so that its prompt is computed once."""
        groups = np.array([row.group for row in rows], dtype=np.int64)
        order = np.argsort(self._rng.permutation(groups.max(initial=0) + 1)[groups], kind="stable")
        return [part for part in np.array_split(order, count) if len(part)]


def tally_values(tally: Tally) -> dict[str, float]:
    """An update's metrics as flat numbers; `loss` and `grad_norm` are NaN when no step was taken."""
    means = {name: tally.mean(name).value for name in ("loss", "grad_norm", *tally.means)}
    names = ("tokens", "tokens_recomputed", "steps", "steps_skipped", "nonfinite")
    counts = {f"num_{name}": float(tally.counts[name]) for name in names}
    return {**means, **counts, "lr": tally.lr, "seconds": tally.seconds}


def _by_row(rows: Sequence[TrainRow], values_N: torch.Tensor) -> list[torch.Tensor]:
    """Cut [N] into one piece a row."""
    return list(torch.split(values_N, [len(row.loss_positions) for row in rows])) if rows else []


def _at_loss(rows: Sequence[TrainRow], values: Sequence[Float32T], name: str) -> torch.Tensor:
    """Per-row [T] arrays at the loss tokens, float32 [N]."""
    found_N = at_loss(rows, values)
    bad = np.flatnonzero(~np.isfinite(found_N))
    if len(bad):
        owner = np.repeat(np.arange(len(rows)), [len(row.loss_positions) for row in rows])[bad[0]]
        raise ValueError(f"row {owner} has {name} that aren't finite at a loss token; leave unscored rows out")
    return torch.from_numpy(found_N.astype(np.float32))
