"""Signals read off what the agent said and saw, as token ids and messages: lengths by outcome, repetition, variety.

Axis letters: N sampled tokens of the batch, W of its n-grams, C counted trajectories.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from upswing.evals.summary import COUNTED
from upswing.stages.evaluate import SUCCESS
from upswing.trajectory.types import Group, Int32T, Outcome, Trajectory


def text_signals(groups: Sequence[Group], rewards_B: Sequence[float]) -> dict[str, float]:
    """Over the completed and truncated trajectories; NaN where nothing was counted. `rewards_B` as in `batch_metrics`.

    No n-gram spans two turns: what the environment said between them isn't repetition, nor is its absence.
    """
    numbered = [(number, t) for number, group in enumerate(groups) for t in group.trajectories]
    kept = [(*one, reward) for one, reward in zip(numbered, rewards_B, strict=True) if one[1].outcome in COUNTED]
    counted, rewards_C = [t for _, t, _ in kept], np.array([reward for *_, reward in kept], dtype=np.float64)
    group_C = np.array([number for number, *_ in kept], dtype=np.int64)
    tokens_C, span_N, owner_N = _sampled(counted)
    length_C, good_C = np.array([len(tokens) for tokens in tokens_C]), succeeded(counted, rewards_C)
    finished_C = np.array([t.outcome == Outcome.COMPLETED for t in counted], dtype=bool)
    gram_W, start_W = ngrams(np.concatenate([*tokens_C, np.zeros(0, np.int32)]), span_N, 4)
    members = [np.flatnonzero(group_C == number) for number in np.unique(group_C)]
    said = [tokens.tobytes() for tokens in tokens_C]
    return {
        "tokens_good": mean(length_C[good_C == 1]),
        "tokens_bad": mean(length_C[good_C == 0]),
        "tokens_finished": mean(length_C[finished_C]),
        "tokens_min": float(length_C.min()) if len(kept) else math.nan,
        "tokens_max": float(length_C.max()) if len(kept) else math.nan,
        "repetition": _repetition(gram_W, owner_N[start_W]),
        "distinct_4": len(np.unique(gram_W)) / len(gram_W) if len(gram_W) else math.nan,
        "unique_frac": mean([len({said[i] for i in one}) / len(one) for one in members if len(one) > 1]),
        "novelty": mean([share for t in counted if (share := _novelty(t)) is not None]),
        "same_first_turn_frac": _same_first_turn(counted, members),
        "reward_length_corr": spearman(rewards_C, length_C.astype(np.float64)),
        "group_reward_std": mean([np.std(found) for one in members if len(found := _finite(rewards_C[one])) > 1]),
    }


def succeeded(trajectories: Sequence[Trajectory], rewards_C: np.ndarray) -> np.ndarray:
    """float64 [C]: 1 succeeded, 0 not, NaN unscored.

    The verifier's success says it (`strict_match`, above 1/2); without one, a reward above half of the batch's best,
    which a shaped or scaled reward passes too. A batch without a positive reward has no success.
    """
    best = max(_finite(rewards_C), default=0.0)
    by_reward_C = (rewards_C > best / 2) & (best > 0)
    parts = [t.score.components if t.score else {} for t in trajectories]
    marks = [one.get(SUCCESS) if SUCCESS in one else float(by) for one, by in zip(parts, by_reward_C, strict=True)]
    found_C = np.array([math.nan if mark is None or math.isnan(mark) else mark > 0.5 for mark in marks], np.float64)
    return np.where(np.isfinite(rewards_C), found_C, math.nan)


def first_turn(trajectory: Trajectory) -> tuple[Int32T, Int32T] | None:
    """Token ids of the prompt and of the first turn; None when nothing was sampled after a prompt."""
    for branch in trajectory.branches:
        at = np.flatnonzero(branch.sampled)
        if len(at):
            own = at[branch.turn[at] == branch.turn[at[0]]]
            return (branch.tokens[: at[0]], branch.tokens[own]) if at[0] else None
    return None


def ngrams(tokens_N: np.ndarray, span_N: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Exact ids [W] of the n-grams within spans, equal where the n-grams are, and where each starts [W].

    `size`: a power of two. Each round pairs the ids of neighbours into those of twice the length, without a loop.
    """
    ids_W, step = tokens_N.astype(np.int64), 1
    while step < size and len(ids_W):
        ids_W = np.unique(ids_W, return_inverse=True)[1]
        ids_W = ids_W[:-step] * len(tokens_N) + ids_W[step:]
        step *= 2
    within_W = span_N[: len(ids_W)] == span_N[size - 1 :]
    return ids_W[within_W], np.flatnonzero(within_W)


def spearman(x_C: np.ndarray, y_C: np.ndarray) -> float:
    """Rank correlation, ties at their mean rank; NaN with fewer than 3 known pairs, or where one doesn't vary."""
    known_C = np.isfinite(x_C) & np.isfinite(y_C)
    if known_C.sum() < 3:
        return math.nan
    x, y = (_ranks(values[known_C]) for values in (x_C, y_C))
    scale = math.sqrt(float((x @ x) * (y @ y)))
    return float(x @ y) / scale if scale else math.nan


def mean(values: Sequence[float] | np.ndarray) -> float:
    """NaN without values."""
    return float(np.mean(values)) if len(values) else math.nan


def _finite(values: np.ndarray) -> np.ndarray:
    known: np.ndarray = values[np.isfinite(values)]
    return known


def _ranks(values: np.ndarray) -> np.ndarray:
    """Less their mean."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: np.ndarray = (np.cumsum(counts) - counts / 2)[inverse] - len(values) / 2
    return ranks


def _sampled(trajectories: Sequence[Trajectory]) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Each trajectory's sampled tokens; over all of them, [N]: ids of the unbroken turns, and whose tokens they are."""
    found = [(number, branch) for number, trajectory in enumerate(trajectories) for branch in trajectory.branches]
    if not found:
        return [np.zeros(0, np.int32) for _ in trajectories], np.zeros(0, np.int64), np.zeros(0, np.int64)
    names = ("tokens", "sampled", "turn")
    tokens_T, sampled_T, turn_T = (np.concatenate([getattr(branch, name) for _, branch in found]) for name in names)
    branch_T = np.repeat(np.arange(len(found)), [len(branch) for _, branch in found])
    at = np.flatnonzero(sampled_T)
    turn_N, branch_N, breaks = turn_T[at], branch_T[at], np.diff(at, prepend=-2) != 1
    breaks |= (np.diff(turn_N, prepend=-1) != 0) | (np.diff(branch_N, prepend=-1) != 0)
    owner_N = np.array([number for number, _ in found])[branch_N]
    starts = np.searchsorted(owner_N, np.arange(1, len(trajectories)))
    return np.split(tokens_T[at], starts), np.cumsum(breaks), owner_N


def _repetition(gram_W: np.ndarray, owner_W: np.ndarray) -> float:
    """Mean over owners of the share of their n-grams that they had already."""
    if not len(gram_W):
        return math.nan
    ids_W = np.unique(gram_W, return_inverse=True)[1]
    distinct = np.unique(owner_W * len(gram_W) + ids_W) // len(gram_W)
    counts = np.unique(owner_W, return_counts=True)[1]
    return float(np.mean(1.0 - np.unique(distinct, return_counts=True)[1] / counts))


def _novelty(trajectory: Trajectory) -> float | None:
    """Share of what the environment answered that hadn't stood in the conversation before; None without answers."""
    roles = [message.role for message in trajectory.messages]
    start = roles.index("assistant") if "assistant" in roles else len(roles)
    given = {message.content for message in trajectory.messages[:start]}
    answers = [message.content for message in trajectory.messages[start:] if message.role != "assistant"]
    return len(set(answers) - given) / len(answers) if answers else None


def _same_first_turn(trajectories: Sequence[Trajectory], members: Sequence[np.ndarray]) -> float:
    """NaN with fewer than two tasks, which can't be told apart."""
    found = [first_turn(t) for t in trajectories]
    turns = [[one[1].tobytes() for i in group if (one := found[i]) is not None] for group in members]
    tops = [Counter(group).most_common(1)[0][0] for group in turns if group]
    top = Counter(turn for group in turns for turn in group).most_common(1)
    return mean([one == top[0][0] for one in tops]) if len(tops) > 1 else math.nan
