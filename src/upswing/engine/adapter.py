"""What a learner tells an engine that can take an adapter in place of merged weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """A low-rank update beside frozen weights. Weights that have one say so as their `adapter`."""

    of: object
    """Whose weights are frozen: as long as it is the same object, so are they."""
    frozen: Mapping[str, torch.Tensor]
    """Those weights, by Hugging Face name."""
    save: Callable[[Path], None]
    """Writes the update, as it is now, in peft's layout into a new folder."""
