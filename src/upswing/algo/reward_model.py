"""Reward models: the Bradley-Terry loss of pairs, figures for labels, and whether the scores can be trusted.

Axis letters: B pairs, chosen was preferred; N labelled positions. Nothing in a pair's preference fixes the level of the
scores; centring does (arXiv 2312.09244).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from upswing.algo.preference import preferred
from upswing.errors import ConfigError


def bradley_terry(
    chosen_B: torch.Tensor,
    rejected_B: torch.Tensor,
    *,
    margins_B: torch.Tensor | None = None,
    centring: float = 0.0,
) -> torch.Tensor:
    """-log sigmoid(chosen - rejected - margin) + centring * (chosen + rejected)^2 a pair, [B]; their mean is the loss.

    Margins as in Llama 2 (arXiv 2307.09288): how much better chosen is, 0 by default. The log-sigmoid is a softplus, so
    that no difference of scores overflows. Raises ConfigError for a negative `centring`.
    """
    if not centring >= 0:
        raise ConfigError(f"centring is {centring}; it must be 0 (none) or above, such as 0.01")
    difference_B = chosen_B - rejected_B - (0.0 if margins_B is None else margins_B)
    return F.softplus(-difference_B) + centring * (chosen_B + rejected_B).square()


def pair_accuracy(chosen_B: torch.Tensor, rejected_B: torch.Tensor) -> float:
    """Share of pairs in the right order, a tie counting half; NaN without pairs."""
    return float(preferred(chosen_B - rejected_B).double().mean())


def pair_ece(chosen_B: torch.Tensor, rejected_B: torch.Tensor, *, bins: int = 10) -> float:
    """Expected calibration error in [0, .5] of sigmoid(difference) as a probability; NaN without pairs.

    The model bets on the higher score with confidence sigmoid(|difference|), and wins when that is chosen (a tie wins
    half). ECE (arXiv 1706.04599) with `bins` equal bins over [.5, 1]: the mean of |wins - confidence| of the bins,
    weighted by their pairs.
    """
    if not len(chosen_B):
        return math.nan
    difference_B = (chosen_B - rejected_B).double()
    confidence_B, win_B = difference_B.abs().sigmoid(), preferred(difference_B)
    bin_B = ((confidence_B - 0.5) * 2 * bins).long().clamp(max=bins - 1)
    gap_B = torch.zeros(bins, dtype=torch.float64, device=bin_B.device).index_add_(0, bin_B, win_B - confidence_B)
    return float(gap_B.abs().sum() / len(bin_B))


def label_hits(logits_N: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
    """[N]: the chance that a draw from the label is on the side of 1/2 where sigmoid(logit) is; 1/2 on neither."""
    return 0.5 + logits_N.sign() * (labels_N - 0.5)


def label_figures(logits_N: torch.Tensor, labels_N: torch.Tensor) -> dict[str, float]:
    """How well sigmoid(logit) says labels from 0 to 1; NaN without any.

    `loss` is the mean binary cross-entropy, `brier` the mean squared error, `base_brier` that of the labels' mean said
    everywhere, `auc` the chance that a position drawn by its label scores above one drawn by 1 - label, a tie counting
    half (NaN if all labels are 0, or 1).
    """
    logits_N, labels_N = logits_N.double(), labels_N.double()
    _, level_N = torch.unique(logits_N, return_inverse=True)
    good_U, bad_U = (torch.bincount(level_N, weights=weights_N) for weights_N in (labels_N, 1 - labels_N))
    above = (good_U * (bad_U.cumsum(0) - bad_U / 2)).sum() / (labels_N.sum() * (1 - labels_N).sum())
    return {
        "loss": float(F.binary_cross_entropy_with_logits(logits_N, labels_N)),
        "accuracy": float(label_hits(logits_N, labels_N).mean()),
        "auc": float(above),
        "brier": float((logits_N.sigmoid() - labels_N).square().mean()),
        "base_brier": float((labels_N - labels_N.mean()).square().mean()),
    }


def length_correlation(scores_B: torch.Tensor, lengths_B: torch.Tensor) -> float:
    """Pearson correlation of scores and lengths of B answers; NaN where one of them doesn't vary.

    Well above 0 (.4, say) the model has learned to like length, and so will a policy trained on it.
    """
    if len(scores_B) < 2:
        return math.nan
    stacked = torch.stack([scores_B.double(), lengths_B.double()])
    if bool((stacked.amax(1) == stacked.amin(1)).any()):
        return math.nan
    return float(torch.corrcoef(stacked)[0, 1])
