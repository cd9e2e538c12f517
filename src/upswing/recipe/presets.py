"""The named algorithms: one table from a name to choices, and which keys each choice gives an effect to.

Plain data, so that checking a recipe needs no torch. What the choices compute is in `upswing.algo`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

LENGTH_NORMALISED = "seq-mean-token-sum-norm"
SEQUENCES = "seq-mean-token-mean"

# Keys with an effect only under some choices, and their values when the recipe leaves them null.
# choice key -> choice -> {key: default}
EFFECTS: dict[str, dict[str, dict[str, Any]]] = {
    "advantage": {
        "group": {"normalize_std": True},
        "reinforce": {"baseline": "batch"},
        "reinforce_pp": {"gamma": 1.0},
        "reinforce_pp_baseline": {},
        "rloo": {},
        "remax": {},
        "opo": {},
        "gpg": {},
        "pass_at_k": {"pass_k": 4},
        "gdpo": {},
        "gigpo": {"normalize_std": False, "gamma": 0.95, "step_weight": 1.0},
        "turn": {"step_weight": 1.0},
        "process": {"step_weight": 0.3, "process_form": "step_end"},
        "gae": {"gamma": 1.0, "lam": 1.0, "critic": {}, "gae_over": "tokens", "scale_rewards": False},
    },
    "loss": {
        "policy_gradient": {},
        "ppo_clip": {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0},
        "gspo": {"clip_low": 3e-4, "clip_high": 4e-4, "dual_clip": 3.0, "ratio_level": "sequence"},
        "gmpo": {"clip_low": 0.4, "clip_high": 0.4, "dual_clip": 3.0},
        "cispo": {"clip_low": 1.0, "clip_high": 4.0},
        "sapo": {"tau_pos": 1.0, "tau_neg": 1.05},
        "clip_cov": {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0, "cov_fraction": 2e-4},
        "kl_cov": {"dual_clip": 3.0, "cov_fraction": 2e-3, "cov_coef": 1.0},
    },
    "baseline": {"batch": {}, "ema": {"baseline_decay": 0.9}, "none": {}},
    "correction": {
        "tis": {"correction_high": 2.0},
        "seq_tis": {"correction_high": 2.0},
        "mis": {"correction_low": 0.0, "correction_high": 3.0},
        "seq_mis": {"correction_low": 0.0, "correction_high": 3.0},
        "icepop": {"correction_low": 0.5, "correction_high": 5.0},
        "geo_rs": {"correction_low": 0.999, "correction_high": 1.001},
        "k3_rs": {"correction_high": 0.01},
    },
}


@dataclass(frozen=True)
class Preset:
    """A named choice of advantage, loss, aggregation and what else the source fixes."""

    source: str
    choices: dict[str, Any]
    note: str = ""


def _preset(source: str, advantage: str, loss: str, aggregation: str, note: str = "", **more: Any) -> Preset:
    return Preset(source, {"advantage": advantage, "loss": loss, "aggregation": aggregation, **more}, note)


PG, PPO = "policy_gradient", "ppo_clip"
TOKENS, SUMS = "token-mean", "seq-mean-token-sum"

PRESETS: dict[str, Preset] = {
    "reinforce": _preset("Williams 1992", "reinforce", PG, SUMS, "mean of the rest of the batch, or a moving average"),
    "reinforce++": _preset("arXiv 2501.03262", "reinforce_pp", PPO, TOKENS, "whitened over all tokens", kl_in="reward"),
    "reinforce++-baseline": _preset("arXiv 2501.03262", "reinforce_pp_baseline", PPO, TOKENS, "group mean, batch std"),
    "rloo": _preset("arXiv 2402.14740", "rloo", PG, SUMS, "leave-one-out within the group", kl_in="reward"),
    "remax": _preset("arXiv 2310.10505", "remax", PG, SUMS, "a greedy rollout a task is the baseline"),
    "grpo": _preset("arXiv 2402.03300", "group", PPO, TOKENS, f"published with {SEQUENCES}", normalize_std=True),
    "dr_grpo": _preset("arXiv 2503.20783", "group", PPO, LENGTH_NORMALISED, "no std; norm_length", normalize_std=False),
    "dapo": _preset("arXiv 2503.14476", "group", PPO, TOKENS, "clip-higher, dynamic sampling", dynamic_sampling=4),
    "opo": _preset("arXiv 2505.23585", "opo", PG, TOKENS, "length-weighted baseline, exactly on-policy"),
    "gpg": _preset("arXiv 2504.02546", "gpg", PG, TOKENS, "rescaled by the groups that have a spread"),
    "pass_at_k": _preset("arXiv 2508.10751", "pass_at_k", PPO, TOKENS, "rewards a set of k that holds a success"),
    "gspo": _preset("arXiv 2507.18071", "group", "gspo", SEQUENCES, "ratio of whole sequences", minibatches=2),
    "gmpo": _preset("arXiv 2507.20673", "group", "gmpo", SEQUENCES, "geometric mean of token ratios", minibatches=2),
    "cispo": _preset(
        "arXiv 2506.13585", "group", "cispo", TOKENS, "clipped weights: no token loses its gradient", minibatches=2
    ),
    "sapo": _preset("arXiv 2511.20347", "group", "sapo", SEQUENCES, "a soft gate instead of a clip", minibatches=2),
    "clip_cov": _preset("arXiv 2505.22617", "group", "clip_cov", TOKENS, "drops some high-covariance tokens"),
    "kl_cov": _preset(
        "arXiv 2505.22617", "group", "kl_cov", TOKENS, "penalises the highest-covariance tokens", minibatches=2
    ),
    "llds": _preset(
        "arXiv 2512.04220", "group", PPO, TOKENS, "keeps good actions likely", llds_coef=0.2, minibatches=2
    ),
    "gigpo": _preset("arXiv 2505.10978", "gigpo", PPO, TOKENS, "episode and step groups"),
    "mt_grpo": _preset("arXiv 2505.11821", "turn", PPO, TOKENS, "outcome plus turn rewards"),
    "process": _preset("arXiv 2402.03300, 2504.15275", "process", PPO, TOKENS, "outcome plus step scores"),
    "gdpo": _preset("arXiv 2601.05242", "gdpo", PPO, TOKENS, "each verifier normalised by itself"),
    "ppo": _preset("arXiv 1707.06347, 1506.02438", "gae", PPO, TOKENS, "a critic and GAE", kl_in="reward"),
}

TABLE_KEYS = ("advantage", "loss", "aggregation")
