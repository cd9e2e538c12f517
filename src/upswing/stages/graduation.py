"""Is SFT done? Format learned, validation loss flat, and diversity kept, so that RL has something to choose from."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from upswing.evals.summary import EvalSummary, record_of, summarize
from upswing.recipe import Graduation
from upswing.seeding import derive_seed
from upswing.stages.context import RunContext
from upswing.stages.evaluate import SUCCESS
from upswing.trajectory.types import Outcome, Trajectory


@dataclass(frozen=True, kw_only=True)
class Criterion:
    """One requirement. `value` NaN: it could not be measured, which doesn't pass."""

    name: str
    value: float
    limit: float
    passed: bool
    words: str


@dataclass(frozen=True, kw_only=True)
class Verdict:
    criteria: tuple[Criterion, ...]
    pass_1: float = math.nan
    pass_k: float = math.nan
    """With as many samples as every task has."""
    pace: Mapping[str, float] = field(default_factory=dict)
    """Of what was sampled for it; see `pace_of`."""

    @property
    def graduated(self) -> bool:
        return all(criterion.passed for criterion in self.criteria)

    @property
    def words(self) -> str:
        """What a person reads: that it graduated, or what is lacking and by how much."""
        lacking = [criterion.words for criterion in self.criteria if not criterion.passed]
        if not lacking:
            return "graduated: " + "; ".join(criterion.words for criterion in self.criteria)
        return "not graduated: " + "; ".join(lacking)

    def as_dict(self) -> dict[str, Any]:
        found = {"graduated": self.graduated, "words": self.words} | {c.name: c.value for c in self.criteria}
        return {**found, "pass_1": self.pass_1, "pass_k": self.pass_k}


def flatness(losses: Sequence[float], tolerance: float) -> Criterion:
    """Whether the validation loss stopped falling: its relative fall between the last two checks is below tolerance."""
    fall = (losses[-2] - losses[-1]) / losses[-2] if len(losses) > 1 and losses[-2] > 0 else math.nan
    flat = abs(fall) < tolerance
    moved = f"{'fell' if fall >= 0 else 'rose'} by {100 * abs(fall):.1f} % since the last check"
    seen = "measured only once" if math.isnan(fall) else moved
    words = f"validation loss {losses[-1]:.4f} {seen} ({'flat' if flat else 'not flat'} at {100 * tolerance:g} %)"
    return Criterion(name="loss_fall_frac", value=fall, limit=tolerance, passed=flat, words=words)


def _least(name: str, value: float, limit: float, label: str) -> Criterion:
    passed = value >= limit
    words = f"{label} {value:.3g} ({'at least' if passed else 'below'} {limit:g})"
    return Criterion(name=name, value=value, limit=limit, passed=passed, words=words)


def diversity(summary: EvalSummary, format_valid: float, entropy: float, rules: Graduation) -> tuple[Criterion, ...]:
    """The criteria that need samples: `pass_k` of them for each task."""
    most, first, many = _pass_figures(summary)
    return (
        _least("format_valid_frac", format_valid, rules.min_format_valid, "share in the right format"),
        _least("passk_gain", many - first, rules.min_passk_gain, f"pass@{most} minus pass@1"),
        _least("entropy", entropy, rules.min_entropy, "entropy in nats"),
        _least("mixed_frac", summary.mixed_frac, rules.min_mixed_frac, "share of tasks solved by some samples only"),
    )


def _pass_figures(summary: EvalSummary) -> tuple[int, float, float]:
    """(k, pass@1, pass@k), k the most samples that every task has: an errored one makes it fewer than pass_k."""
    most = max(summary.pass_at_k, default=1)
    return most, summary.pass_at_k.get(1, math.nan), summary.pass_at_k.get(most, math.nan)


def is_well_formed(trajectory: Trajectory) -> bool:
    """The agent followed the protocol to its end: an answer where it belongs, and no invalid call on the way."""
    followed = record_of(trajectory).invalid_calls == 0
    return trajectory.outcome is Outcome.COMPLETED and trajectory.answer is not None and followed


async def examine(context: RunContext, rules: Graduation, stage: str, step: int, flat: Criterion) -> Verdict:
    """Sample train tasks with the engine's current weights and judge."""
    tasks = context.tasks.take("train", derive_seed(context.recipe.seed, stage, "graduation"), rules.tasks)
    name, total = f"{stage}: graduation check", len(tasks) * rules.pass_k
    began = time.perf_counter()
    with context.progress.task(name, total=total, unit="trajectory") as shown:
        groups = await context.rollouts.groups(
            tasks,
            size=rules.pass_k,
            sampling=context.sampling(temperature=rules.temperature),
            seed=derive_seed(context.recipe.seed, stage, "graduation", step),
            on_done=lambda trajectory: shown.advance(1),
        )
    played = [t for group in groups for t in group.trajectories]
    pace = pace_of(played, time.perf_counter() - began) if played else {}
    counted = [t for t in played if record_of(t).counted]
    summary = summarize(counted, success=SUCCESS, resamples=100)
    valid = sum(map(is_well_formed, counted)) / len(counted) if counted else math.nan
    _, first, many = _pass_figures(summary)
    criteria = (flat, *diversity(summary, valid, sampled_entropy(counted), rules))
    return Verdict(criteria=criteria, pass_1=first, pass_k=many, pace=pace)


def pace_of(played: Sequence[Trajectory], seconds: float) -> dict[str, float]:
    """Sampled tokens a second; of a trajectory its seconds, many at once, and its tokens, those of the prompt apart."""
    branches, count = [branch for one in played for branch in one.branches], len(played)
    prompts = sum(int(one.branches[0].sampled.argmax()) for one in played if one.branches)
    return {
        "sampled_per_s": sum(one.num_sampled_tokens for one in played) / seconds,
        "trajectory_s": seconds / count,
        "prompt_tokens": prompts / count,
        "further_tokens": (sum(map(len, branches)) - prompts) / count,
    }


def sampled_entropy(trajectories: Sequence[Trajectory]) -> float:
    """Mean of -log-prob over sampled tokens [nats]: unbiased for the policy's entropy; NaN without tokens."""
    total, count = 0.0, 0
    for trajectory in trajectories:
        for branch in trajectory.branches:
            total -= float(branch.engine_logprobs[branch.sampled].sum())
            count += int(branch.sampled.sum())
    return total / count if count else math.nan
