"""Tasks from JSON Lines files, for environments that have none of their own.

A row has `prompt` (text) or `messages` (a list of role and content), and `answer` (text or number) or `answers` (a
list). `id` and `tags` (text to text) are optional. Every other column goes, row by row, to the verifiers as `data`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol

from upswing.errors import ConfigError, did_you_mean
from upswing.plugins import missing_file
from upswing.seeding import derive_seed
from upswing.trajectory.types import Message, Task
from upswing.verify.base import Episode

KNOWN_COLUMNS = ("prompt", "messages", "answer", "answers", "id", "tags")
CLASHING_COLUMNS = frozenset({field.name for field in fields(Episode)} | {"env", "split"}) - set(KNOWN_COLUMNS)
ROLES = ("system", "user", "assistant", "tool")


class DatasetSpec(Protocol):
    """What of the recipe's `dataset` section is used here."""

    @property
    def train(self) -> str: ...
    @property
    def dev(self) -> str | None: ...
    @property
    def test(self) -> str | None: ...
    @property
    def shuffle(self) -> bool: ...
    @property
    def answer_required(self) -> bool: ...


class Dataset:
    """The tasks of each split, read and checked at once. Raises ConfigError naming the file and the line."""

    def __init__(self, spec: DatasetSpec, env: str = "") -> None:
        self.shuffle = spec.shuffle
        self._tasks: dict[str, tuple[Task, ...]] = {}
        paths = {"train": spec.train, "dev": spec.dev, "test": spec.test}
        for split, path in paths.items():
            if path is not None:
                self._tasks[split] = read_tasks(Path(path), split, env, spec.answer_required)
        _check_disjoint(self._tasks, paths)

    def count(self, split: str) -> int:
        """Number of tasks of a split; 0 when it has no file."""
        return len(self._tasks.get(split, ()))

    def tasks(self, split: str, seed: int = 0) -> Iterator[Task]:
        """`train`: endless, in passes; each pass is shuffled anew with the seed, or in the order of the file when
        `shuffle` is false. Other splits: once, in the order of the file. Raises ConfigError for a missing split."""
        if split not in self._tasks:
            raise ConfigError(f"the dataset has no {split} rows; set dataset.{split} to a JSON Lines file")
        return self._endless(seed) if split == "train" else iter(self._tasks[split])

    def _endless(self, seed: int) -> Iterator[Task]:
        for number in range(2**62):
            order = list(self._tasks["train"])
            if self.shuffle:
                random.Random(derive_seed(seed, "dataset", number)).shuffle(order)
            yield from order


def read_tasks(path: Path, split: str, env: str = "", answer_required: bool = True) -> tuple[Task, ...]:
    """The tasks of one file, in its order. Raises ConfigError for a missing or empty file and for a bad row."""
    if not path.is_file():
        raise ConfigError(f"dataset.{split}: {missing_file(path)}")
    tasks: dict[str, Task] = {}
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                task = _task(_row(line, path, number), f"{path}: line {number}", number, split, env, answer_required)
                if task.id in tasks:
                    raise ConfigError(f"{path}: line {number}: id '{task.id}' is there twice")
                tasks[task.id] = task
    if not tasks:
        raise ConfigError(f"dataset.{split}: file '{path}' has no rows")
    return tuple(tasks.values())


def _row(line: str, path: Path, number: int) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as problem:
        raise ConfigError(f"{path}: line {number}: not JSON ({problem})") from None
    if not isinstance(row, dict):
        raise ConfigError(
            f'{path}: line {number}: got {type(row).__name__}, expected an object such as {{"prompt": …}}'
        )
    return row


def _task(row: Mapping[str, Any], where: str, number: int, split: str, env: str, answer_required: bool) -> Task:
    clash = sorted(set(row) & CLASHING_COLUMNS)
    if clash:
        raise ConfigError(
            f"{where}: column '{clash[0]}' clashes with what verifiers know under that name; rename the column "
            f"(names taken: {', '.join(sorted(CLASHING_COLUMNS))})"
        )
    tags = row.get("tags") or {}
    if not isinstance(tags, dict) or not all(isinstance(value, str) for value in tags.values()):
        raise ConfigError(f'{where}: tags: got {tags!r}, expected text to text, such as {{"kind": "easy"}}')
    name = row.get("id")
    if name is not None and not isinstance(name, str | int):
        raise ConfigError(f"{where}: id: got {name!r}, expected text")
    return Task(
        id=f"{split}-{number - 1}" if name is None else str(name),
        messages=_messages(row, where),
        gold=_gold(row, where, answer_required),
        data={key: value for key, value in row.items() if key not in KNOWN_COLUMNS},
        tags=tags,
        env=env,
        split=split,
    )


def _one_of(row: Mapping[str, Any], one: str, other: str, where: str) -> str:
    """Which of two alternative columns the row has."""
    both = [key for key in (one, other) if key in row]
    if len(both) == 2:
        raise ConfigError(f"{where}: has both '{one}' and '{other}'; keep one")
    if not both:
        hint = did_you_mean(one, row) or did_you_mean(other, row)
        raise ConfigError(f"{where}: no '{one}' (or '{other}'){hint} (columns: {', '.join(row) or 'none'})")
    return both[0]


def _messages(row: Mapping[str, Any], where: str) -> tuple[Message, ...]:
    key = _one_of(row, "prompt", "messages", where)
    value = row[key]
    if key == "prompt":
        if not isinstance(value, str) or not value.strip():
            raise ConfigError(f"{where}: prompt: got {value!r}, expected text")
        return (Message(role="user", content=value),)
    if not isinstance(value, list) or not value:
        raise ConfigError(f'{where}: messages: expected a list of {{"role": …, "content": …}}')
    messages = []
    for index, item in enumerate(value):
        role = item.get("role") if isinstance(item, dict) else None
        content = item.get("content") if isinstance(item, dict) else None
        if role not in ROLES or not isinstance(content, str):
            raise ConfigError(
                f"{where}: messages.{index}: got {item!r}, expected a role ({', '.join(ROLES)}) and a text content"
            )
        messages.append(Message(role=role, content=content))
    return tuple(messages)


def _gold(row: Mapping[str, Any], where: str, required: bool) -> tuple[str, ...]:
    if not required and "answer" not in row and "answers" not in row:
        return ()
    key = _one_of(row, "answer", "answers", where)
    given = row[key] if key == "answers" else [row[key]]
    if not isinstance(given, list) or not given:
        raise ConfigError(f"{where}: answers: got {given!r}, expected a list with at least one answer")
    for answer in given:
        if isinstance(answer, bool) or not isinstance(answer, str | int | float) or not str(answer).strip():
            raise ConfigError(f"{where}: {key}: got {answer!r}, expected text or a number")
    return tuple(str(answer) for answer in given)


def _check_disjoint(tasks: Mapping[str, tuple[Task, ...]], paths: Mapping[str, str | None]) -> None:
    """The same question in two splits would make every figure on the later one worthless."""
    seen: dict[tuple[tuple[str, str], ...], tuple[str, str]] = {}
    for split, members in tasks.items():
        for task in members:
            key = tuple((message.role, message.content) for message in task.messages)
            earlier = seen.setdefault(key, (split, task.id))
            if earlier[0] != split:
                raise ConfigError(
                    f"{paths[split]}: task '{task.id}' has the prompt of the {earlier[0]} task '{earlier[1]}'; "
                    "remove it from one of them: splits may not overlap"
                )
