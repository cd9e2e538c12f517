"""Preference losses on whole sequences: sums or means of log-probs over a sequence's loss tokens in, one loss each out.

Axis letters: P pairs, B unpaired sequences. *Log-ratio* is policy minus ref; nothing here sees tokens. A prompt common
to both sides cancels in every loss that compares sums, and never enters, as prompts aren't loss tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import logsigmoid

PREFERENCE_LOSSES = ("dpo", "ipo", "kto", "orpo", "simpo")
LARGEST_MEAN = -1e-6
"""Mean log-probs are clamped to this in odds: nearer to 0 they are float32 noise, and the odds of 1 are infinite."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PreferenceTerms:
    """A loss per pair and the implicit rewards that it compares. All [P]; only `loss_P` carries gradient."""

    loss_P: torch.Tensor
    chosen_rewards_P: torch.Tensor
    rejected_rewards_P: torch.Tensor


def dpo_loss(
    margin_P: torch.Tensor, *, beta: float = 0.1, label_smoothing: float = 0.0, robust: bool = False
) -> torch.Tensor:
    """DPO (arXiv 2305.18290): -log sigmoid(beta margin) [P]; `margin_P`: chosen minus rejected log-ratio, of sums.

    `label_smoothing` e is the chance that a label is flipped. L(m) as above: cDPO (Mitchell's note) is
    (1 - e) L(m) + e L(-m), least where the policy is as sure as the labels; `robust` (arXiv 2403.00409) is
    ((1 - e) L(m) - e L(-m)) / (1 - 2e), in expectation over flips the loss of clean labels; it needs e < 0.5.
    """
    if robust and not label_smoothing < 0.5:
        raise ValueError(f"label_smoothing is {label_smoothing}; robust DPO needs less than 0.5")
    right_P, wrong_P = -logsigmoid(beta * margin_P), -logsigmoid(-beta * margin_P)
    sign, scale = (-1.0, 1.0 - 2.0 * label_smoothing) if robust else (1.0, 1.0)
    return ((1.0 - label_smoothing) * right_P + sign * label_smoothing * wrong_P) / scale


def ipo_loss(mean_margin_P: torch.Tensor, *, beta: float = 0.1) -> torch.Tensor:
    """IPO (arXiv 2310.12036): (margin - 1 / (2 beta))^2 [P].

    `mean_margin_P`: chosen minus rejected log-ratio, each averaged over its own loss tokens, as the authors intend and
    as TRL does. OpenRLHF and TRL's CPO use sums: their beta means something else.
    """
    return (mean_margin_P - 1.0 / (2.0 * beta)).square()


def simpo_loss(
    chosen_means_P: torch.Tensor, rejected_means_P: torch.Tensor, *, beta: float = 2.0, margin: float = 1.0
) -> torch.Tensor:
    """SimPO (arXiv 2405.14734), without a reference: -log sigmoid(beta (chosen - rejected) - margin) [P] of means."""
    return -logsigmoid(beta * (chosen_means_P - rejected_means_P) - margin)


def log_odds(means: torch.Tensor) -> torch.Tensor:
    """log(p / (1 - p)) of p = exp(mean log-prob); expm1 keeps it exact near p = 1. Gradient 0 above LARGEST_MEAN."""
    below = means.clamp(max=LARGEST_MEAN)
    return below - torch.log(-torch.expm1(below))


def orpo_loss(chosen_means_P: torch.Tensor, rejected_means_P: torch.Tensor, *, beta: float = 0.1) -> torch.Tensor:
    """ORPO's odds-ratio term (arXiv 2403.07691): -beta log sigmoid(log-odds of chosen - of rejected) [P], of means.

    ORPO is this plus the NLL of the chosen side, `nll_loss`, with weight 1.
    """
    return -beta * logsigmoid(log_odds(chosen_means_P) - log_odds(rejected_means_P))


def nll_loss(chosen_means_P: torch.Tensor) -> torch.Tensor:
    """-log-prob per token of the chosen side [P]: the SFT term of ORPO, RPO and IRPO (arXiv 2404.19733).

    TRL's `rpo_alpha` instead averages over all tokens of the batch.
    """
    return -chosen_means_P


def kto_baseline(mismatched_log_ratios_B: torch.Tensor) -> torch.Tensor:
    """KTO's z0: mean log-ratio of completions under prompts that aren't theirs, at least 0, detached; 0 without any."""
    if not mismatched_log_ratios_B.numel():
        return mismatched_log_ratios_B.new_zeros(())
    return mismatched_log_ratios_B.detach().mean().clamp(min=0.0)


def kto_loss(
    log_ratios_B: torch.Tensor,
    desirable_B: torch.Tensor,
    baseline: torch.Tensor,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> torch.Tensor:
    """KTO (arXiv 2402.01306), on unpaired sequences [B]: weight (1 - sigmoid(+-beta (log-ratio - baseline))).

    `desirable_B` bool: the sign is + where True. `baseline` is `kto_baseline` of the *whole* minibatch.
    """
    sign_B = desirable_B.to(log_ratios_B.dtype) * 2.0 - 1.0
    weight_B = torch.where(desirable_B, desirable_weight, undesirable_weight).to(log_ratios_B.dtype)
    return weight_B * torch.sigmoid(-sign_B * beta * (log_ratios_B - baseline))


def pair_terms(
    loss: str,
    chosen_P: torch.Tensor,
    rejected_P: torch.Tensor,
    ref_chosen_P: torch.Tensor,
    ref_rejected_P: torch.Tensor,
    chosen_length_P: torch.Tensor,
    rejected_length_P: torch.Tensor,
    *,
    beta: float,
    label_smoothing: float = 0.0,
    robust: bool = False,
    margin: float = 0.0,
    nll_coef: float = 0.0,
) -> PreferenceTerms:
    """Any paired loss from sums of log-probs and numbers of loss tokens, all [P].

    The implicit rewards are beta times what the loss compares: log-ratios of sums (dpo) or means (ipo), mean log-probs
    (simpo, orpo). Raises ValueError for a loss that isn't a paired one.
    """
    chosen_means_P, rejected_means_P = chosen_P / chosen_length_P, rejected_P / rejected_length_P
    if loss == "dpo":
        compared = chosen_P - ref_chosen_P, rejected_P - ref_rejected_P
        loss_P = dpo_loss(compared[0] - compared[1], beta=beta, label_smoothing=label_smoothing, robust=robust)
    elif loss == "ipo":
        compared = (chosen_P - ref_chosen_P) / chosen_length_P, (rejected_P - ref_rejected_P) / rejected_length_P
        loss_P = ipo_loss(compared[0] - compared[1], beta=beta)
    elif loss == "simpo":
        compared = chosen_means_P, rejected_means_P
        loss_P = simpo_loss(*compared, beta=beta, margin=margin)
    elif loss == "orpo":
        compared = chosen_means_P, rejected_means_P
        loss_P = orpo_loss(*compared, beta=beta)
    else:
        raise ValueError(f"loss is '{loss}'; paired losses: dpo, ipo, orpo, simpo")
    if nll_coef:
        loss_P = loss_P + nll_coef * nll_loss(chosen_means_P)
    chosen, rejected = (beta * one.detach() for one in compared)
    return PreferenceTerms(loss_P=loss_P, chosen_rewards_P=chosen, rejected_rewards_P=rejected)


def preferred(margin: torch.Tensor) -> torch.Tensor:
    """1 where the margin is above 0, 0.5 at exactly 0 (nothing is preferred), else 0; the mean of it is accuracy."""
    return 0.5 * (1.0 + torch.sign(margin.detach()))
