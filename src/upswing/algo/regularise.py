"""Regularisers and choices of what to train on: LLDS, entropy control, length shaping, dynamic sampling."""

from __future__ import annotations

import torch

from upswing.algo.aggregate import segment_sums, turn_ids
from upswing.errors import ConfigError, did_you_mean

LLDS_GATES = ("action", "response", "token")


def llds(
    policy_logprobs_N: torch.Tensor,
    old_logprobs_N: torch.Tensor,
    advantages_N: torch.Tensor,
    sequence_N: torch.Tensor,
    turn_N: torch.Tensor,
    *,
    num_preserved: int,
    gate: str = "action",
    gate_threshold: float = 0.0,
    answer_N: torch.Tensor | None = None,
    answer_weight: float = 1.0,
) -> torch.Tensor:
    """Penalty on likelihood that good trajectories lose (LLDS, arXiv 2512.04220), per token [N]; its *sum* is the term.

    With D = old - policy log-prob: D where D > 0 on preserved tokens (A >= 0, A = 0 too) of a segment whose sum of D
    is above `gate_threshold` (nats; a small positive one keeps rounding from opening it), else 0; over `num_preserved`.

    `num_preserved`: `(advantages_N >= 0).sum()` over the *global* batch; 0 gives 0. `gate`: the segment is an action
    (one turn, eq. 4), the response (the sequence, eq. 10) or none (`token`, eq. 9: the threshold is per token).
    `answer_N` bool: tokens of the answer turn, weighted by `answer_weight`: LLDS-MA (eq. 5), whose beta is
    min(mean valid searches / 2, 1). The official code divides by all response tokens of the micro-batch instead.

    With a single update per batch policy == old and it is exactly 0. `old` is the learner's, never the engine's:
    mismatch would open every gate. Raises ConfigError for an unknown gate.
    """
    if gate not in LLDS_GATES:
        raise ConfigError(f"llds gate is '{gate}'; allowed: {', '.join(LLDS_GATES)}{did_you_mean(gate, LLDS_GATES)}")
    preserved_N = advantages_N >= 0
    drop_N = torch.where(preserved_N, old_logprobs_N - policy_logprobs_N, 0.0)
    fixed_N = drop_N.detach()
    if gate == "token":
        open_N = fixed_N > gate_threshold
    else:
        segment_N = turn_ids(sequence_N, turn_N) if gate == "action" else sequence_N
        open_N = segment_sums(fixed_N, segment_N)[0] > gate_threshold
    penalty_N = torch.where(open_N & (fixed_N > 0), drop_N, 0.0) / max(num_preserved, 1)
    return penalty_N if answer_N is None else penalty_N * torch.where(answer_N, answer_weight, 1.0)


def adaptive_entropy_coef(
    coef: float, entropy: float, *, target: float, step: float = 0.005, low: float = 0.0, high: float = 1.0
) -> tuple[float, float]:
    """(next coefficient, weight of the next update's entropy bonus) (Skywork-OR1, arXiv 2505.22312).

    The coefficient rises by `step` when `entropy` (nats, mean over the global batch) is at or below `target`, else
    falls, within [low, high]; the bonus is applied only in the first case. NaN changes nothing and applies nothing.
    """
    if entropy <= target:
        coef = min(coef + step, high)
        return coef, coef
    return (max(coef - step, low) if entropy > target else coef), 0.0


def overlong_penalty(lengths_B: torch.Tensor, *, max_length: int, cache: int, factor: float = 1.0) -> torch.Tensor:
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13), [B] in [-factor, 0], to add to the reward.

    0 up to max_length - cache, then linear to -factor at max_length. `lengths_B`: loss tokens, not tool output.
    Raises ConfigError unless 0 <= cache <= max_length (0: -factor beyond max_length, no slope).
    """
    if not 0 <= cache <= max_length:
        raise ConfigError(f"overlong cache is {cache}; it must be between 0 and max_length = {max_length}")
    excess_B = (lengths_B - (max_length - cache)).to(torch.float32)
    return -factor * (excess_B / cache if cache else excess_B).clamp(0.0, 1.0)


def informative_groups(success_B: torch.Tensor, group_B: torch.Tensor) -> torch.Tensor:
    """bool [B]: rows of groups whose outcomes differ, for dynamic sampling (DAPO). A group is kept or dropped whole.

    `success_B`: the verifier's metric, not the shaped reward, in which a length penalty makes every group look
    informative. NaN or infinite: not scored, no part in the decision. Differ: by more than 1e-6, relative above 1.
    """
    _, index_B = torch.unique(group_B, return_inverse=True)
    wide_B, scored_B = success_B.to(torch.float64), success_B.isfinite()
    num_groups = int(index_B.max()) + 1 if len(index_B) else 0
    high_G = wide_B.new_full((num_groups,), -torch.inf)
    low_G = -high_G
    high_G = high_G.scatter_reduce(0, index_B, wide_B.masked_fill(~scored_B, -torch.inf), "amax")
    low_G = low_G.scatter_reduce(0, index_B, wide_B.masked_fill(~scored_B, torch.inf), "amin")
    size_G = torch.maximum(high_G.abs(), low_G.abs()).clamp(min=1.0)
    return (high_G - low_G > 1e-6 * size_G)[index_B]


def top_entropy_mask(entropy_N: torch.Tensor, *, fraction: float = 0.2) -> torch.Tensor:
    """bool [N]: the `fraction` of tokens with the highest entropy, at least one, ties included (arXiv 2506.01939).

    Over the loss tokens of the *global* batch: call it once, before the first update.
    """
    if len(entropy_N) == 0:
        return torch.zeros_like(entropy_N, dtype=torch.bool)
    rank = max(1, int(fraction * len(entropy_N)))
    return entropy_N >= entropy_N.detach().topk(rank).values[-1]
