"""Stages with `lora` in a tiny run, and recipes that get it wrong."""

import json
import re
import shutil
from importlib import util
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from upswing.errors import ConfigError
from upswing.models.load import load_model
from upswing.monitor.metrics import MetricsLog
from upswing.monitor.progress import Progress
from upswing.recipe import load_recipe
from upswing.stages.runner import run_recipe

peft = pytest.importorskip("peft")
RECIPE = Path(__file__).parents[2] / "recipes" / "tiny.yaml"
LAYERS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
SHORT = ["sft.demonstrations=16", "sft.validation_demonstrations=0", "sft.batch_size=8", "sft.epochs=4", "sft.lr=1e-2"]
SHORT += ["sft.graduation={enabled: false}", "sft.lora={r: 8, alpha: 16, dropout: 0.1, target: all-linear}"]
SHORT += ["sft.gradient_checkpointing=true", "rl.steps=2", "rl.tasks_per_step=2", "rl.group_size=4", "rl.eval_every=0"]
SHORT += ["rl.save_every=1", "rl.lr=1e-2", "rl.lora={r: 4, target: [q_proj, v_proj]}", "rl.kl_coef=0.1"]
SHORT += ["sft.min_reward=0", "test.tasks=4", "verifiers=[tests.stages.test_lora:share_of_e]"]


def share_of_e(messages):
    """A reward that even a bad policy gets some of, so that groups differ."""
    return messages[-1].content.count("e") / 20


def recipe(*more):
    return load_recipe(RECIPE, [*SHORT, *more])


def folder(run, stage, *parts):
    return run.joinpath("checkpoints", stage, "final", *parts)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "finished"
    run_recipe(recipe(), out, log=Progress(quiet=True))
    return out


@pytest.mark.parametrize("stage", ["sft", "rl"])
def test_a_stage_leaves_a_merged_model_and_its_adapter(finished, stage):
    """The start model plus the adapter, loaded by peft, is the final model; nothing else has moved."""
    start = load_model("tiny" if stage == "sft" else str(folder(finished, "sft"))).model
    before = {name: p.detach().clone() for name, p in start.named_parameters()}
    final = load_model(str(folder(finished, stage))).model
    moved = {name.split(".")[-2] for name, p in final.named_parameters() if not torch.equal(p, before[name])}
    assert moved == (LAYERS if stage == "sft" else {"q_proj", "v_proj"})
    merged = peft.PeftModel.from_pretrained(start, folder(finished, stage, "adapter")).merge_and_unload()
    for name, p in final.named_parameters():
        torch.testing.assert_close(p, merged.get_parameter(name), rtol=0, atol=1e-6)


def test_it_learns_and_its_reference_is_the_start_of_the_stage(finished):
    losses = [row["loss"] for row in MetricsLog(finished).read("sft") if "loss" in row]
    assert losses[-1] < 0.9 * losses[0]
    kl = [row["kl"] for row in MetricsLog(finished).read("rl") if "kl" in row]
    assert kl[0] == 0.0 and kl[1] > 0.0


def test_a_resumed_stage_ends_where_it_would_have_ended(finished, tmp_path):
    out = tmp_path / "resumed"
    shutil.copytree(finished, out)
    for late in ("final", "step-000002"):
        shutil.rmtree(out / "checkpoints" / "rl" / late)
    state = json.loads((out / "state.json").read_text())
    state["stages"] = {"sft": state["stages"]["sft"]}
    (out / "state.json").write_text(json.dumps(state))
    run_recipe(recipe(), out, resume=True, log=Progress(quiet=True))
    first, again = (load_file(folder(run, "rl", "model.safetensors")) for run in (finished, out))
    assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sft.lora={rank: 8}", "stages.0.lora.rank: unknown key"),
        ("sft.lora={ralpha: 8}", "did you mean 'alpha'?"),
        ("sft.lora={r: 0}", "stages.0.lora.r: got 0; allowed: 1 and more"),
        ("sft.lora={alpha: -1}", "stages.0.lora.alpha: got -1; allowed: more than 0"),
        ("sft.lora={dropout: 1}", "stages.0.lora.dropout: got 1; allowed: less than 1"),
        ("sft.lora={target: []}", "stages.0.lora.target: got a list ([]), expected at least one item"),
        ("sft.lora={target: [all-linear, q_proj]}", "allowed: all-linear alone, or names of layers"),
        ("sft.lora={target: [3]}", "got 3, expected text"),
        ("sft.lora={quantize: 8bit}", "did you mean '4bit'? (allowed: none, 4bit)"),
        ("sft.lora=16", "stages.0.lora: got 16, expected keys and values"),
        ("rl.lora={dropout: 0.1}", "stages.1.lora.dropout: got 0.1; allowed: 0 (log-probs of two policies"),
    ],
)
def test_mistakes_are_one_line_before_anything_is_loaded(override, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        recipe(override)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("missing", "extra"), [("peft", "lora"), ("bitsandbytes", "qlora")])
def test_a_missing_package_is_named_with_its_extra(monkeypatch, missing, extra):
    found = util.find_spec
    there = {"peft", "bitsandbytes"} - {missing}
    monkeypatch.setattr(
        "upswing.recipe.lora.find_spec",
        lambda name: None if name == missing else found("json" if name in there else name),
    )
    with pytest.raises(ConfigError, match=rf"stages.0.lora: needs {missing}; .* 'upswing\[{extra}\]'"):
        recipe("sft.lora={quantize: 4bit}" if extra == "qlora" else "sft.lora={r: 4}")


def test_an_unknown_layer_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"lora.target: no linear layer 'q_prj'; did you mean 'q_proj'"):
        run_recipe(recipe("sft.lora={target: [q_prj]}"), tmp_path / "run", log=Progress(quiet=True))
