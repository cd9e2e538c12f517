"""The validator that every trajectory passes, always, before it may be trained on.

The first complaint is raised as InvalidTrajectory, naming the trajectory, the branch, the position and the rule.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from upswing.errors import InvalidTrajectory
from upswing.trajectory.types import SOURCES, BoolT, Branch, Group, Int16T, Outcome, StopReason, Trajectory

LOGPROB_SLACK = 1e-4
"""A log-prob may be above 0 by this much: rounding of a log-softmax, not an error."""

STOP_REASONS: dict[Outcome, frozenset[StopReason]] = {
    Outcome.COMPLETED: frozenset({StopReason.ANSWERED, StopReason.ENV_DONE}),
    Outcome.TRUNCATED: frozenset(
        {
            StopReason.MAX_TURNS,
            StopReason.MAX_TOKENS,
            StopReason.CONTEXT_OVERFLOW,
            StopReason.INVALID_CALLS,
            StopReason.TIMEOUT,
        }
    ),
    Outcome.ERRORED: frozenset({StopReason.ERROR}),
    Outcome.CANCELLED: frozenset({StopReason.CANCELLED}),
}
"""Which stop reasons go with which outcome."""

DTYPES = {
    "tokens": np.dtype(np.int32),
    "sampled": np.dtype(np.bool_),
    "engine_logprobs": np.dtype(np.float32),
    "policy_version": np.dtype(np.int32),
    "turn": np.dtype(np.int16),
}
"""The arrays of a branch and their types."""

Complaint = tuple[str, int | None, str]
"""(rule, position in the branch or None, what is wrong)."""


def validate(trajectory: Trajectory, *, branches: bool = True) -> None:
    """Raise InvalidTrajectory at the first broken rule, naming trajectory, branch, position and rule. `branches`: the
    rules of their arrays too."""
    for rule, message in _trajectory_rules(trajectory):
        raise InvalidTrajectory(f"trajectory '{trajectory.id}': {message} (rule {rule})")
    owner: dict[int, int] = {}
    for index, branch in enumerate(trajectory.branches if branches else ()):
        for rule, position, message in _branch_rules(branch, trajectory, index, owner):
            where = "" if position is None else f", position {position}"
            raise InvalidTrajectory(f"trajectory '{trajectory.id}', branch {index}{where}: {message} (rule {rule})")


def validate_group(group: Group, *, branches: bool = True) -> None:
    """Validate every trajectory of a group, and that all play the group's task under ids of their own. `branches`
    False: the arrays were validated when they were played; only what came later, scores and the group, is.
    """
    seen: set[str] = set()
    for trajectory in group.trajectories:
        if trajectory.task.id != group.task.id:
            raise InvalidTrajectory(
                f"trajectory '{trajectory.id}' plays task '{trajectory.task.id}' in a group of task '{group.task.id}' "
                "(rule same-task)"
            )
        if trajectory.id in seen:
            raise InvalidTrajectory(
                f"trajectory id '{trajectory.id}' occurs twice in the group of task '{group.task.id}' (rule unique-ids)"
            )
        seen.add(trajectory.id)
        validate(trajectory, branches=branches)


# -- rules of a branch ------------------------------------------------------------------------------------------------


def _branch_rules(branch: Branch, trajectory: Trajectory, index: int, owner: dict[int, int]) -> Iterator[Complaint]:
    yield from _arrays(branch)
    (positions,) = branch.sampled.nonzero()
    turns = branch.turn[positions]
    for rule, wrong, message in (*_values(branch, trajectory), *_turns(branch, positions, turns)):
        first = int(wrong.argmax())
        if wrong[first]:
            yield rule, first, message
    firsts = [0, *((turns[1:] != turns[:-1]).nonzero()[0] + 1).tolist()] if len(turns) else []
    for turn, position in zip(turns[firsts].tolist(), positions[firsts].tolist(), strict=True):
        if turn >= trajectory.num_turns:
            yield "turns", position, f"turn {turn} of a trajectory with num_turns={trajectory.num_turns}"
        if owner.setdefault(turn, index) != index:  # no token is trained twice
            yield "trained-once", position, f"turn {turn} is sampled in branch {owner[turn]} too"


def _arrays(branch: Branch) -> Iterator[Complaint]:
    """One-dimensional, of the contract's dtypes, all of one length, not empty."""
    for name, dtype in DTYPES.items():
        array = getattr(branch, name)
        if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype != dtype:
            shape = f"{array.dtype} of shape {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
            yield "arrays", None, f"{name} is {shape}, must be {dtype} of shape (T,)"
    lengths = {name: len(getattr(branch, name)) for name in DTYPES}
    if len(set(lengths.values())) != 1:
        yield "arrays", None, "lengths differ: " + ", ".join(f"{name} {length}" for name, length in lengths.items())
    if not lengths["tokens"]:
        yield "arrays", None, "the branch is empty"


Check = tuple[str, BoolT, str]
"""(rule, True where it is broken, what is wrong there)."""


def _values(branch: Branch, trajectory: Trajectory) -> Iterator[Check]:
    """A policy's sampled tokens have a log-prob <= 0 and a version; all others have neither."""
    sampled, logprobs = branch.sampled, branch.engine_logprobs
    scored, versioned = ~np.isnan(logprobs), branch.policy_version != -1
    yield "token-ids", branch.tokens < 0, "token id is negative"
    yield "context", sampled[:1], "the first token can't be a sampled one: nothing conditions it"
    yield "unsampled-values", ~sampled & scored, "a token not sampled has engine_logprobs"
    yield "unsampled-values", ~sampled & versioned, "a token not sampled has a policy_version"
    if trajectory.source != "policy":
        whose = "an expert's token" if trajectory.source == "expert" else "a token of text"
        yield "sampled-values", scored, f"{whose} has engine_logprobs"
        yield "sampled-values", versioned, f"{whose} has a policy_version"
        return
    finite = np.isfinite(logprobs)
    yield "sampled-values", sampled & ~finite, "a sampled token's engine_logprobs isn't finite"
    above = np.where(finite, logprobs, 0.0) > LOGPROB_SLACK
    yield "sampled-values", sampled & above, "a sampled token's engine_logprobs is above 0"
    yield "sampled-values", sampled & (branch.policy_version < 0), "a sampled token has no policy_version"


def _turns(branch: Branch, positions: np.ndarray, turns: Int16T) -> Iterator[Check]:
    """Turns count up along the branch, and each is one run of sampled tokens. `positions`, `turns`: of those."""
    yield "turns", branch.turn < 0, "turn is negative"
    again, back = np.zeros((2, len(branch)), dtype=np.bool_)
    again[positions[1:]] = (turns[1:] == turns[:-1]) & (positions[1:] - positions[:-1] > 1)
    yield "turns", again, "a turn is sampled in two pieces"
    back[1:] = branch.turn[1:] < branch.turn[:-1]
    yield "turns", back, "its turn comes before that of the token in front of it"


# -- rules of a trajectory --------------------------------------------------------------------------------------------


def _trajectory_rules(trajectory: Trajectory) -> Iterator[tuple[str, str]]:
    """Stop reason, error text, score and branches go with the outcome, and every fork with a drift event."""
    outcome, count = trajectory.outcome, len(trajectory.branches)
    unplayed = outcome in (Outcome.ERRORED, Outcome.CANCELLED)
    if trajectory.source not in SOURCES:
        yield "source", f"source '{trajectory.source}'; allowed: {', '.join(SOURCES)}"
    if trajectory.stop_reason not in STOP_REASONS[outcome]:
        allowed = ", ".join(sorted(STOP_REASONS[outcome]))
        yield "outcome", f"outcome {outcome} with stop_reason {trajectory.stop_reason}; allowed: {allowed}"
    if outcome is Outcome.ERRORED and not trajectory.error:
        yield "outcome", "outcome errored without an error text"
    if outcome is not Outcome.ERRORED and trajectory.error is not None:
        yield "outcome", f"outcome {outcome} with an error text: {trajectory.error}"
    if trajectory.score is not None:
        if unplayed:
            yield "score", f"outcome {outcome} with a score; it must never count as a reward"
        for name, value in {"value": trajectory.score.value, **trajectory.score.components}.items():
            if value is not None and not math.isfinite(value):
                yield "score", f"score {name} is {value}; a score that can't be made is None"
    if not count and not unplayed:
        yield "branches", f"outcome {outcome} without a branch"
    forked = sum(event.forked for event in trajectory.drift)
    if max(count - 1, 0) != forked:
        yield "branches", f"{count} branches but {forked} drift events that opened one"
