"""The critic's loss, and how well it predicts. N runs over loss tokens; a value is of the state *before* its token.

Returns are `advantages + values` of GAE before any whitening. They are never whitened themselves: a critic trained on
whitened returns would predict in units that change with every batch, and GAE adds its values to raw rewards.
"""

from __future__ import annotations

import math

import torch

from upswing.errors import ConfigError


def check_value_clip(clip: float | None) -> None:
    """Raises ConfigError for a range that makes no sense."""
    if clip is not None and not clip > 0:
        raise ConfigError(f"value_clip is {clip}; it must be above 0, such as 0.2, or null for none")


def value_loss(
    values_N: torch.Tensor,
    returns_N: torch.Tensor,
    old_values_N: torch.Tensor | None = None,
    *,
    clip: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Squared error per token, and where clipping took its gradient away (bool): both [N].

    .5 max((v - R)^2, (clip(v, old +- clip) - R)^2), as in PPO's implementation (baselines, verl); `clip` None: plain
    .5 (v - R)^2. The maximum is pessimistic: moving away from the return is never clipped. `clip` is in units of the
    return and so depends on the scale of the rewards. Raises ValueError when `clip` is given without `old_values_N`.
    """
    check_value_clip(clip)
    error_N = (values_N - returns_N).square()
    if clip is None:
        return 0.5 * error_N, torch.zeros_like(error_N, dtype=torch.bool)
    if old_values_N is None:
        raise ValueError("value clipping needs old_values_N, the values before the update")
    clipped_error_N = (old_values_N + (values_N - old_values_N).clamp(-clip, clip) - returns_N).square()
    return 0.5 * torch.maximum(error_N, clipped_error_N), (clipped_error_N > error_N).detach()


def explained_variance(values_N: torch.Tensor, returns_N: torch.Tensor) -> float:
    """1 - Var(R - v) / Var(R): 1 perfect, 0 no better than a constant, below 0 worse; NaN when returns don't vary."""
    wide_N = returns_N.detach().double()
    if len(wide_N) < 2 or bool(wide_N.max() == wide_N.min()):
        return math.nan
    residual_N = wide_N - values_N.detach().double()
    return float(1.0 - residual_N.var(correction=0) / wide_N.var(correction=0))
