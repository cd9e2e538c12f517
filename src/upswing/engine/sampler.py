"""Sampling with exact log-probs: one uniform number a row, inverse CDF, no [B, V] random draws.

Order of the settings, as in Hugging Face: temperature, top-k, top-p (of what top-k left), min-p. Log-probs and entropy
are of the distribution that was sampled from: after temperature and truncation, renormalised, in float32.

Axis letters: B tokens to draw, U rows of logits to draw them from, V vocabulary, C candidates (sorted by probability).
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
    """One entry a draw; log-probs and entropies in nats, of the untempered distribution for greedy ones."""

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


def sample(
    logits_UV: torch.Tensor,
    samplings: Sequence[Sampling],
    uniforms: Sequence[float],
    rows: Sequence[int] | None = None,
) -> Sampled:
    """A token for each of `uniforms`, which are in [0, 1). `rows`: the row of logits that each is drawn from; None: its
    own. Draws don't influence each other.

    Raises FloatingPointError when a row's logits have NaN or +inf, or nothing but -inf.
    """
    groups: dict[tuple[float, ...], list[int]] = {}
    for draw, s in enumerate(samplings):
        groups.setdefault((s.temperature, s.top_k, s.top_p, s.min_p), []).append(draw)
    device = logits_UV.device
    u_B = torch.tensor(uniforms, dtype=torch.float32, device=device)
    row_B = torch.arange(len(u_B), device=device) if rows is None else torch.tensor(rows, device=device)
    if len(groups) == 1:  # the usual case: nothing to copy or to put in order
        return Sampled(*(column.tolist() for column in _draw(logits_UV.float(), samplings[0], u_B, row_B)))
    drawn: list[_Draw] = []
    for draws in groups.values():
        index = torch.tensor(draws, device=device)
        own = torch.arange(len(draws), device=device)
        drawn.append(_draw(logits_UV[row_B[index]].float(), samplings[draws[0]], u_B[index], own))
    order = torch.tensor([draw for draws in groups.values() for draw in draws]).argsort()
    return Sampled(*(torch.cat(column).cpu()[order].tolist() for column in zip(*drawn, strict=True)))


def _draw(logits_UV: torch.Tensor, settings: Sampling, u_B: torch.Tensor, row_B: torch.Tensor) -> _Draw:
    if settings.temperature == 0:
        weights_UV, top_U = _weights(logits_UV)
        return _finish(logits_UV, weights_UV, top_U, weights_UV.sum(-1), logits_UV.argmax(-1)[row_B], row_B)
    scores_UV = logits_UV if settings.temperature == 1 else logits_UV / settings.temperature
    if settings.top_k == 0 and settings.top_p == 1:
        return _draw_full(scores_UV, settings.min_p, u_B, row_B)
    return _draw_truncated(scores_UV, settings, u_B, row_B)


def _weights(scores_UV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """exp(score - the row's largest score), and that largest score. Raises FloatingPointError for NaN and +inf."""
    top_U = scores_UV.amax(-1)
    if not bool(top_U.isfinite().all()):
        raise FloatingPointError("logits are not finite: the weights or the model's arithmetic have gone wrong")
    return (scores_UV - top_U[:, None]).exp_(), top_U


def _draw_full(scores_UV: torch.Tensor, min_p: float, u_B: torch.Tensor, row_B: torch.Tensor) -> _Draw:
    """The whole vocabulary, in two levels: which block of the CDF, then which entry of it."""
    weights_UV, top_U = _weights(scores_UV)
    if min_p > 0:
        weights_UV.masked_fill_(weights_UV < min_p, 0.0)  # the likeliest token's weight is exactly 1
    vocab = weights_UV.shape[1]
    padded = F.pad(weights_UV, (0, -vocab % _BLOCK)) if vocab % _BLOCK else weights_UV
    blocks = padded.view(len(padded), -1, _BLOCK)
    block_cdf = blocks.sum(-1).cumsum(-1)
    total_U = block_cdf[:, -1]
    target_B = u_B * total_U[row_B]
    block_B = _first_above(block_cdf[row_B], target_B)
    before_B = torch.where(block_B > 0, block_cdf[row_B, (block_B - 1).clamp(min=0)], 0.0)
    inner_B = _first_above(blocks[row_B, block_B].cumsum(-1), target_B - before_B)
    return _finish(scores_UV, weights_UV, top_U, total_U, block_B * _BLOCK + inner_B, row_B)


def _first_above(cdf_BC: torch.Tensor, target_B: torch.Tensor) -> torch.Tensor:
    """Index of the first entry above the target; entries of weight 0 are never it."""
    last_B = cdf_BC[:, -1]
    # Rounding may put the target at (or above) the end: the largest number below the end is still inside.
    target_B = torch.minimum(target_B, torch.nextafter(last_B, torch.zeros_like(last_B)))
    return torch.searchsorted(cdf_BC.contiguous(), target_B[:, None], right=True)[:, 0]


def _finish(
    scores: torch.Tensor,
    weights: torch.Tensor,
    top_U: torch.Tensor,
    total_U: torch.Tensor,
    chosen_B: torch.Tensor,
    row_B: torch.Tensor,
) -> _Draw:
    """Log-prob of the entries chosen from each draw's row, and its entropy, of the distribution weights / total."""
    log_total_U = total_U.log() + top_U
    mean_score_U = _dot(weights, scores) / total_U
    if bool(mean_score_U.isnan().any()):  # 0 x -inf: a weight of 0 contributes nothing, whatever its score
        mean_score_U = _dot(weights, scores.clamp(min=torch.finfo(scores.dtype).min)) / total_U
    entropy_U = (log_total_U - mean_score_U).clamp_(min=0.0)
    return chosen_B, scores[row_B, chosen_B] - log_total_U[row_B], entropy_U[row_B]


def _dot(left_BC: torch.Tensor, right_BC: torch.Tensor) -> torch.Tensor:
    """Row by row [B], without an intermediate [B, C]."""
    return torch.bmm(left_BC[:, None, :], right_BC[:, :, None])[:, 0, 0]


def _draw_truncated(scores_UV: torch.Tensor, settings: Sampling, u_B: torch.Tensor, row_B: torch.Tensor) -> _Draw:
    """Top-k, top-p and min-p over candidates sorted by score."""
    top_k, vocab = settings.top_k, scores_UV.shape[1]
    for count in (top_k,) if top_k else (_TOP_P_CANDIDATES, vocab):
        scores_UC, tokens_UC = scores_UV.topk(min(count, vocab))
        probs_UC = (scores_UC - (scores_UC if top_k else scores_UV).logsumexp(-1, keepdim=True)).exp()
        if bool((probs_UC.sum(-1) > settings.top_p + 1e-3).all()):
            break
    keep_UC = probs_UC >= settings.min_p * probs_UC[:, :1]
    if settings.top_p < 1:  # the margin: 0.5 and 0.3 make a nucleus of 0.8, however they are rounded
        keep_UC &= probs_UC.cumsum(-1) - probs_UC < settings.top_p - 1e-6
    keep_UC[:, 0] = True
    weights_UC, top_U = _weights(scores_UC)
    weights_UC.masked_fill_(~keep_UC, 0.0)
    cdf_UC = weights_UC.cumsum(-1)
    chosen_B = _first_above(cdf_UC[row_B], u_B * cdf_UC[row_B, -1])
    _, logprobs_B, entropies_B = _finish(scores_UC, weights_UC, top_U, cdf_UC[:, -1], chosen_B, row_B)
    return tokens_UC[row_B, chosen_B], logprobs_B, entropies_B
