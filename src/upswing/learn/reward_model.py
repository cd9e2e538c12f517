"""Reward models: one score for a whole row, read at its last token, learned from pairs of rows.

Axis letters: B rows or pairs, M rows of a pack.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from upswing.algo.preference import preferred
from upswing.algo.reward_model import bradley_terry, length_correlation, pair_accuracy, pair_ece
from upswing.learn.critic import ScalarTrainer, tally_values
from upswing.learn.packing import Pack
from upswing.learn.rows import TrainRow
from upswing.models.heads import load_scalar_model
from upswing.trajectory.types import Float32T, Outcome, Trajectory

Pair = tuple[TrainRow, TrainRow]
"""(chosen, rejected)."""


class RewardModel(ScalarTrainer):
    """Scores rows. Which tokens a row trains doesn't matter here: all of it is read, to its last token."""

    def scores(self, rows: Sequence[TrainRow]) -> Float32T:
        """[B]: the scalar at each row's last token, whatever token that is. Raises ValueError for an empty row."""
        return self.predict([_whole(row) for row in rows])

    def pair_update(
        self, pairs: Sequence[Pair], *, margins: Sequence[float] | None = None, centring: float = 0.01
    ) -> dict[str, float]:
        """One optimizer step on the mean Bradley-Terry loss of `pairs` -> the update's metrics.

        `margins`: one a pair, 0 by default. A pair is never cut, since its gradient needs both scores: one longer than
        `max_tokens_per_pack` is a pack of its own. Raises ValueError for empty rows or a wrong number of margins.
        """
        if margins is not None and len(margins) != len(pairs):
            raise ValueError(f"got {len(margins)} margins for {len(pairs)} pairs; give one a pair")
        rows = [_whole(row, group=index) for index, pair in enumerate(pairs) for row in pair]
        with self.update() as tally:

            def objective(one: Pack) -> torch.Tensor:
                # A row's slot is its index in `rows`: 2 i for the chosen row of pair i, 2 i + 1 for its rejected row.
                scores_M = self.forward(one)[one.slot_M.argsort().to(self.device)]
                chosen_B, rejected_B = scores_M[0::2], scores_M[1::2]
                pair_B = one.slot_M.sort().values[0::2] // 2
                margins_B = None if margins is None else torch.tensor(margins).to(scores_M)[pair_B.to(self.device)]
                tally.add("accuracy", preferred(chosen_B - rejected_B))
                tally.add("score", scores_M)
                return bradley_terry(chosen_B, rejected_B, margins_B=margins_B, centring=centring).sum() / len(pairs)

            self.step(self.packs(rows, keep_groups=True), objective, tally)
        return tally_values(tally)

    def pair_metrics(self, pairs: Sequence[Pair], *, margins: Sequence[float] | None = None) -> dict[str, float]:
        """Held-out `loss` (without centring), `accuracy`, `ece` and `length_correlation`, in evaluation mode.

        A row's length for the last one is the number of its loss tokens: what the agent said.
        """
        rows = [row for pair in pairs for row in pair]
        scores_B = torch.from_numpy(self.scores(rows))
        chosen_B, rejected_B = scores_B[0::2], scores_B[1::2]
        margins_B = None if margins is None else torch.tensor(margins)
        loss_B = bradley_terry(chosen_B, rejected_B, margins_B=margins_B)
        return {
            "loss": float(loss_B.double().mean()),
            "accuracy": pair_accuracy(chosen_B, rejected_B),
            "ece": pair_ece(chosen_B, rejected_B),
            "length_correlation": length_correlation(scores_B, torch.tensor([r.loss_mask.sum() for r in rows])),
        }


def load_reward_model(spec: str | Path, **options: Any) -> RewardModel:
    """A saved reward model for scoring only: no gradients, no optimizer state. `options` are the Trainer's.

    Raises ConfigError as `load_scalar_model` does.
    """
    return RewardModel(load_scalar_model(spec), lr=0.0, **options)


def score_trajectories(model: RewardModel, trajectories: Sequence[Trajectory]) -> list[float | None]:
    """The score of each trajectory's last branch, exact tokens; None: it can't be scored, which is never 0.

    That is so for errored and cancelled ones, and where the model's score isn't finite.
    """
    ended = [t.outcome not in (Outcome.ERRORED, Outcome.CANCELLED) and len(t.branches) > 0 for t in trajectories]
    scored = [(number, t) for number, t in enumerate(trajectories) if ended[number]]
    groups = {task: index for index, task in enumerate(dict.fromkeys(t.task.id for _, t in scored))}
    rows = [TrainRow.from_branch(t.branches[-1], group=groups[t.task.id]) for _, t in scored]
    out: list[float | None] = [None] * len(trajectories)
    for (number, _), score in zip(scored, model.scores(rows), strict=True):
        out[number] = float(score) if math.isfinite(score) else None
    return out


def _whole(row: TrainRow, group: int | None = None) -> TrainRow:
    """A row whose one loss token comes after all of its tokens, so that their last one predicts it.

    The packer cuts a row before its last loss token: the added one is never seen by the model, so its value is free.
    """
    if not len(row.tokens):
        raise ValueError("a row without tokens has no score; leave it out")
    tokens = np.append(row.tokens, np.int32(0))
    last = np.arange(len(tokens)) == len(row.tokens)
    return TrainRow(tokens=tokens, loss_mask=last, group=row.group if group is None else group)
