"""Training and evaluation mode, always put back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Set every module to training or evaluation mode, and restore each one's own mode, also after an exception."""
    before = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, was_training in before:
            module.training = was_training
