"""Entropy of the policy's next-token distribution."""

from __future__ import annotations

import torch


def entropy_from_logits(logits_NV: torch.Tensor) -> torch.Tensor:
    """Entropy in nats [N] of softmax(logits) [N, V]; logits of -inf (tokens ruled out) count as probability 0."""
    logprobs_NV = torch.log_softmax(logits_NV, dim=-1)
    # where: at p = 0 the term is 0, but 0 * -inf would be NaN.
    terms_NV = torch.where(logprobs_NV.isneginf(), 0.0, logprobs_NV.exp() * logprobs_NV)
    return -terms_NV.sum(dim=-1)
