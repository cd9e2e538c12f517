"""From what was measured before an `rl` stage to advice: is the reward clean, can RL learn, is there enough compute?

NaN means not measured and decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from upswing.evals.stats import Interval
from upswing.monitor.findings import Finding, Remedy, Severity
from upswing.recipe import Recipe, RlStage

Kind = Literal[
    "go", "sft first", "more sft", "easier tasks", "harder tasks", "better prompt", "dpo", "not enough compute"
]
UNKNOWN = Interval(math.nan, math.nan, math.nan, 0)
FALSE_ACCEPT, FALSE_REJECT = 0.005, 0.01
THIRD, EASY, SPREAD, FORMAT = 1 / 3, 0.8, 0.2, 0.9
TRUNCATED, CALLS, ERRORED = 0.2, 0.2, 0.1
PAIRS, FEW_TASKS, STEPS = 0.5, 100, 0.5


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What is known of the model, tasks, reward and machine that a stage starts with."""

    samples: int = 0
    """Of each task: the k of pass@k."""
    pass_1: Interval = UNKNOWN
    pass_k: Interval = UNKNOWN
    mixed: Interval = UNKNOWN
    """Share of tasks that some samples solve and some don't."""
    spread: Interval = UNKNOWN
    """Share of tasks whose rewards differ: what RL learns from, format and partial rewards included."""
    format: Interval = UNKNOWN
    """Share of trajectories that follow the protocol to an answer."""
    pass_formed: Interval = UNKNOWN
    """pass@1 of those."""
    truncated: Interval = UNKNOWN
    calls: Interval = UNKNOWN
    """Tool calls a trajectory."""
    turns: float = math.nan
    errored: float = math.nan
    false_accept: float = math.nan
    false_reject: float = math.nan
    has_tools: bool = False
    base: bool = False
    """Nothing trains the model before the stage."""
    pending: str = ""
    """A stage that does, but hasn't yet: the base model was measured in its place."""
    distinct_tasks: float = math.nan
    sampled_per_s: float = math.nan
    trained_per_s: float = math.nan
    """Tokens, prompts included."""
    step_s: float = math.nan
    hours: float = math.nan
    """Of all steps that the time limit leaves, and of the evaluations."""
    steps_frac: float = math.nan
    """Share of the steps that the time limit leaves."""
    memory_gb: Mapping[str, float] = field(default_factory=dict)
    """By what takes it (1e9 bytes)."""
    machine_gb: float = math.nan

    @property
    def memory_frac(self) -> float:
        return sum(self.memory_gb.values()) / self.machine_gb if self.memory_gb else math.nan


ROWS = (
    ("wrong answers accepted", "false_accept", f"at most {FALSE_ACCEPT:.1%}", "default of upswing audit"),
    ("right answers refused", "false_reject", f"at most {FALSE_REJECT:.0%}", "default of upswing audit"),
    ("pass@1", "pass_1", f"about a third, at most {EASY}", "DAPO (2503.14476): groups all right teach nothing"),
    ("pass@k", "pass_k", "above 0", "what is never sampled can't become likelier"),
    ("tasks strictly between", "mixed", f"at least {SPREAD}", "rule of thumb"),
    ("groups whose rewards differ", "spread", f"at least {SPREAD}", "rule of thumb; the others' gradient is zero"),
    ("in the right format", "format", f"at least {FORMAT}", "default of graduation.min_format_valid"),
    ("pass@1 of those", "pass_formed", f"prompt instead of SFT from {THIRD:.2f} on", "rule of thumb"),
    ("calls a trajectory", "calls", f"with tools at least {CALLS}", "rule of thumb"),
    ("truncated", "truncated", f"at most {TRUNCATED}", "rule of thumb"),
    ("errored", "errored", f"at most {ERRORED}", "rule of thumb"),
    (f"distinct of {2 * FEW_TASKS} tasks", "distinct_tasks", f"DPO below {FEW_TASKS}", "rule of thumb"),
    ("sampled tokens/s", "sampled_per_s", "", ""),
    ("trained tokens/s", "trained_per_s", "", ""),
    ("seconds a step", "step_s", "", ""),
    ("hours", "hours", "at most --max-hours", ""),
    ("steps in time_limit_s", "steps_frac", f"at least {STEPS:.0%}", "rule of thumb"),
    ("memory needed of the machine's", "memory_frac", "at most 100%", "estimate"),
)
"""What a person is shown: name, attribute, what is wanted and where that comes from."""


@dataclass(frozen=True)
class Advice:
    """What to do, and the numbers that decided."""

    kind: Kind
    why: str
    remedy: str = ""

    @property
    def ok(self) -> bool:
        return self.kind in ("go", "sft first")


_SFT = "Add an sft stage before RL, or demonstrations or epochs to it; without an expert, a better prompt."
_DPO = "Sample pairs once and train a preference stage on them (docs/preference.md): nothing is sampled at each step."
_CUT = "Cut steps, tasks_per_step or group_size; use lora or gradient_checkpointing; a smaller model; more machine."


def advise(m: Measured, *, max_hours: float = math.inf) -> Advice:
    """One piece of advice: the first that the numbers call for."""
    formed, solved, gives_pairs = m.format.mean, m.pass_1.mean, m.turns == 1 and m.mixed.mean >= PAIRS
    differ = m.mixed if math.isnan(m.spread.mean) else m.spread
    problem, little = _compute_problem(m, max_hours), differ.mean < SPREAD
    unformed = formed < FORMAT and solved < THIRD and 1 - formed >= (1 - solved) / 2
    prompted = unformed and m.base and m.pass_formed.mean >= THIRD and m.pass_formed.n >= 5
    success = f"pass@1 {shown(m.pass_1)}, pass@{m.samples or 'k'} {shown(m.pass_k)}"
    protocol, groups = f"{shown(m.format)} follow the protocol", f"rewards differ in {shown(differ)} of the groups"
    cases: tuple[tuple[object, Kind, str, str], ...] = (
        (problem and gives_pairs, "dpo", f"{problem}; one turn, and {shown(m.mixed)} of the tasks give a pair", _DPO),
        (problem, "not enough compute", problem, _CUT),
        (solved > EASY, "harder tasks", f"{success}: little is left to learn", "Leave out tasks that are solved."),
        (m.pending and (unformed or little), "sft first", f"before '{m.pending}' {success}; {protocol}",
         f"Check again after '{m.pending}', with the run folder in the recipe's place."),
        (prompted, "better prompt", f"only {protocol}, but {shown(m.pass_formed)} of those are right",
         "Explain the protocol with an example in the prompt; then check again."),
        (unformed, "more sft", f"only {protocol}; {success}", _SFT),
        (little and m.pass_k.mean == 0, "easier tasks", f"{success}, though {protocol}",
         "Mix in easier tasks, or show in demonstrations how these are done."),
        (little and solved >= 0.5, "harder tasks", f"{success}; {groups}", "Leave out tasks that are solved."),
        (little, "more sft", f"{success}; {groups}", _SFT),
        (gives_pairs and m.distinct_tasks < FEW_TASKS, "dpo",
         f"{m.distinct_tasks:.0f} tasks of one turn, {shown(m.mixed)} of them give a pair", _DPO),
        (True, "go", f"{success}; {groups}", ""),
    )  # fmt: skip
    return next(Advice(kind, why, remedy) for holds, kind, why, remedy in cases if holds)


def _compute_problem(m: Measured, max_hours: float) -> str:
    if m.memory_frac > 1:
        parts = sorted(m.memory_gb.items(), key=lambda part: -part[1])[:3]
        most = ", ".join(f"{what} {size:.1f}" for what, size in parts)
        return f"about {sum(m.memory_gb.values()):.1f} GB are needed ({most}), the machine has {m.machine_gb:.1f}"
    if m.hours > max_hours:
        return f"about {m.hours:.3g} hours ({m.step_s:.3g} s a step), more than {max_hours:g}"
    if m.steps_frac < STEPS:
        return f"time_limit_s leaves {m.steps_frac:.0%} of the steps ({m.step_s:.3g} s each)"
    return ""


def found(
    mode: str, severity: Severity, stage: str, evidence: str, remedy: str, change: Mapping[str, Any] | None = None
) -> Finding:
    """A finding before step 1; its title is its mode in words."""
    return Finding(
        mode=mode, title=mode.replace("_", " "), severity=severity, stage=stage, step=0, since=0,
        evidence=(evidence,), causes=(), remedies=(Remedy(text=remedy, change=change or {}),),
    )  # fmt: skip


def measured_findings(m: Measured, recipe: Recipe, stage: RlStage) -> list[Finding]:
    """What the numbers say beside the advice; how a model behaves that a stage is still to train says nothing."""
    zero, batches, trained = stage.truncated == "zero", stage.dynamic_sampling or 1, not m.pending
    room = min(2 * recipe.limits.turn_tokens, recipe.limits.context_tokens)
    table: tuple[tuple[bool, str, Severity, str, str, dict[str, Any]], ...] = (
        (m.false_accept > FALSE_ACCEPT, "reward_accepts_wrong_answers", "critical",
         f"{m.false_accept:.2%} of wrong answers", "A policy finds them: upswing audit shows which.", {}),
        (m.false_reject > FALSE_REJECT, "reward_refuses_right_answers", "critical",
         f"{m.false_reject:.2%} of right answers", "upswing audit shows which.", {}),
        (m.errored > ERRORED, "trajectories_error", "critical", f"{m.errored:.0%} of them",
         "Mend the environment or its tools, or raise limits.env_timeout_s.", {}),
        (trained and m.truncated.mean > TRUNCATED, "much_truncated", "warning",
         f"{shown(m.truncated)} of the trajectories are cut{' and score 0, however good' if zero else ''}",
         "Keep them out of the loss." if zero else "Give a turn more room.",
         {"truncated": "mask"} if zero else {"limits.turn_tokens": room}),
        (trained and m.has_tools and m.calls.mean < CALLS, "tools_unused", "warning",
         f"{shown(m.calls)} calls a trajectory", "Show calls in demonstrations or in the prompt.", {}),
        (trained and batches > 1 and m.mixed.mean * batches < 1, "dynamic_sampling_in_vain", "warning",
         f"{shown(m.mixed)} of the tasks are mixed, so {batches} batches a step don't fill one",
         "Choose tasks of another difficulty: every step costs all these batches.", {}),
    )  # fmt: skip
    return [found(mode, how, stage.name, why, do, change) for holds, mode, how, why, do, change in table if holds]


def shown(value: Interval | float) -> str:
    """`0.31 [0.22, 0.40]`; a dash for what wasn't measured."""
    if not isinstance(value, Interval):
        return "-" if math.isnan(value) else f"{value:.3g}"
    ends = "" if math.isnan(value.low) else f" [{value.low:.2f}, {value.high:.2f}]"
    return "-" if math.isnan(value.mean) else f"{value.mean:.2f}{ends}"
