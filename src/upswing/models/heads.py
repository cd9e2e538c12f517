"""A backbone with one number per position instead of a vocabulary: what critics and reward models are made of.

The layout is Hugging Face's sequence classification with one label: the head is `score`, a Linear(H, 1) without bias.
Other tools read these folders, and reward models made elsewhere load here. The head is evaluated by position
(`learn.forward.packed_values`), not by Hugging Face's own forward, which looks for the last token that isn't padding.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from upswing.errors import ConfigError
from upswing.models.attention import NAME
from upswing.models.resolve import first_line, no_progress_bars, resolve_model


def scalar_model(causal_model: PreTrainedModel) -> PreTrainedModel:
    """The backbone of `causal_model` under a new scalar head; nothing is copied, so give that model up.

    The head is zero: every initial value is exactly 0, whatever the seed, and so the first GAE is Monte Carlo's. The
    first update therefore moves the head alone. Raises ConfigError for a model type that has no such layout.
    """
    config, backbone = causal_model.config, causal_model.base_model
    config.num_labels = 1
    factory: Any = AutoModelForSequenceClassification
    try:
        with torch.device("meta"):  # only the shell is wanted
            model = factory.from_config(config)
    except ValueError as error:
        raise ConfigError(
            f"model type '{config.model_type}' can't carry a scalar head; use a Llama or Qwen-family model"
        ) from error
    setattr(model, model.base_model_prefix, backbone)
    head = nn.Linear(model.score.in_features, 1, bias=False, device=causal_model.device, dtype=causal_model.dtype)
    model.score = head
    nn.init.zeros_(head.weight)
    return _ready(model)


def load_scalar_model(spec: str | Path) -> PreTrainedModel:
    """A saved critic or reward model in float32. `spec`: a folder or hub id; see `resolve_model` for what it raises.

    Raises ConfigError for a model without a trained scalar head: a random one would be silently wrong.
    """
    path, factory, report = resolve_model(str(spec)), AutoModelForSequenceClassification, {"missing_keys": [""]}
    model: Any = None
    if path.is_dir():
        try:
            with no_progress_bars():
                model, report = factory.from_pretrained(
                    path, dtype=torch.float32, attn_implementation=NAME, output_loading_info=True
                )
        except Exception as error:  # broken files end in whatever their reader raises
            raise ConfigError(f"reward model or critic '{spec}': can't load {path}: {first_line(error)}") from error
    if report["missing_keys"] or scalar_head(model) is None:
        raise ConfigError(f"'{spec}' has no scalar head; give the checkpoint of a reward_model stage or of a critic")
    model.get_input_embeddings().padding_idx = None  # as in load_model
    return _ready(model)


def scalar_head(model: Any) -> nn.Linear | None:
    """The head, None when `model` hasn't one."""
    head = getattr(model, "score", None)
    return head if isinstance(head, nn.Linear) and head.out_features == 1 else None


def _ready(model: Any) -> PreTrainedModel:
    """In evaluation mode and without dropout for good: values and scores are the same in training and out of it."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    ready: PreTrainedModel = model.eval()
    return ready
