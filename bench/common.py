"""What every bench script shares: what it ran on, the table, the last JSON line, the exit status."""

from __future__ import annotations

import json
import math
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Figure:
    """One published number. `target` None: reported only. `value` None: could not be measured, which falls short."""

    value: float | None
    target: float | None = None
    better: str = "higher"
    spread: Sequence[float] | None = None

    @property
    def meets_target(self) -> bool:
        if self.target is None:
            return True
        if self.value is None or math.isnan(self.value):
            return False
        return self.value >= self.target if self.better == "higher" else self.value <= self.target


def describe_machine(packages: Sequence[str] = ("upswing", "torch", "transformers", "numpy")) -> str:
    """CPU, cores, versions and commit, in a few lines."""
    import torch

    cpu = next(
        (line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor(),
    )
    versions = ", ".join(f"{name} {_version(name)}" for name in packages)
    flags = " ".join(
        f for f in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if f" {f}" in "".join(_lines("/proc/cpuinfo"))
    )
    return (
        f"machine: {cpu} ({flags}), {torch.get_num_threads()} threads, {platform.platform()}\n"
        f"versions: python {platform.python_version()}, {versions}\ncommit: {_commit()}"
    )


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines(keepends=True)
    except OSError:
        return []


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


def _commit() -> str:
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def finish(bench: str, quick: bool, figures: Mapping[str, Figure]) -> int:
    """Print the table and, as the last line, the JSON object -> exit status 0 or 1."""
    width = max(map(len, figures))
    print(f"\n{'figure':<{width}}  {'value':>10}  {'target':>10}  ")
    for name, figure in figures.items():
        value = "not measured" if figure.value is None else f"{figure.value:.4g}"
        sign = {"higher": ">=", "lower": "<="}[figure.better]
        target = "reported" if figure.target is None else f"{sign} {figure.target:g}"
        verdict = "" if figure.target is None else ("ok" if figure.meets_target else "SHORT")
        print(f"{name:<{width}}  {value:>10}  {target:>10}  {verdict}")
    rows: dict[str, dict[str, Any]] = {}
    for name, figure in figures.items():
        rows[name] = {"value": figure.value, "target": figure.target, "better": figure.better}
        if figure.spread is not None:
            rows[name]["spread"] = list(figure.spread)
    print(json.dumps({"bench": bench, "quick": quick, "figures": rows}))
    return 0 if all(figure.meets_target for figure in figures.values()) else 1


def paired(name: str, a: Mapping[str, Any], b: Mapping[str, Any], metric: str = "strict_match") -> Any:
    """`b` against `a` on the questions that both answered, by their evaluation summaries: the PairedResult (exact
    McNemar, one greedy sample a question), printed under `name`."""
    from upswing.evals.stats import paired_test

    one, other = ({row["task_id"]: row["components"].get(metric) for row in summary["records"]} for summary in (a, b))
    shared = sorted(task for task in one if None not in (one[task], other.get(task)))
    found = paired_test([one[task] for task in shared], [other[task] for task in shared])
    low, mean, high = (f"{100 * value:+.1f}" for value in (found.low, found.diff, found.high))
    print(
        f"{name}: {mean} points [{low}, {high}] on {found.n} questions, {found.only_b} won, {found.only_a} lost, "
        f"p {found.p:.3g} ({found.test})"
    )
    return found


def cannot_run(reason: str) -> int:
    """Say why and how to mend it -> exit status 2."""
    print(reason, file=sys.stderr)
    return 2


def with_control(recipe: Any, name: str) -> Any:
    """A recipe of sft, rl and test with two more stages: SFT over the same demonstrations, from where RL began, for as
    long as RL took; and its own test."""
    from upswing.recipe import recipe_from

    data = recipe.to_dict()
    stages = {stage["name"]: stage for stage in data["stages"]}
    graduation = {**stages["sft"]["graduation"], "enabled": False}
    control = {**stages["sft"], "name": name, "from": "sft", "time_limit_as": "rl", "graduation": graduation}
    measured = {**stages["test"], "name": "test_control", "of": [name]}
    return recipe_from({**data, "stages": [*data["stages"], control, measured]})
