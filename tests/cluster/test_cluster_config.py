"""What is refused before anything starts, and the plan of `--dry-run`."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM
from typer.testing import CliRunner

from upswing.cli.main import app
from upswing.cluster.actors import connect
from upswing.errors import ConfigError
from upswing.learn.activations import Fits
from upswing.learn.precision import compute_context
from upswing.models.attention import use_upswing_attention
from upswing.recipe import ClusterSection, check_same, load_recipe
from upswing.stages.placement import _fits, plan

TINY = Path(__file__).parents[2] / "recipes" / "tiny.yaml"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["cluster.engines=2"], "cluster.engines: got 2 without effect: kind is local; add kind: ray"),
        (["cluster.kind=rya"], "cluster.kind: got 'rya'"),
        (["cluster.kind=ray", "cluster.engine_gpus=1.5"], "got 1.5; allowed: a share of one GPU, or whole ones"),
        (["cluster.kind=ray", "cluster.address='ray://h:1'"], "Ray's client"),
        (
            ["cluster.kind=ray", "engine={kind: vllm, url: 'http://h:1'}"],
            "engine.kind: got 'vllm', but cluster.kind ray starts embedded engines; allowed: torch",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_recipe(TINY, overrides)


def test_a_run_may_go_on_elsewhere() -> None:
    check_same(load_recipe(TINY), load_recipe(TINY, ["cluster={kind: ray, engines: 4}"]), Path("run"))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"address": "127.0.0.1:9"}, "cluster.address: no Ray cluster answers at '127.0.0.1:9' (ConnectionRefused"),
        ({"engines": 3, "engine_gpus": 64}, "cluster: 192 GPUs are needed, but there are"),
    ],
)
def test_what_is_not_there_is_named(section: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(ConfigError, match=re.escape(message)):
        connect(ClusterSection(kind="ray", **section))


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'upswing\[ray\]'"):
        connect(ClusterSection(kind="ray"))


def test_the_plan_says_what_is_where() -> None:
    more = ["cluster.engines=3", "cluster.engine_gpus=0", "cluster.env_workers=2", "rl.kl_coef=0.1"]
    shown = CliRunner().invoke(app, ["run", str(TINY), *more, "engine.dtype=float32", "--cluster", "ray", "--dry-run"])
    assert shown.exit_code == 0, shown.output
    said = [line[2:] for line in shown.stdout.splitlines() if line.startswith("# ")]
    assert re.match(r"Ray, started on this machine: \d+ CPUs", said[0])
    # 2 layers x 2 x 2 key heads x 16 x 4 bytes a token; 64 slots of 256 tokens.
    assert said[1].startswith("engines: 3, each 1 CPU; ") and "keys and values 0.00839 (64 x 256 tokens)" in said[1]
    assert said[2] == "env workers: 2, each 1 CPU; verifiers are there, too"
    assert "the policy's weights, gradients and moments" in said[4] and "the reference" in said[4]
    assert "kind: ray" in shown.stdout
    assert list(plan(load_recipe(TINY)))[1].startswith("engine: in the process of the run; ")


def models() -> dict[str, tuple[Any, Any]]:
    shape = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300}
    llama = LlamaConfig(**shape, intermediate_size=704, num_hidden_layers=5)
    qwen = Qwen2Config(**shape, intermediate_size=512, num_hidden_layers=3)
    return {"llama": (LlamaForCausalLM, llama), "qwen2": (Qwen2ForCausalLM, qwen)}


@pytest.mark.parametrize("name", models())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_are_known_without_weights(name: str, dtype: torch.dtype) -> None:
    """As they are measured on the model itself, which the plan doesn't make."""
    kind, config = models()[name]
    model = kind(config)
    use_upswing_attention(model)
    measured = Fits.measure(model, lambda: compute_context("cpu", dtype), 1.0)
    found = _fits(config, dtype)
    assert found is not None
    assert found.kept == pytest.approx(measured.kept, rel=0.05)
    assert found.recomputed == pytest.approx(measured.recomputed, rel=0.05)
