"""What a long step tells the person, or the program, that waits for it.

One of two formats, never both on one stream: live bars on a terminal, JSON lines elsewhere (one object an event).
`quiet` keeps warnings and tables only, in the same format.
"""

from __future__ import annotations

import json
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich import progress as bars
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from upswing.view.run_folder import json_safe


class TaskProgress:
    """The handle of one running task."""

    def __init__(
        self, name: str, total: float | None, unit: str, done: float, clock: Callable[[], float], show: Show
    ) -> None:
        self.name, self.total, self.unit, self.done = name, total, unit, done
        self.values: dict[str, Any] = {}
        self._clock, self._show = clock, show
        self._started_s, self._done_before = clock(), done

    def advance(self, amount: float = 1, **values: Any) -> None:
        """`amount` more units are done; `values` (reward=.4) replace what is shown beside the bar."""
        self.update(self.done + amount, **values)

    def update(self, done: float | None = None, *, total: float | None = None, **values: Any) -> None:
        """Set how far it is, or the total, or only the values."""
        self.done = self.done if done is None else done
        self.total = self.total if total is None else total
        self.values.update(values)
        self._show(self)

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._started_s

    @property
    def rate(self) -> float | None:
        """Units a second since the start; None before the first unit."""
        done, elapsed_s = self.done - self._done_before, self.elapsed_s
        return done / elapsed_s if done > 0 and elapsed_s > 0 else None

    @property
    def left_s(self) -> float | None:
        """Seconds left at the mean rate so far; None when unknown."""
        rate = self.rate
        return None if rate is None or self.total is None else max(0.0, (self.total - self.done) / rate)


Show = Callable[[TaskProgress], None]


class Progress:
    """Reports tasks, notes, warnings and tables; `quiet`: only warnings and tables.

    `console` is standard output by default, and its file gets the JSON lines: `json_lines=None` writes them when it
    isn't a terminal, one a task in `min_interval_s` beside the first and the last. `clock`: seconds, monotonic.
    """

    def __init__(
        self,
        console: Console | None = None,
        *,
        json_lines: bool | None = None,
        quiet: bool = False,
        min_interval_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console = console or Console()
        self.json_lines = not self.console.is_terminal if json_lines is None else json_lines
        self.quiet = quiet
        self.min_interval_s = min_interval_s
        self._clock = clock
        self._lock = threading.RLock()
        self._bars: bars.Progress | None = None

    @contextmanager
    def task(self, name: str, total: float | None = None, unit: str = "", done: float = 0) -> Iterator[TaskProgress]:
        """Follow one step: `with progress.task("rl", total=20, unit="step") as t: t.advance(reward=.4)`.

        `done` units were done before, by the run that this one resumes: they count for the bar, not for the rate.
        """
        if self.quiet:
            yield TaskProgress(name, total, unit, done, self._clock, lambda task: None)
        elif self.json_lines:
            yield from self._json_task(name, total, unit, done)
        else:
            yield from self._bar_task(name, total, unit, done)

    def note(self, text: str) -> None:
        """Something worth saying once."""
        if not self.quiet:
            self._say("note", text, Text(text))

    def warn(self, text: str) -> None:
        """Something that a person should act on; shown even when quiet."""
        self._say("warning", text, Text.assemble(("warning: ", "bold yellow"), text))

    def _say(self, event: str, text: str, shown: Text) -> None:
        if self.json_lines:
            self._write({"event": event, "text": text})
        else:
            self.console.print(shown)

    def table(self, table: Table) -> None:
        """A table; shown even when quiet. JSON lines hold its columns and rows as text."""
        if self.json_lines:
            self._write({"event": "table", **_as_text(table)})
        else:
            self.console.print(table)

    def _write(self, event: dict[str, Any]) -> None:
        with self._lock:
            self.console.file.write(json.dumps(json_safe({**event, "time": round(time.time(), 3)})) + "\n")
            self.console.file.flush()

    def _json_task(self, name: str, total: float | None, unit: str, done: float) -> Iterator[TaskProgress]:
        last_s = -math.inf

        def write(kind: str, task: TaskProgress, **more: Any) -> None:
            known = {"event": kind, "task": name, "done": task.done, "total": task.total, "unit": unit}
            timing = {key: getattr(task, key) for key in ("elapsed_s", "rate", "left_s")}
            rounded = {key: None if value is None else round(value, 3) for key, value in timing.items()}
            self._write({**known, **rounded, "values": task.values, **more})

        def show(task: TaskProgress) -> None:
            nonlocal last_s
            if (now := self._clock()) - last_s >= self.min_interval_s:
                last_s = now
                write("progress", task)

        handle = TaskProgress(name, total, unit, done, self._clock, show)
        write("start", handle)
        try:
            yield handle
        except BaseException as error:
            write("end", handle, ok=False, error=type(error).__name__)
            raise
        write("end", handle, ok=True)

    def _bar_task(self, name: str, total: float | None, unit: str, done: float) -> Iterator[TaskProgress]:
        with self._lock:
            if self._bars is None:
                self._bars = _bar_display(self.console, self._clock)
                self._bars.start()
            display = self._bars
            shown: dict[str, Any] = {"unit": escape(unit), "speed": "", "values": ""}
            row = display.add_task(escape(name), total=total, completed=int(done), **shown)

        def show(task: TaskProgress) -> None:
            speed, values = speed_text(task.rate, unit), escape(_values_text(task.values))
            display.update(row, completed=task.done, total=task.total, speed=speed, values=values)

        try:
            yield TaskProgress(name, total, unit, done, self._clock, show)
        finally:
            with self._lock:
                display.stop_task(row)
                if len(display.task_ids) > 1:  # a step within another: its bar would stay and pile up
                    display.remove_task(row)
                else:
                    display.stop()
                    self._bars = None


def _bar_display(console: Console, clock: Callable[[], float]) -> bars.Progress:
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
        get_time=clock,
        speed_estimate_period=3600,  # a step may take longer than rich's 30 s
        redirect_stdout=console.file is sys.stdout,
        redirect_stderr=False,
    )


def speed_text(rate: float | None, unit: str) -> str:
    """`12.3 step/s`, or `28.1 s/step` for what takes longer than a second."""
    if not rate:
        return ""
    return f"{rate:.1f} {unit or 'it'}/s" if rate >= 1 else f"{1 / rate:.1f} s/{unit or 'it'}"


def _values_text(values: dict[str, Any]) -> str:
    """`reward 0.40  entropy 1.20`."""
    return "  ".join(f"{key} {f'{value:.3g}' if isinstance(value, float) else value}" for key, value in values.items())


def _as_text(table: Table) -> dict[str, Any]:
    """Title, columns and rows of a rich table as plain text."""

    def plain(cell: Any) -> str:
        return Text.from_markup(cell).plain if isinstance(cell, str) else str(cell)

    columns = [map(plain, column.cells) for column in table.columns]
    headers = [plain(column.header) for column in table.columns]
    return {"title": plain(table.title or ""), "columns": headers, "rows": list(zip(*columns, strict=True))}
