"""bench/demo.py and bench/search.py: which figures they take from stored results, and the exact test of RL's gain."""

import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest

from upswing.envs.geo_search import KINDS
from upswing.recipe import load_recipe
from upswing.stages import runner

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


def results(folder, control, env="geo_search", kinds=KINDS, each=30):
    """A finished run of recipes/search.yaml, or of another environment."""
    recipe = load_recipe(BENCH.parent / "recipes" / "search.yaml", [] if env == "geo_search" else [f"env={env}"])
    (folder / "recipe.yaml").write_text(recipe.dump())
    (folder / "environment.json").write_text('{"commits": ["abc"], "started": "2026-01-02"}')
    entries = {"sft": SFT, "rl": RL, **({"control": CONTROLS[0]} if control else {})}
    by_kind = {kind: {"strict_match": {"mean": 0.9 - 0.1 * i, "n": each}} for i, kind in enumerate(kinds)}
    rows = [
        {"label": label, "stage": "control_test" if label == "control" else "test", "split": "test", "mode": "greedy",
         "summary": {**summary(right), "by_tag": {"kind": by_kind}}} for label, right in entries.items()
    ]  # fmt: skip
    rows.append({"label": "control", "stage": "dev", "split": "dev", "mode": "greedy", "summary": summary(set())})
    (folder / "results.json").write_text(json.dumps(rows))
    hours = {"sft": 1, "rl": 1.5, "test": 0.25, **({"control": 1.5, "control_test": 0.2} if control else {})}
    stages = {name: {"done": True, "wall_s": 3600 * spent} for name, spent in hours.items()}
    (folder / "state.json").write_text(json.dumps({"stages": stages}))


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs a script -> its exit status and what it said; training is an error."""

    def trained(*args, **options):
        raise AssertionError("it trains")

    def called(module, *args):
        monkeypatch.setattr(module, "describe_machine", lambda: "here")
        monkeypatch.setattr(sys, "argv", ["x.py", *map(str, args)])
        status = module.main()
        said = capsys.readouterr()
        return status, said.out + said.err

    monkeypatch.setattr(runner, "run_recipe", trained)
    return called


@pytest.mark.parametrize("control", [True, False])
def test_search_tests_rl_against_the_control_if_the_run_has_one(tmp_path, run, control):
    results(tmp_path, control)
    status, said = run(search, "--run", tmp_path)
    assert status == 1 and "begun 2026-01-02, commit abc" in said
    figures = json.loads(said.splitlines()[-1])["figures"]
    assert figures["hours"]["value"] == pytest.approx(2.75)  # without the control's
    assert figures["paired_p"]["value"] == pytest.approx(coin(1, 9))
    assert figures["worst_kind_em"]["value"] == pytest.approx(30)
    if not control:
        assert not {"em_control", "control_paired_p"} & figures.keys()
        return
    assert figures["em_control"]["value"] == 30 and figures["rl_minus_control_points"]["value"] == pytest.approx(20)
    assert figures["control_paired_p"]["value"] == pytest.approx(coin(1, 5))


@pytest.mark.parametrize(("kinds", "each"), [(KINDS[:-1], 30), (KINDS, 29)])
def test_the_worst_kind_is_that_of_all_seven_with_enough_questions_each(tmp_path, run, kinds, each):
    results(tmp_path, False, kinds=kinds, each=each)
    status, said = run(search, "--run", tmp_path)
    assert status == 1 and json.loads(said.splitlines()[-1])["figures"]["worst_kind_em"]["value"] is None
    assert ("distractor: none" if each == 30 else "fewer than 30") in said


def test_search_reads_runs_of_its_own_environment_only_and_quick_trains_nothing_in_them(tmp_path, run):
    results(tmp_path, False, env="lookup")
    assert run(search, "--run", tmp_path)[0] == 2
    results(tmp_path, False)
    assert run(search, "--run", tmp_path, "--quick")[0] == 1
    assert run(search, "--run", tmp_path, "--quick", "--control") == (
        2, "--control trains as long as RL took; leave out --quick\n"
    )  # fmt: skip


def test_a_finished_demo_is_reported_only_if_asked_to_and_says_what_it_was_made_with(tmp_path, run):
    folder = tmp_path / "seed-0"
    folder.mkdir()
    names = ("sft", "rl", "test", "sft_control", "test_control")
    stages = {name: {"done": True, "wall_s": 60} for name in names}
    (folder / "state.json").write_text(json.dumps({"stages": stages}))
    (folder / "environment.json").write_text('{"commits": ["abc", "abd"], "started": "2026-01-02"}')
    rights = {"base": set(), "sft": SFT, "rl": RL, "sft_control": CONTROLS[0]}
    rows = [
        {"label": label, "stage": "test_control" if "control" in label else "test", "summary": summary(right)}
        for label, right in rights.items()
    ]
    (folder / "results.json").write_text(json.dumps(rows))
    args = ("--seeds", 0, "--out", tmp_path)
    status, said = run(demo, *args)
    assert status == 2 and said.splitlines()[-1] == (
        f"there is a finished run in {folder}: begun 2026-01-02, commit abc, then abd; "
        "report it with --reuse, or give another --out"
    )
    status, said = run(demo, *args, "--reuse")
    assert status == 1 and f"run: {folder}: begun 2026-01-02, commit abc, then abd" in said
    figures = json.loads(said.splitlines()[-1])["figures"]
    assert figures["em_rl"]["value"] == 50 and figures["minutes"]["value"] == 3
    assert figures["eval_questions"]["value"] == 20  # of 21; one couldn't be scored


@pytest.mark.parametrize("edit", ["model: ./gone", "model: tiny\nmodle: tiny", "name: x"])
def test_an_edited_recipe_or_a_missing_model_is_one_line_and_status_2(tmp_path, run, monkeypatch, edit):
    def check_only(recipe, out, **options):
        runner.check(recipe)
        raise AssertionError("it would train")

    (tmp_path / "recipes").mkdir()
    text = (BENCH.parent / "recipes" / "demo.yaml").read_text()
    kept = text.replace("name: test", "name: tset") if edit == "name: x" else text
    (tmp_path / "recipes" / "demo.yaml").write_text(kept.replace("model: smollm2-135m", edit, edit != "name: x"))
    monkeypatch.setattr(runner, "run_recipe", check_only)
    monkeypatch.setattr(demo, "ROOT", tmp_path)
    status, said = run(demo, "--quick", "--out", tmp_path / "out")
    assert status == 2 and said.count("\n") == 2, said
    results(tmp_path, False)
    (tmp_path / "recipe.yaml").write_text((tmp_path / "recipe.yaml").read_text() + "\nmodle: tiny\n")
    status, said = run(search, "--run", tmp_path, "--control")
    assert status == 2 and "modle: unknown key" in said


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


@pytest.mark.parametrize("option", ["--control", "--quick"])
def test_no_run_is_one_line_that_says_how_to_make_it_and_nothing_is_trained(tmp_path, run, monkeypatch, option):
    monkeypatch.chdir(tmp_path)
    status, said = run(search, option)
    assert status == 2 and said.count("\n") == 2
    assert "runs/search has no finished test of sft, rl; first: upswing run recipes/search.yaml" in said
