"""`upswing check`: what it measures, what it exits with, and what a run says of it before step 1."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from upswing.cli.check import start_of
from upswing.cli.main import app
from upswing.monitor.progress import Progress
from upswing.recipe import load_recipe

RECIPES = Path(__file__).parents[2] / "recipes"


def check(*args: str | Path) -> Result:
    return CliRunner().invoke(app, ["check", *map(str, args)])


def test_what_an_untrained_model_and_a_clean_reward_come_to() -> None:
    result = check(RECIPES / "tiny.yaml", "--tasks", 2, "--samples", 4, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    seen = found["measured"]
    assert found["ok"] and found["advice"]["kind"] == "sft first" and not found["findings"]
    assert seen["false_accept"] == seen["false_reject"] == 0 and seen["has_tools"] and seen["pending"] == "sft"
    assert seen["pass_1"]["n"] == 8 and seen["pass_k"]["n"] == 2 and seen["pass_1"]["mean"] <= seen["pass_k"]["mean"]
    assert 0 <= seen["format"]["low"] <= seen["format"]["mean"] <= seen["format"]["high"] <= 1
    # 40 steps and 3 evaluations of 48 tasks; a copy was updated, so that both halves of a step were measured
    assert 40 * seen["step_s"] < 3600 * seen["hours"] < 60 * seen["step_s"]
    assert seen["sampled_per_s"] > 0 and seen["trained_per_s"] > 0 and sum(seen["memory_gb"].values()) < 1


def test_critical_findings_and_too_little_compute_exit_with_1() -> None:
    changes = ("limits.turn_tokens=2", "rl.group_size=2", "rl.tasks_per_step=1", "env.args.max_turns=1")
    result = check(RECIPES / "tiny.yaml", *changes, "--tasks", 2, "--max-hours", 0, "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    modes = {row["mode"]: row["severity"] for row in found["findings"]}
    assert found["advice"]["kind"] == "not enough compute"
    assert {"small_group", "small_batch", "answer_unreachable", "tool_unreachable"} <= modes.keys()
    assert modes["answer_unreachable"] == modes["tool_unreachable"] == "critical"


@pytest.mark.parametrize("first", ["{stage: sft, demonstrations: 8}, ", ""])
def test_demonstrations_that_spell_names_are_told_where_a_stage_may_learn_them(
    first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("upswing.stages.preflight.respelt", lambda branches, decode: f"{len(branches)} plays")
    stages = f"stages=[{first}{{stage: rl, steps: 1, tasks_per_step: 2, group_size: 2, eval_every: 0}}]"
    result = check(RECIPES / "tiny.yaml", stages, "--tasks", 2, "--samples", 2, "--json")
    told = [row["evidence"] for row in json.loads(result.stdout)["findings"] if row["mode"] == "names_respelt"]
    assert told == ([["2 plays"]] if first else [])


def test_a_run_is_checked_from_the_weights_that_rl_starts_from(echo: Path) -> None:
    recipe = load_recipe(echo)
    stage, model, known = start_of(echo, recipe)
    assert (stage.name, model, known.pending, known.base) == ("rl", "tiny", "sft", False)
    weights = echo.parent / "run" / "checkpoints" / "sft" / "final"
    weights.mkdir(parents=True)
    (echo.parent / "run" / "recipe.yaml").write_text(recipe.dump())
    stage, model, known = start_of(echo.parent / "run", recipe)
    assert (model, known.pending, known.base) == (str(weights), "", False)
    alone = load_recipe(echo, ["stages=[{stage: rl, steps: 2}]"])
    assert start_of(echo, alone)[2].base


@pytest.mark.parametrize(
    ("args", "words"), [(("stages=[{stage: eval}]",), "has no rl stage, only eval"), (("rl.lrr=1",), "lrr")]
)
def test_a_users_mistake_is_one_line(echo: Path, args: tuple[str, ...], words: str) -> None:
    result = check(echo, *args)
    assert result.exit_code == 2 and result.stderr.count("\n") == 1 and words in result.stderr


@pytest.mark.parametrize("every", [1, 0])
def test_a_run_answers_three_questions_before_step_1_or_says_what_it_did_not_measure(
    every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from upswing.stages.runner import run_recipe

    monkeypatch.setattr("upswing.stages.preflight.AUDIT_S", 600.0)
    sft = "{stage: sft, demonstrations: 8, validation_demonstrations: 2, epochs: 1, graduation: {tasks: 2, pass_k: 2}}"
    rl = f"{{stage: rl, steps: 1, tasks_per_step: 1, group_size: 2, eval_tasks: 2, eval_every: {every}}}"
    run_recipe(
        load_recipe(RECIPES / "tiny.yaml", [f"stages=[{sft}, {rl}]"]), tmp_path / "run", log=Progress(quiet=True)
    )
    lines = (tmp_path / "run" / "events.log").read_text().splitlines()
    clean, learn, compute, advice = (line.partition("pre-flight: ")[2] for line in lines if "pre-flight: " in line)
    assert clean == "is the reward clean? wrong answers accepted 0, right answers refused 0"
    assert learn.startswith(f"can RL learn? dev success {'0.00 [' if every else 'not measured, '}")
    assert learn.count("not measured") == 1 - every
    assert all(f"{what} 0.00" in learn for what in ("pass@1", "pass@k", "tasks strictly between", "the right format"))
    pattern = r"^is there .*? sampled tokens/s (\S+), trained tokens/s (\S+), .* memory (\S+), hours (.*)$"
    [(sampled, trained, share, hours)] = re.findall(pattern, compute)
    # One step and at most two evaluations of two tasks, all within the turns and tokens of this model: seconds, no hour
    assert float(sampled) > 10 and float(trained) > 100 and 0 < float(share) < 1 and 0 < float(hours) < 0.1
    assert advice.startswith(("advice: go", "advice: more sft"))
    assert f"(upswing check {tmp_path / 'run'} measures the rest)" in advice
    said = [i for i, line in enumerate(lines) if "advice" in line or "dev after step 1" in line]
    assert len(said) == 1 + every and "advice" in lines[said[0]]
    rows = [json.loads(line) for line in (tmp_path / "run" / "findings.jsonl").read_text().splitlines()]
    assert {"small_group", "small_batch"} <= {row.get("mode") for row in rows if row["step"] == 0}


def test_a_kl_that_a_safeguard_may_switch_on_is_in_the_estimate() -> None:
    import torch

    from upswing.learn.activations import Fits
    from upswing.models.tiny import tiny_model
    from upswing.stages.preflight import learner_bytes

    model, sizes = tiny_model(), []
    for change in ("safeguards=off", "safeguards=[lr]", "safeguards=[kl]", "safeguards=auto", "kl_coef=0.01"):
        recipe = load_recipe(RECIPES / "tiny.yaml", ["rl.kl_coef=0", f"rl.{change}"])
        sizes.append(learner_bytes(recipe, recipe.stages[1], model, Fits(), torch.float32, "cpu")["the reference"])
    assert sizes[:2] == [0, 0] and 0 < sizes[2] == sizes[3] == sizes[4]
