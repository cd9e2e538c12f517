"""Limits of rollouts. Deadlines nest: an environment call, a turn < the rollout < with its scoring < the group."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What ends a trajectory before it ends itself. Seconds are wall time."""

    turn_tokens: int = 256
    """Tokens that one turn may sample; a cut turn ends the trajectory as truncated."""
    context_tokens: int = 2048
    """Tokens of one branch, prompts and tool results included."""
    env_timeout_s: float = 60.0
    """`reset`, one `step` or `close`; past it the environment counts as hung and the trajectory as errored."""
    turn_timeout_s: float = 600.0
    """Sampling one turn; past it the engine counts as hung and the trajectory as errored."""
    rollout_timeout_s: float = 1800.0
    """The whole trajectory; past it the trajectory is truncated."""
    scoring_timeout_s: float = 60.0
    """All verifiers of one trajectory; past it there is no score."""
    group_timeout_s: float | None = None
    """The trajectories of a task, scored, from when the first one began; those that are late are cancelled and the
    group is what is left. None: no limit."""
