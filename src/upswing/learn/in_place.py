"""The vocabulary's gradient, held once: head and embedding add theirs to `weight.grad` in their backward.

Autograd would make a [V, H] tensor for each, beside the one that it accumulates them in: up to three at a time, of what
is often a model's largest weight. Axis letters: N tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

_ACTIVE: ContextVar[bool] = ContextVar("gradients_in_place", default=False)


@contextmanager
def gradients_in_place() -> Iterator[None]:
    """For forwards followed by `backward()`: `torch.autograd.grad` gets nothing for the weights concerned."""
    token = _ACTIVE.set(True)
    try:
        yield
    finally:
        _ACTIVE.reset(token)


def is_in_place(weight: torch.Tensor) -> bool:
    """Whether a forward that runs now leaves the gradient of `weight` in place: asked for, and a trained parameter
    without hooks, which autograd alone calls."""
    hooks: Any = weight._backward_hooks or weight._post_accumulate_grad_hooks
    return _ACTIVE.get() and weight.requires_grad and weight.is_leaf and not hooks


def grad_of(weight: torch.Tensor) -> torch.Tensor:
    """`weight.grad`, zeros if there is none yet."""
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    return weight.grad


def embedded(model: Any, tokens_1N: torch.Tensor) -> dict[str, torch.Tensor]:
    """A model's input, as ids or already embedded, [1, N, H]. An embedding that does more than look up gets ids."""
    embedding = model.get_input_embeddings()
    plain = type(embedding) is torch.nn.Embedding and embedding.padding_idx is None
    if not plain or not is_in_place(embedding.weight):
        return {"input_ids": tokens_1N}
    apply: Any = _Embedding.apply
    return {"inputs_embeds": apply(embedding.weight, tokens_1N)}


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight_VH: torch.Tensor, tokens_1N: torch.Tensor) -> torch.Tensor:
        ctx.weight, ctx.tokens_1N = weight_VH, tokens_1N
        return torch.nn.functional.embedding(tokens_1N, weight_VH)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[None, None]:
        grad_of(ctx.weight).index_add_(0, ctx.tokens_1N[0], grads[0][0])
        return None, None
