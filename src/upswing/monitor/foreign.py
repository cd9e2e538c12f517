"""Other frameworks' logs as rows of Upswing's signals. What a key means is in `foreign.yaml`; nothing is guessed.

Formats, told by content: transformers' `trainer_state.json` (TRL), JSON lines (verl's file logger, W&B histories, flat
rows), verl's console output, CSV of W&B's and of TensorBoard's web page, TensorBoard's JSON and event files.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from upswing.errors import ConfigError
from upswing.view.run_folder import read_json_lines

ACCEPTED = (
    "an Upswing run folder, TRL's trainer_state.json or its output folder, JSON lines of metrics (verl's file logger, "
    "W&B history), verl's console output, CSV exports of W&B or TensorBoard, TensorBoard event files"
)
STEP_KEYS = ("train/global_step", "trainer/global_step", "training/global_step", "global_step", "step", "Step", "_step")
"""The trainer's own counter first: W&B's `_step` counts calls of log()."""

Row = Mapping[str, Any]
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_VERL_LINE = re.compile(r"(?<![\w/])step:(\d+) - (.+)")
_NUMBER = re.compile(r"(?:[a-z]\w*(?:\.\w+)*\()?([-+]?(?:(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?|inf|nan))\b", re.IGNORECASE)
_EVENTS = "*tfevents*"
_TAG = re.compile(r"(?:.*[-_])?tag-(.+)")


@dataclass(frozen=True, kw_only=True)
class ForeignLog:
    """A log of another framework, in Upswing's names."""

    kind: str
    """The format, for people."""
    framework: str
    """Whose names the keys are."""
    rows: tuple[dict[str, Any], ...]
    """`step` and signals, one row a step, oldest first."""
    used: Mapping[str, tuple[str, ...]]
    """Signal -> the keys that gave it."""
    ignored: tuple[str, ...]
    """Numeric keys that gave nothing."""
    notes: tuple[str, ...]
    """What to know about the keys used."""


def read_foreign(path: Path) -> ForeignLog:
    """Read a file or folder of another framework. Raises ConfigError, one line saying what is accepted."""
    kind, raw = _load(path)
    steps: dict[int, dict[str, float]] = defaultdict(dict)
    for row in raw:
        step = next((n for key in STEP_KEYS if (n := number(row.get(key))) is not None), None)
        if step is not None:
            values = ((key, number(value)) for key, value in row.items() if key not in STEP_KEYS)
            steps[int(step)].update({key: value for key, value in values if value is not None})
    keys = list(dict.fromkeys(key for values in steps.values() for key in values))
    if not keys:
        raise ConfigError(f"'{path}' was read as {kind}, but no row has a step and numbers; accepted: {ACCEPTED}")
    return _translated(path, kind, {step: steps[step] for step in sorted(steps)}, keys)


def number(value: Any) -> float | None:
    """A finite number, also one written as text or as numpy prints it (`np.float64(0.3)`); None for anything else."""
    if isinstance(value, str):
        found = _NUMBER.match(value.strip())
        value = float(found[1]) if found else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


# -- keys -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rule:
    pattern: re.Pattern[str]
    signal: str
    """Empty: known, and left out on purpose."""
    times: float
    zero_missing: bool
    note: str


def _rules() -> dict[str, list[_Rule]]:
    table = yaml.safe_load(resources.files("upswing.monitor").joinpath("foreign.yaml").read_text(encoding="utf-8"))
    return {
        of: [_rule(key, key if isinstance(keys, list) else keys[key]) for key in keys] for of, keys in table.items()
    }


def _rule(key: str, meaning: str | Mapping[str, Any]) -> _Rule:
    given: Mapping[str, Any] = {"is": meaning} if isinstance(meaning, str) else meaning
    # In the name of a file that TensorBoard exports, a tag's slashes are underscores.
    pattern = re.compile("(.+)".join(map(re.escape, key.split("*"))).replace("/", "[/_]"))
    signal, times, note = given.get("is", ""), given.get("times", 1.0), given.get("note", "")
    return _Rule(pattern, signal, times, given.get("zero") == "missing", note)


def _match(key: str, rules: Sequence[_Rule]) -> tuple[int, str] | None:
    """(place of the rule, signal) for a key as logged, or without what transformers puts in front of it."""
    for name in (key, re.sub("^train[/_]", "", key), re.sub("^eval[/_]", "eval_", key)):
        for place, rule in enumerate(rules):
            if found := rule.pattern.fullmatch(name):
                return place, rule.signal.replace("*", found[1] if found.groups() else "")
    return None


def _translated(path: Path, kind: str, steps: Mapping[int, Mapping[str, float]], keys: Sequence[str]) -> ForeignLog:
    """The rows under the names of the framework that knows most of the keys."""
    tables = _rules()
    matched = {name: {key: hit for key in keys if (hit := _match(key, rules))} for name, rules in tables.items()}
    framework = max(matched, key=lambda name: sum(bool(signal) for _, signal in matched[name].values()))
    rules, hits = tables[framework], matched[framework]
    best: dict[str, int] = {}
    for place, signal in sorted(hits.values()):
        best.setdefault(signal, place)
    used: dict[str, list[str]] = defaultdict(list)
    for key in sorted(hits):
        place, signal = hits[key]
        if signal and best[signal] == place:
            used[signal].append(key)
    if not used:
        shown = ", ".join(keys[:6]) + (", ..." if len(keys) > 6 else "")
        known = f"known are those of {', '.join(tables)}"
        how = "rename the columns to Upswing's signals, such as reward, entropy, sampled_tokens"
        raise ConfigError(f"'{path}' was read as {kind}, but none of its keys is known ({shown}); {known}: {how}")
    rows = []
    for step, values in steps.items():
        row: dict[str, Any] = {"step": step}
        for signal, sources in used.items():
            rule = rules[best[signal]]
            found = [values[key] for key in sources if key in values and (values[key] or not rule.zero_missing)]
            if found:
                row[signal] = rule.times * sum(found) / len(found)
        rows.append(row)
    taken = {key for sources in used.values() for key in sources}
    notes = dict.fromkeys(rules[place].note for key, (place, signal) in hits.items() if key in taken or not signal)
    return ForeignLog(
        kind=kind,
        framework=framework,
        rows=tuple(rows),
        used={signal: tuple(sources) for signal, sources in used.items()},
        ignored=tuple(key for key in keys if key not in taken),
        notes=tuple(note for note in notes if note),
    )


# -- formats ----------------------------------------------------------------------------------------------------------


def _load(path: Path) -> tuple[str, Iterator[Row] | Sequence[Row]]:
    """(format, rows as logged)."""
    if path.is_dir():
        return _from_folder(path)
    if not path.is_file():
        raise ConfigError(f"'{path}' isn't there; accepted: {ACCEPTED}")
    if path.match(_EVENTS):
        return _from_events(path)
    data = path.read_bytes()
    if b"\0" in data[:4096]:
        raise ConfigError(f"'{path}' isn't text; accepted: {ACCEPTED}")
    text = data.decode("utf-8-sig", errors="replace").strip()
    for read in (_from_json, _from_console, _from_csv):
        if found := read(path, text):
            return found
    json_like = "starts as JSON, but is cut or has no rows of metrics"
    why = json_like if text.startswith(("{", "[")) else "isn't a log that doctor knows" if text else "is empty"
    raise ConfigError(f"'{path}' {why}; accepted: {ACCEPTED}")


def _from_folder(folder: Path) -> tuple[str, Iterator[Row] | Sequence[Row]]:
    """What a folder holds: a trainer's state (of its last checkpoint), event files, exports to be put together."""
    checkpoints = sorted(folder.glob("checkpoint-*/trainer_state.json"), key=lambda p: (len(str(p)), p))
    for state in (folder / "trainer_state.json", *checkpoints[::-1]):
        if state.is_file():
            return _load(state)
    events = sorted({file.parent for file in folder.rglob(_EVENTS)})
    if len(events) > 1:
        raise ConfigError(f"'{folder}' has event files of several runs; name one: {', '.join(map(str, events[:6]))}")
    if events:
        return _from_events(events[0])
    exports = sorted([*folder.glob("*.csv"), *(p for p in folder.glob("*.json") if _TAG.fullmatch(p.stem))])
    logs = exports or sorted([*folder.glob("*.jsonl"), *folder.glob("*.log"), *folder.glob("*.txt")])
    if not logs or (len(logs) > 1 and not exports):
        found = f"{len(logs)} logs ({', '.join(p.name for p in logs[:6])}); name one" if logs else "no log"
        raise ConfigError(f"'{folder}' holds {found}; accepted: {ACCEPTED}")
    read = [_load(file) for file in logs]
    return read[0][0], [row for _, rows in read for row in rows]


def _from_json(path: Path, text: str) -> tuple[str, Sequence[Row]] | None:
    if not text.startswith(("{", "[")):
        return None
    try:
        value = json.loads(text)
    except ValueError:  # lines of JSON, of which the last may be cut
        rows = read_json_lines(path)
        return _json_rows(rows) if rows else None
    if isinstance(value, dict) and isinstance(value.get("log_history"), list):
        return "trainer_state.json of transformers", _dicts(value["log_history"])
    if isinstance(value, dict) and "_runtime" in value and path.suffix == ".json":
        raise ConfigError(f"'{path}' is a W&B summary, which holds last values only; export the run's history")
    if isinstance(value, list) and value and all(isinstance(point, list) and len(point) == 3 for point in value):
        return "JSON export of TensorBoard", [{"step": step, _tag(path): found} for _, step, found in value]
    found = _dicts(value if isinstance(value, list) else [value])
    return _json_rows(found) if found else None


def _json_rows(rows: Sequence[Row]) -> tuple[str, Sequence[Row]]:
    if any(isinstance(row.get("data"), dict) for row in rows):
        return "verl's file log", [{**row["data"], "step": row.get("step")} for row in rows if "data" in row]
    return ("W&B history" if any("_runtime" in row for row in rows) else "JSON rows of metrics"), rows


def _from_console(path: Path, text: str) -> tuple[str, Sequence[Row]] | None:
    """verl prints `step:12 - actor/entropy:0.3 - ...`, behind the name of a Ray actor in colour and a progress bar."""
    rows = []
    for line in _ANSI.sub("", text).splitlines():
        if found := _VERL_LINE.search(line):
            pairs = (part.strip().rpartition(":") for part in found[2].split(" - "))
            rows.append({**{key: value for key, _, value in pairs if key}, "step": found[1]})
    return ("verl's console output", rows) if rows else None


def _from_csv(path: Path, text: str) -> tuple[str, Sequence[Row]] | None:
    try:
        header, *lines = csv.reader(text.splitlines())
    except (ValueError, csv.Error):
        return None
    if [name.strip().lower() for name in header] == ["wall time", "step", "value"]:
        tag = _tag(path)
        return "CSV export of TensorBoard", [{"step": line[1], tag: line[2]} for line in lines if len(line) == 3]
    if not set(STEP_KEYS) & set(header):
        return None
    names = {column: column.rpartition(" - ") for column in header if not column.endswith(("__MIN", "__MAX"))}
    runs = sorted({run for run, _, _ in names.values() if run})
    if len(runs) > 1:
        raise ConfigError(f"'{path}' holds {len(runs)} runs ({', '.join(runs[:6])}); export one run alone")
    cells = (
        [(names[name][2], cell) for name, cell in zip(header, row, strict=False) if name in names] for row in lines
    )
    return ("CSV export of W&B" if runs else "CSV of metrics"), list(map(dict, cells))


def _tag(path: Path) -> str:
    """TensorBoard's exports name their tag in the file name only: `run-NAME-tag-TAG.csv`."""
    found = _TAG.fullmatch(path.stem)
    if not found:
        raise ConfigError(f"'{path}' is a TensorBoard export without its tag; call it run-NAME-tag-TAG{path.suffix}")
    return found[1]


def _from_events(path: Path) -> tuple[str, Sequence[Row]]:
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError:
        how = "install it with: pip install 'upswing[tensorboard]', or export the scalars as CSV"
        raise ConfigError(f"'{path}': TensorBoard event files need the tensorboard package; {how}") from None
    log = EventAccumulator(str(path), size_guidance={"scalars": 0})
    log.Reload()
    rows = [{"step": event.step, tag: event.value} for tag in log.Tags()["scalars"] for event in log.Scalars(tag)]
    return "TensorBoard event files", rows


def _dicts(values: Sequence[Any]) -> list[Row]:
    return [value for value in values if isinstance(value, dict)]
