"""The validator that every trajectory passes, always, before it may be trained on.

Each rule is a small function that yields `(position, message)`; the first complaint is raised as InvalidTrajectory with
the trajectory's id, the branch, the position and the rule's name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from upswing.errors import InvalidTrajectory
from upswing.trajectory.types import Branch, Group, Outcome, StopReason, Trajectory

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

Complaint = tuple[int | None, str]
"""(position in the branch or None, what is wrong)."""


def validate(trajectory: Trajectory) -> None:
    """Raise InvalidTrajectory at the first broken rule, naming trajectory, branch, position and rule."""
    for name, check in _TRAJECTORY_RULES.items():
        for _, message in check(trajectory):
            raise InvalidTrajectory(f"trajectory '{trajectory.id}': {message} (rule {name})")
    for index, branch in enumerate(trajectory.branches):
        for name, branch_check in _BRANCH_RULES.items():
            for position, message in branch_check(branch, trajectory):
                where = "" if position is None else f", position {position}"
                raise InvalidTrajectory(f"trajectory '{trajectory.id}', branch {index}{where}: {message} (rule {name})")
    _check_trained_once(trajectory)


def validate_group(group: Group) -> None:
    """Validate every trajectory of a group, and that all play the group's task under ids of their own."""
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
        validate(trajectory)


# -- rules of a branch ------------------------------------------------------------------------------------------------


def _arrays(branch: Branch, _: Trajectory) -> Iterator[Complaint]:
    """One-dimensional, of the contract's dtypes, all of one length, not empty."""
    lengths = {}
    for name, dtype in DTYPES.items():
        array = getattr(branch, name)
        if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype != dtype:
            shape = f"{array.dtype} of shape {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
            yield None, f"{name} is {shape}, must be {dtype} of shape (T,)"
            return
        lengths[name] = len(array)
    if len(set(lengths.values())) != 1:
        yield None, "lengths differ: " + ", ".join(f"{name} {length}" for name, length in lengths.items())
    elif lengths["tokens"] == 0:
        yield None, "the branch is empty"


def _token_ids(branch: Branch, _: Trajectory) -> Iterator[Complaint]:
    yield from _where(branch.tokens < 0, "token id is negative")


def _has_context(branch: Branch, _: Trajectory) -> Iterator[Complaint]:
    """Something must come before the first sampled token, or it has no log-prob."""
    yield from _where(branch.sampled[:1], "the first token can't be a sampled one: nothing conditions it")


def _sampled_values(branch: Branch, trajectory: Trajectory) -> Iterator[Complaint]:
    """A policy's tokens have a log-prob <= 0 and a version; an expert's have neither."""
    if trajectory.source == "expert":
        yield from _where(~np.isnan(branch.engine_logprobs), "an expert's token has engine_logprobs")
        yield from _where(branch.policy_version != -1, "an expert's token has a policy_version")
        return
    finite = np.isfinite(branch.engine_logprobs)
    yield from _where(branch.sampled & ~finite, "a sampled token's engine_logprobs isn't finite")
    above = branch.sampled & finite & (np.where(finite, branch.engine_logprobs, 0.0) > LOGPROB_SLACK)
    yield from _where(above, "a sampled token's engine_logprobs is above 0")
    yield from _where(branch.sampled & (branch.policy_version < 0), "a sampled token has no policy_version")


def _unsampled_values(branch: Branch, _: Trajectory) -> Iterator[Complaint]:
    yield from _where(~branch.sampled & ~np.isnan(branch.engine_logprobs), "a token not sampled has engine_logprobs")
    yield from _where(~branch.sampled & (branch.policy_version != -1), "a token not sampled has a policy_version")


def _turns(branch: Branch, trajectory: Trajectory) -> Iterator[Complaint]:
    """Turns count up along the branch, within the trajectory's `num_turns`, and each is one run of sampled tokens."""
    yield from _where(branch.turn < 0, "turn is negative")
    positions = np.flatnonzero(branch.sampled)
    turns = branch.turn[positions].astype(np.int64)
    backwards = np.flatnonzero(np.diff(turns) < 0)
    for at in backwards[:1]:
        yield int(positions[at + 1]), f"turn {turns[at + 1]} comes after turn {turns[at]}"
    split = np.flatnonzero((np.diff(turns) == 0) & (np.diff(positions) > 1))
    for at in split[:1]:
        yield int(positions[at + 1]), f"turn {turns[at]} is sampled in two pieces"
    for at in np.flatnonzero(turns >= trajectory.num_turns)[:1]:
        yield int(positions[at]), f"turn {turns[at]} of a trajectory with num_turns={trajectory.num_turns}"


_BRANCH_RULES: dict[str, Callable[[Branch, Trajectory], Iterator[Complaint]]] = {
    "arrays": _arrays,
    "token-ids": _token_ids,
    "context": _has_context,
    "sampled-values": _sampled_values,
    "unsampled-values": _unsampled_values,
    "turns": _turns,
}


# -- rules of a trajectory --------------------------------------------------------------------------------------------


def _outcome(trajectory: Trajectory) -> Iterator[Complaint]:
    """Stop reason, error text and score go with the outcome."""
    allowed = STOP_REASONS[trajectory.outcome]
    if trajectory.stop_reason not in allowed:
        names = ", ".join(sorted(allowed))
        yield None, f"outcome {trajectory.outcome} with stop_reason {trajectory.stop_reason}; allowed: {names}"
    errored = trajectory.outcome is Outcome.ERRORED
    if errored and not trajectory.error:
        yield None, "outcome errored without an error text"
    if not errored and trajectory.error is not None:
        yield None, f"outcome {trajectory.outcome} with an error text: {trajectory.error}"


def _score(trajectory: Trajectory) -> Iterator[Complaint]:
    """Errored and cancelled trajectories are never scored; a score that couldn't be made is None, never NaN."""
    if trajectory.score is None:
        return
    if trajectory.outcome in (Outcome.ERRORED, Outcome.CANCELLED):
        yield None, f"outcome {trajectory.outcome} with a score; it must never count as a reward"
    values = {"value": trajectory.score.value, **trajectory.score.components}
    for name, value in values.items():
        if value is not None and not math.isfinite(value):
            yield None, f"score {name} is {value}; a score that can't be made is None"


def _branches(trajectory: Trajectory) -> Iterator[Complaint]:
    """Every branch but the first was opened by a drift event; only an errored or cancelled rollout may have none."""
    forked = sum(event.forked for event in trajectory.drift)
    count = len(trajectory.branches)
    if count == 0 and trajectory.outcome in (Outcome.COMPLETED, Outcome.TRUNCATED):
        yield None, f"outcome {trajectory.outcome} without a branch"
    if max(count - 1, 0) != forked:
        yield None, f"{count} branches but {forked} drift events that opened one"


def _source(trajectory: Trajectory) -> Iterator[Complaint]:
    if trajectory.source not in ("policy", "expert"):
        yield None, f"source '{trajectory.source}'; allowed: policy, expert"


_TRAJECTORY_RULES: dict[str, Callable[[Trajectory], Iterator[Complaint]]] = {
    "source": _source,
    "outcome": _outcome,
    "score": _score,
    "branches": _branches,
}


def _check_trained_once(trajectory: Trajectory) -> None:
    """Each turn is sampled in exactly one branch, so that no token is trained twice."""
    owner: dict[int, int] = {}
    for index, branch in enumerate(trajectory.branches):
        for turn in np.unique(branch.turn[branch.sampled]).tolist():
            if turn in owner:
                position = int(np.flatnonzero(branch.sampled & (branch.turn == turn))[0])
                raise InvalidTrajectory(
                    f"trajectory '{trajectory.id}', branch {index}, position {position}: turn {turn} is sampled in "
                    f"branch {owner[turn]} too (rule trained-once)"
                )
            owner[turn] = index


def _where(wrong: np.ndarray[tuple[int], np.dtype[np.bool_]], message: str) -> Iterator[Complaint]:
    """A complaint at the first True, if there is one."""
    positions = np.flatnonzero(wrong)
    if len(positions):
        yield int(positions[0]), message
