"""Trajectories on disk: one gzip-compressed JSON-lines file for each (stage, step), written whole or not at all.

A file is valid JSON for any tool: NaN log-probs are null, and long constant stretches are `[value, count]` runs.
A kill leaves at most a hidden temporary file, which readers ignore and the next write of that step replaces.
"""

from __future__ import annotations

import dataclasses
import functools
import gzip
import json
import math
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from upswing.errors import ConfigError, InvalidTrajectory
from upswing.trajectory import types
from upswing.trajectory.types import Branch, Message, Score, Task, ToolCall, ToolRecord, Trajectory
from upswing.trajectory.validate import DTYPES

_STAGE = r"[A-Za-z0-9][A-Za-z0-9_.\-]*"
_SHARD = re.compile(rf"(?P<stage>{_STAGE})-(?P<step>\d{{6,}})\.jsonl\.gz")


@dataclass(frozen=True, kw_only=True)
class StoredTrajectory:
    """A trajectory and where in the run it was played."""

    stage: str
    step: int
    trajectory: Trajectory


class TrajectoryStore:
    """The `trajectories/` folder of a run. One writer; any number of readers, also while it is written."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def append(self, stage: str, step: int, trajectories: Sequence[Trajectory]) -> Path:
        """Write one step's trajectories; -> the file. Writing a (stage, step) again replaces it, as after a resume.

        Raises ConfigError when a stage's name can't be a file name, or when what an environment or dataset put into a
        trajectory isn't JSON-serialisable; then nothing is written.
        """
        target = self._path(stage, step)
        tasks: dict[int, Any] = {}
        lines = [_to_line(stage, step, trajectory, tasks) for trajectory in trajectories]
        data = gzip.compress("".join(lines).encode("ascii"), compresslevel=6, mtime=0)
        self.folder.mkdir(parents=True, exist_ok=True)
        _write_atomically(target, data)
        return target

    def shards(self, stage: str | None = None) -> list[tuple[str, int, Path]]:
        """(stage, step, file) of everything stored, by stage and step."""
        if not self.folder.is_dir():
            return []
        found = []
        for path in self.folder.iterdir():
            match = _SHARD.fullmatch(path.name)
            if match and stage in (None, match["stage"]):
                found.append((match["stage"], int(match["step"]), path))
        return sorted(found)

    def read(self, stage: str | None = None, step: int | None = None) -> Iterator[StoredTrajectory]:
        """Stored trajectories by stage and step, in the order in which they were appended.

        Raises ConfigError naming the file when one is damaged.
        """
        for _, shard_step, path in self.shards(stage):
            if step is None or step == shard_step:
                yield from _read_shard(path)

    def discard_after(self, stage: str, step: int) -> int:
        """Remove a stage's steps later than `step` (they will be played again); -> how many files went."""
        late = [path for _, shard_step, path in self.shards(stage) if shard_step > step]
        for path in late:
            path.unlink()
        return len(late)

    def _path(self, stage: str, step: int) -> Path:
        if not re.fullmatch(_STAGE, stage):
            raise ConfigError(f"stage name '{stage}' can't be a file name; allowed: letters, digits, '_', '-' and '.'")
        if step < 0:
            raise ConfigError(f"step {step} is negative; steps count from 0")
        return self.folder / f"{stage}-{step:06d}.jsonl.gz"


def _write_atomically(target: Path, data: bytes) -> None:
    """Temporary file, flushed to the disk, then renamed: a reader sees the old file or the new one."""
    temporary = target.with_name(f".{target.name}.tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, target)
    if os.name == "posix":
        descriptor = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _read_shard(path: Path) -> Iterator[StoredTrajectory]:
    try:
        if not path.stat().st_size:
            raise EOFError("it is empty")
        with gzip.open(path, "rt", encoding="ascii") as file:
            for record in map(json.loads, file):
                trajectory = _from_json(record["trajectory"])
                yield StoredTrajectory(stage=record["stage"], step=record["step"], trajectory=trajectory)
    except (EOFError, gzip.BadGzipFile, zlib.error, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is damaged ({type(error).__name__}: {error}); remove it or restore a copy"
        ) from error


# -- to JSON ----------------------------------------------------------------------------------------------------------


def _to_line(stage: str, step: int, trajectory: Trajectory, tasks: dict[int, Any]) -> str:
    """One line of ASCII JSON (lone surrogates in sampled text survive as escapes). `tasks`: those that were asked for
    by now, by id, since a group's trajectories have one."""
    branches, task = [_branch_to_json(trajectory.id, branch) for branch in trajectory.branches], trajectory.task
    try:
        if id(task) not in tasks:
            tasks[id(task)] = plain(task, "trajectory.task")
        stored = plain(vars(trajectory) | {"branches": (), "task": None}, "trajectory")
    except TypeError as error:
        raise ConfigError(f"trajectory '{trajectory.id}' can't be stored: {error}; use JSON values only") from error
    stored |= {"branches": branches, "task": tasks[id(task)]}
    return _ENCODER.encode({"stage": stage, "step": step, "trajectory": stored}) + "\n"


_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))
_AS_IS = frozenset({str, int, bool, type(None)})


@functools.cache
def _fields(kind: type) -> tuple[str, ...] | None:
    """Of a dataclass; None for any other type."""
    return tuple(field.name for field in dataclasses.fields(kind)) if dataclasses.is_dataclass(kind) else None


def plain(value: Any, where: str) -> Any:
    """A JSON value: dataclasses and mappings become objects, tuples lists, numbers that aren't finite null."""
    kind = type(value)
    if kind in _AS_IS:
        return value
    if kind is float:
        return value if math.isfinite(value) else None
    if (names := _fields(kind)) is not None:  # type: ignore[arg-type]
        held = [(name, getattr(value, name)) for name in names]
        return {name: v if type(v) in _AS_IS else plain(v, f"{where}.{name}") for name, v in held}
    if kind is list or isinstance(value, list | tuple):
        return [v if type(v) in _AS_IS else plain(v, f"{where}[{index}]") for index, v in enumerate(value)]
    if kind is dict or isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{where} has the key {key!r} of type {type(key).__name__}")
        # What is plain already isn't asked again: a step stores some hundred thousand values.
        return {str(k): v if type(v) in _AS_IS else plain(v, f"{where}.{k}") for k, v in value.items()}
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    raise TypeError(f"{where} is a {type(value).__name__}")


def _branch_to_json(trajectory_id: str, branch: Branch) -> dict[str, Any]:
    for name, dtype in DTYPES.items():
        array = getattr(branch, name)
        if array.dtype != dtype or array.shape != branch.tokens.shape:
            raise InvalidTrajectory(
                f"trajectory '{trajectory_id}' can't be stored: {name} is {array.dtype} of shape {array.shape}, "
                f"must be {dtype} of shape {branch.tokens.shape}"
            )
    return {
        "tokens": branch.tokens.tolist(),
        "sampled": _runs(branch.sampled.view(np.int8)),
        # NaN is null; an infinity, which the validator refuses but a debugger may want to see, is text.
        "engine_logprobs": [
            value if math.isfinite(value) else None if math.isnan(value) else str(value)
            for value in branch.engine_logprobs.tolist()
        ],
        "policy_version": _runs(branch.policy_version),
        "turn": _runs(branch.turn),
    }


def _runs(values: np.ndarray[Any, Any]) -> list[list[int]]:
    """`[1, 1, 0]` as `[[1, 2], [0, 1]]`."""
    return [[value, len(list(run))] for value, run in groupby(values.tolist())]


# -- from JSON --------------------------------------------------------------------------------------------------------


def _from_json(record: Mapping[str, Any]) -> Trajectory:
    score = record["score"]
    read = {
        "task": _task(record["task"]),
        "branches": tuple(_branch(item) for item in record["branches"]),
        "messages": tuple(Message(**item) for item in record["messages"]),
        "outcome": types.Outcome(record["outcome"]),
        "stop_reason": types.StopReason(record["stop_reason"]),
        "tool_records": tuple(
            ToolRecord(**{**item, "call": ToolCall(**item["call"])}) for item in record["tool_records"]
        ),
        "score": None if score is None else Score(**score),
        "drift": tuple(types.DriftEvent(**item) for item in record["drift"]),
    }
    return Trajectory(**{**record, **read})


def _task(record: Mapping[str, Any]) -> Task:
    messages = tuple(Message(**item) for item in record["messages"])
    return Task(**{**record, "messages": messages, "gold": tuple(record["gold"])})


def _branch(record: Mapping[str, Any]) -> Branch:
    logprobs = [math.nan if value is None else float(value) for value in record["engine_logprobs"]]
    return Branch(
        tokens=np.array(record["tokens"], dtype=np.int32),
        sampled=_unrun(record["sampled"], np.dtype(np.bool_)),
        engine_logprobs=np.array(logprobs, dtype=np.float32),
        policy_version=_unrun(record["policy_version"], np.dtype(np.int32)),
        turn=_unrun(record["turn"], np.dtype(np.int16)),
    )


def _unrun(runs: Sequence[Sequence[int]], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    values = np.array([value for value, _ in runs], dtype=np.int64)
    counts = np.array([count for _, count in runs], dtype=np.int64)
    return np.repeat(values, counts).astype(dtype)
