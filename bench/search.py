"""The figures of a finished run of `recipes/search.yaml`.

    upswing run recipes/search.yaml --out runs/search
    python bench/search.py --run runs/search

`--control` first adds what the run lacks: an SFT control (more SFT over the same demonstrations, from where RL began,
for as long as RL took) and its test. `--quick` runs the recipe itself with a few steps and questions instead, so its
figures fall short.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from common import ROOT, Figure, cannot_run, describe_machine, finish, paired, with_control

QUICK = [
    "order.demonstrations=32", "sft.demonstrations=40", "sft.validation_demonstrations=8", "rl.steps=1",
    "rl.eval_every=0", "test.tasks=40",
]  # fmt: skip


CONTROL = "control"
"""A stage of this name, if the run has one: as much more SFT as RL took. It is no part of the job's hours."""


def quick_run(out: Path) -> Path:
    from upswing.monitor.progress import Progress
    from upswing.recipe import load_recipe
    from upswing.stages.runner import run_recipe

    run_recipe(load_recipe(ROOT / "recipes" / "search.yaml", QUICK), out, log=Progress(json_lines=True))
    return out


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=Path("runs/search"), help="a finished run folder")
    parser.add_argument("--quick", action="store_true", help="make a small run first: at most 5 minutes")
    parser.add_argument("--control", action="store_true", help="add the SFT control: about as long as RL took")
    args = parser.parse_args()
    try:
        from upswing.view.run_folder import RESULTS, read_json
    except ImportError as error:
        return cannot_run(f"{error}; run `make setup` and use .venv/bin/python")
    print(describe_machine())
    if args.quick:
        import tempfile

        args.run = quick_run(Path(tempfile.mkdtemp()) / "run")
    if args.control and (args.run / "recipe.yaml").is_file():  # else there is no run, which is said below
        add_control(args.run)
    found = [e for e in (read_json(args.run / RESULTS) or []) if e["split"] == "test" and e["mode"] == "greedy"]
    entries = {e["label"]: e["summary"] for e in found if e["stage"] == "test" or e["label"] == CONTROL}
    state = (read_json(args.run / "state.json") or {}).get("stages", {})
    missing = [label for label in ("sft", "rl") if label not in entries]
    if missing:
        return cannot_run(
            f"{args.run} has no finished test of {', '.join(missing)}; first: "
            f"upswing run recipes/search.yaml --out {args.run}"
        )
    sft, rl = entries["sft"], entries["rl"]
    kinds = {kind: points(row["strict_match"]) for kind, row in rl["by_tag"]["kind"].items()}
    for kind, value in sorted(kinds.items(), key=lambda item: item[1]):
        print(f"  {kind}: {value:.1f} (n={rl['by_tag']['kind'][kind]['strict_match']['n']})")
    strict = points(rl["components"]["strict_match"])
    stages = {"test"} | {e["stage"] for e in found if e["label"] != CONTROL}
    beside = {CONTROL, *(e["stage"] for e in found)} - stages  # the control, and where it alone is measured
    seconds = sum(float(stage["wall_s"]) for name, stage in state.items() if name not in beside)

    def rate(summary: dict[str, Any]) -> float | None:
        return summary["recovery"]["mean"] if summary["recovery"]["n"] else None

    figures = {
        "em_rl": Figure(strict, 90),
        "worst_kind_em": Figure(min(kinds.values()), 80),
        "rl_minus_sft_points": Figure(strict - points(sft["components"]["strict_match"]), 25),
        "hours": Figure(seconds / 3600, 3, "lower"),
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
    return finish("search", args.quick, figures)


if __name__ == "__main__":
    sys.exit(main())
