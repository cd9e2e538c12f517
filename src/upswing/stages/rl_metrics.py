"""Signals of one RL batch, read off its trajectories."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from upswing.algo.advantage import has_signal
from upswing.evals.summary import record_of
from upswing.trajectory.types import Group, Outcome, Trajectory
from upswing.verify.rubric import GATED, variance_shares


def batch_metrics(
    groups: Sequence[Group],
    rewards_B: Sequence[float],
    recovered: Callable[[Trajectory], bool | None] | None = None,
    weights: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Means over the batch's counted trajectories; NaN where nothing was counted.

    `rewards_B` goes over the trajectories of all groups in order; NaN rewards are the unscored ones. `weights`: the
    rubric's; each component's share of the variance of its reward is then told too, if there are several.
    """
    played = [t for group in groups for t in group.trajectories]
    records = [record_of(t, recovered) for t in played]
    counted = [record for record in records if record.counted]
    scored = [reward for reward in rewards_B if not math.isnan(reward)]
    calls = sum(record.tool_calls for record in counted)
    values = {
        "reward": _mean(scored),
        "reward_std": _std(scored),
        "sampled_tokens": _mean(record.sampled_tokens for record in counted),
        "turns": _mean(record.turns for record in counted),
        "tool_calls": _mean(record.tool_calls for record in counted),
        "invalid_call_frac": sum(record.invalid_calls for record in counted) / calls if calls else math.nan,
        "duplicate_call_frac": sum(record.duplicate_calls for record in counted) / calls if calls else math.nan,
        "truncated_frac": _mean(record.outcome == Outcome.TRUNCATED for record in counted),
        "recovery": _mean(float(record.recovered) for record in counted if record.recovered is not None),
        "num_trajectories": len(played),
        "num_errored": sum(record.outcome == Outcome.ERRORED for record in records),
        "num_unscored": len(counted) - len(scored),
        "num_drift_events": sum(len(t.drift) for t in played),
        **_group_shares(groups, rewards_B),
    }
    for name in dict.fromkeys(name for record in counted for name in record.components):
        found = [record.components.get(name) for record in counted]
        values[f"score_{name}"] = _mean(value for value in found if value is not None)
    several = weights if weights is not None and len(weights) > 1 else {}
    shares = variance_shares([record.components for record in counted], several)
    return values | {f"variance_share_{name.removesuffix(GATED)}": share for name, share in shares.items()}


def _group_shares(groups: Sequence[Group], rewards_B: Sequence[float]) -> dict[str, float]:
    """Shares of groups without a reward spread, split into too easy (all at the batch's best) and too hard."""
    group_B = torch.tensor([index for index, group in enumerate(groups) for _ in group.trajectories], dtype=torch.long)
    values_B = torch.tensor(rewards_B, dtype=torch.float64)
    signal_B = has_signal(values_B, group_B)
    informative = len(torch.unique(group_B[signal_B]))
    scored_B = torch.isfinite(values_B)
    flat = [float(values_B[(group_B == index) & scored_B][0]) for index in torch.unique(group_B[scored_B & ~signal_B])]
    known = [reward for reward in rewards_B if not math.isnan(reward)]
    best = max(known, default=math.nan)
    easy = sum(reward >= best and reward > 0 for reward in flat)
    count = max(1, len(groups))
    return {
        "informative_frac": informative / count,
        "zero_variance_frac": len(flat) / count,
        "too_easy_frac": easy / count,
        "too_hard_frac": (len(flat) - easy) / count,
    }


def early_warning(values: dict[str, float], truncated_limit: float, turn_tokens: int) -> tuple[str, str, str] | None:
    """(title, evidence, remedy) when nothing can be learned from a batch; None otherwise."""
    if values["truncated_frac"] >= truncated_limit:
        return (
            "every trajectory is cut",
            f"{100 * values['truncated_frac']:.0f} % of the trajectories were truncated",
            f"Raise limits.turn_tokens (now {turn_tokens}) or the environment's turns, or run SFT first.",
        )
    if values["informative_frac"] == 0:
        easy = values["too_easy_frac"] > values["too_hard_frac"]
        evidence = f"mean reward {values['reward']:.3g}, every advantage 0"
        lost = values["num_errored"] + values["num_unscored"]
        if lost:
            evidence += f", {lost:.0f} of {values['num_trajectories']:.0f} trajectories errored or unscored"
        remedy = "Use harder tasks." if easy else "Use easier tasks, a larger group_size, or run SFT first."
        return ("no group has a reward spread", evidence, remedy)
    return None


def _mean(values: Iterable[float]) -> float:
    found = [float(value) for value in values]
    return sum(found) / len(found) if found else math.nan


def _std(values: Sequence[float]) -> float:
    mean = _mean(values)
    return math.sqrt(_mean((value - mean) ** 2 for value in values)) if values else math.nan
