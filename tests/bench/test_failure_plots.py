"""The plots of docs/failures show what the runs have, where they have it."""

from __future__ import annotations

import importlib.util
import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
SPEC = importlib.util.spec_from_file_location("bench_failure_plots", BENCH / "failure_plots.py")
assert SPEC is not None and SPEC.loader is not None
plots = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(plots)

FAILS = 12
RECIPE = "verifiers: [{name: strict_match, weight: 1.0}]\nstages: [{stage: rl, name: rl, group_size: 8}]\n"


def store(run: Path, fails: int | None) -> None:
    """A run whose success is 0.25, and half of whose attempts break from step `fails` on."""
    run.mkdir(parents=True)
    rows = [{"stage": "rl", "step": 0, "eval_reward": 0.3}]
    for step in range(1, 41):
        broken = 32 if fails is not None and step >= fails else 0
        rows.append({"stage": "rl", "step": step, "reward": 0.25, "score_strict_match": 0.25})
        rows[-1] |= {"num_trajectories": 64, "num_errored": broken, "num_unscored": 0}
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "recipe.yaml").write_text(RECIPE)
    (run / "done.json").write_text(json.dumps({"stopped": "", "seconds": 1.0}))


def elements(root: ET.Element, name: str, css: str) -> list[ET.Element]:
    return [one for one in root.iter(f"{{http://www.w3.org/2000/svg}}{name}") if css in one.get("class", "").split()]


def value_at(labels: list[ET.Element], axis: str, place: float) -> float:
    """What an axis says of a place, from its first and last number."""
    (a, at_a), (b, at_b) = ((float(one.text or ""), float(one.get(axis, ""))) for one in (labels[0], labels[-1]))
    return a + (place - at_a) / (at_b - at_a) * (b - a)


def points(line: ET.Element) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in (pair.split(",") for pair in line.get("points", "").split())]


@pytest.mark.parametrize("fails", [FAILS, None])
def test_a_plot_has_both_runs_and_a_mark_at_the_first_finding(tmp_path: Path, fails: int | None, capsys) -> None:
    store(tmp_path / "runs" / "plain" / "error_storm-0", fails)
    store(tmp_path / "runs" / "healthy" / "healthy-0", None)
    assert plots.main(["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "plots")]) == 0
    assert [path.name for path in (tmp_path / "plots").iterdir()] == ["error_storm.svg"]
    assert "kl_explosion: no finished run plain/kl_explosion-0" in capsys.readouterr().out
    text = (tmp_path / "plots" / "error_storm.svg").read_text()
    root = ET.fromstring(text)
    assert len(text.encode()) <= 12 * 1024

    steps = [one for one in elements(root, "text", "x") if one.text != "step"]
    marks = [one for one in elements(root, "line", "mark") if "key" not in one.get("class", "")]
    if fails is None:
        assert not marks and "never found" in text
    else:
        places = [value_at(steps, "x", float(mark.get(end, ""))) for mark in marks for end in ("x1", "x2")]
        assert places == pytest.approx([FAILS] * 4, abs=0.05)  # a mark a panel
        assert f"step {FAILS}" in text

    success, broken = elements(root, "polyline", "provoked")
    heights = elements(root, "text", "y")
    top = [one for one in heights if float(one.get("y", "")) < points(broken)[0][1] - 90]
    below = [one for one in heights if one not in top]
    assert [value_at(steps, "x", x) for x, _ in points(success)] == pytest.approx(range(1, 41), abs=0.05)
    assert [value_at(top, "y", y + 4) for _, y in points(success)] == pytest.approx([0.25] * 40, abs=0.01)
    expected = [32.0 if fails is not None and step >= fails else 0.0 for step in range(1, 41)]
    assert [value_at(below, "y", y + 4) for _, y in points(broken)] == pytest.approx(expected, abs=0.5)
    for line in elements(root, "polyline", "twin"):
        assert len(points(line)) == 40


def test_no_run_at_all_is_told(tmp_path: Path) -> None:
    assert plots.main(["--runs", str(tmp_path), "--out", str(tmp_path / "plots")]) == 2


def test_every_mode_that_is_provoked_has_a_plot_and_its_page_shows_it() -> None:
    failures = sys.modules["failures"]
    from upswing.monitor.detectors import MODES

    assert {*plots.SIGNALS} == {*MODES} - {*failures.NOT_PROVOKED}
    for mode in plots.SIGNALS:
        page = BENCH.parent / "docs" / "failures" / f"{mode}.md"
        assert f"(plots/{mode}.svg)" in page.read_text()
        assert (page.parent / "plots" / f"{mode}.svg").stat().st_size <= 12 * 1024
