"""What a stage trains is where the learner computes; weights that are only handed on are not."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from upswing.learn import precision, sharded
from upswing.learn import reward_model as reward_models
from upswing.models.heads import scalar_model
from upswing.models.tiny import tiny_model
from upswing.stages import context as contexts
from upswing.stages.context import RunContext


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> RunContext:
    """On a machine whose device for learning is another one than main memory: here `meta`, which every build has."""
    for module in (contexts, reward_models):
        monkeypatch.setattr(module, "learner_device", lambda: torch.device("meta"))
    parts: Any = dict.fromkeys(RunContext.__dataclass_fields__)
    return RunContext(**{**parts, "recipe": SimpleNamespace(model="tiny"), "out": tmp_path})


def test_a_stages_model_is_taken_to_the_learners_device(context: RunContext) -> None:
    assert context.source_model("base").device.type == "meta"
    assert {weight.device.type for weight in context.source_weights("base").values()} == {"cpu"}


def test_ranks_take_their_own_share_of_the_weights(context: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else rank 0 would hold the whole model on its GPU."""
    monkeypatch.setattr(sharded, "_ranks", object())
    assert context.source_model("base").device.type == "cpu"


def test_a_reward_model_is_taken_there_too(context: RunContext, tmp_path: Path) -> None:
    scalar_model(tiny_model()).save_pretrained(tmp_path / "checkpoints" / "rm" / "final")
    assert context.reward_model("rm").device.type == "meta"


def test_the_learners_device_is_the_current_gpu_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert precision.learner_device() == torch.device("cuda", 3)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert precision.learner_device() == torch.device("cpu")
