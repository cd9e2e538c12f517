"""From trajectories to a batch: rewards, groups, and the training rows with what each one's loss covers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from upswing.algo.regularise import overlong_penalty
from upswing.errors import InvalidTrajectory
from upswing.learn.rows import TrainRow
from upswing.trajectory.masks import loss_mask
from upswing.trajectory.types import Group, Outcome, StopReason, Trajectory

UNSCORED = float("nan")


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """The trajectories of a step. `rows` has one row a branch of the scored ones; `row.trajectory` indexes [B]."""

    trajectories: tuple[Trajectory, ...]
    rewards_B: torch.Tensor
    """float64; NaN: not scored, in no baseline, row or denominator."""
    group_B: torch.Tensor
    """int64."""
    rows: tuple[TrainRow, ...]

    @property
    def lengths_B(self) -> torch.Tensor:
        """Loss tokens, int64."""
        lengths_B = torch.zeros_like(self.group_B)
        for row in self.rows:
            lengths_B[row.trajectory] += len(row.loss_positions)
        return lengths_B


def reward_of(trajectory: Trajectory, truncated: str) -> float:
    """The reward that enters the baseline; NaN when the trajectory doesn't: errored, cancelled, unscored, out of time.

    `truncated` is the recipe's rule for truncated trajectories: `as_is` and `mask` keep the score, `zero` makes it 0.
    """
    if trajectory.outcome in (Outcome.ERRORED, Outcome.CANCELLED) or trajectory.reward is None:
        return UNSCORED
    if trajectory.stop_reason is StopReason.TIMEOUT:
        return UNSCORED  # a slow machine or tool is not the agent's fault
    if trajectory.outcome is Outcome.TRUNCATED and truncated == "zero":
        return 0.0
    return trajectory.reward


def rewards_of(
    trajectories: Sequence[Trajectory], truncated: str, judged: Sequence[float | None] | None = None
) -> list[float]:
    """`reward_of` each. `judged`: a reward model's scores (None: unscored) in the verifiers' place; trajectories that
    those leave out stay out, and what `truncated` makes 0 stays 0, whatever it says."""
    found = [reward_of(t, truncated) for t in trajectories]
    if judged is None:
        return found
    cut = [truncated == "zero" and t.outcome is Outcome.TRUNCATED for t in trajectories]
    new = [UNSCORED if value is None else value for value in judged]
    return [own if zero or math.isnan(own) else value for own, value, zero in zip(found, new, cut, strict=True)]


def make_batch(
    groups: Sequence[Group],
    *,
    truncated: str,
    judged: Sequence[float | None] | None = None,
    overlong: tuple[int, int, float] | None = None,
    unscored: bool = False,
) -> Batch:
    """The groups as a batch, with the rewards of `rewards_of`.

    `overlong`: (length, cache, factor) of the length penalty. `unscored`: give rows to trajectories without a reward
    too, unless they errored or were cancelled.
    """
    members = [(index, t) for index, group in enumerate(groups) for t in group.trajectories]
    for _, one in members:
        if one.source == "text":
            raise InvalidTrajectory(f"trajectory '{one.id}' is text of a server: its tokens aren't those it sampled")
    rewards_B = torch.tensor(rewards_of([t for _, t in members], truncated, judged), dtype=torch.float64)
    if overlong is not None:
        sampled_B = torch.tensor([t.num_sampled_tokens for _, t in members])
        length, cache, factor = overlong
        rewards_B += overlong_penalty(sampled_B, max_length=length, cache=cache, factor=factor)
    rows = [
        row
        for number, (group, trajectory) in enumerate(members)
        if not math.isnan(rewards_B[number])
        or (unscored and trajectory.outcome not in (Outcome.ERRORED, Outcome.CANCELLED))
        for row in _rows(trajectory, group, number, truncated == "mask")
    ]
    return Batch(
        trajectories=tuple(t for _, t in members),
        rewards_B=rewards_B,
        group_B=torch.tensor([index for index, _ in members], dtype=torch.long),
        rows=tuple(rows),
    )


def sft_rows(trajectories: Sequence[Trajectory]) -> list[TrainRow]:
    """Rows of demonstrations: the loss covers what the agent said, end-of-turn tokens included, and nothing else.

    They are one group, so that the system prompt that all share is computed once a pack.
    """
    return [row for number, trajectory in enumerate(trajectories) for row in _rows(trajectory, 0, number, False)]


def _rows(trajectory: Trajectory, group: int, number: int, mask_truncated: bool) -> list[TrainRow]:
    hide = mask_truncated and trajectory.outcome is Outcome.TRUNCATED
    return [
        TrainRow(
            tokens=branch.tokens,
            loss_mask=loss_mask(branch) & (not hide),
            engine_logprobs=branch.engine_logprobs,
            turn=branch.turn,
            policy_version=branch.policy_version,
            group=group,
            trajectory=number,
        )
        for branch in trajectory.branches
    ]
