"""The advantage of every loss token of a batch: the estimator that the stage names, and what it reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from upswing.algo import advantage as per_trajectory
from upswing.algo import credit as per_token
from upswing.errors import UpswingError
from upswing.learn.rows import FlatBatch, TrainRow, flatten, spread
from upswing.recipe import RlStage
from upswing.stages.rows import Batch
from upswing.trajectory.types import Float32T, Trajectory


@dataclass(frozen=True, kw_only=True, eq=False)
class Evidence:
    """What some estimators need beside rewards."""

    kl_N: torch.Tensor | None = None
    """float64: the KL penalty of each loss token, coefficient included, to be subtracted from its reward."""
    values_N: torch.Tensor | None = None
    """The critic's value before each loss token."""
    greedy_B: torch.Tensor | None = None
    """Reward of the greedy rollout of each trajectory's task."""
    moving_average: float | None = None
    """Of the rewards of earlier batches; None: there were none."""
    chances: Sequence[Float32T] | None = None
    """Of success, by a process reward model: [1 + turns] a trajectory, before its first turn and after each."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Of the rubric's verifiers."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Credit:
    """What an estimator says."""

    rows: tuple[TrainRow, ...]
    """With advantages."""
    returns_N: torch.Tensor | None = None
    """float64: what the critic should have said."""
    signals: Mapping[str, float] = field(default_factory=dict)


def assign(stage: RlStage, batch: Batch, evidence: Evidence) -> Credit:
    """The batch's rows with advantages. Raises UpswingError for rewards that the estimator can't take."""
    name = stage.advantage or ""
    if name in _TOKENS:
        flat = flatten(batch.rows)
        advantages_N, returns_N, signals = _TOKENS[name](stage, batch, flat, evidence)
        arrays = spread(batch.rows, advantages_N.numpy())
        rows = tuple(replace(row, advantage=array) for row, array in zip(batch.rows, arrays, strict=True))
        return Credit(rows=rows, returns_N=returns_N, signals=signals)
    rewards_B = batch.rewards_B
    if evidence.kl_N is not None:  # less each trajectory's summed KL penalty
        rewards_B = rewards_B.index_add(0, flatten(batch.rows).sequence_N, -evidence.kl_N)
    try:
        advantages_B = _TRAJECTORIES[name](stage, batch, rewards_B, evidence)
    except ValueError as error:
        raise UpswingError(f"{stage.name}: algorithm '{stage.algorithm}' can't take these rewards: {error}") from error
    values = advantages_B.tolist()
    return Credit(rows=tuple(replace(row, advantage=values[row.trajectory]) for row in batch.rows))


# -- one advantage a trajectory ---------------------------------------------------------


def _reinforce(stage: RlStage, batch: Batch, rewards_B: torch.Tensor, evidence: Evidence) -> torch.Tensor:
    average = evidence.moving_average or 0.0  # none of it without a baseline, and before the first batch
    return per_trajectory.reinforce(rewards_B, baseline="batch" if stage.baseline == "batch" else average)


def _remax(stage: RlStage, batch: Batch, rewards_B: torch.Tensor, evidence: Evidence) -> torch.Tensor:
    assert evidence.greedy_B is not None
    return per_trajectory.remax(rewards_B, evidence.greedy_B)


def _gdpo(stage: RlStage, batch: Batch, rewards_B: torch.Tensor, evidence: Evidence) -> torch.Tensor:
    """Each weighted verifier's score; unscored trajectories stay out of all of them."""
    names = list(evidence.weights)
    found = [t.score.components if t.score else {} for t in batch.trajectories]
    numbers = [[torch.nan if (x := parts.get(name)) is None else x for name in names] for parts in found]
    scores_BK = torch.tensor(numbers, dtype=torch.float64)
    scores_BK[torch.isnan(rewards_B)] = torch.nan
    return per_trajectory.gdpo(scores_BK, batch.group_B, [evidence.weights[name] for name in names])


_TRAJECTORIES: dict[str, Callable[[RlStage, Batch, torch.Tensor, Evidence], torch.Tensor]] = {
    "group": lambda stage, b, rewards_B, _: per_trajectory.group_relative(
        rewards_B, b.group_B, normalize_std=bool(stage.normalize_std)
    ),
    "reinforce": _reinforce,
    "rloo": lambda stage, b, rewards_B, _: per_trajectory.rloo(rewards_B, b.group_B),
    "remax": _remax,
    "opo": lambda stage, b, rewards_B, _: per_trajectory.opo(rewards_B, b.group_B, b.lengths_B),
    "gpg": lambda stage, b, rewards_B, _: per_trajectory.gpg(rewards_B, b.group_B),
    "pass_at_k": lambda stage, b, rewards_B, _: per_trajectory.pass_at_k(rewards_B, b.group_B, k=stage.pass_k or 1),
    "reinforce_pp_baseline": lambda stage, b, rewards_B, _: per_trajectory.reinforce_pp_baseline(
        rewards_B, b.group_B, b.lengths_B
    ),
    "gdpo": _gdpo,
}

# -- one advantage a token ---------------------------------------------------------

TokenCredit = tuple[torch.Tensor, torch.Tensor | None, dict[str, float]]


def _token_rewards(batch: Batch, flat: FlatBatch, kl_N: torch.Tensor | None) -> torch.Tensor:
    """The outcome's reward on the last loss token, less each token's KL penalty."""
    rewards_N = per_token.place_rewards(batch.rewards_B, flat.sequence_N)
    return rewards_N if kl_N is None else rewards_N - kl_N


def _reinforce_pp(stage: RlStage, batch: Batch, flat: FlatBatch, evidence: Evidence) -> TokenCredit:
    rewards_N = _token_rewards(batch, flat, evidence.kl_N)
    return per_token.reinforce_pp(rewards_N, flat.sequence_N, gamma=_or_one(stage.gamma)), None, {}


def _gae(stage: RlStage, batch: Batch, flat: FlatBatch, evidence: Evidence) -> TokenCredit:
    assert evidence.values_N is not None
    rewards_N = _token_rewards(batch, flat, evidence.kl_N)
    if stage.scale_rewards:
        rewards_N = per_trajectory.scaled(rewards_N)
    advantages_N, returns_N = per_token.gae(
        rewards_N,
        evidence.values_N,
        flat.sequence_N,
        gamma=_or_one(stage.gamma),
        lam=_or_one(stage.lam),
        turn_N=flat.turn_N if stage.gae_over == "turns" else None,
        whiten_advantages=True,
    )
    return advantages_N, returns_N, {}


def _gigpo(stage: RlStage, batch: Batch, flat: FlatBatch, evidence: Evidence) -> TokenCredit:
    steps, owner_S = _steps(stage, batch, evidence)
    for number, turn in steps:
        if (number, turn + 1) not in steps:
            steps[number, turn] += float(batch.rewards_B[number])
    seen = [_observations(trajectory) for trajectory in batch.trajectories]
    advantages_S, mean_size = per_token.gigpo(
        torch.tensor(list(steps.values()), dtype=torch.float64),
        owner_S,
        [seen[number][turn] for number, turn in steps],
        batch.group_B,
        omega=_or_one(stage.step_weight),
        gamma=_or_one(stage.gamma),
        normalize_std=bool(stage.normalize_std),
    )
    return _spread(steps, advantages_S, flat), None, {"step_group_size": mean_size}


def _turn(stage: RlStage, batch: Batch, flat: FlatBatch, evidence: Evidence) -> TokenCredit:
    tools = [{record.turn for record in trajectory.tool_records} for trajectory in batch.trajectories]
    called = {key: reward for key, reward in _steps(stage, batch, evidence)[0].items() if key[1] in tools[key[0]]}
    advantages_N = per_token.mt_grpo(
        batch.rewards_B, batch.group_B, called, flat.sequence_N, flat.turn_N, turn_weight=_or_one(stage.step_weight)
    )
    return advantages_N, None, {"turn_reward": float(np.nanmean(list(called.values()))) if called else 0.0}


def _process(stage: RlStage, batch: Batch, flat: FlatBatch, evidence: Evidence) -> TokenCredit:
    """Outcome advantage plus the weighted advantage of the step scores."""
    steps, owner_S = _steps(stage, batch, evidence)
    scores_S = torch.tensor(list(steps.values()), dtype=torch.float64)
    if stage.process_form == "min":
        # Each step's soft minimum of what is still to come, against all steps of the group.
        later_S = per_token.returns_to_go(per_token.min_form(scores_S, owner_S), owner_S)
        steps_S = per_trajectory.group_relative(later_S, batch.group_B[owner_S])
    elif stage.process_form == "potential":
        # A turn's score is the potential of the state after it; the start's is 0 unless a model has said it.
        starts = {} if evidence.chances is None else {n: float(c[0]) for n, c in enumerate(evidence.chances) if len(c)}
        before = [steps.get((n, turn - 1), starts.get(n, 0.0)) for n, turn in steps]
        before_S = torch.tensor(before, dtype=torch.float64)
        later_S = per_token.returns_to_go(per_token.potential_shaping(before_S, owner_S), owner_S)
        steps_S = per_trajectory.group_relative(later_S, batch.group_B[owner_S], normalize_std=False)
    else:
        steps_S = per_token.process_step_end(scores_S, owner_S, batch.group_B)
    outcome_B = per_trajectory.group_relative(batch.rewards_B, batch.group_B)
    advantages_N = outcome_B[flat.sequence_N] + (stage.step_weight or 0.0) * _spread(steps, steps_S, flat)
    return advantages_N, None, {"step_score": float(scores_S.nanmean())}


_TOKENS: dict[str, Callable[[RlStage, Batch, FlatBatch, Evidence], TokenCredit]] = {
    "reinforce_pp": _reinforce_pp,
    "gae": _gae,
    "gigpo": _gigpo,
    "turn": _turn,
    "process": _process,
}


def _steps(stage: RlStage, batch: Batch, evidence: Evidence) -> tuple[dict[tuple[int, int], float], torch.Tensor]:
    """The reward of each turn of the scored trajectories, by (trajectory, turn); their trajectories.

    It is the environment's, or what the turn adds to the chance of success; for `process_form` min and potential, which
    need a level, that chance itself.
    """
    if evidence.chances is None:
        rewards = [trajectory.state.get("turn_rewards", ()) for trajectory in batch.trajectories]
    else:
        level = stage.process_form in ("min", "potential")
        rewards = [chances[1:] if level else np.diff(chances) for chances in evidence.chances]
    steps = {
        (number, turn): float(reward)
        for number, of_one in enumerate(rewards)
        if not torch.isnan(batch.rewards_B[number])
        for turn, reward in enumerate(of_one)
    }
    return steps, torch.tensor([number for number, _ in steps], dtype=torch.long)


def _spread(steps: per_token.TurnValues, values_S: torch.Tensor, flat: FlatBatch) -> torch.Tensor:
    """float64 [N]: each step's value on its loss tokens."""
    return per_token.spread_turns(dict(zip(steps, values_S.tolist(), strict=True)), flat.sequence_N, flat.turn_N)


def _observations(trajectory: Trajectory) -> list[str]:
    """What stood before each of the agent's turns since its last one: the state that a turn starts from."""
    seen: list[str] = []
    current: list[str] = []
    for message in trajectory.messages:
        if message.role == "assistant":
            seen.append("\n".join(current))
            current = []
        else:
            current.append(f"{message.role}: {message.content}")
    return seen


def _or_one(value: float | None) -> float:
    return 1.0 if value is None else value
