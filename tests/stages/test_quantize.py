"""Recipes that sample in int8: what they must have besides, and one that runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from upswing.errors import ConfigError
from upswing.recipe import Recipe, recipe_from
from upswing.stages.runner import check

from .test_algorithms import recipe, run


def int8(rl: dict[str, Any], *before: dict[str, Any]) -> Recipe:
    plain = recipe(rl, *before).to_dict()
    return recipe_from({**plain, "engine": {**plain["engine"], "quantize": "int8"}})


@pytest.mark.parametrize(
    ("rl", "words"),
    [
        ({}, "stages.0.correction: got nothing, but engine.quantize 'int8' samples from another distribution than the "
             "learner's; add correction: tis (or seq_tis, mis, seq_mis, icepop), or leave"),
        ({"minibatches": 2}, "stages.0.correction: got nothing"),
        ({"minibatches": 2, "old_logprobs": "engine"}, "stages.0.old_logprobs: got 'engine', but engine.quantize"),
        ({"stage": "distill", "teacher": "base"}, "stages.0.kl: got 'sampled', but engine.quantize 'int8'"),
    ],
)  # fmt: skip
def test_learning_from_another_distribution_needs_a_correction(rl: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        int8(rl)
    assert words in str(caught.value) and "leave quantize out" in str(caught.value)


@pytest.mark.parametrize(
    ("rl", "words"),
    [
        ({"correction": "k3_rs"}, "stages.0.correction_high: got 0.01, k3_rs's default, but engine.quantize 'int8'"),
        ({"correction": "geo_rs"}, "stages.0.correction_low: got 0.999, geo_rs's default"),
        ({"correction": "geo_rs", "correction_low": 0.9}, "stages.0.correction_high: got 1.001, geo_rs's default"),
        # The mean log-ratio of what was sampled is below 0, so that this bound is the one that rejects.
        ({"correction": "geo_rs", "correction_high": 1.1}, "stages.0.correction_low: got 0.999, geo_rs's default"),
    ],
)  # fmt: skip
def test_bounds_that_would_reject_nearly_everything_are_refused(rl: dict[str, Any], words: str) -> None:
    recipe(rl)
    with pytest.raises(ConfigError) as caught:
        int8(rl)
    assert words in str(caught.value) and "set it wider, or use correction: tis" in str(caught.value)


@pytest.mark.parametrize(
    "rl",
    [
        *[{"correction": name} for name in ("tis", "seq_tis", "mis", "seq_mis", "icepop")],
        {"correction": "k3_rs", "correction_high": 0.2},
        {"correction": "geo_rs", "correction_low": 0.9, "correction_high": 1.1},
    ],
)
def test_other_bounds_are_taken(rl: dict[str, Any]) -> None:
    int8(rl)


@pytest.mark.parametrize("kind", ["fp8", "bitsandbytes"])
def test_what_vllm_quantises_needs_a_correction_too(kind: str) -> None:
    """Its own option, beside `engine.quantize`: the sampler is another distribution all the same."""
    engine = {"kind": "vllm", "options": {"quantization": kind}}
    with pytest.raises(ConfigError, match=rf"correction: got nothing, but engine.options.quantization '{kind}'"):
        recipe_from({**recipe({}).to_dict(), "engine": engine})
    recipe_from({**recipe({"correction": "tis"}).to_dict(), "engine": engine})


def test_an_unknown_precision_is_refused() -> None:
    plain = recipe({}).to_dict()
    with pytest.raises(ConfigError, match=r"engine.quantize: got 'int4'.*int8"):
        recipe_from({**plain, "engine": {"quantize": "int4"}})


def test_a_gpu_is_refused_before_a_model_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match=r"engine.quantize: got 'int8' on cuda; it is for CPUs only"):
        check(int8({"correction": "tis"}))


@pytest.mark.parametrize("minibatches", [1, 2])
def test_a_run_shows_its_mismatch(tmp_path: Path, minibatches: int) -> None:
    more = {"minibatches": minibatches, "correction": "tis"}
    rows = run(int8(more), tmp_path / "int8")
    exact = run(recipe(more), tmp_path / "exact")
    assert all(row["mismatch_abs"] > 20 * other["mismatch_abs"] for row, other in zip(rows, exact, strict=True))
    assert all(other["mismatch_max"] < 1e-3 for other in exact)
    assert all(row["mismatch_k3"] > 0 and row["ess_frac"] < 1 and row["kept"] == 1 for row in rows)
    assert "Engine/learner mismatch" in (tmp_path / "int8/report.html").read_text()
