"""The validator: a good trajectory passes, and each way of breaking one is refused by name and position."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from upswing.errors import InvalidTrajectory
from upswing.trajectory.types import (
    Branch,
    DriftEvent,
    Group,
    Message,
    Outcome,
    Score,
    StopReason,
    Task,
    Trajectory,
)
from upswing.trajectory.validate import validate, validate_group

NAN = float("nan")
TASK = Task(id="task", messages=(Message(role="user", content="q"),))


def branch(sampled=(0, 0, 1, 1, 0, 1), turn=(0, 0, 0, 0, 1, 1), expert=False) -> Branch:
    mask = np.array(sampled, dtype=np.bool_)
    return Branch(
        tokens=np.arange(10, 10 + len(mask), dtype=np.int32),
        sampled=mask,
        engine_logprobs=np.where(mask & (not expert), -0.5, NAN).astype(np.float32),
        policy_version=np.where(mask & (not expert), 4, -1).astype(np.int32),
        turn=np.array(turn, dtype=np.int16),
    )


def trajectory(*branches: Branch, **changes) -> Trajectory:
    fields = {
        "id": "t1",
        "task": TASK,
        "branches": branches or (branch(),),
        "messages": TASK.messages,
        "outcome": Outcome.COMPLETED,
        "stop_reason": StopReason.ANSWERED,
        "num_turns": 2,
    }
    return Trajectory(**{**fields, **changes})


def put(array, position, value):
    changed = array.copy()
    changed[position] = value
    return changed


def broken(field, position, value) -> Trajectory:
    good = branch()
    return trajectory(replace(good, **{field: put(getattr(good, field), position, value)}))


FORK = DriftEvent(kind="template", turn=1, forked=True)
FIRST = branch(sampled=(0, 0, 1, 1, 0, 0))
SECOND = branch(sampled=(0, 0, 0, 0, 0, 1), turn=(1,) * 6)


@pytest.mark.parametrize(
    "good",
    [
        trajectory(),
        trajectory(score=Score(value=None, components={"em": None})),
        trajectory(score=Score(value=0.5, components={"em": 1.0})),
        trajectory(branch(expert=True), source="expert"),
        trajectory(FIRST, SECOND, drift=(FORK, replace(FORK, forked=False))),
        trajectory(outcome=Outcome.TRUNCATED, stop_reason=StopReason.MAX_TOKENS),
        trajectory(outcome=Outcome.CANCELLED, stop_reason=StopReason.CANCELLED),
        replace(
            trajectory(), outcome=Outcome.ERRORED, stop_reason=StopReason.ERROR, error="ValueError: x", branches=()
        ),
        broken("engine_logprobs", 2, 5e-5),  # rounding of a log-softmax
    ],
)
def test_good_trajectories_pass(good):
    validate(good)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (broken("tokens", 3, -1), r"branch 0, position 3: token id is negative \(rule token-ids\)"),
        (broken("engine_logprobs", 2, NAN), "position 2: a sampled token's engine_logprobs isn't finite"),
        (broken("engine_logprobs", 5, -np.inf), "position 5: a sampled token's engine_logprobs isn't finite"),
        (broken("engine_logprobs", 3, 0.01), "position 3: a sampled token's engine_logprobs is above 0"),
        (broken("engine_logprobs", 4, -0.5), "position 4: a token not sampled has engine_logprobs"),
        (broken("engine_logprobs", 0, 0.0), "position 0: a token not sampled has engine_logprobs"),
        (broken("policy_version", 5, -1), "position 5: a sampled token has no policy_version"),
        (broken("policy_version", 1, 0), "position 1: a token not sampled has a policy_version"),
        (broken("turn", 1, -1), r"position 1: turn is negative \(rule turns\)"),
        (broken("turn", 2, 1), "position 3: its turn comes before that of the token in front of it"),
        (broken("turn", 5, 0), "position 5: a turn is sampled in two pieces"),
        (broken("turn", 0, 1), "position 1: its turn comes before that of the token in front of it"),
        (broken("turn", 5, 2), "position 5: turn 2 of a trajectory with num_turns=2"),
        (trajectory(branch(sampled=(1, 0, 0), turn=(0, 0, 0))), "position 0: the first token can't be a sampled one"),
        (trajectory(branch(), source="expert"), "position 2: an expert's token has engine_logprobs"),
        (trajectory(branch(expert=True)), "position 2: a sampled token's engine_logprobs isn't finite"),
        (trajectory(branch(), source="text"), "position 2: a token of text has engine_logprobs"),
        (trajectory(source="teacher"), "source 'teacher'; allowed: policy, expert, text"),
        (trajectory(branch(sampled=(), turn=())), "branch 0: the branch is empty"),
        (
            trajectory(replace(branch(), sampled=branch().sampled[:4])),
            "branch 0: lengths differ: tokens 6, sampled 4, engine_logprobs 6",
        ),
        (
            trajectory(replace(branch(), tokens=branch().tokens.astype(np.int64))),
            r"branch 0: tokens is int64 of shape \(6,\), must be int32",
        ),
        (trajectory(replace(branch(), tokens=[1, 2])), "branch 0: tokens is list, must be int32"),
        (trajectory(replace(branch(), turn=branch().turn[None])), r"turn is int16 of shape \(1, 6\)"),
        (
            trajectory(stop_reason=StopReason.MAX_TURNS),
            "outcome completed with stop_reason max_turns; allowed: answered",
        ),
        (trajectory(error="boom"), "outcome completed with an error text: boom"),
        (trajectory(outcome=Outcome.ERRORED, stop_reason=StopReason.ERROR), "errored without an error text"),
        (
            trajectory(outcome=Outcome.ERRORED, stop_reason=StopReason.ERROR, error="E: x", score=Score(value=0.0)),
            r"outcome errored with a score; it must never count as a reward \(rule score\)",
        ),
        (trajectory(score=Score(value=NAN)), "score value is nan"),
        (trajectory(score=Score(value=1.0, components={"f1": np.inf})), "score f1 is inf"),
        (replace(trajectory(), branches=()), "outcome completed without a branch"),
        (trajectory(FIRST, SECOND), "2 branches but 0 drift events that opened one"),
        (trajectory(drift=(FORK,)), "1 branches but 1 drift events that opened one"),
        (
            trajectory(FIRST, branch(), drift=(FORK,)),
            r"trajectory 't1', branch 1, position 2: turn 0 is sampled in branch 0 too \(rule trained-once\)",
        ),
    ],
)
def test_broken_trajectories_are_refused_by_name(bad, message):
    with pytest.raises(InvalidTrajectory, match=message) as caught:
        validate(bad)
    assert str(caught.value).startswith("trajectory 't1'")


def test_groups():
    first, second = trajectory(), trajectory(id="t2")
    validate_group(Group(task=TASK, trajectories=(first, second)))
    with pytest.raises(InvalidTrajectory, match="trajectory id 't1' occurs twice"):
        validate_group(Group(task=TASK, trajectories=(first, first)))
    with pytest.raises(InvalidTrajectory, match="plays task 'task' in a group of task 'other'"):
        validate_group(Group(task=replace(TASK, id="other"), trajectories=(first,)))
    with pytest.raises(InvalidTrajectory, match="trajectory 't2', branch 0, position 3"):
        validate_group(Group(task=TASK, trajectories=(first, replace(broken("tokens", 3, -1), id="t2"))))
    played = Group(task=TASK, trajectories=(first, replace(broken("tokens", 3, -1), id="t2")))
    validate_group(played, branches=False)
    with pytest.raises(InvalidTrajectory, match="score value is nan"):
        validate_group(replace(played, trajectories=(replace(first, score=Score(value=NAN)),)), branches=False)
