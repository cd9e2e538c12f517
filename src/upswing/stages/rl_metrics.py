"""Signals of one RL batch, read off its trajectories."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np
import torch

from upswing.algo.advantage import has_signal
from upswing.evals.summary import record_of
from upswing.learn.rows import TrainRow
from upswing.rollout.scheduler import Counts
from upswing.stages.side_signals import side_signals
from upswing.stages.text_signals import mean, text_signals
from upswing.trajectory.types import Group, Outcome, StopReason, Trajectory
from upswing.verify.rubric import GATED, variance_shares

EMPTY = 2
"""A trajectory of at most so many sampled tokens says nothing: an end of turn, with or without a line break."""


def batch_metrics(
    groups: Sequence[Group],
    rewards_B: Sequence[float],
    recovered: Callable[[Trajectory], bool | None] | None = None,
    weights: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Means over the batch's counted trajectories; NaN where nothing was counted. What each says: docs/signals.md.

    `rewards_B` goes over the trajectories of all groups in order; NaN rewards are the unscored ones. `weights`: the
    rubric's; each component's share of the variance of its reward is then told too, if there are several.
    """
    played = [t for group in groups for t in group.trajectories]
    records = [record_of(t, recovered) for t in played]
    counted = [record for record in records if record.counted]
    scored = [reward for reward in rewards_B if not math.isnan(reward)]
    calls = sum(record.tool_calls for record in counted)
    tried = calls + sum(record.malformed for record in counted)
    errored, unscored = sum(record.outcome == Outcome.ERRORED for record in records), len(counted) - len(scored)
    values = {
        "reward": mean(scored),
        "reward_std": float(np.std(scored)) if scored else math.nan,
        "sampled_tokens": mean([record.sampled_tokens for record in counted]),
        "turns": mean([record.turns for record in counted]),
        "tool_calls": mean([record.tool_calls for record in counted]),
        "invalid_call_frac": sum(record.invalid_calls for record in counted) / tried if tried else math.nan,
        "invalid_attempt_frac": mean([record.invalid_calls > 0 for record in counted]),
        "duplicate_call_frac": sum(record.duplicate_calls for record in counted) / calls if calls else math.nan,
        "no_call_frac": mean([record.tool_calls == 0 for record in counted]),
        "truncated_frac": mean([record.outcome == Outcome.TRUNCATED for record in counted]),
        "max_turns_frac": mean([record.stop_reason == StopReason.MAX_TURNS for record in counted]),
        "empty_frac": mean([record.sampled_tokens <= EMPTY for record in counted]),
        "recovery": mean([record.recovered for record in counted if record.recovered is not None]),
        "num_trajectories": len(played),
        "num_errored": errored,
        "num_unscored": unscored,
        "errored_frac": errored / len(played) if played else math.nan,
        "unscored_frac": unscored / len(played) if played else math.nan,
        "num_drift_events": sum(len(t.drift) for t in played),
        "num_forks": sum(event.forked for t in played for event in t.drift),
        **_group_shares(groups, rewards_B),
        **text_signals(groups, rewards_B),
        **side_signals([len(group.trajectories) for group in groups], records, rewards_B),
    }
    for name in dict.fromkeys(name for record in counted for name in record.components):
        found = [record.components.get(name) for record in counted]
        values[f"score_{name}"] = mean([value for value in found if value is not None])
    several = weights if weights is not None and len(weights) > 1 else {}
    shares = variance_shares([record.components for record in counted], several)
    return values | {f"variance_share_{name.removesuffix(GATED)}": share for name, share in shares.items()}


def effective_frac(rows: Sequence[TrainRow]) -> float:
    """(sum |A|)^2 / (B sum A^2) over the rows, A the mean size of the advantage at a row's loss tokens: the share of
    the batch that the update in effect learns from. 0 when no row has an advantage, NaN without rows."""
    sizes = [np.abs(np.broadcast_to(row.advantage, row.tokens.shape)[row.loss_positions]) for row in rows]
    size_B = np.array([found.mean(dtype=np.float64) if len(found) else 0.0 for found in sizes])
    squares = float(size_B @ size_B)
    return float(size_B.sum()) ** 2 / (len(rows) * squares) if squares else 0.0 if rows else math.nan


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


def age(group: Group, now: int) -> int:
    """Steps (weight pushes) since the oldest of a group's tokens was sampled."""
    versions_N = versions([group])
    return now - int(versions_N.min()) if len(versions_N) else 0


def versions(groups: Sequence[Group]) -> np.ndarray:
    """int32 [N]: of every sampled token. Not of errored attempts: they may be old, but nothing learns from them."""
    branches = [b for g in groups for t in g.trajectories if t.outcome is not Outcome.ERRORED for b in t.branches]
    return np.concatenate([np.empty(0, np.int32), *(b.policy_version[b.sampled] for b in branches)])


def staleness(groups: Sequence[Group], now: int, counts: Counts) -> dict[str, float]:
    """How far behind version `now` the sampled tokens are, and what became of groups that were not learned from."""
    ages_N = now - versions(groups)
    if not len(ages_N):
        return {}
    shares = {f"staleness_{age}_frac": float((ages_N == age).mean()) for age in range(int(ages_N.max()) + 1)}
    lost = counts.requeued + counts.dropped
    return {
        "staleness": float(ages_N.mean()),
        "staleness_max": float(ages_N.max()),
        **shares,
        "kept_frac": len(groups) / (len(groups) + lost),
        "num_requeued": counts.requeued,
        "num_dropped": counts.dropped,
        "num_cancelled": counts.cancelled,
    }


def trouble(trajectories: Sequence[Trajectory]) -> str:
    """How many errored or have no score, and what most of them say; empty when there are none. Texts that differ in
    numbers only count as one: a port, a time, an id."""
    said = [
        " ".join(((t.error if t.score is None else t.score.reason) or "no reason given").split())[:200]
        for t in trajectories
        if t.outcome is Outcome.ERRORED or (t.score is not None and t.score.value is None)
    ]
    if not said:
        return ""
    kinds = [re.sub(r"\d+", "#", text) for text in said]
    kind, count = Counter(kinds).most_common(1)[0]
    of = f"{len(said)} of {len(trajectories)} trajectories errored or have no score"
    return f"{of}, {count} of them: {said[kinds.index(kind)]}"


def early_warning(
    values: Mapping[str, float],
    truncated_limit: float,
    turn_tokens: int,
    *,
    spread: Literal["group", "batch"] | None = "group",
    broken: str = "",
) -> tuple[str, str, str] | None:
    """(title, evidence, remedy) when nothing can be learned from a batch; None otherwise.

    `spread`: where rewards must differ for that; None: nowhere, nor need there be any. `broken`: what `trouble` says.
    """
    if values["truncated_frac"] >= truncated_limit:
        return (
            "every trajectory is cut",
            f"{100 * values['truncated_frac']:.0f} % of the trajectories were truncated",
            f"Raise limits.turn_tokens (now {turn_tokens}) or the environment's turns, or run SFT first.",
        )
    lost = values["num_errored"] + (values["num_unscored"] if spread else 0)
    scored = values["num_trajectories"] - lost
    if lost and not scored:
        return ("every trajectory broke", broken, "Mend that first: nothing in the stage's keys helps.")
    flat = {"group": values["informative_frac"] == 0, "batch": scored > 1 and values["reward_std"] == 0, None: False}
    if not flat[spread]:
        return None
    easy = values["too_easy_frac"] > values["too_hard_frac"]
    title, more = "no group has a reward spread", "a larger group_size"
    if spread == "batch":
        title, more = "all rewards are equal", "more tasks_per_step"
    evidence = f"mean reward {values['reward']:.3g}" + (", every advantage 0" if spread == "group" else "")
    remedy = "Use harder tasks." if easy else f"Use easier tasks, {more}, or run SFT first."
    return (title, f"{evidence}; {broken}" if broken else evidence, remedy)
