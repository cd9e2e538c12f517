"""What a set of trajectories amounts to: scores with intervals, costs, how they ended, by tag, and paired comparison.

Who counts: `errored` and `cancelled` trajectories enter no mean, never as 0; they are counted and shown. `truncated`
ones count like completed ones. A component that could not be scored (None) is left out of that component's mean only.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from operator import attrgetter
from textwrap import shorten
from typing import Any

from rich.markup import escape
from rich.table import Table

from upswing.errors import did_you_mean
from upswing.evals.stats import Interval, PairedResult, bootstrap_mean_ci, paired_test, pass_at_k, pass_hat_k
from upswing.trajectory.types import Outcome, Trajectory
from upswing.view.run_folder import json_safe
from upswing.view.text import DASH, difference, interval, number, p_value, readable

COSTS = ("turns", "tool_calls", "invalid_calls", "duplicate_calls", "sampled_tokens")
COUNTED = (Outcome.COMPLETED, Outcome.TRUNCATED)
PROBLEMS = 20


@dataclass(frozen=True, kw_only=True)
class EvalRecord:
    """One trajectory, reduced to what evaluation needs."""

    task_id: str
    trajectory_id: str
    outcome: str
    stop_reason: str
    reward: float | None
    """None: errored, cancelled or not scored."""
    components: Mapping[str, float | None]
    tags: Mapping[str, str]
    turns: int
    tool_calls: int
    invalid_calls: int
    duplicate_calls: int
    """Calls repeating an earlier call of the same trajectory: same tool, same arguments."""
    sampled_tokens: int
    recovered: bool | None
    """None: nothing to recover from, or not asked."""
    malformed: int = 0
    """Turns, or calls in them, that couldn't be read: no tool calls, but invalid ones."""

    @property
    def counted(self) -> bool:
        """True when the trajectory may enter a mean."""
        return self.outcome in COUNTED


@dataclass(frozen=True, kw_only=True)
class EvalSummary:
    """All figures of one evaluation."""

    num_trajectories: int
    num_tasks: int
    num_counted: int
    """Completed and truncated: the ones that means are taken over."""
    num_unscored: int
    """Counted ones without a reward: a verifier could not judge."""
    outcomes: Mapping[str, int]
    stop_reasons: Mapping[str, int]
    problems: Mapping[str, int]
    """Why trajectories have no reward -> how many, the commonest `PROBLEMS` of them; empty when all have one."""
    reward: Interval
    components: Mapping[str, Interval]
    costs: Mapping[str, Interval]
    """Per trajectory: the names in `COSTS`."""
    by_tag: Mapping[str, Mapping[str, Mapping[str, Interval]]]
    """tag name -> tag value -> `reward` and component names -> interval."""
    truncated_frac: float
    invalid_call_frac: float
    """Of all tool calls and what couldn't be read; NaN when there was neither."""
    duplicate_call_frac: float
    sampled_tokens_min: int
    sampled_tokens_max: int
    sampled_tokens_completed: float
    """Mean over completed trajectories only; NaN when none."""
    recovery: Interval
    """Share recovered among those that had something to recover from; n is how many had."""
    pass_at_k: Mapping[int, float]
    pass_hat_k: Mapping[int, float]
    mixed_frac: float
    """Share of tasks with a success rate strictly between 0 and 1; NaN with one sample a task."""
    records: tuple[EvalRecord, ...]

    def to_dict(self) -> dict[str, Any]:
        """What `results.json` holds of it; NaN becomes None."""
        return dict(json_safe(asdict(self)))


def record_of(trajectory: Trajectory, recovered: Callable[[Trajectory], bool | None] | None = None) -> EvalRecord:
    """Reduce one trajectory. `recovered` says whether it got past a failed first attempt (None: there was none)."""
    made = [record.call for record in trajectory.tool_records if record.call.name]
    calls = [(call.name, json.dumps(call.arguments, sort_keys=True, default=str)) for call in made]
    counted = trajectory.outcome in COUNTED
    score = trajectory.score if counted else None
    return EvalRecord(
        task_id=trajectory.task.id,
        trajectory_id=trajectory.id,
        outcome=str(trajectory.outcome),
        stop_reason=str(trajectory.stop_reason),
        reward=_finite(score.value) if score else None,
        components={key: _finite(value) for key, value in score.components.items()} if score else {},
        tags=dict(trajectory.task.tags),
        turns=trajectory.num_turns,
        tool_calls=len(calls),
        # A tool that fails by itself isn't an invalid call; an environment that has such tools counts apart.
        invalid_calls=int(trajectory.state.get("invalid_calls", sum(not r.ok for r in trajectory.tool_records))),
        duplicate_calls=len(calls) - len(set(calls)),
        sampled_tokens=trajectory.num_sampled_tokens,
        recovered=recovered(trajectory) if recovered and counted else None,
        malformed=len(trajectory.tool_records) - len(made),
    )


def problem_of(trajectory: Trajectory) -> str | None:
    """Why it has no reward, on one line; None when it has one."""
    score = trajectory.score
    if trajectory.outcome not in COUNTED:
        text = trajectory.error or str(trajectory.stop_reason)
    elif score is None or _finite(score.value) is None:
        text = "the verifiers gave no score" if score is None or not score.reason else score.reason
    else:
        return None
    return shorten(text, 240, placeholder=" …")


def missing_rewards(summary: EvalSummary) -> str:
    """How many trajectories have no reward and the commonest reasons, in words; empty when all have one."""
    missing = summary.num_trajectories - summary.reward.n
    reasons = [f"{count} times {text}" for text, count in summary.problems.items()]
    more = ["and other reasons"] if len(reasons) > 3 else []
    said = f"{missing} of {summary.num_trajectories} trajectories have no reward: {'; '.join([*reasons[:3], *more])}"
    return said if missing else ""


def _finite(value: float | None) -> float | None:
    """A verifier that returns NaN could not score."""
    return None if value is None or not math.isfinite(value) else float(value)


def summarize(
    trajectories: Iterable[Trajectory],
    *,
    recovered: Callable[[Trajectory], bool | None] | None = None,
    success: str = "strict_match",
    resamples: int = 10_000,
) -> EvalSummary:
    """Every figure of an evaluation of one or several trajectories a task.

    `recovered`: see `record_of`. `success`: the component (0/1) that pass@k counts; the reward when none has it.
    """
    trajectories = list(trajectories)
    records = [record_of(trajectory, recovered) for trajectory in trajectories]
    problems = Counter(problem for one in trajectories if (problem := problem_of(one)))
    counted = [record for record in records if record.counted]
    names = list(dict.fromkeys(name for record in counted for name in record.components))

    def mean(rows: Sequence[EvalRecord], value: Callable[[EvalRecord], float | None]) -> Interval:
        pairs = [(found, row.task_id) for row in rows if (found := value(row)) is not None]
        ids = [task_id for _, task_id in pairs]
        clusters = ids if len(set(ids)) < len(ids) else None
        return bootstrap_mean_ci([found for found, _ in pairs], resamples=resamples, clusters=clusters)

    def scores(rows: Sequence[EvalRecord]) -> dict[str, Interval]:
        found = {name: mean(rows, lambda row, name=name: row.components.get(name)) for name in names}  # type: ignore[misc]
        return {"reward": mean(rows, lambda row: row.reward), **found}

    by_tag: dict[str, dict[str, list[EvalRecord]]] = defaultdict(lambda: defaultdict(list))
    for record in counted:
        for tag, value in record.tags.items():
            by_tag[tag][str(value)].append(record)
    overall = scores(counted)
    num_calls = sum(row.tool_calls for row in counted)
    num_tried = num_calls + sum(row.malformed for row in counted)
    lengths = [row.sampled_tokens for row in counted]
    pass_at, pass_hat, mixed = _pass_figures(counted, success if success in names else None)
    return EvalSummary(
        num_trajectories=len(records),
        num_tasks=len({row.task_id for row in records}),
        num_counted=len(counted),
        num_unscored=sum(row.reward is None for row in counted),
        outcomes=dict(Counter(row.outcome for row in records).most_common()),
        stop_reasons=dict(Counter(row.stop_reason for row in records).most_common()),
        problems=dict(problems.most_common(PROBLEMS)),
        reward=overall.pop("reward"),
        components=overall,
        costs={name: mean(counted, attrgetter(name)) for name in COSTS},
        by_tag={tag: {v: scores(rows) for v, rows in sorted(values.items())} for tag, values in by_tag.items()},
        truncated_frac=_ratio(sum(row.outcome == Outcome.TRUNCATED for row in counted), len(counted)),
        invalid_call_frac=_ratio(sum(row.invalid_calls for row in counted), num_tried),
        duplicate_call_frac=_ratio(sum(row.duplicate_calls for row in counted), num_calls),
        sampled_tokens_min=min(lengths, default=0),
        sampled_tokens_max=max(lengths, default=0),
        sampled_tokens_completed=_mean([row.sampled_tokens for row in counted if row.outcome == Outcome.COMPLETED]),
        recovery=mean(counted, lambda row: None if row.recovered is None else float(row.recovered)),
        pass_at_k=pass_at,
        pass_hat_k=pass_hat,
        mixed_frac=mixed,
        records=tuple(records),
    )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def _mean(values: Sequence[float]) -> float:
    return _ratio(sum(values), len(values))


def _pass_figures(
    records: Sequence[EvalRecord], success: str | None
) -> tuple[dict[int, float], dict[int, float], float]:
    """pass@k and pass^k for k = 1, 2, 4, ... and the fewest samples of any task, and the share of mixed tasks."""
    tallies: dict[str, list[bool]] = defaultdict(list)
    for record in records:
        value = record.reward if success is None else record.components.get(success)
        if value is not None:
            tallies[record.task_id].append(value >= 1 - 1e-9)  # weights of 0.7, 0.2 and 0.1 sum to less than 1
    fewest = min((len(tally) for tally in tallies.values()), default=0)
    if fewest < 2:
        return {}, {}, math.nan
    counts = [(len(tally), sum(tally)) for tally in tallies.values()]
    ks = sorted({fewest, *(2**power for power in range(fewest.bit_length()) if 2**power <= fewest)})
    at = {k: _mean([pass_at_k(n, c, k) for n, c in counts]) for k in ks}
    hat = {k: _mean([pass_hat_k(n, c, k) for n, c in counts]) for k in ks}
    return at, hat, _mean([float(0 < c < n) for n, c in counts])


def _task_means(records: Iterable[EvalRecord], metric: str) -> dict[str, float]:
    values: dict[str, list[float]] = defaultdict(list)
    for record in records:
        value = record.reward if metric == "reward" else record.components.get(metric)
        if record.counted and value is not None:
            values[record.task_id].append(value)
    return {task_id: _mean(found) for task_id, found in values.items()}


def compare(a: EvalSummary, b: EvalSummary, metric: str = "strict_match") -> PairedResult:
    """`b` against `a`, paired by task id; several samples of a task are averaged first.

    Tasks that either side could not score are left out (`PairedResult.n` says how many were compared). Raises
    ValueError when the metric is unknown or no task is shared.
    """
    known = {"reward", *a.components, *b.components}
    if metric not in known:
        raise ValueError(f"no metric {metric!r} here; known: {sorted(known)}{did_you_mean(metric, known)}")
    before, after = _task_means(a.records, metric), _task_means(b.records, metric)
    shared = sorted(before.keys() & after.keys())
    if not shared:
        raise ValueError(f"no task with {metric!r} is in both evaluations; a paired test needs the same questions")
    return paired_test([before[task_id] for task_id in shared], [after[task_id] for task_id in shared])


def result_entry(
    label: str,
    stage: str,
    summary: EvalSummary,
    *,
    split: str = "test",
    mode: str = "greedy",
    previous: EvalSummary | None = None,
    previous_label: str = "",
    metric: str = "strict_match",
    **extra: Any,
) -> dict[str, Any]:
    """One entry of `results.json` (what the report and the final table read).

    Args:
        label: what was evaluated, such as `base`, `SFT`, `RL`.
        mode: `greedy` or `sampled`.
        previous: the evaluation on the same questions to test against, named `previous_label`; `paired` is None when
            nothing was scored on both sides.
        metric: what is tested; the reward when `summary` lacks it.
        extra: further JSON values, such as `wall_s` or `checkpoint`.
    """
    metric = metric if metric in summary.components else "reward"
    paired = None
    if previous is not None:
        with suppress(ValueError):  # every trajectory of one side may be errored or unscored
            found = asdict(compare(previous, summary, metric))
            paired = {"against": previous_label, "metric": metric, **json_safe(found)}
    entry = {"label": label, "stage": stage, "split": split, "mode": mode}
    return {**entry, "summary": summary.to_dict(), "paired": paired, **extra}


def results_table(entries: Sequence[Mapping[str, Any]], title: str = "Results") -> Table:
    """The final table (base -> SFT -> RL) from `result_entry` dicts."""
    names = list(dict.fromkeys(name for entry in entries for name in entry["summary"]["components"])) or ["reward"]
    chosen = [entry.get("best_of") or {} for entry in entries]
    sizes = sorted({found["n"] for found in chosen if found})
    table = Table("", title=title)
    for column in (
        "n",
        *map(readable, names),
        *(f"best of {n}" for n in sizes),
        "turns",
        "calls",
        "tokens",
        "errored",
        "difference",
        "p",
    ):
        table.add_column(column, justify="right")
    for entry, best in zip(entries, chosen, strict=True):
        summary, paired = entry["summary"], entry.get("paired")
        scores = {**summary["components"], "reward": summary["reward"]}
        costs = [summary["costs"][name]["mean"] for name in ("turns", "tool_calls", "sampled_tokens")]
        against = f" vs {paired['against']}" if paired and paired.get("against") else ""
        table.add_row(
            escape(str(entry["label"])),
            str(summary["num_counted"]),
            *(_with_ends(*interval(scores.get(name))) for name in names),
            *(_with_ends(*interval(best["best"] if best.get("n") == n else None)) for n in sizes),
            *map(number, costs),
            str(summary["outcomes"].get("errored", 0)),
            escape(f"{difference(paired)[0]}{against}") if paired else DASH,
            p_value(paired["p"]).removeprefix("= ") if paired else DASH,
        )
    return table


def _with_ends(mean: str, low: str, high: str) -> str:
    return escape(f"{mean} [{low}, {high}]") if low else mean
