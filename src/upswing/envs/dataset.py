"""Tasks from JSON Lines, Parquet and Hugging Face datasets: one row a task, checked row by row, in their order.

A row has `prompt`, `question` or `messages`; `answer`, `answers` or `gold`; optionally `id`, `tags` and `split`; every
other column goes to `Task.data`.
"""

from __future__ import annotations

import datetime
import decimal
import json
import math
import re
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from upswing.envs.adapters import library
from upswing.errors import ConfigError, did_you_mean
from upswing.trajectory.types import ROLES, Message, Task
from upswing.verify.options import problem
from upswing.verify.strict_json import FLOATS
from upswing.verify.text import one_line

PROMPT_COLUMNS = ("prompt", "question", "messages")
GOLD_COLUMNS = ("answer", "answers", "gold")
OTHER_COLUMNS = ("id", "tags", "split")
_KNOWN = (*PROMPT_COLUMNS, *GOLD_COLUMNS, *OTHER_COLUMNS)
# fmt: off
RESERVED = frozenset((
    "prompts", "completion", "completions", "prompt_ids", "completion_ids", "tokens", "sampled", "loss_mask",
    "engine_logprobs", "old_logprobs", "policy_logprobs", "ref_logprobs", "teacher_logprobs", "policy_version",
    "turn", "advantage", "advantages", "reward", "rewards", "score", "group", "task", "env", "episode", "data",
    "state", "extra", "outcome", "stop_reason", "tool_records", "num_turns", "env_reward", "branches",
))
# fmt: on
"""Names with a meaning inside Upswing: as a data column they would be mistaken for it."""


SUFFIXES = (".jsonl", ".json", ".ndjson", ".parquet")


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    role: str
    content: str
    name: str | None = None


_MESSAGES = TypeAdapter(list[_Message])
_ID = TypeAdapter[Any](Annotated[str, Field(min_length=1)] | int)
_TAGS = TypeAdapter(dict[str, str | int | float | bool | None])
_ANSWERS = TypeAdapter(list[str | int | float])
_HUB_SPLITS = {"train": "train", "dev": "validation", "test": "test"}
_Row = tuple[str, dict[str, Any]]
"""(where, for messages; the row)."""


def tasks_from_jsonl(path: str | Path, *, env: str = "", split: str = "train", require_gold: bool = True) -> list[Task]:
    """The tasks of a JSONL file, in its order.

    `require_gold`: every row needs an accepted answer (a verifier compares with it). Raises ConfigError naming the
    file and line for anything that is wrong, and for a file without rows.
    """
    return _tasks(read_rows(Path(path)), Path(path).stem, str(path), env, split, require_gold)


def tasks_from(
    source: str,
    *,
    env: str = "",
    split: str = "train",
    require_gold: bool = True,
    columns: Mapping[str, str] | None = None,
    answer_pattern: str | None = None,
    name: str | None = None,
    lacking: Callable[[Task], str | None] = lambda task: None,
) -> list[Task]:
    """The tasks of a JSONL or Parquet file, a folder (`save_to_disk`'s, or of data files), or a dataset of the Hub.

    source: a path or `owner/name`; `#part` after either of the last two names its split (Hugging Face's, slices such as
    `#train[:90%]` included; otherwise train, validation or test). columns: what a row has to have -> the column that
    holds it, such as {"answer": "solution"}. answer_pattern: where in an answer's text the answer is: the last match's
    first group (or all of it). name: the configuration of a dataset on the Hub. lacking: what is missing in a task, in
    words. Raises ConfigError as for JSONL.
    """
    rows, label, file = _rows(source, split, name)
    rows = [(where, _renamed(row, columns or {}, where)) for where, row in rows]
    if answer_pattern is not None:
        pattern = re.compile(answer_pattern)
        rows = [(where, _with_answer(row, pattern, where)) for where, row in rows]
    return _tasks(rows, label if file else f"{label}-{split}", source, env, split, require_gold, lacking)


def is_hub_id(source: str) -> bool:
    """Whether it looks like `owner/name` (perhaps `#part`) and names nothing here."""
    path = source.partition("#")[0]
    return bool(re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", path)) and not path.endswith(SUFFIXES) and not Path(path).exists()


def _tasks(
    rows: Sequence[_Row],
    label: str,
    source: str,
    env: str,
    split: str,
    require_gold: bool,
    lacking: Callable[[Task], str | None] = lambda task: None,
) -> list[Task]:
    tasks: list[Task] = []
    places: dict[str, str] = {}
    for where, row in rows:
        task = _task(row, where, f"{label}-{len(tasks)}", env, split, require_gold)
        if task.id in places:
            raise ConfigError(f"{where}: id '{task.id}' was already used at {places[task.id]}; ids must be unique")
        if (missing := lacking(task)) is not None:
            raise ConfigError(f"{where}: {missing}")
        places[task.id] = where
        tasks.append(task)
    if not tasks:
        raise ConfigError(f"{source} has no rows; write one JSON object a line, such as {_EXAMPLE}")
    return tasks


def _rows(source: str, split: str, name: str | None) -> tuple[list[_Row], str, bool]:
    """(rows, what ids start with, whether it is a JSONL file)."""
    path_text, _, part = source.partition("#") if not Path(source).is_file() else (source, "", "")
    path = Path(path_text)
    if not path.is_dir() and path.suffix != ".parquet" and not is_hub_id(source):
        return read_rows(path), path.stem, True
    if path.suffix == ".parquet" and not path.is_dir():
        table = _parquet(path)
    else:
        table = _hugging_face(path_text, part or _HUB_SPLITS.get(split, split), name)
    found = []
    for number, row in enumerate(table, start=1):
        where = f"{source}: row {number}"
        found.append((where, {key: _json(value, where, key) for key, value in row.items() if value is not None}))
    return found, path.stem, False


def _parquet(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        siblings = [p.name for p in path.parent.glob("*.parquet")] if path.parent.is_dir() else []
        raise ConfigError(f"dataset file {path} does not exist{did_you_mean(path.name, siblings)}")
    table = library("pyarrow.parquet", "data")
    try:
        return _rows_of(table.read_table(path))
    except Exception as error:
        raise ConfigError(f"dataset file {path} can't be read as Parquet: {one_line(error)}") from None


def _hugging_face(source: str, part: str, name: str | None) -> list[dict[str, Any]]:
    """A folder's or the Hub's rows; a saved folder's parts are whole splits."""
    datasets = library("datasets", "data")
    saved = any((Path(source) / file).is_file() for file in ("dataset_info.json", "dataset_dict.json"))
    try:
        found = datasets.load_from_disk(source) if saved else datasets.load_dataset(source, name, split=part)
    except Exception as error:
        there = "" if Path(source).exists() else ", which is no file or folder here either,"
        raise ConfigError(
            f"dataset '{source}'{there} can't be loaded: {type(error).__name__}: {one_line(error)}"
        ) from None
    if isinstance(found, Mapping):
        if part not in found:
            raise ConfigError(
                f"dataset '{source}' has no split '{part}'{did_you_mean(part, found)}: {', '.join(found)}"
            )
        found = found[part]
    return _rows_of(found.with_format("arrow")[:])


def _rows_of(table: Any) -> list[dict[str, Any]]:
    """The rows of an Arrow table; its short floats as they print: 0.1, and not the double nearest to a short 0.1."""
    arrow = library("pyarrow", "data")

    def with_short(kind: Any, other: Any) -> Any:
        if arrow.types.is_list(kind):
            return arrow.list_(with_short(kind.value_type, other))
        return other if arrow.types.is_float32(kind) else kind

    for number, column in enumerate(table.schema):
        if with_short(column.type, arrow.float64()) != column.type:
            texts = table[number].cast(with_short(column.type, arrow.string()))
            table = table.set_column(number, column.name, texts.cast(with_short(column.type, arrow.float64())))
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


def _json(value: Any, where: str, column: str) -> Any:
    """A cell as JSON has it: dates and decimals as text; a struct's empty fields, which every row of a table has, left
    out. Raises ConfigError for bytes, NaN and the like."""
    if isinstance(value, Mapping):
        return {str(key): _json(item, where, column) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_json(item, where, column) for item in value]
    if isinstance(value, datetime.date | datetime.time | datetime.timedelta | decimal.Decimal | uuid.UUID):
        return str(value)
    if not isinstance(value, str | int | float | None) or (isinstance(value, float) and not math.isfinite(value)):
        raise ConfigError(
            f"{where}: column '{column}' holds {value!r:.60}, which has no JSON form; leave the column out"
        )
    return value


def _renamed(row: dict[str, Any], columns: Mapping[str, str], where: str) -> dict[str, Any]:
    for target, column in columns.items():
        if column not in row:
            near = did_you_mean(column, row)
            raise ConfigError(f"{where}: no '{column}' (columns.{target}){near}; keys: {', '.join(row) or 'none'}")
    rest = {key: value for key, value in row.items() if key not in columns.values()}
    clash = next((key for key in rest if key in columns), None)
    if clash is not None:
        raise ConfigError(f"{where}: the row has a '{clash}' already; rename that too, as columns: {{old: {clash}}}")
    return {**{target: row[column] for target, column in columns.items()}, **rest}


def _with_answer(row: dict[str, Any], pattern: re.Pattern[str], where: str) -> dict[str, Any]:
    column = _one_column(row, GOLD_COLUMNS, where)
    if column is None:
        return row
    given = row[column] if isinstance(row[column], list) else [row[column]]
    found = [list(pattern.finditer(str(text))) for text in given]
    missing = next((text for text, matches in zip(given, found, strict=True) if not matches), None)
    if missing is not None:
        raise ConfigError(f"{where}: answer_pattern finds nothing in '{column}': …{str(missing)[-60:]!r}")
    return {**row, column: [(m[-1].group(1) if pattern.groups else m[-1].group()).strip() for m in found]}


def problem_of(task: Task) -> str:
    """What is asked, as a text to compare: the messages and the data."""
    return json.dumps([[m.role, m.content] for m in task.messages] + [task.data], sort_keys=True, default=str)


def check_disjoint(splits: Mapping[str, Sequence[Task]]) -> None:
    """Raises ConfigError when two splits share an id, or the same problem under two ids."""
    ids: dict[str, str] = {}
    problems: dict[str, tuple[str, str]] = {}
    for split, tasks in splits.items():
        for task in tasks:
            other = ids.setdefault(task.id, split)
            if other != split:
                raise ConfigError(f"id '{task.id}' is in the splits '{other}' and '{split}'; splits must be disjoint")
            first_split, first_id = problems.setdefault(problem_of(task), (split, task.id))
            if first_split != split:
                raise ConfigError(
                    f"'{first_id}' of '{first_split}' and '{task.id}' of '{split}' are the same problem; "
                    "splits must be disjoint"
                )


def load_tasks(source: Any, *, env: str, split: str) -> list[Task]:
    """Tasks of one split from tasks, what `tasks_from` reads, or splits of either (then checked to be disjoint)."""
    if isinstance(source, Mapping):
        loaded = {name: _tasks_of(part, env, name) for name, part in source.items()}
        check_disjoint(loaded)
        if split not in loaded:
            raise ConfigError(
                f"no tasks for split '{split}'; there are: {', '.join(loaded)}{did_you_mean(split, loaded)}"
            )
        return loaded[split]
    found = [task for task in _tasks_of(source, env, split) if task.split == split]
    if not found:
        raise ConfigError(f"none of the given tasks is of split '{split}'; set Task.split or give a mapping of splits")
    return found


def _tasks_of(source: Any, env: str, split: str) -> list[Task]:
    if isinstance(source, str | Path):
        return tasks_from(str(source), env=env, split=split)
    tasks = list(source) if isinstance(source, Iterable) else [source]
    for task in tasks:
        if not isinstance(task, Task):
            raise ConfigError(f"tasks must be Task objects or a JSONL path, got {type(task).__name__} {task!r}"[:200])
    return tasks


_EXAMPLE = '{"prompt": "…", "answer": "…"}'


def read_rows(path: Path) -> list[_Row]:
    """(`path:line`, object) of every non-blank line."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        siblings = [p.name for p in path.parent.glob("*.json*")] if path.parent.is_dir() else []
        raise ConfigError(f"dataset file {path} does not exist{did_you_mean(path.name, siblings)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"dataset file {path} can't be read as UTF-8 text: {error}") from None
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = FLOATS.decode(line)
            if "\\ud" in line.lower():
                json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ConfigError(f"{path}:{number}: the row holds half of a surrogate pair, which is no text") from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}:{number}: not valid JSON ({error})") from None
        if not isinstance(row, dict):
            raise ConfigError(f"{path}:{number}: a row must be an object such as {_EXAMPLE}, got {type(row).__name__}")
        rows.append((f"{path}:{number}", row))
    return rows


def _task(row: dict[str, Any], where: str, default_id: str, env: str, split: str, require_gold: bool) -> Task:
    for column in row:
        if column in RESERVED:
            raise ConfigError(f"{where}: column '{column}' clashes with a name that Upswing uses; rename the column")
    own_split = row.get("split")
    if own_split is not None and own_split != split:
        raise ConfigError(f"{where}: the row says split '{own_split}' but is read as '{split}'")
    return Task(
        id=str(_checked(_ID, row.get("id", default_id), f"{where}: 'id'")),
        messages=_messages(row, where),
        gold=_gold(row, where, require_gold),
        data={key: value for key, value in row.items() if key not in _KNOWN},
        tags={key: str(value) for key, value in _checked(_TAGS, row.get("tags") or {}, f"{where}: 'tags'").items()},
        env=env,
        split=split,
    )


def _one_column(row: Mapping[str, Any], columns: Sequence[str], where: str) -> str | None:
    """The one of `columns` that the row has a value in."""
    present = [column for column in columns if row.get(column) is not None]
    if len(present) > 1:
        raise ConfigError(f"{where}: columns '{present[0]}' and '{present[1]}' mean the same; keep one")
    return present[0] if present else None


def _keys(row: Mapping[str, Any], columns: Sequence[str]) -> str:
    """What a message says of the row's keys, with the wanted column that one of them may be a misspelling of."""
    hints = (f" ('{key}'{hint})" for key in row if key not in _KNOWN and (hint := did_you_mean(key, columns)))
    hint = next(hints, "")
    return f"keys: {', '.join(map(str, row)) or 'none'}; allowed: {', '.join(columns)}{hint}"


def _checked(kind: TypeAdapter[Any], value: Any, where: str) -> Any:
    """A value that is what it should be; nothing is converted."""
    try:
        return kind.validate_python(value, strict=True)
    except ValidationError as error:
        raise ConfigError(problem(error, where, _Message.model_fields)) from None


def _messages(row: Mapping[str, Any], where: str) -> tuple[Message, ...]:
    column = _one_column(row, PROMPT_COLUMNS, where)
    if column is None:
        raise ConfigError(f"{where}: the row has no prompt; {_keys(row, PROMPT_COLUMNS)}")
    if column == "messages" and isinstance(row[column], str):
        raise ConfigError(f"{where}: 'messages' must be a list of messages; text goes under 'prompt'")
    return prompt_from(row[column], f"{where}: '{column}'")


def prompt_from(value: Any, where: str) -> tuple[Message, ...]:
    """A string or a list of messages up to the agent's turn."""
    messages = messages_from(value, where, "user")
    if messages[-1].role not in ("user", "tool"):
        raise ConfigError(f"{where} ends with role '{messages[-1].role}'; it must end before the agent's turn")
    return messages


def messages_from(value: Any, where: str, role: str) -> tuple[Message, ...]:
    """A list of messages; a string is one of `role`."""
    if isinstance(value, str) and value.strip():
        return (Message(role=role, content=value),)
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{where} must be text or a list of messages, not empty; got {str(value)[:80]!r}")
    found = tuple(Message(**each.model_dump()) for each in _checked(_MESSAGES, value, f"{where}: message"))
    wrong = next((each.role for each in found if each.role not in ROLES), None)
    if wrong is not None:
        raise ConfigError(f"{where}: role '{wrong}' is not one of {', '.join(ROLES)}{did_you_mean(wrong, ROLES)}")
    return found


def _gold(row: Mapping[str, Any], where: str, required: bool) -> tuple[str, ...]:
    column = _one_column(row, GOLD_COLUMNS, where)
    values = [] if column is None else row[column]
    values = values if isinstance(values, list) else [values]
    golds = tuple(map(str, _checked(_ANSWERS, values, f"{where}: '{column}'")))
    if not all(map(str.strip, golds)):
        raise ConfigError(f"{where}: '{column}' has an empty answer")
    if not golds and required:
        raise ConfigError(f"{where}: the row has no answer; {_keys(row, GOLD_COLUMNS)}")
    return golds
