"""Advantage estimators: rewards and group ids in, one advantage per trajectory out. `credit.py` has the per-token ones.

Every estimator has the shape `(rewards_B, group_B, **options) -> advantages_B`; a new one is a new function. For all:

- `rewards_B` [B] float, one per trajectory, not per branch; NaN or infinite: could not be scored, enters no statistic
  and gets 0. `group_B` [B] integer group ids in any order; membership goes by id, never by adjacency.
- Computed in float64 (so the order of the rows and the size of the rewards don't matter), returned in the dtype of
  the rewards, without gradient.
- A group of equal rewards gets exactly 0, decided by max - min because a computed std keeps rounding residue that a
  division would blow up. A group with one scored trajectory gets 0: there is nothing to compare it with.
- ValueError for shapes that don't match and for rewards that aren't floating point.

"Target" is what the gradient `mean_i A_i * grad log pi(i)` of groups of size G estimates on policy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch

from upswing.errors import ConfigError

ZERO_VARIANCE = 1e-6
"""A group whose rewards differ by at most this (relative to their size, if above 1) has no preference to teach."""


def group_relative(
    rewards_B: torch.Tensor, group_B: torch.Tensor, *, normalize_std: bool = True, eps: float = 1e-6
) -> torch.Tensor:
    """GRPO's advantage (DeepSeekMath, arXiv 2402.03300): (reward - mean) / (std + eps) within the group.

    With `normalize_std=False` it is Dr. GRPO's (arXiv 2503.20783): reward - mean; target (G-1)/G of the exact gradient.
    std is the unbiased one (n - 1), as in TRL and verl; dividing by it biases towards easy and hard prompts.
    """
    advantages_B = per_group(
        rewards_B, group_B, lambda r, _: (r - r.mean()) / (r.std(correction=1) + eps if normalize_std else 1.0)
    )
    return advantages_B.to(rewards_B.dtype)


def reinforce(rewards_B: torch.Tensor, *, baseline: float | Literal["batch"]) -> torch.Tensor:
    """REINFORCE (Williams 1992): reward - baseline. Target: the exact gradient.

    `baseline` is a number that no reward of this batch has entered (0.0: none; the value that `ema_baseline` returned
    after an *earlier* batch), or "batch": the mean of the others in the batch, so that no sample enters its own.
    Raises ConfigError (a ValueError) for anything else.
    """
    if baseline == "batch":
        return rloo(rewards_B, torch.zeros_like(rewards_B, dtype=torch.long))
    if isinstance(baseline, str) or not math.isfinite(baseline):
        raise ConfigError(f"baseline is {baseline!r}; it must be 'batch' or a finite number (0.0: none)")
    check_vectors(rewards_B)
    return _or_zero(rewards_B.detach().to(torch.float64) - baseline).to(rewards_B.dtype)


def ema_baseline(previous: float | None, rewards_B: torch.Tensor, decay: float) -> float:
    """The moving average after this batch: decay * previous + (1 - decay) * mean of the scored rewards.

    Call it *after* `reinforce` has used `previous` for this batch: a baseline that contains its own sample is biased.
    `previous` None: nothing seen yet, the mean is taken as it is. No scored reward: `previous` stays (0.0 for None).
    """
    scored = rewards_B[torch.isfinite(rewards_B)].to(torch.float64)
    if not len(scored):
        return previous or 0.0
    mean = float(scored.mean())
    return mean if previous is None else decay * previous + (1.0 - decay) * mean


def rloo(rewards_B: torch.Tensor, group_B: torch.Tensor) -> torch.Tensor:
    """RLOO (arXiv 2402.14740): reward - mean of the *other* members = G/(G-1) (reward - mean). Target: exact.

    verl gives a group of one its raw reward; here it is 0 as everywhere.
    """
    return per_group(rewards_B, group_B, lambda r, _: (r - r.mean()) * (len(r) / (len(r) - 1))).to(rewards_B.dtype)


def remax(rewards_B: torch.Tensor, greedy_rewards_B: torch.Tensor) -> torch.Tensor:
    """ReMax (arXiv 2310.10505): reward - reward of the greedy rollout of the same task. Target: the exact gradient.

    `greedy_rewards_B` [B]: of each trajectory's task; non-finite (the greedy rollout could not be scored): 0.
    """
    check_vectors(rewards_B, greedy_rewards_B=greedy_rewards_B)
    return _or_zero((rewards_B.to(torch.float64) - greedy_rewards_B.to(torch.float64)).detach()).to(rewards_B.dtype)


def opo(rewards_B: torch.Tensor, group_B: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
    """OPO (arXiv 2505.23585): reward - length-weighted group mean, the baseline of least variance where the squared
    norm of grad log pi grows as the length. Made for exact on-policy updates, without KL or entropy terms.

    `lengths_B` [B]: loss tokens, tool results not counted. A group without any loss token gets 0. With equal lengths
    the target is (G-1)/G of the exact gradient; otherwise it is biased, as a sample enters its own baseline.
    """
    check_vectors(rewards_B, group_B=group_B, lengths_B=lengths_B)
    length_B = lengths_B.to(torch.float64)

    def centre(rewards_G: torch.Tensor, rows_G: torch.Tensor) -> torch.Tensor:
        weight_G = length_B[rows_G]
        return rewards_G - (weight_G * rewards_G).sum() / weight_G.sum() if weight_G.sum() > 0 else 0.0 * rewards_G

    return per_group(rewards_B, group_B, centre).to(rewards_B.dtype)


def gpg(rewards_B: torch.Tensor, group_B: torch.Tensor) -> torch.Tensor:
    """GPG (arXiv 2504.02546, F_norm = 1): alpha (reward - mean), alpha = scored / scored in groups that have signal.

    alpha = B / (B - M) of the paper makes up for the M trajectories in groups of equal rewards, whose gradient is 0.
    verl divides by the number of non-zero *rewards* instead, which depends on where the rewards' zero is.
    """
    signal_B = has_signal(rewards_B, group_B)
    alpha = float(torch.isfinite(rewards_B).sum()) / max(1.0, float(signal_B.sum()))
    return (alpha * per_group(rewards_B, group_B, lambda r, _: r - r.mean())).to(rewards_B.dtype)


def pass_at_k(rewards_B: torch.Tensor, group_B: torch.Tensor, *, k: int) -> torch.Tensor:
    """Pass@k training, analytic advantage (arXiv 2508.10751): the mean over all k-subsets that hold the sample.

    With n scored, w of them wrong and F = C(w,k)/C(n,k) the chance that k of them all fail: right ones get F/s, wrong
    ones (F - C(w-1,k-1)/C(n-1,k-1))/s, s = sqrt(F(1-F)). Without the division by s the target is (G-k)/(G k) of the
    gradient of pass@k. F = 0 or 1 gives 0: k samples always or never succeed. Fewer than k scored: 0.

    Raises ValueError unless rewards are 0 or 1 and every group has at least max(2, k) members.
    """
    check_vectors(rewards_B, group_B=group_B)
    smallest = int(torch.unique(group_B, return_counts=True)[1].min()) if len(group_B) else max(2, k)
    if not 1 <= k <= smallest or smallest < 2:
        raise ValueError(f"k is {k} and the smallest group has {smallest}; 1 <= k <= group size >= 2 is needed")
    scored = rewards_B[torch.isfinite(rewards_B)]
    if not ((scored == 0) | (scored == 1)).all():
        raise ValueError("pass@k needs rewards that are 0 or 1")

    def analytic(rewards_G: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        n, wrong = len(rewards_G), int((rewards_G == 0).sum())
        fail = math.comb(wrong, k) / math.comb(n, k) if k <= n else 0.0
        if fail == 0.0:
            return 0.0 * rewards_G
        wrong_value = fail - math.comb(wrong - 1, k - 1) / math.comb(n - 1, k - 1)
        return (rewards_G * fail + (1 - rewards_G) * wrong_value) / math.sqrt(fail * (1 - fail))

    return per_group(rewards_B, group_B, analytic).to(rewards_B.dtype)


def top_minus_second(rewards_B: torch.Tensor, group_B: torch.Tensor, *, eps: float = 1e-6) -> torch.Tensor:
    """verl's `grpo_passk`: only the best of the group gets (best - second) / (std + eps), the others 0; a tie is 0."""

    def best(rewards_G: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        top, second = rewards_G.topk(2).values
        return torch.where(rewards_G == top, (top - second) / (rewards_G.std(correction=1) + eps), 0.0)

    return per_group(rewards_B, group_B, best).to(rewards_B.dtype)


def gdpo(rewards_BK: torch.Tensor, group_B: torch.Tensor, weights_K: Sequence[float]) -> torch.Tensor:
    """GDPO (arXiv 2601.05242) for K rewards: GRPO's advantage of each alone, weighted sum, division by the batch's std.

    Summing first gives different reward tuples the same advantage. A component that couldn't be scored (non-finite)
    adds nothing for that trajectory and is left out of that component's statistics only; with none scored the
    trajectory is out of the batch's std too. The mean isn't subtracted: it is 0 by construction, and what rounding
    leaves of it would move the exact zeros.
    """
    if rewards_BK.ndim != 2 or len(weights_K) != rewards_BK.shape[1]:
        raise ValueError(f"rewards must be [B, K] with K weights; got {tuple(rewards_BK.shape)} and {len(weights_K)}")
    wide_BK = rewards_BK.detach().to(torch.float64)
    total_B = torch.zeros_like(wide_BK[:, 0]) if len(weights_K) else wide_BK.sum(1)
    for weight, rewards_B in zip(weights_K, wide_BK.unbind(1), strict=True):
        total_B += weight * group_relative(rewards_B, group_B)
    scored_B = torch.isfinite(wide_BK).any(1)
    if scored_B.sum() > 1:
        total_B /= (total_B[scored_B].var(correction=1) + 1e-8).sqrt()
    return total_B.to(rewards_BK.dtype)


def reinforce_pp_baseline(rewards_B: torch.Tensor, group_B: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
    """REINFORCE++ with a group baseline (arXiv 2501.03262): reward - group mean, whitened over all loss tokens.

    `lengths_B` [B]: loss tokens; a trajectory weighs in the whitening as often as it has tokens. Groups without signal
    and trajectories without tokens are left out of it and get 0; as in verl they would get -mean / std, a push
    that nothing in their rewards asks for.
    """
    check_vectors(rewards_B, group_B=group_B, lengths_B=lengths_B)
    advantages_B = per_group(rewards_B, group_B, lambda r, _: r - r.mean())
    live_B = has_signal(rewards_B, group_B) & (lengths_B > 0)
    advantages_B[~live_B] = 0.0
    advantages_B[live_B] = _whiten(advantages_B[live_B], lengths_B[live_B].to(torch.float64), shift_mean=True)
    return advantages_B.to(rewards_B.dtype)


def tree(rewards_B: torch.Tensor, group_B: torch.Tensor, tree_B: torch.Tensor) -> torch.Tensor:
    """Tree-GRPO (arXiv 2509.21240): GRPO's advantage among the leaves of one tree + that among all of the task's.

    `tree_B` [B] integer: the tree within the group (ids may repeat in other groups). Its public `tree_2norm` instead
    normalises by group and the result by tree; the second undoes the first, which is affine, so that nothing compares
    the trees. Tokens that leaves share must be trained once (or weigh 1 / leaves): the learner's business.
    """
    check_vectors(rewards_B, group_B=group_B, tree_B=tree_B)
    _, leaf_group_B = torch.unique(torch.stack([group_B, tree_B], 1), dim=0, return_inverse=True)
    wide_B = rewards_B.detach().to(torch.float64)
    return (group_relative(wide_B, leaf_group_B) + group_relative(wide_B, group_B)).to(rewards_B.dtype)


def whiten(values_N: torch.Tensor, *, shift_mean: bool = True) -> torch.Tensor:
    """(value - mean) / sqrt(var + 1e-8) over all values; with `shift_mean=False` the mean is added again.

    To be given the loss tokens of the whole batch, never of a micro-batch. Fewer than two values: only centred. Equal
    values: exactly 0 (or the mean). Non-finite values enter nothing and become 0. var is the unbiased one.
    """
    check_vectors(values_N)
    wide_N = values_N.detach().to(torch.float64)
    result_N, scored_N = torch.zeros_like(wide_N), torch.isfinite(wide_N)
    result_N[scored_N] = _whiten(wide_N[scored_N], torch.ones_like(wide_N[scored_N]), shift_mean)
    return result_N.to(values_N.dtype)


def scaled(values_N: torch.Tensor) -> torch.Tensor:
    """value / std over all values, so that a 0 stays 0; unchanged where they are equal or fewer than two.

    For the sparse token rewards of PPO. TRL's `whiten_rewards` moves them too, (value - mean) / std + mean, which gives
    every token without a reward a small one and so pays for length.
    """
    wide_N = values_N.detach().to(torch.float64)
    if len(wide_N) < 2 or _is_constant(wide_N):
        return values_N.detach()
    return (wide_N / wide_N.std(correction=1)).to(values_N.dtype)


def has_signal(rewards_B: torch.Tensor, group_B: torch.Tensor) -> torch.Tensor:
    """bool [B]: scored, in a group of at least two scored trajectories whose rewards differ. True for the whole group
    or for none of it (unscored members apart), so that dropping the others never tears a group."""
    return per_group(rewards_B, group_B, lambda r, _: torch.ones_like(r)).bool()


def per_group(
    rewards_B: torch.Tensor,
    group_B: torch.Tensor,
    estimate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """float64 [B]: `estimate(rewards_G, rows_G)` for each group's scored members; 0 for the unscored, and for a group
    of equal rewards or with fewer than two scored. `rewards_G` float64, `rows_G` their indices in the batch."""
    check_vectors(rewards_B, group_B=group_B)
    wide_B = rewards_B.detach().to(torch.float64)
    result_B = torch.zeros_like(wide_B)
    scored = torch.isfinite(wide_B).nonzero().squeeze(1)
    _, index, sizes = torch.unique(group_B[scored], return_inverse=True, return_counts=True)
    for rows_G in torch.split(scored[torch.argsort(index, stable=True)], sizes.tolist()):
        rewards_G = wide_B[rows_G]
        if len(rewards_G) > 1 and not _is_constant(rewards_G):
            result_B[rows_G] = estimate(rewards_G, rows_G)
    return result_B


def check_vectors(rewards_B: torch.Tensor, **others: torch.Tensor) -> None:
    """Raises ValueError unless rewards are floating, and all one-dimensional and of one length."""
    if not rewards_B.is_floating_point():
        raise ValueError(f"rewards have dtype {rewards_B.dtype}; a floating one is needed")
    if rewards_B.ndim != 1 or any(other.shape != rewards_B.shape for other in others.values()):
        shapes = ", ".join(f"{name} {tuple(other.shape)}" for name, other in others.items())
        raise ValueError(
            f"rewards must be one-dimensional and all of the same length; got {tuple(rewards_B.shape)}, {shapes}"
        )


def _whiten(values_N: torch.Tensor, weights_N: torch.Tensor, shift_mean: bool) -> torch.Tensor:
    """Whitened float64 values, each counted `weights_N` times."""
    if not len(values_N):
        return values_N
    count = weights_N.sum()
    mean = (weights_N * values_N).sum() / count
    centred_N = 0.0 * values_N if _is_constant(values_N) else values_N - mean
    if count >= 2:
        centred_N = centred_N / ((weights_N * centred_N**2).sum() / (count - 1) + 1e-8).sqrt()
    return centred_N if shift_mean else centred_N + mean


def _or_zero(values_B: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.isfinite(values_B), values_B, 0.0)


def _is_constant(rewards_G: torch.Tensor) -> bool:
    low, high = rewards_G.aminmax()
    size = max(1.0, float(rewards_G.abs().max()))
    return bool(high - low <= ZERO_VARIANCE * size)
