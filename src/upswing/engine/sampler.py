"""Sampling with exact log-probs: one uniform number a row, inverse CDF, no [B, V] random draws.

Order of the settings, as in Hugging Face: temperature, top-k, top-p (of what top-k left), min-p. Log-probs and entropy
are of the distribution that was sampled from: after temperature and truncation, renormalised, in float32.

Axis letters: B rows, V vocabulary, C candidates (sorted by probability).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from upswing.engine.base import Sampling

_BLOCK = 128
"""Vocabulary entries a block of the two-level CDF."""
_TOP_P_CANDIDATES = 1024
"""Enough for most nucleus cuts; rows whose nucleus is larger sort the whole vocabulary."""


class Sampled(NamedTuple):
    """One entry a row; log-probs and entropies in nats, of the untempered distribution for greedy rows."""

    tokens: list[int]
    logprobs: list[float]
    entropies: list[float]


_Draw = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Tokens, log-probs and entropies [B]."""


def check_sampling(sampling: Sampling) -> None:
    """Raise ValueError naming the first setting that is out of range."""
    rules = {
        "max_tokens": (sampling.max_tokens >= 1, "at least 1"),
        "temperature": (0 <= sampling.temperature < float("inf"), "0 (greedy) or more"),
        "top_p": (0 < sampling.top_p <= 1, "above 0 and at most 1"),
        "top_k": (sampling.top_k >= 0, "0 (keep all) or more"),
        "min_p": (0 <= sampling.min_p <= 1, "between 0 and 1"),
        "seed": (sampling.seed >= 0, "0 or more"),  # Python's generator takes -1 and 1 for the same seed
    }
    for name, (ok, allowed) in rules.items():
        if not ok:
            raise ValueError(f"sampling.{name} is {getattr(sampling, name)}; allowed: {allowed}")


def sample(logits_BV: torch.Tensor, samplings: Sequence[Sampling], uniforms: Sequence[float]) -> Sampled:
    """One token a row. `uniforms` are in [0, 1), one a row; rows don't influence each other.

    Raises FloatingPointError when a row's logits have NaN or +inf, or nothing but -inf.
    """
    groups: dict[tuple[float, ...], list[int]] = {}
    for row, s in enumerate(samplings):
        groups.setdefault((s.temperature, s.top_k, s.top_p, s.min_p), []).append(row)
    u_B = torch.tensor(uniforms, dtype=torch.float32, device=logits_BV.device)
    if len(groups) == 1:  # the usual case: nothing to copy or to put in order
        return Sampled(*(column.tolist() for column in _draw(logits_BV.float(), samplings[0], u_B)))
    draws: list[_Draw] = []
    for rows in groups.values():
        index = torch.tensor(rows, device=logits_BV.device)
        draws.append(_draw(logits_BV[index].float(), samplings[rows[0]], u_B[index]))
    order = torch.tensor([row for rows in groups.values() for row in rows]).argsort()
    return Sampled(*(torch.cat(column).cpu()[order].tolist() for column in zip(*draws, strict=True)))


def _draw(logits_BV: torch.Tensor, settings: Sampling, u_B: torch.Tensor) -> _Draw:
    if settings.temperature == 0:
        weights_BV, top_B = _weights(logits_BV)
        return _finish(logits_BV, weights_BV, top_B, weights_BV.sum(-1), logits_BV.argmax(-1))
    scores_BV = logits_BV if settings.temperature == 1 else logits_BV / settings.temperature
    if settings.top_k == 0 and settings.top_p == 1:
        return _draw_full(scores_BV, settings.min_p, u_B)
    return _draw_truncated(scores_BV, settings, u_B)


def _weights(scores_BV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """exp(score - the row's largest score), and that largest score. Raises FloatingPointError for NaN and +inf."""
    top_B = scores_BV.amax(-1)
    if not bool(top_B.isfinite().all()):
        raise FloatingPointError("logits are not finite: the weights or the model's arithmetic have gone wrong")
    return (scores_BV - top_B[:, None]).exp_(), top_B


def _draw_full(scores_BV: torch.Tensor, min_p: float, u_B: torch.Tensor) -> _Draw:
    """The whole vocabulary, in two levels: which block of the CDF, then which entry of it."""
    weights_BV, top_B = _weights(scores_BV)
    if min_p > 0:
        weights_BV.masked_fill_(weights_BV < min_p, 0.0)  # the likeliest token's weight is exactly 1
    vocab = weights_BV.shape[1]
    padded = F.pad(weights_BV, (0, -vocab % _BLOCK)) if vocab % _BLOCK else weights_BV
    blocks = padded.view(len(padded), -1, _BLOCK)
    block_cdf = blocks.sum(-1).cumsum(-1)
    total_B = block_cdf[:, -1]
    target_B = u_B * total_B
    block_B = _first_above(block_cdf, target_B)
    rows = torch.arange(len(u_B), device=u_B.device)
    before_B = torch.where(block_B > 0, block_cdf[rows, (block_B - 1).clamp(min=0)], 0.0)
    inner_B = _first_above(blocks[rows, block_B].cumsum(-1), target_B - before_B)
    return _finish(scores_BV, weights_BV, top_B, total_B, block_B * _BLOCK + inner_B)


def _first_above(cdf_BC: torch.Tensor, target_B: torch.Tensor) -> torch.Tensor:
    """Index of the first entry above the target; entries of weight 0 are never it."""
    last_B = cdf_BC[:, -1]
    # Rounding may put the target at (or above) the end: the largest number below the end is still inside.
    target_B = torch.minimum(target_B, torch.nextafter(last_B, torch.zeros_like(last_B)))
    return torch.searchsorted(cdf_BC.contiguous(), target_B[:, None], right=True)[:, 0]


def _finish(
    scores: torch.Tensor, weights: torch.Tensor, top_B: torch.Tensor, total_B: torch.Tensor, chosen_B: torch.Tensor
) -> _Draw:
    """Log-prob of the chosen entries and the entropy, of the distribution weights / total."""
    log_total_B = total_B.log() + top_B
    logprobs_B = scores.gather(1, chosen_B[:, None])[:, 0] - log_total_B
    mean_score_B = _dot(weights, scores) / total_B
    if bool(mean_score_B.isnan().any()):  # 0 x -inf: a weight of 0 contributes nothing, whatever its score
        mean_score_B = _dot(weights, scores.clamp(min=torch.finfo(scores.dtype).min)) / total_B
    return chosen_B, logprobs_B, (log_total_B - mean_score_B).clamp_(min=0.0)


def _dot(left_BC: torch.Tensor, right_BC: torch.Tensor) -> torch.Tensor:
    """Row by row [B], without an intermediate [B, C]."""
    return torch.bmm(left_BC[:, None, :], right_BC[:, :, None])[:, 0, 0]


def _draw_truncated(scores_BV: torch.Tensor, settings: Sampling, u_B: torch.Tensor) -> _Draw:
    """Top-k, top-p and min-p over candidates sorted by score."""
    top_k, vocab = settings.top_k, scores_BV.shape[1]
    for count in (top_k,) if top_k else (_TOP_P_CANDIDATES, vocab):
        scores_BC, tokens_BC = scores_BV.topk(min(count, vocab))
        probs_BC = (scores_BC - (scores_BC if top_k else scores_BV).logsumexp(-1, keepdim=True)).exp()
        if bool((probs_BC.sum(-1) > settings.top_p + 1e-3).all()):
            break
    keep_BC = probs_BC >= settings.min_p * probs_BC[:, :1]
    if settings.top_p < 1:  # the margin: 0.5 and 0.3 make a nucleus of 0.8, however they are rounded
        keep_BC &= probs_BC.cumsum(-1) - probs_BC < settings.top_p - 1e-6
    keep_BC[:, 0] = True
    weights_BC, top_B = _weights(scores_BC)
    weights_BC.masked_fill_(~keep_BC, 0.0)
    cdf_BC = weights_BC.cumsum(-1)
    chosen_B = _first_above(cdf_BC, u_B * cdf_BC[:, -1])
    _, logprobs_B, entropies_B = _finish(scores_BC, weights_BC, top_B, cdf_BC[:, -1], chosen_B)
    return tokens_BC.gather(1, chosen_B[:, None])[:, 0], logprobs_B, entropies_B
