"""Training and evaluation mode, always put back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Set every module to training or evaluation mode, and restore each one's own mode, also after an exception."""
    others = [module for module in model.modules() if module.training is not training]
    for module in others:
        module.training = training
    try:
        yield
    finally:
        for module in others:
            module.training = not training
