"""Is SFT done? Each criterion on both sides of its limit, the words, and what a stage does with the verdict."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from upswing.errors import ConfigError
from upswing.monitor.progress import Progress
from upswing.recipe import Graduation, recipe_from
from upswing.stages.graduation import Criterion, Verdict, diversity, flatness
from upswing.stages.runner import run_recipe
from upswing.view.run_folder import read_json

RULES = Graduation()


@pytest.mark.parametrize(
    ("losses", "fall", "flat", "words"),
    [
        ((0.5, 0.499), 0.002, True, "validation loss 0.4990 fell by 0.2 % since the last check (flat at 1 %)"),
        ((0.9, 0.5, 0.4), 0.2, False, "validation loss 0.4000 fell by 20.0 % since the last check (not flat at 1 %)"),
        ((0.5, 0.55), -0.1, False, "rose by 10.0 %"),  # it overfits: not flat either
        ((0.5,), math.nan, False, "measured only once"),
    ],
)
def test_loss_is_flat_when_it_hardly_moved_since_the_last_check(
    losses: tuple[float, ...], fall: float, flat: bool, words: str
) -> None:
    found = flatness(losses, 0.01)
    assert found.value == pytest.approx(fall, nan_ok=True)
    assert found.passed is flat and words in found.words


GOOD = {"format_valid_frac": 0.9, "passk_gain": 0.125, "entropy": 0.02, "mixed_frac": 0.25}


def judged(**changed: float) -> dict[str, Criterion]:
    v = {**GOOD, **changed}
    summary: Any = SimpleNamespace(pass_at_k={1: 0.5, 8: 0.5 + v["passk_gain"]}, mixed_frac=v["mixed_frac"])
    return {c.name: c for c in diversity(summary, v["format_valid_frac"], v["entropy"], RULES)}


def test_at_the_limits_everything_passes() -> None:
    assert all(criterion.passed for criterion in judged().values())


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("format_valid_frac", 0.89, "share in the right format 0.89 (below 0.9)"),
        ("passk_gain", 0.0625, "pass@8 minus pass@1 0.0625 (below 0.1)"),
        ("entropy", 0.019, "entropy in nats 0.019 (below 0.02)"),
        ("mixed_frac", 0.24, "share of tasks solved by some samples only 0.24 (below 0.25)"),
        *((name, math.nan, "nan (below") for name in GOOD),  # what couldn't be measured doesn't pass
    ],
)
def test_below_its_limit_a_criterion_alone_fails_and_says_so(name: str, value: float, words: str) -> None:
    found = judged(**{name: value})
    assert [key for key, criterion in found.items() if not criterion.passed] == [name]
    assert words in found[name].words
    verdict = Verdict(criteria=tuple(found.values()))
    assert not verdict.graduated and verdict.words == f"not graduated: {found[name].words}"
    assert Verdict(criteria=tuple(judged().values())).words.startswith("graduated: share in the right format")


def test_pass_at_k_takes_as_many_samples_as_every_task_has() -> None:
    summary: Any = SimpleNamespace(pass_at_k={1: 0.25, 2: 0.375, 4: 0.5}, mixed_frac=1.0)
    found = diversity(summary, 1.0, 1.0, RULES)[1]
    assert found.value == 0.25 and "pass@4 minus pass@1" in found.words
    assert not diversity(SimpleNamespace(pass_at_k={}, mixed_frac=1.0), 1.0, 1.0, RULES)[1].passed  # type: ignore[arg-type]


def sft(out: Path, validation: int = 4, **graduation: Any) -> dict[str, Any]:
    """A short SFT with a check before it and after every second update -> its facts. The second one passes."""
    met = {"flat_tol": 10.0, "min_format_valid": 0.0, "min_passk_gain": 0.0, "min_entropy": 0.0, "min_mixed_frac": 0.0}
    stage = {
        "stage": "sft",
        "demonstrations": 16,
        "validation_demonstrations": validation,
        "epochs": 3,
        "batch_size": 4,
        "lr": 1e-3,
        "eval_every": 2,
        "graduation": {"tasks": 2, "pass_k": 2, **met, **graduation},
    }
    sections = {"engine": {"max_slots": 8, "max_context": 128}, "limits": {"turn_tokens": 16, "context_tokens": 128}}
    recipe = recipe_from(
        {
            "name": "short",
            "model": "tiny",
            "env": "lookup",
            "verifiers": ["strict_match"],
            "stages": [stage],
            **sections,
        }
    )
    run_recipe(recipe, out, log=Progress(quiet=True))
    return dict(read_json(out / "state.json")["stages"]["sft"])


def test_a_check_without_a_validation_loss_is_refused_also_when_it_would_not_stop_the_stage(tmp_path: Path) -> None:
    """With stop: false it was skipped without a word."""
    with pytest.raises(ConfigError, match=r"stages.0.validation_demonstrations: got 0, but graduation needs"):
        sft(tmp_path, validation=0, stop=False)


def test_sft_ends_when_it_graduates_unless_it_is_told_to_go_on_or_something_is_lacking(tmp_path: Path) -> None:
    stopped = sft(tmp_path / "stops")
    assert stopped["graduation"]["graduated"] and stopped["steps"] == 2  # the first check is before the first update
    graded = stopped["graduation"]
    assert graded["passk_gain"] == pytest.approx(graded["pass_k"] - graded["pass_1"]) and 0 <= graded["pass_1"] <= 1
    went_on = sft(tmp_path / "goes-on", stop=False)
    assert went_on["graduation"]["graduated"] and went_on["steps"] == 12
    lacking = sft(tmp_path / "lacks", min_mixed_frac=1.0)
    assert not lacking["graduation"]["graduated"] and lacking["steps"] == 12
    assert "solved by some samples only" in lacking["graduation"]["words"]
