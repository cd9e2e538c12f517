"""Entropy of the policy's next-token distribution."""

from __future__ import annotations

import torch


def entropy_from_logits(logits_NV: torch.Tensor) -> torch.Tensor:
    """Entropy in nats [N] of softmax(logits) [N, V]; logits of -inf (tokens ruled out) count as probability 0.

    Value and gradient are then finite. A row of nothing but -inf is no distribution: NaN.
    """
    logprobs_NV = torch.log_softmax(logits_NV, dim=-1)
    # At p = 0 the term is 0, but 0 * -inf would be NaN. Filled before the product: its gradient must be finite too.
    return -(logprobs_NV.exp() * logprobs_NV.masked_fill(logprobs_NV.isneginf(), 0.0)).sum(dim=-1)
