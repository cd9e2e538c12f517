"""From per-token losses to one number, the same however the batch is cut into micro-batches or ranks.

A mode is turned into one weight per loss token over the *global* batch. The loss of the batch is then
`(token_weights_N * loss_N).sum()`, and any split of that sum over micro-batches or ranks adds up to the same: ranks
*sum* their gradients (a mean over R ranks must be multiplied by R), and nothing divides by the accumulation steps.

Every sequence with a loss token counts in the denominators, advantage 0 included, and so does its KL term: that is the
published formula. To leave groups without preference out of both, drop them whole (`informative_groups`).
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


def token_weights(
    sequence_N: torch.Tensor,
    *,
    mode: str,
    norm_length: float | None = None,
    num_tokens: int | None = None,
    num_sequences: int | None = None,
) -> torch.Tensor:
    """Weight of each loss token of the global batch, float32 [N].

    `sequence_N` [N] integer: which sequence (trajectory) the token is of, in any order. A sequence without loss tokens
    doesn't appear and counts nowhere. With S distinct sequences, n_i tokens in sequence i and L = `norm_length`:

    - `token-mean`: 1 / N (DAPO)
    - `seq-mean-token-mean`: 1 / (S n_i) (GRPO as published)
    - `seq-mean-token-sum`: 1 / S
    - `seq-mean-token-sum-norm`: 1 / (S L) (Dr. GRPO); L is a constant, not the longest of the batch

    `num_tokens` and `num_sequences`: N and S of the global batch, for a rank that holds part of it (both summed over
    ranks; all tokens of a sequence must be on one rank). Left out: `sequence_N` is the whole batch. A batch without
    loss tokens has no weights, so its loss is 0. Raises ConfigError as `check_aggregation`.
    """
    check_aggregation(mode, norm_length)
    _, index_N, length_S = torch.unique(sequence_N, return_inverse=True, return_counts=True)
    num_tokens = sequence_N.numel() if num_tokens is None else num_tokens
    num_sequences = length_S.numel() if num_sequences is None else num_sequences
    size_N = torch.ones(sequence_N.shape, dtype=torch.float64, device=sequence_N.device)
    if mode == "seq-mean-token-mean":
        size_N = length_S[index_N].to(torch.float64)
    total: float = num_tokens if mode == "token-mean" else num_sequences * (norm_length or 1.0)
    return torch.reciprocal(size_N * total).to(torch.float32)


def focal_weights(logprobs_N: torch.Tensor, gamma: float) -> torch.Tensor:
    """(1 - p)^gamma [N], constants: what the model is sure of hardly counts, what it can't tell does (the weight of the
    focal loss, Lin et al., 1708.02002)."""
    return (-torch.expm1(logprobs_N.detach().clamp(max=0.0))).pow(gamma)


def segment_sums(values_N: torch.Tensor, segment_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of `values_N` over the tokens with the same integer id, and how many they are, both at each token [N]."""
    ids, index_N, count_S = torch.unique(segment_N, return_inverse=True, return_counts=True)
    total_S = values_N.new_zeros(len(ids)).index_add(0, index_N, values_N)
    return total_S[index_N], count_S[index_N]


def turn_ids(sequence_N: torch.Tensor, turn_N: torch.Tensor) -> torch.Tensor:
    """One id per (sequence, turn), int64 [N]; `turn_N` is not negative."""
    index_N: torch.Tensor = torch.unique(sequence_N, return_inverse=True)[1]
    return index_N * (int(turn_N.max()) + 1 if len(turn_N) else 1) + turn_N
