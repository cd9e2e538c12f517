"""Advantage estimators: rewards and group ids in, one advantage per trajectory out.

Every estimator has the shape `(rewards_B, group_B, **options) -> advantages_B`; a new one is a new function.
"""

from __future__ import annotations

import torch

ZERO_VARIANCE = 1e-6
"""A group whose rewards differ by at most this (relative to their size, if above 1) has no preference to teach."""


def group_relative(
    rewards_B: torch.Tensor, group_B: torch.Tensor, *, normalize_std: bool = True, eps: float = 1e-6
) -> torch.Tensor:
    """GRPO's advantage (DeepSeekMath, arXiv 2402.03300): (reward - mean) / (std + eps) within the group.

    With `normalize_std=False` it is Dr. GRPO's (arXiv 2503.20783): reward - mean.

    `rewards_B` [B] float, one per trajectory, not per branch; NaN or infinite: could not be scored. `group_B` [B]
    integer group ids in any order; membership goes by id, never by adjacency. Returns [B] in the dtype of `rewards_B`.

    - Unscored trajectories enter neither mean nor std, and get 0.
    - A group of equal rewards gets exactly 0, decided by max - min because a computed std keeps rounding residue that
      the division would blow up.
    - A group with one scored trajectory gets 0: there is nothing to compare it with.
    - std is the unbiased one (n - 1), as in TRL and verl.

    Raises ValueError when the shapes differ or aren't one-dimensional.
    """
    _check_shapes(rewards_B, group_B)
    # Double precision: the result then doesn't depend on the order of the rows or the size of the rewards.
    wide_B = rewards_B.detach().to(torch.float64)
    advantages_B = torch.zeros_like(wide_B)
    scored_B = torch.isfinite(wide_B)
    for group in torch.unique(group_B):
        member_B = (group_B == group) & scored_B
        advantages_B[member_B] = _relative_to_peers(wide_B[member_B], normalize_std, eps)
    return advantages_B.to(rewards_B.dtype)


def _relative_to_peers(rewards_G: torch.Tensor, normalize_std: bool, eps: float) -> torch.Tensor:
    """Advantages of one group's scored rewards [G], G may be 0."""
    if len(rewards_G) < 2 or _is_constant(rewards_G):
        return torch.zeros_like(rewards_G)
    centred_G = rewards_G - rewards_G.mean()
    return centred_G / (rewards_G.std(correction=1) + eps) if normalize_std else centred_G


def _is_constant(rewards_G: torch.Tensor) -> bool:
    low, high = rewards_G.aminmax()
    size = max(1.0, float(rewards_G.abs().max()))
    return bool(high - low <= ZERO_VARIANCE * size)


def _check_shapes(rewards_B: torch.Tensor, group_B: torch.Tensor) -> None:
    if rewards_B.ndim != 1 or rewards_B.shape != group_B.shape:
        raise ValueError(
            f"rewards and group ids must be one-dimensional and of the same length; "
            f"got {tuple(rewards_B.shape)} and {tuple(group_B.shape)}"
        )
