"""Scalar models with random heads, and plain values by the unpacked backbone."""

import numpy as np
import torch

from upswing.models.heads import scalar_model

from .helpers import tiny


def scalar(kind="llama", seed=0, **changes):
    model = scalar_model(tiny(kind, seed, **changes))
    torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(seed))
    return model


def plain_values(model, one):
    """[T]: the head at every position of a row."""
    tokens = torch.from_numpy(one.tokens.astype(np.int64))
    return model.score(model.base_model(input_ids=tokens[None], use_cache=False).last_hidden_state)[0, :, 0]


def recording(trainer):
    """Keeps the gradient of each optimizer step, before clipping, in `trainer.steps`."""
    trainer.steps, apply = [], trainer._apply_gradient

    def record(tally):
        trainer.steps.append({n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None})
        apply(tally)

    trainer._apply_gradient = record
    return trainer
