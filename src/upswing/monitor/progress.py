"""What a long step tells the person, or the program, that waits for it.

One of two formats, never both on one stream: live bars on a terminal, JSON lines elsewhere (one object an event).
`quiet` keeps warnings and tables only, in the same format.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any

from rich import progress as bars
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from upswing.view.run_folder import json_safe


class TaskProgress:
    """The handle of one running task."""

    def __init__(self, name: str, total: float | None, unit: str, show: Callable[[TaskProgress], None], now: float):
        self.name, self.total, self.unit = name, total, unit
        self.done: float = 0
        self.values: dict[str, Any] = {}
        self.started_s = now
        self._show = show

    def advance(self, amount: float = 1, **values: Any) -> None:
        """`amount` more units are done; `values` (reward=.4) replace what is shown beside the bar."""
        self.update(self.done + amount, **values)

    def update(self, done: float | None = None, *, total: float | None = None, **values: Any) -> None:
        """Set how far it is, or the total, or only the values."""
        self.done = self.done if done is None else done
        self.total = self.total if total is None else total
        self.values.update(values)
        self._show(self)

    def rate(self, now: float) -> float | None:
        """Units a second since the start; None before the first unit."""
        elapsed_s = now - self.started_s
        return self.done / elapsed_s if self.done and elapsed_s > 0 else None

    def left_s(self, now: float) -> float | None:
        """Seconds left at the mean rate so far; None when unknown."""
        rate = self.rate(now)
        return None if rate is None or self.total is None else max(0.0, (self.total - self.done) / rate)


class Progress:
    """Reports tasks, notes, warnings and tables.

    Args:
        console: where rich output goes; its file gets the JSON lines. Default: standard output.
        json_lines: None decides by the console: JSON lines when it isn't a terminal.
        quiet: only warnings and tables.
        min_interval_s: at most one JSON line per task in this time; the first and last are always written.
        clock: seconds, monotonic (tests inject one).
    """

    def __init__(
        self,
        console: Console | None = None,
        *,
        file: IO[str] | None = None,
        json_lines: bool | None = None,
        quiet: bool = False,
        min_interval_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console = console or Console(file=file)
        self.json_lines = not self.console.is_terminal if json_lines is None else json_lines
        self.quiet = quiet
        self.min_interval_s = min_interval_s
        self._clock = clock
        self._lock = threading.RLock()
        self._bars: bars.Progress | None = None
        self._num_running = 0

    @contextmanager
    def task(self, name: str, total: float | None = None, unit: str = "") -> Iterator[TaskProgress]:
        """Follow one step: `with progress.task("rl", total=20, unit="step") as t: t.advance(reward=.4)`."""
        if self.quiet:
            yield TaskProgress(name, total, unit, lambda task: None, self._clock())
        elif self.json_lines:
            yield from self._json_task(name, total, unit)
        else:
            yield from self._bar_task(name, total, unit)

    def note(self, text: str) -> None:
        """Something worth saying once."""
        if self.quiet:
            return
        if self.json_lines:
            self._write({"event": "note", "text": text})
        else:
            self.console.print(Text(text))

    def warn(self, text: str) -> None:
        """Something that a person should act on; shown even when quiet."""
        if self.json_lines:
            self._write({"event": "warning", "text": text})
        else:
            self.console.print(Text.assemble(("warning: ", "bold yellow"), text))

    def table(self, table: Table) -> None:
        """A table; shown even when quiet. JSON lines hold its columns and rows as text."""
        if self.json_lines:
            self._write({"event": "table", **table_as_dict(table)})
        else:
            self.console.print(table)

    def _write(self, event: dict[str, Any]) -> None:
        with self._lock:
            file = self.console.file
            file.write(json.dumps(json_safe({**event, "time": round(time.time(), 3)}), ensure_ascii=False) + "\n")
            file.flush()

    def _json_task(self, name: str, total: float | None, unit: str) -> Iterator[TaskProgress]:
        last_s = -float("inf")

        def event(kind: str, task: TaskProgress) -> dict[str, Any]:
            now = self._clock()
            known = {"event": kind, "task": name, "done": task.done, "total": task.total, "unit": unit}
            timing = {"elapsed_s": now - task.started_s, "rate": task.rate(now), "left_s": task.left_s(now)}
            rounded = {key: None if value is None else round(value, 3) for key, value in timing.items()}
            return {**known, **rounded, "values": task.values}

        def show(task: TaskProgress) -> None:
            nonlocal last_s
            now = self._clock()
            if now - last_s >= self.min_interval_s:
                last_s = now
                self._write(event("progress", task))

        handle = TaskProgress(name, total, unit, show, self._clock())
        self._write(event("start", handle))
        try:
            yield handle
        except BaseException as error:
            self._write({**event("end", handle), "ok": False, "error": type(error).__name__})
            raise
        self._write({**event("end", handle), "ok": True})

    def _bar_task(self, name: str, total: float | None, unit: str) -> Iterator[TaskProgress]:
        with self._lock:
            display = self._bars = self._bars or _bar_display(self.console)
            self._num_running += 1
            if self._num_running == 1:
                display.start()
            row = display.add_task(escape(name), total=total, unit=escape(unit), speed="", values="")

        def show(task: TaskProgress) -> None:
            display.update(
                row,
                completed=task.done,
                total=task.total,
                speed=speed_text(task.rate(self._clock()), unit),
                values=escape(values_text(task.values)),
            )

        handle = TaskProgress(name, total, unit, show, self._clock())
        try:
            yield handle
        finally:
            with self._lock:
                display.stop_task(row)
                self._num_running -= 1
                if self._num_running == 0:
                    display.stop()
                    self._bars = None


def _bar_display(console: Console) -> bars.Progress:
    return bars.Progress(
        bars.TextColumn("[bold]{task.description}"),
        bars.BarColumn(bar_width=24),
        bars.MofNCompleteColumn(),
        bars.TextColumn("{task.fields[unit]}"),
        bars.TextColumn("[dim]{task.fields[speed]}"),
        bars.TimeElapsedColumn(),
        bars.TextColumn("[dim]left"),
        bars.TimeRemainingColumn(),
        bars.TextColumn("[cyan]{task.fields[values]}"),
        console=console,
        redirect_stdout=console.file is sys.stdout,
        redirect_stderr=False,
    )


def speed_text(rate: float | None, unit: str) -> str:
    """`12.3 step/s`, or `28.1 s/step` for what takes longer than a second."""
    if not rate:
        return ""
    return f"{rate:.1f} {unit or 'it'}/s" if rate >= 1 else f"{1 / rate:.1f} s/{unit or 'it'}"


def values_text(values: dict[str, Any]) -> str:
    """`reward 0.40  entropy 1.20`."""
    shown = ((key, f"{value:.3g}" if isinstance(value, float) else str(value)) for key, value in values.items())
    return "  ".join(f"{key} {text}" for key, text in shown)


def table_as_dict(table: Table) -> dict[str, Any]:
    """Title, columns and rows of a rich table as plain text."""
    columns = [[_plain(cell) for cell in column.cells] for column in table.columns]
    return {
        "title": _plain(table.title or ""),
        "columns": [_plain(column.header) for column in table.columns],
        "rows": [list(row) for row in zip(*columns, strict=True)],
    }


def _plain(cell: Any) -> str:
    if isinstance(cell, Text):
        return cell.plain
    return Text.from_markup(cell).plain if isinstance(cell, str) else str(cell)
