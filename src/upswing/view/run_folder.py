"""The files of a run folder and how they are read and written: JSON in any state, also of a run killed half-way."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

RECIPE = "recipe.yaml"
METRICS = "metrics.jsonl"
FINDINGS = "findings.jsonl"
EVENTS = "events.log"
RESULTS = "results.json"
EXAMPLES = "examples.json"
ENVIRONMENT = "environment.json"
REPORT = "report.html"


def json_safe(value: Any) -> Any:
    """Plain JSON: NaN and infinities become None, numpy and torch scalars numbers, other objects their text."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [json_safe(item) for item in value]
    if hasattr(value, "tolist"):  # numpy arrays and scalars, torch tensors
        return json_safe(value.tolist())
    return str(value)


def append_line(path: Path, text: str) -> None:
    """Append one line in a single write; line breaks inside `text` become spaces."""
    data = (" ".join(text.splitlines()) + "\n").encode()
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(handle, data)
    finally:
        os.close(handle)


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file; a cut or foreign line is skipped, a missing file is empty."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError):
            rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict)]


def replace_file(path: Path, text: str) -> None:
    """Write a whole file so that a reader, or a kill, sees the old one or the new one.

    A lone surrogate, which a model's JSON can hold and UTF-8 can't, is written as `\\ud800`: in JSON that is the same.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> Path:
    """Write a JSON file atomically and return its path."""
    replace_file(path, json.dumps(json_safe(value), ensure_ascii=False))
    return path


def read_json(path: Path) -> Any:
    """The content of a JSON file; None when it is missing or not (yet) whole."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
