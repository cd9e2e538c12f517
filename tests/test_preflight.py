"""Pre-flight: the advice that numbers call for, and recipes that trip a check beside twins that don't."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from upswing.evals.stats import Interval
from upswing.models.tiny import tiny_tokenizer
from upswing.preflight.advice import Measured, advise, measured_findings
from upswing.preflight.checks import RULES, Size, option_findings, room_findings, template_findings
from upswing.recipe import Recipe, RlStage, load_recipe, recipe_from
from upswing.trajectory.render import ChatRenderer
from upswing.view.health import overrides

ROOT = Path(__file__).parents[1]
DATA = {
    "name": "t",
    "model": "tiny",
    "env": "lookup",
    "verifiers": ["strict_match"],
    "limits": {"turn_tokens": 64, "context_tokens": 512},
}


def made(stage: dict[str, Any], *changes: str) -> tuple[Recipe, RlStage]:
    judge = [{"stage": "reward_model", "name": "judge"}] if "reward_model" in stage else []
    recipe = recipe_from({**DATA, "stages": [*judge, {"stage": "rl", "steps": 4, **stage}]}, changes)
    assert isinstance(recipe.stages[-1], RlStage)
    return recipe, recipe.stages[-1]


def at(mean: float, n: int = 100) -> Interval:
    return Interval(mean, max(0.0, mean - 0.1), min(1.0, mean + 0.1), n)


def measured(**values: Any) -> Measured:
    """A good start, with other values."""
    start = {"pass_1": 0.35, "pass_k": 0.8, "mixed": 0.7, "spread": 0.75, "format": 0.95, "pass_formed": 0.37}
    given = {**start, "truncated": 0.02, "calls": 1.5, "turns": 2.5, "false_accept": 0.0, "false_reject": 0.0}
    given |= {"errored": 0.0, "hours": 2.0, "step_s": 9.0, "memory_gb": {"weights": 3.0}, "machine_gb": 8.0} | values
    names = ("pass_1", "pass_k", "mixed", "spread", "format", "pass_formed", "truncated", "calls")
    return Measured(samples=8, **{k: at(v) if k in names and isinstance(v, float) else v for k, v in given.items()})


ALL_WRONG = {"pass_1": 0.0, "pass_k": 0.0, "mixed": 0.0, "spread": 0.0}


@pytest.mark.parametrize(
    ("values", "kind", "words"),
    [
        ({}, "go", "0.35"),
        (ALL_WRONG, "easier tasks", "follow the protocol"),
        (ALL_WRONG | {"spread": 0.6}, "go", "0.60"),  # a partial reward: there is something to learn from
        (ALL_WRONG | {"format": 0.1}, "more sft", "0.10"),
        (ALL_WRONG | {"format": 0.1, "pending": "sft"}, "sft first", "'sft'"),
        (ALL_WRONG | {"pending": "sft"}, "sft first", "'sft'"),
        ({"pending": "sft"}, "go", ""),
        ({"pass_1": 0.01, "pass_k": 0.08, "mixed": 0.08, "spread": 0.08}, "more sft", "0.08"),
        ({"pass_1": 0.1, "format": 0.15, "pass_formed": 0.7, "base": True}, "better prompt", "0.70"),
        ({"pass_1": 0.1, "format": 0.15, "pass_formed": 0.7}, "more sft", "0.15"),  # trained for the format already
        ({"pass_1": 0.1, "format": 0.15, "pass_formed": at(0.7, 4), "base": True}, "more sft", "0.15"),
        ({"pass_1": 0.5, "format": 0.6}, "go", ""),  # RL mends such a format by itself
        ({"pass_1": 0.1, "format": 0.85}, "go", ""),  # what fails isn't the format
        ({"pass_1": 0.85}, "harder tasks", "0.85"),
        ({"pass_1": 0.7, "mixed": 0.1, "spread": 0.1}, "harder tasks", "0.10"),
        ({"pass_1": 0.3, "mixed": 0.1, "spread": 0.1}, "more sft", "0.10"),
        ({"hours": 30.0}, "not enough compute", "30 hours"),
        ({"memory_gb": {"weights": 6.0, "cache": 3.0}}, "not enough compute", "weights 6.0, cache 3.0"),
        ({"steps_frac": 0.3}, "not enough compute", "30%"),
        ({"hours": 30.0, "turns": 1.0}, "dpo", "30 hours"),
        ({"hours": 30.0, "turns": 1.0, "mixed": 0.3}, "not enough compute", ""),
        ({"turns": 1.0, "distinct_tasks": 40.0}, "dpo", "40 tasks"),
        ({"distinct_tasks": 40.0}, "go", ""),
        ({"pass_1": math.nan, "mixed": math.nan, "spread": math.nan}, "go", "-"),
    ],
)
def test_the_advice_is_what_the_numbers_call_for(values: dict[str, Any], kind: str, words: str) -> None:
    found = advise(measured(**values), max_hours=24)
    assert found.kind == kind and words in found.why
    assert found.ok == (kind in ("go", "sft first")) and bool(found.remedy) == (kind != "go")


def test_nothing_measured_is_no_reason_against() -> None:
    assert advise(Measured()).kind == "go"
    assert not measured_findings(Measured(), *made({}))


@pytest.mark.parametrize(
    ("mode", "values", "stage"),
    [
        ("reward_accepts_wrong_answers", {"false_accept": 0.02}, {}),
        ("reward_refuses_right_answers", {"false_reject": 0.2}, {}),
        ("trajectories_error", {"errored": 0.3}, {}),
        ("much_truncated", {"truncated": 0.4}, {}),
        ("much_truncated", {"truncated": 0.4}, {"truncated": "zero"}),
        ("tools_unused", {"has_tools": True, "calls": 0.1}, {}),
        ("dynamic_sampling_in_vain", {"mixed": 0.1}, {"dynamic_sampling": 4}),
    ],
)
def test_what_was_measured_is_a_finding_beyond_its_limit(
    mode: str, values: dict[str, Any], stage: dict[str, Any]
) -> None:
    recipe, rl = made(stage)
    (found,) = measured_findings(measured(**values), recipe, rl)
    assert found.mode == mode and not measured_findings(measured(), recipe, rl)
    # What an untrained model does is no reason; what the reward and the environment do is one for any model.
    assert bool(measured_findings(measured(**values, pending="sft"), recipe, rl)) == (found.severity == "critical")
    made(stage, *overrides(found.remedies[0].change, "rl").split())  # what it says to change can be changed


TWO = {"minibatches": 2}
TRIPPED: dict[str, dict[str, Any]] = {
    "small_group": {"group_size": 2},
    "small_batch": {"group_size": 4, "tasks_per_step": 2},
    "bonus_against_kl_stop": {"entropy_coef": 0.001, "kl_stop": 1e-3, **TWO},
    "large_entropy_bonus": {"entropy_coef": 0.05},
    "tempered_entropy_target": {"entropy_coef": 0.001, "entropy_target": 0.5, "temperature": 0.7},
    "stale_without_correction": {"max_staleness": 1, "correction": "none"},
    "reference_follows_policy": {"kl_coef": 0.01, "ref_refresh_steps": 1},
    "reward_model_without_kl": {"reward_model": "judge"},
    "many_updates_of_a_batch": {"updates_per_batch": 16},
    "length_penalty_out_of_reach": {"overlong_length": 900, "overlong_cache": 100},
}


@pytest.mark.parametrize("mode", [rule.mode for rule in RULES])
def test_options_that_fight_are_found_and_the_remedy_ends_it(mode: str) -> None:
    recipe, stage = made(TRIPPED[mode])
    (found,) = option_findings(recipe, stage)
    assert found.mode == mode
    changes = overrides(found.remedies[0].change, "rl").split()
    assert changes and not option_findings(*made(TRIPPED[mode], *changes))


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_recipes_trip_nothing(path: Path) -> None:
    recipe = load_recipe(path)
    assert not [f for s in recipe.stages if isinstance(s, RlStage) for f in option_findings(recipe, s, 135_000_000)
                if recipe.model != "tiny" or f.mode != "high_lr"]  # fmt: skip


def test_a_learning_rate_is_high_by_the_models_size() -> None:
    for lr, size, high in ((2e-5, 7 * 10**9, True), (1e-6, 7 * 10**9, False), (2e-5, 135 * 10**6, False),
                           (2e-3, 135 * 10**6, True), (2e-3, 10**5, False), (2e-3, 0, False)):  # fmt: skip
        found = option_findings(*made({"lr": lr}), size)
        assert [f.mode for f in found] == ["high_lr"] * high
        assert all(f.remedies[0].change["lr"] < lr for f in found)


@pytest.mark.parametrize(("name", "mode"), [("chatml", None), ("qwen3", "thinking_stripped"), ("last_only", "history")])
def test_a_template_that_rewrites_earlier_turns_is_found(name: str, mode: str | None) -> None:
    rewriting = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ m.content if loop.last or m.role == 'user' else 'earlier' }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    text = rewriting if name == "last_only" else (ROOT / "tests" / "templates" / f"{name}.jinja").read_text()
    renderer = ChatRenderer(tiny_tokenizer(), template=text)
    found = template_findings(renderer, renderer.end_tokens(), "rl")
    assert [f.mode for f in found] == ([] if mode is None else ["history_rewritten" if mode == "history" else mode])


def test_right_plays_must_fit_and_tools_need_a_turn() -> None:
    recipe, _ = made({})
    fits, long_turn, long = Size(30, 200), Size(90, 200), Size(30, 3000)
    assert not room_findings(recipe, "rl", [fits] * 3, has_tools=True, max_turns=2)
    (found,) = room_findings(recipe, "rl", [fits], has_tools=True, max_turns=1)
    assert (found.mode, found.severity) == ("tool_unreachable", "critical")
    assert not room_findings(recipe, "rl", [fits], max_turns=1)
    for sizes, severity in (([fits, fits, long_turn], "warning"), ([long, long, fits], "critical")):
        (found,) = room_findings(recipe, "rl", sizes)
        assert (found.mode, found.severity) == ("answer_unreachable", severity)
        changed, _ = made({}, *overrides(found.remedies[0].change, "rl").split())
        assert not room_findings(changed, "rl", sizes)
