"""Base, SFT, RL and the SFT control of `recipes/demo.yaml`, over several seeds.

    python bench/demo.py [--quick] [--seeds 0 1 2] [--out runs/bench-demo]

Each seed runs the recipe as `make demo` does, then an SFT control: more SFT over the same demonstrations, from the same
SFT checkpoint, for as long as RL took, measured on the same test questions. RL is tested against both by the exact
McNemar test; of several seeds the largest p is given. `minutes` is the recipe's stages: what
`make demo` takes once .venv and the model are there. A run that was stopped goes on where it was. `--quick`
takes one seed and a few steps of RL, so its figures fall short.
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


def run_seed(seed: int, out: Path, quick: bool) -> tuple[dict[str, Any], float]:
    """Run recipe and control -> (test entries by label, minutes of the recipe)."""
    from upswing.monitor.progress import Progress
    from upswing.recipe import load_recipe
    from upswing.stages.runner import run_recipe
    from upswing.view.run_folder import RESULTS, read_json

    recipe = load_recipe(ROOT / "recipes" / "demo.yaml", [f"seed={seed}", *(QUICK if quick else [])])
    log = Progress(json_lines=True, min_interval_s=30)
    begun = (read_json(out / "state.json") or {}).get("stages", {})
    if not all(begun.get(stage.name, {}).get("done") for stage in recipe.stages):  # else the control has begun
        run_recipe(recipe, out, log=log, resume=out.exists())
    stages = read_json(out / "state.json")["stages"]
    minutes = sum(float(stages[stage.name]["wall_s"]) for stage in recipe.stages) / 60
    run_recipe(with_control(recipe, CONTROL), out, log=log, resume=True)
    entries = read_json(out / RESULTS)
    found = {entry["label"]: entry for entry in entries if entry["stage"] == "test"}
    found |= {
        entry["label"]: entry for entry in entries if entry["stage"] == "test_control" and entry["label"] == CONTROL
    }
    return found, minutes


def points(entry: dict[str, Any], component: str = "strict_match") -> float:
    return 100 * float(entry["summary"]["components"][component]["mean"])


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
        "eval_questions": figure(lambda e: float(e["rl"]["summary"]["num_tasks"]), 200),
        "lenient_minus_strict_points": figure(lambda e: points(e["rl"], "exact_match") - points(e["rl"]), 3, "lower"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, little training: at most 5 minutes")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/bench-demo"))
    args = parser.parse_args()
    try:
        print(describe_machine())
        runs = [
            run_seed(seed, args.out / ("quick" if args.quick else f"seed-{seed}"), args.quick)
            for seed in (args.seeds[:1] if args.quick else args.seeds)
        ]
    except ImportError as error:
        return cannot_run(f"{error}; run `make setup` and use .venv/bin/python")
    return finish("demo", args.quick, figures_of(runs))


if __name__ == "__main__":
    sys.exit(main())
