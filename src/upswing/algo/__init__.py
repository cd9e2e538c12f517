"""The maths, as pure functions: advantage, credit, loss, correction, KL, aggregation, regularisers, preference, value.

Tensors in, tensors out, no state. Axis letters: B rows (or trajectories), N loss tokens in row order, V vocabulary.
Nothing here sees padding or tool tokens: callers select the loss tokens first, so no reduction can be polluted by a
masked position.
"""

from upswing.algo.advantage import group_relative
from upswing.algo.aggregate import AGGREGATIONS, check_aggregation, token_weights
from upswing.algo.entropy import entropy_from_logits
from upswing.algo.kl import KL_LOSS_ESTIMATORS, check_kl_estimator, kl_k1, kl_k2, kl_k3, kl_loss
from upswing.algo.loss import LossTerms, check_clip, ppo_clip, safe_ratio

__all__ = [
    "AGGREGATIONS",
    "KL_LOSS_ESTIMATORS",
    "LossTerms",
    "check_aggregation",
    "check_clip",
    "check_kl_estimator",
    "entropy_from_logits",
    "group_relative",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "kl_loss",
    "ppo_clip",
    "safe_ratio",
    "token_weights",
]
