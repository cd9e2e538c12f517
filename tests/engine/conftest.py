import copy
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from upswing.engine.torch import TorchEngine
from upswing.models.load import LoadedModel, load_model

MakeEngine = Callable[..., TorchEngine]


def sharpen(model: PreTrainedModel) -> PreTrainedModel:
    """Random weights give almost uniform predictions; larger ones make contexts matter."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(6.0)
    return model


def reference(model: PreTrainedModel) -> PreTrainedModel:
    """A copy that runs Hugging Face's own eager attention."""
    other = copy.deepcopy(model)
    other.set_attn_implementation("eager")
    return other


@pytest.fixture(scope="session")
def tiny() -> LoadedModel:
    loaded = load_model("tiny")
    sharpen(loaded.model)
    return loaded


@pytest.fixture(scope="session")
def oracle(tiny: LoadedModel) -> PreTrainedModel:
    return reference(tiny.model)


@pytest.fixture
async def make_engine(tiny: LoadedModel) -> AsyncIterator[MakeEngine]:
    made: list[TorchEngine] = []

    def make(model: PreTrainedModel | None = None, **options: Any) -> TorchEngine:
        engine = TorchEngine.from_model(
            model or tiny.model, tokenizer=tiny.tokenizer, dtype=torch.float32, device="cpu", **options
        )
        made.append(engine)
        return engine

    yield make
    for engine in made:
        await engine.close()
