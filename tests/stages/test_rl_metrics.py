"""Signals of a batch, by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from upswing.rollout.scheduler import Counts
from upswing.stages.rl_metrics import age, batch_metrics, early_warning, staleness, trouble
from upswing.stages.rows import make_batch
from upswing.trajectory.types import Branch, DriftEvent, Group, Message, Outcome, Score, StopReason, Task, Trajectory

TASKS = [Task(id=name, messages=(Message(role="user", content="?"),)) for name in "abc"]


def trajectory(task: Task, index: int, reward: float | None, **changes: object) -> Trajectory:
    length = 6
    sampled = np.array([False, False, True, True, False, True])
    branch = Branch(
        tokens=np.arange(length, dtype=np.int32),
        sampled=sampled,
        engine_logprobs=np.where(sampled, -0.5, np.nan).astype(np.float32),
        policy_version=np.where(sampled, 0, -1).astype(np.int32),
        turn=np.array([0, 0, 0, 0, 1, 1], dtype=np.int16),
    )
    fields: dict[str, object] = {
        "outcome": Outcome.COMPLETED,
        "stop_reason": StopReason.ANSWERED,
        "num_turns": 2,
        "score": None if reward is None else Score(value=reward, components={"strict_match": reward}),
    }
    merged: dict[str, Any] = fields | changes
    return Trajectory(id=f"{task.id}{index}", task=task, branches=(branch,), messages=task.messages, **merged)


def group(task: Task, rewards: list[float | None]) -> Group:
    return Group(task=task, trajectories=tuple(trajectory(task, i, r) for i, r in enumerate(rewards)))


def test_groups_without_a_spread_are_split_into_too_easy_and_too_hard() -> None:
    groups = [group(TASKS[0], [1.0, 1.0]), group(TASKS[1], [0.0, 0.0]), group(TASKS[2], [1.0, 0.0])]
    values = batch_metrics(groups, make_batch(groups, truncated="as_is").rewards_B.tolist())
    assert values["zero_variance_frac"] == pytest.approx(2 / 3)
    assert values["too_easy_frac"] == values["too_hard_frac"] == pytest.approx(1 / 3)
    assert values["reward"] == values["score_strict_match"] == 0.5
    assert values["sampled_tokens"] == 3


def test_a_components_share_of_the_variance() -> None:
    """x: 0 1 0 1 and y: 0 0 1 1, rewards x + 2 y: variances 1/4 and 4/4 of 5/4; the unscored row is left out."""
    scores = [{"x": 0.0, "y": 0.0}, {"x": 1.0, "y": 0.0}, {"x": 0.0, "y": 1.0}, {"x": 1.0, "y": 1.0}, {"x": 1.0}]
    played = tuple(
        trajectory(TASKS[0], i, None, score=Score(value=None if len(parts) < 2 else 1.0, components=parts))
        for i, parts in enumerate(scores)
    )
    values = batch_metrics([Group(task=TASKS[0], trajectories=played)], [1.0] * 5, weights={"x": 1.0, "y": 2.0})
    assert (values["variance_share_x"], values["variance_share_y"]) == pytest.approx((0.2, 0.8))


def test_errored_and_unscored_trajectories_shrink_the_group_and_never_count_as_zero() -> None:
    broken = trajectory(
        TASKS[0], 9, None, outcome=Outcome.ERRORED, stop_reason=StopReason.ERROR, error="OSError: gone", score=None
    )
    unscored = trajectory(TASKS[0], 8, None, score=Score(value=None, reason="judge is down"))
    whole = group(TASKS[0], [1.0, 0.0])
    shrunk = Group(task=TASKS[0], trajectories=(*whole.trajectories, broken, unscored))
    batch = make_batch([shrunk], truncated="as_is")
    rewards = batch.rewards_B.tolist()
    assert len(batch.rows) == 2 and math.isnan(rewards[2]) and math.isnan(rewards[3])
    values = batch_metrics([shrunk], rewards)
    assert (values["reward"], values["num_errored"], values["num_unscored"]) == (0.5, 1, 1)


@pytest.mark.parametrize(
    ("rule", "reward", "trained"), [("as_is", 0.4, True), ("zero", 0.0, True), ("mask", 0.4, False)]
)
def test_the_rule_for_truncated_trajectories(rule: str, reward: float, trained: bool) -> None:
    cut = trajectory(TASKS[0], 5, 0.4, outcome=Outcome.TRUNCATED, stop_reason=StopReason.MAX_TURNS)
    batch = make_batch([Group(task=TASKS[0], trajectories=(trajectory(TASKS[0], 0, 1.0), cut))], truncated=rule)
    rows, rewards = batch.rows, batch.rewards_B
    assert float(rewards[1]) == pytest.approx(reward)
    assert bool(rows[1].loss_mask.any()) is trained
    assert rows[0].loss_mask.tolist() == [False, False, True, True, False, True]


def test_only_drift_that_opened_a_branch_is_a_fork() -> None:
    """A model that splits its text into other tokens than the tokenizer leaves a note at every turn."""
    drift = [DriftEvent(kind="retokenised", turn=i, forked=False) for i in range(3)]
    drift += [DriftEvent(kind=kind, turn=3, forked=True) for kind in ("template", "rewritten")]
    values = batch_metrics(
        [Group(task=TASKS[0], trajectories=(trajectory(TASKS[0], 0, 1.0, drift=tuple(drift)),))], [1.0]
    )
    assert (values["num_drift_events"], values["num_forks"]) == (5, 2)


@pytest.mark.parametrize(
    ("values", "spread", "title"),
    [
        ({"truncated_frac": 1.0}, "group", "every trajectory is cut"),
        ({"informative_frac": 0.0}, "group", "no group has a reward spread"),
        ({}, "group", None),
        # Groups of one have no spread, and need none; a batch of one can't have any.
        ({"informative_frac": 0.0}, "batch", None),
        ({"informative_frac": 0.0, "reward_std": 0.0}, "batch", "all rewards are equal"),
        ({"reward_std": 0.0, "num_errored": 3}, "batch", None),
        ({"informative_frac": 0.0, "reward_std": 0.0}, None, None),
        ({"informative_frac": 0.0, "num_errored": 3, "num_unscored": 1}, "group", "every trajectory broke"),
        ({"num_errored": 3, "num_unscored": 1}, None, None),
        ({"num_errored": 4}, None, "every trajectory broke"),
    ],
)
def test_early_warning(values: dict[str, float], spread: Any, title: str | None) -> None:
    known = {"too_easy_frac": 0.0, "too_hard_frac": 1.0, "reward": 0.0, "reward_std": 0.5, "informative_frac": 0.1}
    known |= {"num_errored": 0, "num_unscored": 0, "num_trajectories": 4, "truncated_frac": 0.2}
    found = early_warning(known | values, 1.0, 16, spread=spread, broken="4 errored: OSError: gone")
    assert (found[0] if found else None) == title
    assert title in (None, "every trajectory is cut") or "OSError: gone" in found[1], "why is not said"


def test_the_commonest_reason_is_told_with_its_count() -> None:
    errored = {"outcome": Outcome.ERRORED, "stop_reason": StopReason.ERROR, "score": None}
    texts = ["KeyError: 'a'", "ConnectError: port 8001\n  refused", "ConnectError: port 8002 refused"]
    played = [trajectory(TASKS[0], i, None, error=text, **errored) for i, text in enumerate(texts)]
    unscored = trajectory(TASKS[0], 3, None, score=Score(value=None, reason="judge is down"))
    fine = trajectory(TASKS[0], 4, 1.0)
    said = trouble([*played, unscored, fine])
    assert said == "4 of 5 trajectories errored or have no score, 2 of them: ConnectError: port 8001 refused"
    assert trouble([fine]) == ""


def test_the_age_is_of_what_can_be_learned_from() -> None:
    """An attempt that broke under version 0 doesn't make its group, played again under 3, too old."""
    new = trajectory(TASKS[0], 0, 1.0)
    branch = replace(new.branches[0], policy_version=np.where(new.branches[0].sampled, 3, -1).astype(np.int32))
    broken = trajectory(TASKS[0], 1, None, outcome=Outcome.ERRORED, stop_reason=StopReason.ERROR, error="OSError: gone")
    one = Group(task=TASKS[0], trajectories=(replace(new, branches=(branch,)), broken))
    assert age(one, 5) == 2 and staleness([one], 5, Counts())["staleness_max"] == 2
    assert age(group(TASKS[0], [1.0]), 5) == 5
    assert age(Group(task=TASKS[0], trajectories=(broken,)), 5) == 0
