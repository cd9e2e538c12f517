"""Learning-rate schedules."""

from __future__ import annotations

import math
from dataclasses import dataclass

from upswing.errors import ConfigError, did_you_mean

KINDS = ("constant", "linear", "cosine")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The factor on the learning rate at each update: linear warmup, then `kind` down to `final` at `total`."""

    kind: str = "constant"
    warmup: int = 0
    """Updates of linear warmup; the first has factor 1 / (warmup + 1), so that no update is wasted at 0."""
    total: int | None = None
    """Updates until `final` is reached; needed by `linear` and `cosine`."""
    final: float = 0.0
    """Factor at and after `total`; unused by `constant`."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"schedule is '{self.kind}'; allowed: {', '.join(KINDS)}{did_you_mean(self.kind, KINDS)}")
        if self.warmup < 0:
            raise ConfigError(f"schedule warmup is {self.warmup}; it must be 0 or more updates")
        if self.kind != "constant" and (self.total is None or self.total <= self.warmup):
            raise ConfigError(
                f"schedule '{self.kind}' needs total above warmup ({self.warmup}) in updates; got {self.total}"
            )

    def __call__(self, update: int) -> float:
        """Factor for the update with this 0-based number."""
        if update < self.warmup:
            return (update + 1) / (self.warmup + 1)
        if self.kind == "constant" or self.total is None:
            return 1.0
        progress = min(1.0, (update - self.warmup) / (self.total - self.warmup))
        shape = 1.0 - progress if self.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.final + (1.0 - self.final) * shape
