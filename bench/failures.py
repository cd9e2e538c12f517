"""The failure lab: every failure mode provoked on purpose on a tiny agent, and what the monitor makes of it.

    python bench/failures.py [--quick] [--modes entropy_collapse ...] [--seeds 0 1 2 3 4] [--healthy 20] [--workers N]
                             [--runs DIR] [--only signal_cost]

Each mode has a recipe (`recipes/failures/`, and `recipes/hack.yaml` for reward hacking) that differs from a healthy
twin by its cause alone. `train_inference_mismatch` is the exception: no recipe can bring it about, so the bench breaks
the engine: from step 10 on it gets no new weights, nor shares the learner's memory. Every mode and seed is run without
safeguards and with `safeguards: auto`; the healthy recipe with 20 seeds. Runs of a seed start from the same weights,
which SFT makes once.
Findings are those that a watch makes of `metrics.jsonl` row by row, as a run in progress has them.

Success is the strict match of all attempts of a step (overfitting: of the held-out tasks), smoothed over 5 whole steps.
What counts as harm, both for good (to the end of the run), and by two standard errors of the difference more, since at
low success 10 % is less than chance makes:
- a run has *lost* its success at the first step from which it is more than 10 % below its own peak so far;
- it *lags* from the first step at which it is more than 10 % of the twin's peak below the twin of the same seed. Where
  the start weights differ (control_token_collapse), gains since the first five steps are compared, not levels.
Harm is the earlier one of the two. A run that has neither is harmless: it counts for `detected` alone.

`detected`: share of the provoked runs with a finding of their mode, of severity warning or above.
`lead_positive`: share of the harmed runs whose first such finding is at an earlier step than the harm.
`median_lead`: (harm - found) / harm over the harmed runs, 0 where the finding came later or never.
`false_alarms_per_run`: modes found at warning or above in a healthy run, mean.
`kept_with_safeguards`: success in the last 5 steps with safeguards over that of the twin of the same seed; median over
modes and seeds. A run that a safeguard stopped counts as it was then. `kept_without` (reported): the same without.
`signal_cost`: seconds a healthy step takes with signals and detectors over seconds without (patched away), less 1. The
same seed is run with and without in turn, so that both do the same work; the median over all steps of all turns
(spread: of each turn's median). On so small a model this is an upper bound. `--only signal_cost` measures this alone;
it needs a machine without other work.
`llds`: the LLD recipe without LLDS and with llds_coef 0.2 and 1: change of the first turn's log-prob of good attempts
(`delta_good_first`, mean over steps) and success at the end; reported.

`--runs DIR` keeps the runs there and takes finished ones from there, judged again; an unfinished one goes on.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent))
from common import ROOT, Figure, cannot_run, describe_machine, finish

RECIPES = ROOT / "recipes" / "failures"
HEALTHY, LLD = "healthy.yaml", "likelihood_displacement"
STRICT = ("verifiers=[strict_match, {name: exact_match, weight: 0}]", "sft.min_reward=0.0")
"""Makes hack.yaml healthy: the same demonstrations, rewarded strictly."""
UNPAID = ("verifiers=[strict_match, {name: format, weight: 0}]",)
"""Makes repeated_calls.yaml healthy: the same demonstrations, without a reward a call."""
LLDS_COEFS = (0.2, 1.0)
QUICK_MODES = ("advantage_collapse", "tool_call_collapse", "kl_explosion")
WINDOW, LOST = 5, 0.1
BROKEN_FROM = 10
DONE = "done.json"


@dataclass(frozen=True, kw_only=True)
class Mode:
    """How a mode is provoked and measured, where it isn't by its own recipe in the usual way."""

    recipe: str = ""
    """Beside healthy.yaml; empty: of the mode's own name."""
    twin: str = HEALTHY
    twin_overrides: tuple[str, ...] = ()
    success: str = "score_strict_match"
    by_gain: bool = False
    broken_engine: bool = False


SPECIAL = {
    "reward_hacking": Mode(recipe="../hack.yaml", twin="../hack.yaml", twin_overrides=STRICT),
    "repeated_calls": Mode(twin="repeated_calls.yaml", twin_overrides=UNPAID),
    "overfitting": Mode(success="eval_strict_match"),
    "control_token_collapse": Mode(by_gain=True),
    "train_inference_mismatch": Mode(recipe=HEALTHY, broken_engine=True),
}
NOT_PROVOKED = {
    "template_collapse": "an entropy bonus (0.02 and 0.2) over a reward that is a coin broke the markup before first "
    "turns stopped depending on the question",
}
"""Modes that this agent could not be brought into, and what was tried."""


def mode_of(name: str) -> Mode:
    mode = SPECIAL.get(name, Mode())
    return mode if mode.recipe else replace(mode, recipe=f"{name}.yaml")


# -- what counts -------------------------------------------------------------------------------------------------------

Curve = Sequence[tuple[int, float]]
"""(step, success)."""


def smooth(curve: Curve, window: int = WINDOW) -> list[tuple[int, float]]:
    """Means over the up to `window` newest values."""
    values = [value for _, value in curve]
    return [(step, statistics.fmean(values[max(0, i + 1 - window) : i + 1])) for i, (step, _) in enumerate(curve)]


def for_good(steps: Sequence[int], bad: Sequence[bool]) -> int | None:
    """The first step of the bad ones that last to the end; None when the last one isn't bad."""
    good = [i for i, one in enumerate(bad) if not one]
    first = good[-1] + 1 if good else 0
    return steps[first] if first < len(steps) else None


def doubt(one: float, other: float, count: float) -> float:
    """Two standard errors of the difference of two shares, each of `count` attempts."""
    return 2 * math.sqrt(max(0.0, one * (1 - one) + other * (1 - other)) / count)


def lost_at(curve: Curve, *, skip: int = 0, count: float = math.inf) -> int | None:
    """The step from which a smoothed curve is more than LOST of its peak so far below that, for good. `skip`: values at
    the start that aren't over a whole window. `count`: attempts that a value is of."""
    peak, bad = -math.inf, []
    for _, value in curve[skip:]:
        peak = max(peak, value)
        bad.append(value < (1 - LOST) * peak - doubt(peak, value, count))
    return for_good([step for step, _ in curve[skip:]], bad)


def lags_at(curve: Curve, twin: Curve, *, by_gain: bool = False, skip: int = 0, count: float = math.inf) -> int | None:
    """The step from which a smoothed curve is more than LOST of the twin's peak below the twin's, for good."""
    peak, other, early = (
        max(value for _, value in twin[skip:] or twin),
        dict(twin),
        min(WINDOW, len(curve), len(twin)) - 1,
    )
    start = curve[early][1] - twin[early][1] if by_gain else 0.0
    both = [(step, value - start, other[step]) for step, value in curve[skip:] if step in other]
    bad = [value < its - LOST * peak - doubt(value + start, its, count) for _, value, its in both]
    return for_good([step for step, *_ in both], bad)


def lead(found: int | None, harm: int) -> float:
    """How much earlier a finding was, as a share of the steps up to the harm; 0 for later or none."""
    return 0.0 if found is None else max(0.0, (harm - found) / max(harm, 1))


def median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else math.nan


# -- runs --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run."""

    arm: str
    mode: str
    seed: int
    recipe: str
    overrides: tuple[str, ...] = ()
    success: str = "score_strict_match"
    broken_engine: bool = False

    @property
    def name(self) -> str:
        return f"{self.arm}/{self.mode}-{self.seed}"


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is known of a finished one."""

    job: Job
    success: list[tuple[int, float]]
    found: Mapping[str, int]
    """Mode -> the step of its first finding at warning or above."""
    series: Mapping[str, list[tuple[int, float]]] = field(default_factory=dict)
    attempts: float = math.inf
    """That a value of success is of; inf: not known, and no value is doubted."""
    stopped: str = ""
    """Why a safeguard ended it."""
    seconds: float = math.nan

    @property
    def final(self) -> float:
        window = WINDOW if self.job.success.startswith("score_") else 1
        return statistics.fmean(value for _, value in self.success[-window:]) if self.success else math.nan


def start_of(recipe: Any, folder: Path) -> str:
    """The weights after a recipe's SFT, made once for all recipes whose SFT is the same -> their folder."""
    from upswing.monitor.progress import Progress
    from upswing.stages.runner import run_recipe

    first = recipe.stages[0]
    env = {**recipe.env.args, **first.env_args}
    parts = [recipe.model, recipe.seed, recipe.env.name, env, first.model_dump(mode="json", exclude={"env_args"})]
    key = hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=8).hexdigest()
    there = folder / f"start-{key}"
    if not there.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            run_recipe(recipe.model_copy(update={"stages": (first,)}), Path(scratch) / "run", log=Progress(quiet=True))
            try:
                (Path(scratch) / "run" / "checkpoints" / first.name / "final").rename(there)
            except OSError:  # another process was faster
                if not there.exists():
                    raise
    return str(there)


def play(job: Job, folder: Path) -> Run:
    """Make a run, or finish it, unless that was done before; and judge it."""
    from upswing.errors import UpswingError
    from upswing.monitor.progress import Progress
    from upswing.recipe import RlStage, SftStage, load_recipe
    from upswing.stages.runner import run_recipe

    out = folder / job.name
    if not (out / DONE).exists():
        recipe = load_recipe(RECIPES / job.recipe, (*job.overrides, f"seed={job.seed}"))
        rest = tuple(stage for stage in recipe.stages if isinstance(stage, RlStage))
        model = start_of(recipe, folder) if isinstance(recipe.stages[0], SftStage) else recipe.model
        began, stopped = time.perf_counter(), ""
        with broken_engine(BROKEN_FROM) if job.broken_engine else ExitStack():
            try:
                recipe = recipe.model_copy(update={"stages": rest, "model": model})
                run_recipe(recipe, out, resume=out.exists(), log=Progress(quiet=True))
            except UpswingError as error:
                stopped = str(error)
        shutil.rmtree(out / "checkpoints", ignore_errors=True)
        (out / DONE).write_text(json.dumps({"stopped": stopped, "seconds": time.perf_counter() - began}))
    return judged(job, out)


def judged(job: Job, out: Path) -> Run:
    """A finished run as the detectors of now see it."""
    from upswing.cli.doctor import facts_of
    from upswing.monitor.watch import Watch
    from upswing.recipe.yaml_reader import parse_yaml
    from upswing.view.run_folder import METRICS, RECIPE, read_json_lines

    rows = [row for row in read_json_lines(out / METRICS) if row["stage"] == "rl"]
    facts = facts_of(parse_yaml((out / RECIPE).read_text(), RECIPE), "rl")
    watch, found = Watch("rl", facts), dict[str, int]()
    for row in rows:
        for one in watch.observe(row).judgements:
            if one.finding is not None and one.finding.severity != "info":
                found.setdefault(one.mode, one.finding.step)
    # A twin is measured by the success of every mode that it is the twin of.
    names = {
        job.success,
        *(mode.success for mode in SPECIAL.values()),
        "delta_good_first",
        "logprob_good",
        "entropy",
        "kl",
        "kl_old",
        "reward",
    }
    series = {name: [(r["step"], r[name]) for r in rows if r.get(name) is not None] for name in names}
    of_tasks = job.success.startswith("eval_")
    attempts = float(facts.get("eval_tasks") or math.inf) if of_tasks else played_of(rows)
    done = json.loads((out / DONE).read_text())
    return Run(job=job, success=series[job.success], found=found, series=series, attempts=attempts, **done)


def played_of(rows: Sequence[Mapping[str, Any]]) -> float:
    """Attempts a step whose success is known."""
    known = [row["num_trajectories"] - row["num_errored"] for row in rows if row.get("num_trajectories")]
    return median(known) if known else math.inf


@contextmanager
def broken_engine(after: int) -> Iterator[None]:
    """Weights beyond version `after` never reach the sampler, which says that they have. Nor are the learner's in its
    memory, where every update would be the sampler's at once."""
    from upswing.engine.torch import TorchEngine
    from upswing.stages.context import RunContext

    whole = TorchEngine.update_weights

    async def update_weights(self: Any, weights: Any, version: int) -> None:
        if version <= after:
            await whole(self, weights, version)
        self.version = version

    with (
        mock.patch.object(TorchEngine, "update_weights", update_weights),
        mock.patch.object(RunContext, "share_memory", lambda self, learner: None),
    ):
        yield


def jobs_of(modes: Sequence[str], seeds: Sequence[int], healthy: int, more: tuple[str, ...]) -> list[Job]:
    """Twins first; then a seed after the other, so that a run that is cut short has seen all modes on some seeds."""
    jobs = [
        Job(arm="healthy", mode="healthy", seed=seed, recipe=HEALTHY, overrides=more)
        for seed in sorted({*range(healthy), *seeds})
    ]
    for seed in seeds:
        for name in modes:
            mode = mode_of(name)
            plain = Job(
                arm="plain",
                mode=name,
                seed=seed,
                recipe=mode.recipe,
                overrides=more,
                success=mode.success,
                broken_engine=mode.broken_engine,
            )
            jobs += [plain, replace(plain, arm="guarded", overrides=(*more, "rl.safeguards=auto"))]
            if mode.twin != HEALTHY:
                jobs.append(replace(plain, arm="twin", recipe=mode.twin, overrides=(*more, *mode.twin_overrides)))
            if name == LLD:
                jobs += [replace(plain, arm=f"llds-{c:g}", overrides=(*more, f"rl.llds_coef={c}")) for c in LLDS_COEFS]
    return jobs


def run_all(jobs: Sequence[Job], folder: Path, workers: int) -> list[Run]:
    """Every process computes with one thread, so `workers` cores are busy."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=_one_thread) as pool:
        runs = []
        for job in [pool.submit(play, job, folder) for job in jobs]:
            run = job.result()
            runs.append(run)
            told = ", ".join(f"{mode} {step}" for mode, step in run.found.items()) or "nothing"
            stopped = f"; {run.stopped[:60]}" if run.stopped else ""
            print(
                f"  {run.job.name}: {run.final:.2f} at the end; found {told}; {run.seconds:.0f} s{stopped}", flush=True
            )
    return runs


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


# -- what signals cost -------------------------------------------------------------------------------------------------


@contextmanager
def without_monitor() -> Iterator[None]:
    """Signals that only detectors read, and the detectors, away."""
    from upswing.learn import learner
    from upswing.stages import guard, policy, rl_metrics

    class NoProbe:
        def __init__(self, *args: Any, **kwargs: Any) -> None: ...

        def after(self, *args: Any) -> dict[str, float]:
            return {}

    with ExitStack() as patches:
        for where, name, what in (
            (policy, "Probe", NoProbe),
            (rl_metrics, "text_signals", lambda *args: {}),
            (learner, "_tally_turns", lambda *args: None),
            (guard.Guard, "observe", lambda *args: None),
        ):
            patches.enter_context(mock.patch.object(where, name, what))
        yield


def cost_figure(folder: Path, quick: bool) -> Figure:
    """The healthy recipe with and without the monitor, in turn."""
    _one_thread()
    rounds, steps = (2, 10) if quick else (4, 30)
    seconds: dict[bool, list[list[float]]] = {True: [], False: []}
    for number in range(rounds):
        for watched in (True, False):
            with ExitStack() if watched else without_monitor():
                more = (f"rl.steps={steps}", "rl.warmup_steps=0", "rl.eval_every=0", "rl.save_every=0")
                job = Job(arm=f"cost-{watched}-{number}", mode="healthy", seed=0, recipe=HEALTHY, overrides=more)
                play(job, folder)
            rows = (folder / job.name / "metrics.jsonl").read_text().splitlines()
            ended = [row["time"] for row in map(json.loads, rows) if row["stage"] == "rl"]
            seconds[watched].append([b - a for a, b in itertools.pairwise(ended)])
            print(f"  {job.name}: {median(seconds[watched][-1]):.3f} s a step", flush=True)
    more_s = [  # by round and step: both do the same work in the same step
        [a / b - 1 for a, b in zip(on, off, strict=True)] for on, off in zip(seconds[True], seconds[False], strict=True)
    ]
    middles = [median(one) for one in more_s]
    return Figure(median(list(itertools.chain(*more_s))), 0.03, "lower", (min(middles), max(middles)))


# -- figures -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One mode, one seed."""

    mode: str
    found: int | None
    lost: int | None
    lags: int | None
    kept: float
    """Final success over the twin's."""
    guarded: float
    others: tuple[str, ...]
    """Further modes that were found."""

    @property
    def harm(self) -> int | None:
        return min((step for step in (self.lost, self.lags) if step is not None), default=None)


def outcomes_of(runs: Sequence[Run]) -> list[Outcome]:
    """Of every mode and seed."""
    by = {(run.job.arm, run.job.mode, run.job.seed): run for run in runs}
    outcomes = []
    for (arm, name, seed), run in by.items():
        if arm != "plain":
            continue
        mode, twin = mode_of(name), by.get(("twin", name, seed)) or by["healthy", "healthy", seed]
        window = WINDOW if mode.success.startswith("score_") else 1
        curves = [smooth(one, window) for one in (run.success, twin.series.get(mode.success) or twin.success)]
        whole = {"skip": window - 1, "count": min(run.attempts, twin.attempts) * window}
        last = statistics.fmean(value for _, value in (twin.series.get(mode.success) or twin.success)[-window:])
        guarded = by.get(("guarded", name, seed))
        outcomes.append(
            Outcome(
                mode=name,
                found=run.found.get(name),
                lost=lost_at(curves[0], **whole),
                lags=lags_at(*curves, by_gain=mode.by_gain, **whole),
                kept=run.final / last,
                guarded=math.nan if guarded is None else guarded.final / last,
                others=tuple(one for one in run.found if one != name),
            )
        )
    return outcomes


def detection_figures(outcomes: Sequence[Outcome]) -> dict[str, Figure]:
    harmed = [(one.found, one.harm) for one in outcomes if one.harm is not None]
    leads = [lead(found, harm) for found, harm in harmed]
    return {
        "detected": Figure(_share(one.found is not None for one in outcomes), 0.95),
        "lead_positive": Figure(_share(value > 0 for value in leads), 0.9),
        "median_lead": Figure(_known(median(leads)), 0.2, spread=(min(leads), max(leads)) if leads else None),
    }


def kept_figures(outcomes: Sequence[Outcome]) -> dict[str, Figure]:
    guarded = [one.guarded for one in outcomes if not math.isnan(one.guarded)]
    return {
        "kept_with_safeguards": Figure(_known(median(guarded)), 0.95),
        "kept_without": Figure(_known(median([one.kept for one in outcomes]))),
    }


def _share(marks: Iterator[bool]) -> float | None:
    found = list(marks)
    return sum(found) / len(found) if found else None


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def print_table(outcomes: Sequence[Outcome]) -> None:
    print("\nmedians over seeds; kept: success at the end over the twin's\n")
    print(
        "| mode | detected | found | lost | lags | lead | success, share of the twin's | with safeguards | also found |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name in dict.fromkeys(one.mode for one in outcomes):
        own = [one for one in outcomes if one.mode == name]
        leads = [lead(one.found, one.harm) for one in own if one.harm is not None]
        steps = [_middle([getattr(one, key) for one in own]) for key in ("found", "lost", "lags")]
        shares = [f"{median([getattr(one, key) for one in own]):.2f}" for key in ("kept", "guarded")]
        others = ", ".join(dict.fromkeys(other for one in own for other in one.others))
        cells = [f"{sum(one.found is not None for one in own)}/{len(own)}", *steps]
        cells += [f"{median(leads):.2f}" if leads else "no harm", *shares, others]
        print(f"| {name} | " + " | ".join(cells) + " |")
    for name, why in NOT_PROVOKED.items():
        print(f"| {name} | not provoked: {why} |")


def _middle(steps: Sequence[int | None]) -> str:
    known = [step for step in steps if step is not None]
    few = f" ({len(known)}/{len(steps)})" if known and len(known) < len(steps) else ""
    return f"{statistics.median_low(known)}{few}" if known else "never"


def llds_figures(runs: Sequence[Run]) -> dict[str, Figure]:
    """The LLD recipe without LLDS and with it."""
    figures: dict[str, Figure] = {}
    for arm in ("plain", *(f"llds-{coef:g}" for coef in LLDS_COEFS)):
        own = [run for run in runs if run.job.arm == arm and run.job.mode == LLD]
        if own:
            means = [statistics.fmean(value for _, value in run.series["delta_good_first"]) for run in own]
            label = "0" if arm == "plain" else arm.removeprefix("llds-")
            figures[f"llds.{label}.delta_good_first"] = Figure(median(means), spread=(min(means), max(means)))
            ends = [run.final for run in own]
            figures[f"llds.{label}.final_success"] = Figure(median(ends), spread=(min(ends), max(ends)))
    return figures


def false_alarms(runs: Sequence[Run]) -> Figure:
    healthy = [run for run in runs if run.job.arm in ("healthy", "twin")]
    for run in healthy:
        if run.found:
            print(f"false alarm in {run.job.name}: " + ", ".join(f"{mode} at {at}" for mode, at in run.found.items()))
    return Figure(statistics.fmean(len(run.found) for run in healthy), 0.05, "lower")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"one seed of {', '.join(QUICK_MODES)}: 5 minutes")
    parser.add_argument("--modes", nargs="+", default=None, metavar="MODE")
    parser.add_argument("--seeds", type=int, nargs="+", default=None)
    parser.add_argument("--healthy", type=int, default=None, help="how many healthy runs (20)")
    parser.add_argument("--runs", type=Path, default=None, help="folder of the runs, kept and reused")
    parser.add_argument("--only", choices=("signal_cost",), default=None, help="measure this figure alone")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="runs at the same time")
    args = parser.parse_args()
    try:
        from upswing.monitor.detectors import MODES
    except ImportError as error:
        return cannot_run(f"{error}; run `make setup` and use .venv/bin/python")
    known = [name for name in MODES if name not in NOT_PROVOKED]
    modes = args.modes or list(QUICK_MODES if args.quick else known)
    if unknown := [name for name in modes if name not in known]:
        return cannot_run(f"no mode '{unknown[0]}' to provoke; there are {', '.join(known)}")
    seeds = args.seeds or ([0] if args.quick else [0, 1, 2, 3, 4])
    healthy = (2 if args.quick else 20) if args.healthy is None else args.healthy
    more = ("rl.steps=30",) if args.quick else ()
    jobs = jobs_of(modes, seeds, healthy, more)
    print(describe_machine())
    if args.only:
        with tempfile.TemporaryDirectory() as scratch:
            return finish("failures", args.quick, {"signal_cost": cost_figure(Path(scratch), args.quick)})
    print(f"{len(modes)} modes x {len(seeds)} seeds, {len(jobs)} runs, {args.workers} at a time", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.runs or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        runs = run_all(jobs, folder, args.workers)
        outcomes = outcomes_of(runs)
        print_table(outcomes)
        figures = {
            **detection_figures(outcomes),
            "false_alarms_per_run": false_alarms(runs),
            **kept_figures(outcomes),
            "signal_cost": cost_figure(Path(scratch), args.quick),
            **llds_figures(runs),
        }
    return finish("failures", args.quick, figures)


if __name__ == "__main__":
    sys.exit(main())
