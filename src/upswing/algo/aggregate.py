"""From per-token losses to one number, the same however the batch is cut into micro-batches.

A mode is turned into one weight per loss token over the *global* batch. The loss of the batch is then
`(token_weights_N * loss_N).sum()`, and any split of that sum over micro-batches or ranks adds up to the same.
"""

from __future__ import annotations

import torch

from upswing.errors import ConfigError, did_you_mean

AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


def check_aggregation(mode: str, norm_length: float | None = None) -> None:
    """Raises ConfigError for an unknown mode, or for a `norm_length` that is lacking or has no effect."""
    if mode not in AGGREGATIONS:
        allowed = ", ".join(AGGREGATIONS)
        raise ConfigError(f"aggregation is '{mode}'; allowed: {allowed}{did_you_mean(mode, AGGREGATIONS)}")
    needs_length = mode == "seq-mean-token-sum-norm"
    if needs_length and not (norm_length is not None and norm_length > 0):
        raise ConfigError(
            f"aggregation '{mode}' needs norm_length, a constant number of tokens (the longest completion allowed, "
            f"say); got {norm_length}"
        )
    if not needs_length and norm_length is not None:
        raise ConfigError(f"norm_length has no effect with aggregation '{mode}'; remove it")


def token_weights(sequence_N: torch.Tensor, *, mode: str, norm_length: float | None = None) -> torch.Tensor:
    """Weight of each loss token of the global batch, float32 [N].

    `sequence_N` [N] integer: which sequence (trajectory) the token is of, in any order. A sequence without loss tokens
    doesn't appear and counts nowhere. With S distinct sequences, n_i tokens in sequence i and L = `norm_length`:

    - `token-mean`: 1 / N (DAPO)
    - `seq-mean-token-mean`: 1 / (S n_i) (GRPO as published)
    - `seq-mean-token-sum`: 1 / S
    - `seq-mean-token-sum-norm`: 1 / (S L) (Dr. GRPO); L is a constant, not the longest of the batch

    Raises ConfigError as `check_aggregation`.
    """
    check_aggregation(mode, norm_length)
    num_tokens = sequence_N.numel()
    if num_tokens == 0:
        return torch.zeros(0, dtype=torch.float32, device=sequence_N.device)
    _, index_N, length_S = torch.unique(sequence_N, return_inverse=True, return_counts=True)
    num_sequences = length_S.numel()
    if mode == "token-mean":
        weights_N = torch.full((num_tokens,), 1.0 / num_tokens, dtype=torch.float64, device=sequence_N.device)
    elif mode == "seq-mean-token-mean":
        weights_N = 1.0 / (num_sequences * length_S[index_N].to(torch.float64))
    else:
        length = norm_length if norm_length is not None else 1.0
        value = 1.0 / (num_sequences * length)
        weights_N = torch.full((num_tokens,), value, dtype=torch.float64, device=sequence_N.device)
    return weights_N.to(torch.float32)
