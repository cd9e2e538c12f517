"""The plots of docs/failures, of runs that bench/failures.py left: one SVG a mode.

    python bench/failures.py --seeds 0 --healthy 1 --runs runs/failures
    python bench/failure_plots.py --runs runs/failures [--seed 0] [--out docs/failures/plots]

Success (over 5 steps, as bench/failures.py counts it) and the signals that tell the mode, step by step: the provoked
run solid, its healthy twin dashed, and a mark at the step of the mode's first finding of severity warning or above, by
the detectors of now. Modes without a finished run are named and left out. Exit status 2: there is none at all.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from common import ROOT, cannot_run
from failures import DONE, WINDOW, Curve, Job, jobs_of, judged, smooth
from upswing.view.charts import ticks
from upswing.view.html import Html, h

SIGNALS: dict[str, dict[str, str]] = {
    "entropy_collapse": {"entropy": "nats a token", "unique_frac": "different attempts in a group"},
    "entropy_explosion": {"entropy": "nats a token", "invalid_call_frac": "share of calls that are invalid"},
    "advantage_collapse": {"zero_variance_frac": "share of groups with one reward", "too_hard_frac": "all of it 0"},
    "echo_trap": {"group_reward_std": "spread of rewards in a group", "unique_frac": "different attempts in a group"},
    "kl_explosion": {"kl": "to the reference, nats a token", "kl_old": "move of one step, nats a token"},
    "length_explosion": {
        "sampled_tokens": "an attempt",
        "reward_length_corr": "rank correlation of reward and length",
    },
    "length_collapse": {"sampled_tokens": "an attempt", "tool_calls": "an attempt"},
    "likelihood_displacement": {
        "delta_good_first": "change of good first turns' log-prob, nats a token",
        "entropy": "nats a token",
    },
    "train_inference_mismatch": {"mismatch_abs": "nats a token", "ess_frac": "effective sample size"},
    "tool_call_collapse": {"tool_calls": "an attempt", "no_call_frac": "share of attempts without a call"},
    "repeated_calls": {"duplicate_call_frac": "share of calls made before", "tool_calls": "an attempt"},
    "control_token_collapse": {"invalid_call_frac": "share of calls that are invalid", "tool_calls": "an attempt"},
    "retokenisation_drift": {"num_forks": "new branches, of 64 attempts"},
    "stale_updates": {"kl_old": "move of one step, nats a token", "clipped_low": "share of the tokens"},
    "reward_hacking": {"reward": "what is paid: full stops forgiven"},
    "overfitting": {"score_strict_match": "success on the training tasks"},
    "gradient_instability": {"grad_norm": "", "kl_old": "move of one step, nats a token"},
    "error_storm": {"num_errored": "attempts that broke"},
}
"""Mode -> signal -> what it is, in the order of the panels below that of success."""
LOG = frozenset({"kl", "kl_old", "mismatch_abs", "grad_norm"})
"""Drawn by their logarithm; what isn't positive is left out."""
WIDTH, LEFT, RIGHT, HEAD, PANEL, GAP, FOOT = 640, 56, 624, 34, 80, 30, 34
STYLE = Html(
    "text{font:12px system-ui,sans-serif;fill:#5b6878}.name{fill:#1b2430}.card{fill:#fff}.grid{stroke:#dfe4ea}"
    "polyline,.key{fill:none;stroke-width:2;stroke-linejoin:round}.provoked{stroke:#c2570c}"
    ".twin{stroke:#2457c5;stroke-dasharray:6 4}.mark{stroke:#1b2430;stroke-width:1.5;stroke-dasharray:2 3}"
    ".y{text-anchor:end}.x{text-anchor:middle}@media(prefers-color-scheme:dark){text{fill:#9aa8b8}.name{fill:#e6ebf2}"
    ".card{fill:#1a2029}.grid{stroke:#2f3946}.provoked{stroke:#ffa763}.twin{stroke:#8fb2ff}.mark{stroke:#e6ebf2}}"
)

Panel = tuple[str, bool, Mapping[str, Curve]]
"""(title, by its logarithm, curves by CSS class)."""


def curve_of(run: Path, name: str) -> Curve:
    """A signal of a stored run's rl stage."""
    from upswing.view.run_folder import METRICS, read_json_lines

    rows = read_json_lines(run / METRICS)
    return [(row["step"], row[name]) for row in rows if row["stage"] == "rl" and row.get(name) is not None]


def drawn(mode: str, plain: Job, twin: Job, runs: Path) -> str:
    """The SVG of one mode."""
    whose = {"twin": runs / twin.name, "provoked": runs / plain.name}  # the latter above the former
    found = judged(plain, whose["provoked"]).found.get(mode)
    window = WINDOW if plain.success.startswith("score_") else 1
    over = f", over {WINDOW} steps" if window > 1 else " on held-out tasks"
    panels: list[Panel] = [
        (f"success{over}", False, {css: smooth(curve_of(run, plain.success), window) for css, run in whose.items()})
    ]
    for name, what in SIGNALS[mode].items():
        title = f"{name}: {what}" if what else name
        panels.append((title, name in LOG, {css: curve_of(run, name) for css, run in whose.items()}))
    return svg(mode, panels, found)


def svg(mode: str, panels: Sequence[Panel], found: int | None) -> str:
    """Panels above one another with the same steps; `found`: the step of the mark."""
    last = max(step for _, _, curves in panels for curve in curves.values() for step, _ in curve)
    bottom = HEAD + len(panels) * (PANEL + GAP)
    to_x = _scale(0, last, LEFT, RIGHT)
    parts = [h("rect", width=WIDTH, height=bottom + FOOT, rx=8, class_="card")]
    for index, panel in enumerate(panels):
        top = HEAD + index * (PANEL + GAP) + GAP
        parts += _panel(panel, top, to_x)
        if found is not None:
            parts.append(h("line", x1=to_x(found), x2=to_x(found), y1=top, y2=top + PANEL, class_="mark"))
    parts += [
        h("text", f"{x:g}", x=to_x(x), y=bottom + 15, class_="x") for x in ticks(0, last, most=6) if 0 <= x <= last
    ]
    parts.append(h("text", "step", x=(LEFT + RIGHT) / 2, y=bottom + 28, class_="x name"))
    told = "never found" if found is None else f"first finding: step {found}"
    for at, css, text in ((LEFT, "provoked", "provoked"), (180, "twin", "healthy twin"), (330, "mark", told)):
        parts.append(h("line", x1=at, x2=at + 28, y1=20, y2=20, class_=f"key {css}"))
        parts.append(h("text", text, x=at + 36, y=24, class_="name"))
    spoken = f"{mode}: " + "; ".join(title for title, *_ in panels) + f". {told}"
    size = {"viewBox": f"0 0 {WIDTH} {bottom + FOOT}", "width": WIDTH, "height": bottom + FOOT}
    xml = {"xmlns": "http://www.w3.org/2000/svg", "role": "img"}
    return h("svg", h("title", spoken), h("style", STYLE), *parts, **xml, **size) + "\n"


def _panel(panel: Panel, top: float, to_x: Callable[[float], float]) -> Iterator[Html]:
    title, log, curves = panel
    shown = {css: [(x, math.log10(y) if log else y) for x, y in c if y > 0 or not log] for css, c in curves.items()}
    values = [y for curve in shown.values() for _, y in curve]
    low, high = min(values), max(values)
    if log:
        low, high = math.floor(low), math.ceil(high)
        marks: list[float] = list(range(int(low), int(high) + 1, max(1, math.ceil((high - low) / 3))))
    else:
        low = 0.0 if 0 < low < 0.5 * high else low
        marks = ticks(low, high if high > low else low + 1, most=3)
    to_y = _scale(min(low, *marks), max(high, *marks), top + PANEL, top)
    yield h("text", title, x=LEFT, y=top - 7, class_="name")
    for mark in marks:
        yield h("line", x1=LEFT, x2=RIGHT, y1=to_y(mark), y2=to_y(mark), class_="grid")
        yield h("text", f"{10**mark if log else mark:g}", x=LEFT - 6, y=round(to_y(mark) + 4, 1), class_="y")
    for css, curve in shown.items():
        yield h("polyline", points=" ".join(f"{to_x(x):g},{to_y(y):g}" for x, y in curve), class_=css)


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    return lambda value: round(start + (value - low) / ((high - low) or 1) * (end - start), 1)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True, help="where bench/failures.py --runs left them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "failures" / "plots")
    args = parser.parse_args(arguments)
    jobs = {(job.arm, job.mode): job for job in jobs_of(list(SIGNALS), [args.seed], 0, ())}
    args.out.mkdir(parents=True, exist_ok=True)
    count = 0
    for mode in SIGNALS:
        plain, twin = jobs["plain", mode], jobs.get(("twin", mode)) or jobs["healthy", "healthy"]
        missing = [job.name for job in (plain, twin) if not (args.runs / job.name / DONE).exists()]
        if missing:
            print(f"{mode}: no finished run {missing[0]} in {args.runs}")
            continue
        (args.out / f"{mode}.svg").write_text(drawn(mode, plain, twin, args.runs))
        count += 1
    print(f"{count} plots in {args.out}")
    return 0 if count else cannot_run(f"python bench/failures.py --seeds {args.seed} --healthy 1 --runs {args.runs}")


if __name__ == "__main__":
    sys.exit(main())
