"""Base, SFT, RL and the SFT control of `recipes/demo.yaml`, over several seeds.

    python bench/demo.py [--quick] [--seeds 0 1 2] [--out runs/bench-demo] [--reuse]

Each seed runs the recipe as `make demo` does, then an SFT control: more SFT over the same demonstrations, from the same
SFT checkpoint, for as long as RL took, measured on the same test questions. RL is tested against both by the exact
McNemar test; of several seeds the largest p is given. `minutes` is the recipe's stages: what
`make demo` takes once .venv and the model are there. A run that was stopped goes on where it was; a finished one is
reported only with `--reuse`, as it is. `--quick` takes one seed and a few steps of RL, so its figures fall short.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from common import ROOT, Figure, cannot_run, describe_machine, finish, paired, with_control

QUICK = ["rl.steps=2", "test.tasks=40", "sft.demonstrations=40"]
CONTROL = "sft_control"


def made_by(run: Path) -> str:
    """What a run was made with, in a line."""
    from upswing.view.run_folder import ENVIRONMENT, read_json

    told = read_json(run / ENVIRONMENT) or {}
    commits = ", then ".join(told.get("commits") or ["unknown"])
    return f"{run}: begun {told.get('started', 'at an unknown time')}, commit {commits}"


def run_seed(seed: int, out: Path, quick: bool, reuse: bool) -> tuple[dict[str, Any], float]:
    """Run recipe and control -> (test entries by label, minutes of the recipe). Raises ConfigError."""
    from upswing.errors import ConfigError
    from upswing.monitor.progress import Progress
    from upswing.recipe import load_recipe
    from upswing.stages.runner import run_recipe
    from upswing.view.run_folder import RESULTS, read_json

    recipe = load_recipe(ROOT / "recipes" / "demo.yaml", [f"seed={seed}", *(QUICK if quick else [])])
    if absent := {"sft", "rl", "test"} - {stage.name for stage in recipe.stages}:
        raise ConfigError(f"recipes/demo.yaml has no stage {', '.join(sorted(absent))}, whose figures these are")
    log, whole = Progress(json_lines=True, min_interval_s=30), with_control(recipe, CONTROL)
    begun = (read_json(out / "state.json") or {}).get("stages", {})
    done = {name for name, stage in begun.items() if stage.get("done")}
    finished = {stage.name for stage in whole.stages} <= done
    if finished and not reuse:
        raise ConfigError(f"there is a finished run in {made_by(out)}; report it with --reuse, or give another --out")
    if not {stage.name for stage in recipe.stages} <= done:  # else the control has begun
        run_recipe(recipe, out, log=log, resume=out.exists())
    stages = read_json(out / "state.json")["stages"]
    minutes = sum(float(stages[stage.name]["wall_s"]) for stage in recipe.stages) / 60
    if not finished:
        run_recipe(whole, out, log=log, resume=True)
    print(f"run: {made_by(out)}")
    entries = read_json(out / RESULTS)
    found = {entry["label"]: entry for entry in entries if entry["stage"] == "test"}
    found |= {
        entry["label"]: entry for entry in entries if entry["stage"] == "test_control" and entry["label"] == CONTROL
    }
    for label in ("base", "sft", "rl", CONTROL):
        if label not in found or not is_scored(found[label]["summary"]):
            raise ConfigError(f"{out}: its test has no strict_match and exact_match of '{label}'")
    return found, minutes


def is_scored(summary: dict[str, Any]) -> bool:
    """By both; not so when every trajectory errored, or when the recipe lacks one of the verifiers."""
    return all(summary["components"].get(name, {"n": 0})["n"] for name in ("strict_match", "exact_match"))


def points(entry: dict[str, Any], component: str = "strict_match") -> float:
    return 100 * float(entry["summary"]["components"][component]["mean"])


def questions(entries: dict[str, Any]) -> float:
    """How many were scored of every checkpoint."""
    measured = [entries[label]["summary"]["components"]["strict_match"] for label in ("base", "sft", "rl")]
    return float(min(interval["n"] for interval in measured))


def figures_of(runs: Sequence[tuple[dict[str, Any], float]]) -> dict[str, Figure]:
    """The figures of all seeds: medians with the range; of p-values the largest."""

    def figure(value: Callable[[dict[str, Any]], float], target: float | None = None, better: str = "higher") -> Figure:
        values = [value(entries) for entries, _ in runs]
        return Figure(statistics.median(values), target, better, (min(values), max(values)))

    def p_against(label: str, target: float | None = None) -> Figure:
        values = [
            paired(f"run {number}: rl against {label}", entries[label]["summary"], entries["rl"]["summary"]).p
            for number, (entries, _) in enumerate(runs)
        ]
        return Figure(max(values), target, "lower", (min(values), max(values)))

    minutes = [spent for _, spent in runs]
    return {
        "minutes": Figure(statistics.median(minutes), 15, "lower", (min(minutes), max(minutes))),
        "em_base": figure(lambda e: points(e["base"])),
        "em_sft": figure(lambda e: points(e["sft"])),
        "em_rl": figure(lambda e: points(e["rl"])),
        "em_sft_control": figure(lambda e: points(e[CONTROL])),
        "rl_minus_sft_points": figure(lambda e: points(e["rl"]) - points(e["sft"]), 20),
        # Strictly above 0: half of what one of 200 questions makes.
        "rl_minus_control_points": figure(lambda e: points(e["rl"]) - points(e[CONTROL]), 0.25),
        "paired_p": p_against("sft", 0.01),
        "control_paired_p": p_against(CONTROL),
        "eval_questions": figure(questions, 200),
        "lenient_minus_strict_points": figure(lambda e: points(e["rl"], "exact_match") - points(e["rl"]), 3, "lower"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, little training: at most 5 minutes")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/bench-demo"))
    parser.add_argument("--reuse", action="store_true", help="report finished runs as they are, and don't run them")
    args = parser.parse_args()
    try:
        from upswing.errors import ConfigError

        print(describe_machine())
        runs = [
            run_seed(seed, args.out / ("quick" if args.quick else f"seed-{seed}"), args.quick, args.reuse)
            for seed in (args.seeds[:1] if args.quick else args.seeds)
        ]
    except ImportError as error:
        return cannot_run(f"{error}; run `make setup` and use .venv/bin/python")
    except ConfigError as problem:
        return cannot_run(str(problem))
    return finish("demo", args.quick, figures_of(runs))


if __name__ == "__main__":
    sys.exit(main())
