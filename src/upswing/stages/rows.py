"""From trajectories to training rows: rewards, group-relative advantages, and what each row's loss covers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from upswing.algo.advantage import group_relative
from upswing.learn.rows import TrainRow
from upswing.trajectory.masks import loss_mask
from upswing.trajectory.types import Group, Outcome, StopReason, Trajectory

UNSCORED = float("nan")


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


def rl_rows(
    groups: Sequence[Group], *, truncated: str, normalize_std: bool
) -> tuple[list[TrainRow], list[float], list[float]]:
    """Training rows of a batch, one a branch -> (rows, rewards, advantages), the last two one a trajectory.

    Trajectories without a reward give no rows: they are neither in the baseline nor in any denominator.
    """
    trajectories = [(index, t) for index, group in enumerate(groups) for t in group.trajectories]
    rewards_B = torch.tensor([reward_of(t, truncated) for _, t in trajectories], dtype=torch.float64)
    group_B = torch.tensor([index for index, _ in trajectories], dtype=torch.long)
    advantages_B = group_relative(rewards_B, group_B, normalize_std=normalize_std)
    rows = []
    for number, (group, trajectory) in enumerate(trajectories):
        if torch.isnan(rewards_B[number]):
            continue
        hide = truncated == "mask" and trajectory.outcome is Outcome.TRUNCATED
        for branch in trajectory.branches:
            rows.append(
                TrainRow(
                    tokens=branch.tokens,
                    loss_mask=loss_mask(branch) & (not hide),
                    advantage=float(advantages_B[number]),
                    engine_logprobs=branch.engine_logprobs,
                    group=group,
                    trajectory=number,
                )
            )
    return rows, rewards_B.tolist(), advantages_B.tolist()


def sft_rows(trajectories: Sequence[Trajectory]) -> list[TrainRow]:
    """Rows of demonstrations: the loss covers what the agent said, end-of-turn tokens included, and nothing else."""
    return [
        TrainRow(
            tokens=branch.tokens,
            loss_mask=loss_mask(branch),
            advantage=1.0,
            engine_logprobs=branch.engine_logprobs,
            group=0,  # one group, so that the system prompt that all share is computed once a pack
            trajectory=number,
        )
        for number, trajectory in enumerate(trajectories)
        for branch in trajectory.branches
    ]
