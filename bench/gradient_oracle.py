"""Does each advantage estimator push where it says? Two problems so small that every gradient is an exact sum.

*bandit*: two tasks with two and three answers, three samples each. *mdp*: two steps of two actions, three trajectories.
A batch has finitely many outcomes, so an estimator is evaluated once on each: `bias` sums over all of them, and
`gradient_z` draws batches and compares their mean gradient with the target, in standard errors.

The target is the exact policy gradient (in closed form, not from samples) times a known constant, or, for an estimator
that is biased on purpose, what its published formula, written again here in plain numpy, gives over all outcomes.
Rows and tokens are interleaved and ids arbitrary, so that grouping by position shows.

`python bench/gradient_oracle.py` prints both figures of every estimator.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from upswing.algo import advantage, credit

Array = np.ndarray
GROUP_SIZE = 3
# Per state: the policy's logits and the reward of each action.
LOGITS = {
    "bandit": ([0.4, -0.3], [0.2, -0.5, 0.6]),
    "mdp": ([0.3, -0.4], [0.5, 0.1], [-0.6, 0.2]),
}
REWARDS = {
    "bandit": ([1.0, 0.0], [0.0, 1.0, 0.3]),
    "mdp": ([0.2, 0.0], [0.0, 1.0], [0.6, -0.5]),
}
LENGTHS = ([1, 4], [2, 1, 3])
WRONG_CRITIC = np.array([0.3, 0.7, -0.2])


def softmax(logits: list[float]) -> Array:
    weights = np.exp(np.array(logits) - max(logits))
    return weights / weights.sum()


PROBS = {name: [softmax(logits) for logits in states] for name, states in LOGITS.items()}
_LAST = [float(p @ r) for p, r in zip(PROBS["mdp"], REWARDS["mdp"], strict=True)]
TRUE_CRITIC = np.array([_LAST[0] + PROBS["mdp"][0] @ _LAST[1:], *_LAST[1:]])


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """One outcome of a batch. Bandit: six trajectories of one action; mdp: three of two, N = 6 actions either way."""

    group_B: Array
    sequence_N: Array
    state_N: Array
    action_N: Array
    reward_N: Array

    def at(self, table: tuple[list[int], ...]) -> Array:
        """[N]: the table's entry for each action."""
        return np.array([table[s][a] for s, a in zip(self.state_N, self.action_N, strict=True)])

    @property
    def paths(self) -> list[Array]:
        """The tokens of each trajectory, in time order."""
        return [np.flatnonzero(self.sequence_N == i) for i in range(len(self.group_B))]


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """All outcomes of a batch."""

    batches: list[Batch]
    chance_O: Array
    scores_OND: Array
    """grad log pi of each action over the logits of all states."""
    gradient_D: Array
    """Of the expected reward."""


@dataclass(frozen=True, kw_only=True)
class Estimator:
    problem: str
    advantages: Callable[[Batch], torch.Tensor]
    """[N], one for each action."""
    target: float | Callable[[Batch], Array]
    """Times the exact gradient; or the documented advantages [N]."""


@cache
def make_problem(name: str) -> Problem:
    probs = PROBS[name]
    in_bandit = name == "bandit"
    batches = []
    for actions in itertools.product(range(3), repeat=2 * GROUP_SIZE):
        sequence_N = np.arange(6) if in_bandit else np.array([0, 1, 2, 2, 0, 1])
        first = [0, 0, 0, *(1 + min(actions[i], 1) for i in (2, 0, 1))]
        state_N = np.array([0, 1] * GROUP_SIZE if in_bandit else first)
        if any(a >= len(probs[s]) for s, a in zip(state_N, actions, strict=True)):
            continue
        reward_N = np.array([REWARDS[name][s][a] for s, a in zip(state_N, actions, strict=True)])
        group_B = np.array([7, 3] * GROUP_SIZE if in_bandit else [5] * GROUP_SIZE)
        batches.append(
            Batch(
                group_B=group_B, sequence_N=sequence_N, state_N=state_N, action_N=np.array(actions), reward_N=reward_N
            )
        )
    ends = np.cumsum([0, *map(len, probs)])
    scores_OND = np.zeros((len(batches), 6, ends[-1]))
    chance_O = np.ones(len(batches))
    for o, batch in enumerate(batches):
        for n, (s, a) in enumerate(zip(batch.state_N, batch.action_N, strict=True)):
            chance_O[o] *= probs[s][a]
            scores_OND[o, n, ends[s] : ends[s + 1]] = np.eye(len(probs[s]))[a] - probs[s]
    if in_bandit:
        reach, values = [0.5, 0.5], [np.array(r) for r in REWARDS[name]]
    else:
        reach = [1.0, *probs[0]]
        values = [np.array(REWARDS[name][0]) + TRUE_CRITIC[1:], *map(np.array, REWARDS[name][1:])]
    # The policy gradient theorem: chance of the state * pi * (Q - V).
    gradient = [d * p * (q - p @ q) for d, p, q in zip(reach, probs, values, strict=True)]
    return Problem(batches=batches, chance_O=chance_O, scores_OND=scores_OND, gradient_D=np.concatenate(gradient))


def gradients(problem: Problem, advantages: Callable[[Batch], torch.Tensor | Array]) -> Array:
    """[O, D]: the estimate mean over trajectories of sum_t A_t grad log pi_t, for each outcome."""
    advantages_ON = np.stack([np.asarray(advantages(batch)) for batch in problem.batches])
    return np.einsum("on,ond->od", advantages_ON, problem.scores_OND) / len(problem.batches[0].group_B)


@cache
def evaluate(estimator: Estimator) -> tuple[Array, Array]:
    """Its gradient for each outcome [O, D], and the target [D]."""
    problem = make_problem(estimator.problem)
    if callable(estimator.target):
        target_D = problem.chance_O @ gradients(problem, estimator.target)
    else:
        target_D = estimator.target * problem.gradient_D
    return gradients(problem, estimator.advantages), target_D


def estimator_bias(estimator: Estimator) -> float:
    """Largest difference between the expected gradient, summed over all outcomes, and the target."""
    gradients_OD, target_D = evaluate(estimator)
    return float(np.abs(make_problem(estimator.problem).chance_O @ gradients_OD - target_D).max())


def estimator_z(estimator: Estimator, num_batches: int, seed: int) -> float:
    """Worst |mean gradient of sampled batches - target| over the parameters, in standard errors."""
    gradients_OD, target_D = evaluate(estimator)
    chance_O = make_problem(estimator.problem).chance_O
    drawn_MD = gradients_OD[np.random.default_rng(seed).choice(len(chance_O), num_batches, p=chance_O)]
    error_D = drawn_MD.std(0, ddof=1) / math.sqrt(num_batches)
    return float((np.abs(drawn_MD.mean(0) - target_D) / np.maximum(error_D, 1e-12)).max())


def bias(name: str) -> float:
    """`estimator_bias` of one of ESTIMATORS."""
    return estimator_bias(ESTIMATORS[name])


def gradient_z(name: str, num_batches: int, seed: int) -> float:
    """`estimator_z` of one of ESTIMATORS."""
    return estimator_z(ESTIMATORS[name], num_batches, seed)


# --- the published formulas again, in numpy ---


def per_id(values: Array, ids: Array, formula: Callable[[Array], Array]) -> Array:
    """`formula` within each id; 0 where all values are equal."""
    result = np.zeros(len(values))
    for i in set(ids.tolist()):
        member = ids == i
        if np.ptp(values[member]) > 0:
            result[member] = formula(values[member])
    return result


def centred(x: Array) -> Array:
    return x - x.mean()


def standard(x: Array) -> Array:
    return (x - x.mean()) / (x.std(ddof=1) + 1e-6)


def formula_opo(b: Batch) -> Array:
    out = np.zeros(6)
    for g in (3, 7):
        rows = b.group_B == g
        length = b.at(LENGTHS)[rows]
        out[rows] = b.reward_N[rows] - (length * b.reward_N[rows]).sum() / length.sum()
    return out


def formula_gpg(b: Batch) -> Array:
    varied = sum(np.ptp(b.reward_N[b.group_B == g]) > 0 for g in (3, 7))
    return per_id(b.reward_N, b.group_B, centred) * 2 / max(varied, 1)


def formula_pass_at_2(b: Batch) -> Array:
    """By listing the pairs: mean pass@2 of the pairs with the sample, against mean and std over all pairs."""

    def of_group(right: Array) -> Array:
        pairs = {pair: max(right[list(pair)]) for pair in itertools.combinations(range(len(right)), 2)}
        own = np.array([np.mean([v for pair, v in pairs.items() if i in pair]) for i in range(len(right))])
        spread = np.std(list(pairs.values()))
        return (own - np.mean(list(pairs.values()))) / spread if spread > 0 else 0 * own

    return per_id(1.0 * (b.reward_N == 1), b.group_B, of_group)


def formula_top(b: Batch) -> Array:
    def of_group(r: Array) -> Array:
        second, top = sorted(r)[-2:]
        return (r == top) * (top - second) / (r.std(ddof=1) + 1e-6)

    return per_id(b.reward_N, b.group_B, of_group)


def formula_gdpo(b: Batch) -> Array:
    total = per_id(b.reward_N, b.group_B, standard) + 0.5 * per_id(-1.0 * b.at(LENGTHS), b.group_B, standard)
    return (total - total.mean()) / math.sqrt(total.var(ddof=1) + 1e-8)


def formula_rpp_baseline(b: Batch) -> Array:
    out = per_id(b.reward_N, b.group_B, centred)
    live = np.array([np.ptp(b.reward_N[b.group_B == g]) > 0 for g in b.group_B])
    tokens = np.repeat(out[live], b.at(LENGTHS)[live])
    if live.any():
        out[live] = (out[live] - tokens.mean()) / math.sqrt(tokens.var(ddof=1) + 1e-8)
    return out


def formula_gae(b: Batch) -> Array:
    out = np.zeros(6)
    for first, last in b.paths:
        out[last] = b.reward_N[last] - WRONG_CRITIC[b.state_N[last]]
        delta = b.reward_N[first] + 0.9 * WRONG_CRITIC[b.state_N[last]] - WRONG_CRITIC[0]
        out[first] = delta + 0.9 * 0.5 * out[last]
    return out


def to_go(b: Batch, rewards: Array, gamma: float = 1.0) -> Array:
    out = rewards.copy()
    for first, last in b.paths:
        out[first] += gamma * rewards[last]
    return out


def formula_rpp(b: Batch) -> Array:
    returns = to_go(b, b.reward_N)
    return centred(returns) / math.sqrt(returns.var(ddof=1) + 1e-8) if np.ptp(returns) > 0 else 0 * returns


def formula_gigpo(b: Batch) -> Array:
    episode = centred(np.array([b.reward_N[path].sum() for path in b.paths]))
    return episode[b.sequence_N] + 0.7 * per_id(to_go(b, b.reward_N, 0.95), b.state_N, centred)


def tool_rewards(b: Batch) -> dict[tuple[int, int], float]:
    """For mt_grpo: taking action 1 twice counts as calling no tool."""
    return {(i, 0): float(b.reward_N[path[0]]) for i, path in enumerate(b.paths) if b.action_N[path].sum() < 2}


def formula_mt_grpo(b: Batch) -> Array:
    turn, calls, group = tool_rewards(b), np.zeros(3, bool), np.zeros(3)
    outcome = np.array([b.reward_N[path[1]] for path in b.paths])
    called = np.array([i for i, _ in turn], int)
    calls[called] = True
    combined = outcome + np.array([turn.get((i, 0), 0.0) for i in range(3)])
    base = np.where(calls, per_id(outcome, group, standard), per_id(combined, group, standard))
    out = base[b.sequence_N]
    if len(called):
        first = np.array([b.paths[i][0] for i in called])
        out[first] += 0.6 * per_id(np.array(list(turn.values())), np.zeros(len(called)), standard)
    return out


def formula_min_form(b: Batch) -> Array:
    out = np.zeros(6)
    for path in b.paths:
        out[path] = b.reward_N[path] * softmax(list(-b.reward_N[path] / 0.5))
    return to_go(b, out)


# --- the estimators themselves ---

T = torch.from_numpy
TREE_B = np.array([0, 0, 1, 1, 0, 1])
GREEDY_B = np.array([REWARDS["bandit"][s][int(np.argmax(LOGITS["bandit"][s]))] for s in (0, 1)] * GROUP_SIZE)
EARLIER = advantage.ema_baseline(0.2, torch.tensor([1.0, math.nan, 0.0]), 0.9)


def _bandit(function: Callable[..., torch.Tensor], target: float | Callable[[Batch], Array]) -> Estimator:
    return Estimator(
        problem="bandit", target=target, advantages=lambda b: function(T(b.reward_N), T(b.group_B), T(b.at(LENGTHS)))
    )


def _mdp(function: Callable[..., torch.Tensor], target: float | Callable[[Batch], Array]) -> Estimator:
    return Estimator(
        problem="mdp", target=target, advantages=lambda b: function(b, T(b.reward_N), T(b.sequence_N), T(b.group_B))
    )


def _totals(b: Batch) -> torch.Tensor:
    return torch.tensor([b.reward_N[path].sum() for path in b.paths])


def _outcomes(b: Batch) -> torch.Tensor:
    return torch.tensor([b.reward_N[path[1]] for path in b.paths])


def _turn(b: Batch) -> torch.Tensor:
    return T(1 * (b.state_N > 0))


def _gae(critic: Array, **options: float) -> Callable[..., torch.Tensor]:
    return lambda b, r, s, g: credit.gae(r, T(critic[b.state_N]), s, **options)[0]


ESTIMATORS: dict[str, Estimator] = {
    "reinforce": _bandit(lambda r, g, n: advantage.reinforce(r, baseline=0.0), 1.0),
    "reinforce, moving average": _bandit(lambda r, g, n: advantage.reinforce(r, baseline=EARLIER), 1.0),
    "reinforce, batch mean": _bandit(lambda r, g, n: advantage.reinforce(r, baseline="batch"), 1.0),
    "rloo": _bandit(lambda r, g, n: advantage.rloo(r, g), 1.0),
    "remax": _bandit(lambda r, g, n: advantage.remax(r, T(GREEDY_B)), 1.0),
    "dr_grpo": _bandit(lambda r, g, n: advantage.group_relative(r, g, normalize_std=False), 2 / 3),
    "grpo": _bandit(lambda r, g, n: advantage.group_relative(r, g), lambda b: per_id(b.reward_N, b.group_B, standard)),
    "opo, equal lengths": _bandit(lambda r, g, n: advantage.opo(r, g, 5 + 0 * n), 2 / 3),
    "opo": _bandit(lambda r, g, n: advantage.opo(r, g, n), formula_opo),
    "gpg": _bandit(lambda r, g, n: advantage.gpg(r, g), formula_gpg),
    "pass_at_2": _bandit(lambda r, g, n: advantage.pass_at_k((r == 1).double(), g, k=2), formula_pass_at_2),
    "top_minus_second": _bandit(lambda r, g, n: advantage.top_minus_second(r, g), formula_top),
    "gdpo": _bandit(lambda r, g, n: advantage.gdpo(torch.stack([r, -n.double()], 1), g, [1.0, 0.5]), formula_gdpo),
    "reinforce_pp_baseline": _bandit(lambda r, g, n: advantage.reinforce_pp_baseline(r, g, n), formula_rpp_baseline),
    "tree": _bandit(
        lambda r, g, n: advantage.tree(r, g, T(TREE_B)),
        lambda b: per_id(b.reward_N, 10 * b.group_B + TREE_B, standard) + per_id(b.reward_N, b.group_B, standard),
    ),
    "rloo over steps": _mdp(lambda b, r, s, g: advantage.rloo(_totals(b), g)[s], 1.0),
    "returns_to_go": _mdp(lambda b, r, s, g: credit.returns_to_go(r, s), 1.0),
    "gae, lam 1": _mdp(_gae(WRONG_CRITIC), 1.0),
    "gae, true critic": _mdp(_gae(TRUE_CRITIC, lam=0.5), 1.0),
    "gae": _mdp(_gae(WRONG_CRITIC, gamma=0.9, lam=0.5), formula_gae),
    "gae over turns": _mdp(
        lambda b, r, s, g: credit.gae(r, T(WRONG_CRITIC[b.state_N]), s, gamma=0.9, lam=0.5, turn_N=_turn(b))[0],
        formula_gae,
    ),
    "reinforce_pp": _mdp(lambda b, r, s, g: credit.reinforce_pp(r, s), formula_rpp),
    "gigpo": _mdp(lambda b, r, s, g: credit.gigpo(r, s, b.state_N.tolist(), g, omega=0.7)[0], formula_gigpo),
    "mt_grpo": _mdp(
        lambda b, r, s, g: credit.mt_grpo(_outcomes(b), g, tool_rewards(b), s, _turn(b), turn_weight=0.6),
        formula_mt_grpo,
    ),
    "process_step_end": _mdp(
        lambda b, r, s, g: credit.process_step_end(r, s, g),
        lambda b: to_go(b, per_id(b.reward_N, np.zeros(6), standard)),
    ),
    "min_form": _mdp(
        lambda b, r, s, g: credit.returns_to_go(credit.min_form(r, s, temperature=0.5), s), formula_min_form
    ),
    "potential_shaping": _mdp(
        lambda b, r, s, g: credit.returns_to_go(r + credit.potential_shaping(T(WRONG_CRITIC[b.state_N]), s), s), 1.0
    ),
}


if __name__ == "__main__":
    for name in ESTIMATORS:
        print(f"{name:28} bias {bias(name):.1e}  z {gradient_z(name, 20_000, 0):.2f}")
