"""The figures of a finished run of `recipes/search.yaml`.

    upswing run recipes/search.yaml --out runs/search
    python bench/search.py --run runs/search

`--control` first adds what the run lacks: an SFT control (more SFT over the same demonstrations, from where RL began,
for as long as RL took) and its test. That is all that is ever trained here, and `--quick` refuses it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from common import ROOT, Figure, cannot_run, describe_machine, finish, paired, with_control
from demo import is_scored, made_by

LEAST = 30
"""Questions of each kind, for the worst of them to say something."""
CONTROL = "control"
"""A stage of this name, if the run has one: as much more SFT as RL took. It is no part of the job's hours."""


def add_control(run: Path) -> None:
    from upswing.monitor.progress import Progress
    from upswing.recipe import load_recipe
    from upswing.stages.runner import run_recipe

    recipe = load_recipe(run / "recipe.yaml")
    if all(stage.name != CONTROL for stage in recipe.stages):
        recipe = with_control(recipe, CONTROL)
    run_recipe(recipe, run, log=Progress(json_lines=True, min_interval_s=30), resume=True)


def points(interval: dict[str, Any]) -> float:
    return 100 * float(interval["mean"])


def problem_with(run: Path, entries: dict[str, Any]) -> str | None:
    """Why these aren't the figures of a finished run of `recipes/search.yaml`, if so. Raises ConfigError."""
    from upswing.recipe import load_recipe

    if missing := [label for label in ("sft", "rl") if label not in entries or not is_scored(entries[label])]:
        first = f"upswing run recipes/search.yaml --out {run}"
        return f"{run} has no finished test of {', '.join(missing)}; first: {first}"
    ran, asked = load_recipe(run).env, load_recipe(ROOT / "recipes" / "search.yaml").env
    if ran != asked:
        return f"{run} was run with env {ran.name} {ran.args}, recipes/search.yaml has {asked.name} {asked.args}"
    return None


def read(run: Path) -> tuple[dict[str, Any], float]:
    """(summaries of the test by label, hours of the job)."""
    from upswing.view.run_folder import RESULTS, read_json

    found = [e for e in (read_json(run / RESULTS) or []) if e["split"] == "test" and e["mode"] == "greedy"]
    entries = {e["label"]: e["summary"] for e in found if e["stage"] == "test" or e["label"] == CONTROL}
    state = (read_json(run / "state.json") or {}).get("stages", {})
    stages = {"test"} | {e["stage"] for e in found if e["label"] != CONTROL}
    beside = {CONTROL, *(e["stage"] for e in found)} - stages  # the control, and where it alone is measured
    return entries, sum(float(stage.get("wall_s", 0)) for name, stage in state.items() if name not in beside) / 3600


def worst_kind(summary: dict[str, Any]) -> float | None:
    """Of all seven, printed; None unless there are `LEAST` questions of each."""
    from upswing.envs.geo_search import KINDS

    nothing = {"strict_match": {"mean": None, "n": 0}}
    rows = [(kind, summary["by_tag"].get("kind", {}).get(kind, nothing)["strict_match"]) for kind in KINDS]
    for kind, row in sorted(rows, key=lambda pair: pair[1]["mean"] or 0.0):
        few = "" if row["n"] >= LEAST else f", fewer than {LEAST}"
        print(f"  {kind}: {points(row):.1f} (n={row['n']}{few})" if row["n"] else f"  {kind}: none")
    return min(points(row) for _, row in rows) if all(row["n"] >= LEAST for _, row in rows) else None


def figures_of(entries: dict[str, Any], hours: float) -> dict[str, Figure]:
    sft, rl = entries["sft"], entries["rl"]
    strict = points(rl["components"]["strict_match"])

    def rate(summary: dict[str, Any]) -> float | None:
        return summary["recovery"]["mean"] if summary["recovery"]["n"] else None

    figures = {
        "em_rl": Figure(strict, 90),
        "worst_kind_em": Figure(worst_kind(rl), 80),
        "rl_minus_sft_points": Figure(strict - points(sft["components"]["strict_match"]), 25),
        "hours": Figure(hours, 3, "lower"),
        "lenient_minus_strict_points": Figure(points(rl["components"]["exact_match"]) - strict, 3, "lower"),
        "recovery_rate_sft": Figure(rate(sft)),
        "recovery_rate_rl": Figure(rate(rl)),
        "paired_p": Figure(paired("rl against sft", sft, rl).p, None, "lower"),
    }
    if CONTROL in entries:
        control = entries[CONTROL]
        em = points(control["components"]["strict_match"])
        figures |= {
            "em_control": Figure(em),
            "rl_minus_control_points": Figure(strict - em),
            "control_paired_p": Figure(paired(f"rl against {CONTROL}", control, rl).p, None, "lower"),
        }
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=Path("runs/search"), help="a finished run; default: runs/search")
    parser.add_argument("--quick", action="store_true", help="train nothing, so without --control")
    parser.add_argument("--control", action="store_true", help="add the SFT control: about as long as RL took")
    args = parser.parse_args()
    if args.quick and args.control:
        return cannot_run("--control trains as long as RL took; leave out --quick")
    try:
        from upswing.errors import ConfigError

        print(describe_machine())
        if problem := problem_with(args.run, read(args.run)[0]):
            return cannot_run(problem)
        if args.control:
            add_control(args.run)
        print(f"run: {made_by(args.run)}")
        return finish("search", args.quick, figures_of(*read(args.run)))
    except ImportError as error:
        return cannot_run(f"{error}; run `make setup` and use .venv/bin/python")
    except ConfigError as problem:
        return cannot_run(str(problem))


if __name__ == "__main__":
    sys.exit(main())
