"""Reward models: one score for a whole row, read at its last token, learned from pairs of rows; or chances of success,
read where turns end, learned from labels.

Axis letters: B rows or pairs, M rows or labels of a pack, N labels, T tokens of a row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from upswing.algo.preference import preferred
from upswing.algo.reward_model import (
    bradley_terry,
    label_figures,
    label_hits,
    length_correlation,
    pair_accuracy,
    pair_ece,
)
from upswing.learn.critic import ScalarTrainer, tally_values
from upswing.learn.packing import Pack
from upswing.learn.precision import learner_device
from upswing.learn.rows import TrainRow, at_loss, flatten
from upswing.models.heads import load_scalar_model
from upswing.trajectory.types import Float32T, Int32T, Outcome, Trajectory

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

    def label_update(self, rows: Sequence[TrainRow]) -> dict[str, float]:
        """One optimizer step on the mean binary cross-entropy of the rows' loss tokens -> the update's metrics.

        What stands before a loss token should say `returns` there, a label from 0 to 1. Raises ValueError for others.
        """
        labels_N = _labels(rows).to(self.device)
        with self.update() as tally:

            def objective(one: Pack) -> torch.Tensor:
                logits_M, labels_M = self.forward(one), labels_N[one.slot_M.to(self.device)]
                tally.add("accuracy", label_hits(logits_M, labels_M))
                return F.binary_cross_entropy_with_logits(logits_M, labels_M, reduction="sum") / len(labels_N)

            self.step(self.packs(rows), objective, tally)
        return tally_values(tally)

    def label_metrics(self, rows: Sequence[TrainRow]) -> dict[str, float]:
        """`label_figures` of held-out rows, in evaluation mode."""
        return label_figures(torch.from_numpy(self.predict(rows)), _labels(rows))


def load_reward_model(spec: str | Path, **options: Any) -> RewardModel:
    """A saved reward model for scoring only: no gradients, no optimizer state. `options` are the Trainer's.

    Raises ConfigError as `load_scalar_model` does.
    """
    model: Any = load_scalar_model(spec)
    return RewardModel(model.to(learner_device()), lr=0.0, **options)


def score_trajectories(model: RewardModel, trajectories: Sequence[Trajectory]) -> list[float | None]:
    """The score of each trajectory's last branch, exact tokens; None: it can't be scored, which is never 0.

    That is so for errored and cancelled ones, and where the model's score isn't finite.
    """
    ended = _ended(trajectories)
    rows = [TrainRow.from_branch(trajectories[number].branches[-1], group=group) for number, group in ended.items()]
    out: list[float | None] = [None] * len(trajectories)
    for number, score in zip(ended, model.scores(rows), strict=True):
        out[number] = float(score) if math.isfinite(score) else None
    return out


def score_steps(model: RewardModel, trajectories: Sequence[Trajectory]) -> list[Float32T]:
    """The chances of success [1 + turns] of each: before its first turn, then at each turn's last token.

    Empty for an errored or cancelled one; NaN where there is no finite one.
    """
    out = [np.zeros(0, np.float32) for _ in trajectories]
    rows = []
    for number, group in _ended(trajectories).items():
        out[number] = np.full(1 + trajectories[number].num_turns, np.nan, np.float32)
        rows += step_rows(trajectories[number], group=group, number=number)
    flat, chances_N = flatten(rows), torch.from_numpy(model.predict(rows)).sigmoid()
    for number, step, chance in zip(*(x.tolist() for x in (flat.sequence_N, flat.turn_N, chances_N)), strict=True):
        out[number][step] = chance
    return out


def step_rows(
    trajectory: Trajectory, labels: Mapping[int, float] | None = None, *, group: int = 0, number: int = -1
) -> list[TrainRow]:
    """A row a branch, read at the steps that it holds: step 0 is before the first turn, step t + 1 the last token that
    turn t sampled. `labels`: of the steps to read, all by default. A row's `turn` is the step, `returns` its label."""
    rows = []
    for branch in trajectory.branches:
        sampled = np.flatnonzero(branch.sampled)
        # The loss token of a step comes after the token that it is read at.
        places = {int(turn) + 1: int(at) + 1 for turn, at in zip(branch.turn[sampled], sampled, strict=True)}
        if 1 in places:
            places[0] = int(sampled[0])
        rows.append(_read_at(branch.tokens, places, labels, group, number))
    return [row for row in rows if row.loss_mask.any()]


def _read_at(
    tokens: Int32T, places: Mapping[int, int], labels: Mapping[int, float] | None, group: int, number: int
) -> TrainRow:
    size = len(tokens) + 1  # one more than the row has, as in `_whole`
    mask, steps, returns = np.zeros(size, bool), np.zeros(size, np.int16), np.full(size, np.nan, np.float32)
    for step, at in places.items():
        if labels is None or step in labels:
            mask[at], steps[at], returns[at] = True, step, math.nan if labels is None else labels[step]
    tokens = np.append(tokens, np.int32(0))
    return TrainRow(tokens=tokens, loss_mask=mask, turn=steps, returns=returns, group=group, trajectory=number)


def _ended(trajectories: Sequence[Trajectory]) -> dict[int, int]:
    """Number of each trajectory that can be scored -> the group of its task."""
    unplayed = (Outcome.ERRORED, Outcome.CANCELLED)
    tasks = {number: t.task.id for number, t in enumerate(trajectories) if t.outcome not in unplayed and t.branches}
    groups = {task: index for index, task in enumerate(dict.fromkeys(tasks.values()))}
    return {number: groups[task] for number, task in tasks.items()}


def _labels(rows: Sequence[TrainRow]) -> torch.Tensor:
    """float32 [N]. Raises ValueError for what isn't from 0 to 1."""
    labels_N = at_loss(rows, [np.full(len(r.tokens), np.nan) if r.returns is None else r.returns for r in rows])
    if not ((labels_N >= 0) & (labels_N <= 1)).all():
        raise ValueError("a label isn't a number from 0 to 1; leave steps without one out of the loss mask")
    return torch.from_numpy(labels_N)


def _whole(row: TrainRow, group: int | None = None) -> TrainRow:
    """A row whose one loss token comes after all of its tokens, so that their last one predicts it.

    The packer cuts a row before its last loss token: the added one is never seen by the model, so its value is free.
    """
    if not len(row.tokens):
        raise ValueError("a row without tokens has no score; leave it out")
    tokens = np.append(row.tokens, np.int32(0))
    last = np.arange(len(tokens)) == len(row.tokens)
    return TrainRow(tokens=tokens, loss_mask=last, group=row.group if group is None else group)
