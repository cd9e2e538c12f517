"""Credit below the trajectory: rewards placed on tokens, returns, GAE, and advantages per turn or step.

Axis letters: N loss tokens of the batch, B trajectories, S steps (a step is one turn of one trajectory). Tool results
and padding don't exist here, so nothing can bootstrap from them or lose a reward on them. `sequence_N` [N] holds the
index in 0..B-1 of each token's trajectory, `turn_N` its turn; `step_trajectory_S` likewise. Tokens (steps) of one
trajectory come in time order but may be mixed with others': ids decide, never adjacency.

A non-finite reward means that the trajectory could not be scored: all its advantages are 0 and it enters no statistic.
Everything is computed in float64 and returned in the dtype of the rewards (float64 for those given as a mapping),
without gradient. ValueError for shapes that don't match and ids that are out of range.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence

import torch

from upswing.algo.advantage import check_vectors, group_relative, per_group, whiten

TurnValues = Mapping[tuple[int, int], float]
"""(trajectory, turn) -> a number."""


def place_rewards(rewards_B: torch.Tensor, sequence_N: torch.Tensor) -> torch.Tensor:
    """[N]: each trajectory's reward on its last loss token, 0 elsewhere. One without loss tokens: nowhere."""
    check_vectors(rewards_B)
    _check_ids(sequence_N, len(rewards_B))
    last_B = sequence_N.new_full((len(rewards_B),), -1)
    last_B.scatter_reduce_(0, sequence_N, torch.arange(len(sequence_N), device=sequence_N.device), "amax")
    placed_N = rewards_B.new_zeros(len(sequence_N))
    placed_N[last_B[last_B >= 0]] = rewards_B[last_B >= 0]
    return placed_N.detach()


def place_turn_rewards(turn_rewards: TurnValues, sequence_N: torch.Tensor, turn_N: torch.Tensor) -> torch.Tensor:
    """float64 [N]: each turn's reward on the last loss token of the turn, 0 elsewhere.

    A turn without loss tokens leaves its reward on the trajectory's last one before it, so that no return loses it; if
    there is none, nothing that is trained led to the reward, and it is nowhere.
    """
    slot = {key: i for i, key in enumerate(zip(sequence_N.tolist(), turn_N.tolist(), strict=True))}
    placed = [0.0] * len(sequence_N)
    for (trajectory, turn), reward in turn_rewards.items():
        while turn >= 0 and (trajectory, turn) not in slot:
            turn -= 1
        if turn >= 0:
            placed[slot[trajectory, turn]] += reward
    return torch.tensor(placed, dtype=torch.float64, device=sequence_N.device)


def spread_turns(values: TurnValues, sequence_N: torch.Tensor, turn_N: torch.Tensor) -> torch.Tensor:
    """float64 [N]: each turn's value on all its loss tokens; 0 for a turn that isn't in `values`."""
    keys = zip(sequence_N.tolist(), turn_N.tolist(), strict=True)
    return torch.tensor([values.get(key, 0.0) for key in keys], dtype=torch.float64, device=sequence_N.device)


def returns_to_go(
    token_rewards_N: torch.Tensor,
    sequence_N: torch.Tensor,
    *,
    gamma: float = 1.0,
    turn_N: torch.Tensor | None = None,
    gamma_turn: float | None = None,
) -> torch.Tensor:
    """[N]: the discounted sum of the trajectory's rewards from this token on; 0 throughout an unscored trajectory.

    `gamma` per loss token. With `turn_N` and `gamma_turn`: `gamma` inside a turn, `gamma_turn` for each turn crossed.
    """
    if (turn_N is None) != (gamma_turn is None):
        raise ValueError("turn_N and gamma_turn belong together; give both or neither")
    check_vectors(token_rewards_N, sequence_N=sequence_N, turn_N=sequence_N if turn_N is None else turn_N)
    wide_N = token_rewards_N.detach().to(torch.float64)
    wide_N = torch.where(_scored(wide_N, sequence_N), wide_N, 0.0)
    next_N = _next(sequence_N)
    decay_N = torch.full_like(wide_N, gamma)
    if turn_N is not None and gamma_turn is not None:
        crossed_N = turn_N[next_N] - turn_N
        decay_N = torch.where(crossed_N == 0, decay_N, torch.tensor(gamma_turn, dtype=torch.float64) ** crossed_N)
    return _accumulate(wide_N, decay_N, next_N).to(token_rewards_N.dtype)


def reinforce_pp(token_rewards_N: torch.Tensor, sequence_N: torch.Tensor, *, gamma: float = 1.0) -> torch.Tensor:
    """REINFORCE++ (arXiv 2501.03262): returns to go, whitened over the scored loss tokens of the whole batch.

    The KL penalty, if any, is in `token_rewards_N` (-beta * k1 per token).
    """
    returns_N = returns_to_go(token_rewards_N.to(torch.float64), sequence_N, gamma=gamma)
    scored_N = _scored(token_rewards_N, sequence_N)
    return whiten(torch.where(scored_N, returns_N, math.nan)).to(token_rewards_N.dtype)


def gae(
    token_rewards_N: torch.Tensor,
    values_N: torch.Tensor,
    sequence_N: torch.Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    turn_N: torch.Tensor | None = None,
    bootstrap_B: torch.Tensor | None = None,
    whiten_advantages: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantages_N, returns_N) of GAE (arXiv 1506.02438): A_t = sum_k (gamma lam)^k delta_{t+k}, returns = A + V.

    `values_N`: the critic's value of the state *before* each loss token. The next state of a loss token is the one
    before the trajectory's next loss token, tool results between included: this is the skip-observation GAE.

    - `turn_N`: GAE over turns (the outer level of VAGEN's bi-level GAE). A turn is one action with the sum of its
      rewards and the value at its first token; gamma and lam act between turns; all its tokens share the turn's
      advantage and return.
    - `bootstrap_B`: the value after the last loss token, for trajectories cut by a limit that isn't part of the task;
      None or 0: the end is the end.
    - `whiten_advantages`: over the scored tokens, after the returns are taken.

    Unscored trajectories get advantage 0 and returns = values, so that the critic has no error there.
    """
    turns_N = sequence_N if turn_N is None else turn_N
    check_vectors(token_rewards_N, values_N=values_N, sequence_N=sequence_N, turn_N=turns_N)
    if bootstrap_B is not None:
        _check_ids(sequence_N, len(bootstrap_B))
    rewards_N, wide_N = token_rewards_N.detach().to(torch.float64), values_N.detach().to(torch.float64)
    scored_N = _scored(rewards_N, sequence_N)
    if turn_N is None:
        next_N = _next(sequence_N)
        after_N = torch.zeros_like(wide_N) if bootstrap_B is None else bootstrap_B.to(torch.float64)[sequence_N]
        after_N = torch.where(next_N >= 0, wide_N[next_N], after_N)
        advantages_N = _accumulate(rewards_N + gamma * after_N - wide_N, torch.full_like(wide_N, gamma * lam), next_N)
        returns_N = advantages_N + wide_N
    else:
        # Sorted by (trajectory, turn), so the turns of a trajectory are in time order.
        turns_U, unit_N = torch.unique(torch.stack([sequence_N, turn_N], 1), dim=0, return_inverse=True)
        slots = torch.arange(len(unit_N), device=unit_N.device)
        first_U = unit_N.new_full((len(turns_U),), len(unit_N)).scatter_reduce_(0, unit_N, slots, "amin")
        rewards_U = rewards_N.new_zeros(len(turns_U)).index_add_(0, unit_N, rewards_N)
        over_turns = gae(rewards_U, wide_N[first_U], turns_U[:, 0], gamma=gamma, lam=lam, bootstrap_B=bootstrap_B)
        advantages_N, returns_N = (values_U[unit_N] for values_U in over_turns)
    if whiten_advantages:
        advantages_N = whiten(torch.where(scored_N, advantages_N, math.nan))
    advantages_N, returns_N = torch.where(scored_N, advantages_N, 0.0), torch.where(scored_N, returns_N, wide_N)
    return advantages_N.to(token_rewards_N.dtype), returns_N.to(token_rewards_N.dtype)


def gigpo(
    step_rewards_S: torch.Tensor,
    step_trajectory_S: torch.Tensor,
    step_anchor_S: Sequence[Hashable],
    group_B: torch.Tensor,
    *,
    omega: float = 1.0,
    gamma: float = 0.95,
    normalize_std: bool = False,
) -> tuple[torch.Tensor, float]:
    """(advantages_S, mean step-group size) of GiGPO (arXiv 2505.10978): episode advantage + omega * step advantage.

    Episode: the trajectory's total reward against its group's, each trajectory counted once however many steps it has.
    Step: the discounted return from the step on, against those of all steps of the group that start at the same anchor
    (`step_anchor_S`, say a hash of the observation); alone at its anchor: 0. Both are value - mean (mean_norm), or
    divided by the std too (`normalize_std`, mean_std_norm). A mean size near 1 says that there is no step signal.
    """
    check_vectors(step_rewards_S, step_trajectory_S=step_trajectory_S)
    _check_ids(step_trajectory_S, len(group_B))
    wide_S = step_rewards_S.detach().to(torch.float64)
    scored_S = _scored(wide_S, step_trajectory_S)
    # A trajectory without steps has no reward at all, which isn't a reward of 0.
    total_B = wide_S.new_full((len(group_B),), math.nan)
    total_B[step_trajectory_S] = 0.0
    total_B.index_add_(0, step_trajectory_S, wide_S)
    returns_S = torch.where(scored_S, returns_to_go(wide_S, step_trajectory_S, gamma=gamma), math.nan)
    places = zip(group_B[step_trajectory_S].tolist(), step_anchor_S, strict=True)
    anchor_S = _numbered(list(places), group_B)
    step_S = group_relative(returns_S, anchor_S, normalize_std=normalize_std)
    episode_B = group_relative(total_B, group_B, normalize_std=normalize_std)
    num_places = len(torch.unique(anchor_S[scored_S]))
    mean_size = float(scored_S.sum()) / num_places if num_places else 0.0
    return (episode_B[step_trajectory_S] + omega * step_S).to(step_rewards_S.dtype), mean_size


def mt_grpo(
    rewards_B: torch.Tensor,
    group_B: torch.Tensor,
    turn_rewards: TurnValues,
    sequence_N: torch.Tensor,
    turn_N: torch.Tensor,
    *,
    turn_weight: float = 1.0,
) -> torch.Tensor:
    """[N]: turn-level credit of MT-GRPO (arXiv 2505.11821) for any number of tool turns; its code knows only one.

    `turn_rewards` holds one reward for each turn that called a tool. Tokens of such a turn: outcome advantage +
    turn_weight * turn advantage; other tokens: the outcome advantage. A trajectory that called no tool gets the
    advantage of the combined reward (outcome + its turn rewards), so that skipping the tools doesn't dodge their
    rewards. Each is GRPO's within the group: turn rewards against those of the same turn index, outcome and combined
    over trajectories. A turn that couldn't be scored has turn advantage 0.
    """
    check_vectors(rewards_B, group_B=group_B)
    _check_ids(sequence_N, len(rewards_B))
    wide_B = rewards_B.detach().to(torch.float64)
    trajectory_S = torch.tensor([key[0] for key in turn_rewards], dtype=torch.long, device=group_B.device)
    _check_ids(trajectory_S, len(rewards_B))
    rewards_S = torch.tensor(list(turn_rewards.values()), dtype=torch.float64, device=group_B.device)
    combined_B = wide_B.index_add(0, trajectory_S, rewards_S)
    rewards_S = torch.where(torch.isfinite(wide_B[trajectory_S]), rewards_S, math.nan)
    peers = zip(group_B[trajectory_S].tolist(), (key[1] for key in turn_rewards), strict=True)
    turn_S = group_relative(rewards_S, _numbered(list(peers), group_B))
    called_B = torch.zeros_like(group_B, dtype=torch.bool)
    called_B[trajectory_S] = True
    outcome_B = torch.where(called_B, group_relative(wide_B, group_B), group_relative(combined_B, group_B))
    turn_values = spread_turns(dict(zip(turn_rewards, turn_S.tolist(), strict=True)), sequence_N, turn_N)
    return (outcome_B[sequence_N] + turn_weight * turn_values).to(rewards_B.dtype)


def process_step_end(
    step_scores_S: torch.Tensor, step_trajectory_S: torch.Tensor, group_B: torch.Tensor, *, eps: float = 1e-6
) -> torch.Tensor:
    """[S]: GRPO with process supervision (DeepSeekMath, arXiv 2402.03300, 4.1.3): all step scores of the group
    normalised by their common mean and std, then A_t = the sum of the trajectory's from step t on.

    A step that couldn't be scored adds 0. A group in which only one trajectory has scored steps gets 0.
    """
    _check_ids(step_trajectory_S, len(group_B))

    def standardise(scores_G: torch.Tensor, rows_G: torch.Tensor) -> torch.Tensor:
        alone = len(torch.unique(step_trajectory_S[rows_G])) < 2
        return 0.0 * scores_G if alone else (scores_G - scores_G.mean()) / (scores_G.std(correction=1) + eps)

    normal_S = per_group(step_scores_S, group_B[step_trajectory_S], standardise)
    return returns_to_go(normal_S, step_trajectory_S).to(step_scores_S.dtype)


def min_form(step_scores_S: torch.Tensor, step_trajectory_S: torch.Tensor, *, temperature: float = 0.1) -> torch.Tensor:
    """[S]: PURE's rewards (arXiv 2504.15275): score * softmax(-score / temperature) within the trajectory.

    They sum to a soft minimum of the scores (the minimum as temperature -> 0, the mean as it grows): good steps don't
    make up for a bad one and more steps are no gain. Place them at the steps' ends and take `returns_to_go`: steps up
    to the worst share its score, those after it get about 0. A step that couldn't be scored gets 0 and takes no
    weight. Raises ValueError unless temperature > 0.
    """
    check_vectors(step_scores_S, step_trajectory_S=step_trajectory_S)
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; it must be above 0")
    wide_S = step_scores_S.detach().to(torch.float64)
    scored_S = torch.isfinite(wide_S)
    ids, index_S = torch.unique(step_trajectory_S, return_inverse=True)
    least = wide_S.new_full((len(ids),), math.inf)
    least.scatter_reduce_(0, index_S, torch.where(scored_S, wide_S, math.inf), "amin")
    weight_S = torch.where(scored_S, ((least[index_S] - wide_S) / temperature).exp(), 0.0)
    weight_S = weight_S / wide_S.new_zeros(len(ids)).index_add_(0, index_S, weight_S)[index_S]
    return torch.where(scored_S, weight_S * wide_S, 0.0).to(step_scores_S.dtype)


def potential_shaping(
    potentials_S: torch.Tensor, step_trajectory_S: torch.Tensor, *, gamma: float = 1.0
) -> torch.Tensor:
    """[S]: F_t = gamma Phi(s_{t+1}) - Phi(s_t), to be added to the step rewards (Ng, Harada and Russell 1999).

    `potentials_S`: Phi of the state *before* each step; the end state has 0. The discounted sum from a step on is
    -Phi(s_t) whatever is done there: shaping moves credit, never the best policy, and with a shared start no
    difference between trajectories of a group. A trajectory with a non-finite potential is unscored: NaN throughout.
    """
    check_vectors(potentials_S, step_trajectory_S=step_trajectory_S)
    wide_S = potentials_S.detach().to(torch.float64)
    next_S = _next(step_trajectory_S)
    shaped_S = gamma * torch.where(next_S >= 0, wide_S[next_S], 0.0) - wide_S
    return torch.where(_scored(wide_S, step_trajectory_S), shaped_S, math.nan).to(potentials_S.dtype)


def _accumulate(values_N: torch.Tensor, decay_N: torch.Tensor, next_N: torch.Tensor) -> torch.Tensor:
    """float64 [N]: x_i = values_i + decay_i * x_next(i); a plain loop, as each depends on the one after it."""
    total, decay = values_N.tolist(), decay_N.tolist()
    for i, following in reversed(list(enumerate(next_N.tolist()))):
        if following >= 0:
            total[i] += decay[i] * total[following]
    return torch.tensor(total, dtype=torch.float64, device=values_N.device)


def _next(sequence_N: torch.Tensor) -> torch.Tensor:
    """int64 [N]: the slot of the same trajectory's next token, -1 at its last."""
    order = torch.argsort(sequence_N, stable=True)
    same = sequence_N[order[1:]] == sequence_N[order[:-1]]
    next_N = torch.full_like(order, -1)
    next_N[order[:-1][same]] = order[1:][same]
    return next_N


def _scored(rewards_N: torch.Tensor, sequence_N: torch.Tensor) -> torch.Tensor:
    """bool [N]: the token's trajectory has finite rewards only."""
    return ~torch.isin(sequence_N, sequence_N[~torch.isfinite(rewards_N)])


def _numbered(keys: Sequence[Hashable], like: torch.Tensor) -> torch.Tensor:
    """int64: equal keys get equal numbers."""
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return torch.tensor([numbers[key] for key in keys], dtype=torch.long, device=like.device)


def _check_ids(sequence_N: torch.Tensor, count: int) -> None:
    if sequence_N.ndim != 1 or sequence_N.is_floating_point():
        raise ValueError(f"ids must be a vector of integers; got {sequence_N.dtype} {tuple(sequence_N.shape)}")
    if len(sequence_N) and not 0 <= int(sequence_N.min()) <= int(sequence_N.max()) < count:
        raise ValueError(f"ids must be in 0..{count - 1}; got {int(sequence_N.min())}..{int(sequence_N.max())}")
