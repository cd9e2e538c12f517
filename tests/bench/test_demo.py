"""bench/demo.py and bench/search.py: which figures they take from stored results, and the exact test of RL's gain."""

import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest

from upswing.recipe import load_recipe

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))


def script(name):
    spec = importlib.util.spec_from_file_location(f"bench_{name}", BENCH / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


demo, search = script("demo"), script("search")


def summary(right, n=20):
    """Of `n` questions, those numbered in `right` are right; another one couldn't be scored."""
    scored = [{"task_id": f"q{i}", "components": {"strict_match": float(i in right)}} for i in range(n)]
    mean = {"mean": len(right) / n, "n": n}
    return {
        "records": [*scored, {"task_id": "broken", "components": {"strict_match": None}}],
        "components": {"strict_match": mean, "exact_match": mean},
        "by_tag": {"kind": {"one_hop": {"strict_match": mean}}},
        "num_tasks": n + 1,
        "recovery": {"mean": 0.5, "n": 4},
    }


def coin(lost, won):
    """The exact two-sided McNemar p, by counting the outcomes of a fair coin that are at least as uneven."""
    n = lost + won
    uneven = [k for k in range(n + 1) if abs(2 * k - n) >= abs(won - lost)]
    return sum(math.comb(n, k) for k in uneven) / 2**n


# RL is right where SFT isn't 9 times, and wrong where it is once; against the control it is 5 to 1, then 2 to 2.
SFT, RL = {0, 1}, {1, *range(2, 11)}
CONTROLS = {0, *range(1, 6)}, {0, 11, *range(1, 9)}


def test_the_demo_tests_rl_against_sft_and_against_its_control(capsys):
    runs = [
        (
            {name: {"summary": summary(right)} for name, right in
             {"base": set(), "sft": SFT, "rl": RL, "sft_control": control}.items()},
            12.0 + seed,
        )
        for seed, control in enumerate(CONTROLS)
    ]  # fmt: skip
    figures = demo.figures_of(runs)
    assert figures["paired_p"].value == pytest.approx(coin(1, 9)) and figures["paired_p"].target == 0.01
    control = figures["control_paired_p"]  # the largest over the seeds
    assert control.value == pytest.approx(coin(2, 2)) and control.spread == pytest.approx((coin(1, 5), coin(2, 2)))
    assert control.target is None and figures["rl_minus_control_points"].spread == pytest.approx((0, 20))
    told = capsys.readouterr().out
    assert "run 0: rl against sft_control: +20.0 points" in told and "5 won, 1 lost, p 0.219 (mcnemar)" in told


def results(folder, control):
    entries = {"sft": SFT, "rl": RL, **({"control": CONTROLS[0]} if control else {})}
    rows = [
        {"label": label, "stage": "control_test" if label == "control" else "test", "split": "test", "mode": "greedy",
         "summary": summary(right)} for label, right in entries.items()
    ]  # fmt: skip
    rows.append({"label": "control", "stage": "dev", "split": "dev", "mode": "greedy", "summary": summary(set())})
    (folder / "results.json").write_text(json.dumps(rows))
    hours = {"sft": 1, "rl": 1.5, "test": 0.25, **({"control": 1.5, "control_test": 0.2} if control else {})}
    stages = {name: {"done": True, "wall_s": 3600 * spent} for name, spent in hours.items()}
    (folder / "state.json").write_text(json.dumps({"stages": stages}))


@pytest.mark.parametrize("control", [True, False])
def test_search_tests_rl_against_the_control_if_the_run_has_one(tmp_path, monkeypatch, capsys, control):
    results(tmp_path, control)
    monkeypatch.setattr(search, "describe_machine", lambda: "here")
    monkeypatch.setattr(sys, "argv", ["search.py", "--run", str(tmp_path)])
    assert search.main() == 1
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])["figures"]
    assert figures["hours"]["value"] == pytest.approx(2.75)  # without the control's
    assert figures["paired_p"]["value"] == pytest.approx(coin(1, 9))
    if not control:
        assert not {"em_control", "control_paired_p"} & figures.keys()
        return
    assert figures["em_control"]["value"] == 30 and figures["rl_minus_control_points"]["value"] == pytest.approx(20)
    assert figures["control_paired_p"]["value"] == pytest.approx(coin(1, 5))


@pytest.mark.parametrize("name", ["demo", "search"])
def test_the_control_differs_from_sft_in_where_it_starts_and_how_long_it_takes(name):
    recipe = load_recipe(BENCH.parent / "recipes" / f"{name}.yaml")
    *stages, control, measured = demo.with_control(recipe, "control").to_dict()["stages"]
    assert stages == recipe.to_dict()["stages"]
    sft = next(stage for stage in stages if stage["name"] == "sft")
    differs = {key for key in sft.keys() | control.keys() if sft.get(key) != control.get(key)}
    assert differs == {"name", "from", "time_limit_as", "graduation"}
    assert (control["from"], control["time_limit_as"], measured["of"]) == ("sft", "rl", ["control"])
    assert measured["tasks"] == next(stage for stage in stages if stage["name"] == "test")["tasks"]


def test_a_control_of_no_run_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["search.py", "--control", "--run", str(tmp_path / "none")])
    assert search.main() == 2
    said = capsys.readouterr()
    assert "has no finished test of sft, rl; first: upswing run recipes/search.yaml" in said.out + said.err
