"""The append-only series of a run: `metrics.jsonl`, `findings.jsonl` and `events.log`.

A line is written with one `write` to a file opened for appending, so readers and a kill see whole lines only. A tail
cut by a kill (or a full disk) is repaired when the log is opened again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from upswing.view.run_folder import EVENTS, FINDINGS, METRICS, append_line, json_safe, read_json_lines, replace_file


class MetricsLog:
    """The series of one run folder. Rows: `{stage, step, time, **values}`; several rows may share a stage and step."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = Path(run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        for name in (METRICS, FINDINGS, EVENTS):
            _drop_cut_tail(self.run_dir / name)

    def append(self, stage: str, step: int, values: Mapping[str, Any]) -> None:
        """Log values of one step. NaN and infinities are stored as null; `stage`, `step` and `time` are taken."""
        taken = {"stage", "step", "time"} & set(values)
        if taken:
            raise ValueError(f"metric named {sorted(taken)[0]!r}: stage, step and time are set by the log itself")
        row = {"stage": stage, "step": int(step), "time": round(time.time(), 3), **json_safe(values)}
        append_line(self.run_dir / METRICS, json.dumps(row, allow_nan=False))

    def read(self, stage: str | None = None) -> list[dict[str, Any]]:
        """All rows in the order written, or those of one stage."""
        rows = read_json_lines(self.run_dir / METRICS)
        return rows if stage is None else [row for row in rows if row.get("stage") == stage]

    def truncate_after(self, stage: str, step: int) -> int:
        """Forget what a resumed run will do again: everything from the first row of `stage` beyond `step` on, rows of
        other stages too, and the same of findings. `step=-1` restarts the stage. Returns the number of metric rows
        dropped; each file is replaced atomically."""
        self._truncate(FINDINGS, stage, step)
        if dropped := self._truncate(METRICS, stage, step):
            self.event(f"resume: dropped {dropped} metric rows after {stage} step {step}")
        return dropped

    def _truncate(self, name: str, stage: str, step: int) -> int:
        rows = read_json_lines(self.run_dir / name)
        cut = next((i for i, row in enumerate(rows) if row.get("stage") == stage and row.get("step", 0) > step), None)
        if cut is None:
            return 0
        replace_file(self.run_dir / name, "".join(json.dumps(row) + "\n" for row in rows[:cut]))
        return len(rows) - cut

    def finding(self, title: str, *, severity: str = "warning", **values: Any) -> None:
        """Record something that a person should look at: `stage`, `step`, `evidence`, `remedy`, a `Finding.row()`."""
        row = {"title": title, "severity": severity, **values, "time": round(time.time(), 3)}
        append_line(self.run_dir / FINDINGS, json.dumps(json_safe(row)))

    def event(self, text: str, level: str = "info") -> None:
        """One line in `events.log`: UTC time, level, text."""
        stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        append_line(self.run_dir / EVENTS, f"{stamp} {level} {text}")


def _drop_cut_tail(path: Path) -> None:
    """Remove what follows the last line break, left by a kill in the middle of a write."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        data = file.read()
        if data and not data.endswith(b"\n"):
            file.truncate(data.rfind(b"\n") + 1)
