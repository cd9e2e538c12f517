"""Progress on a terminal is live bars, elsewhere JSON lines, and never a mixture."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console
from rich.table import Table

from upswing.monitor.progress import Progress, speed_text


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def lines(file: io.StringIO) -> list[dict]:
    return [json.loads(line) for line in file.getvalue().splitlines()]


def sample_table() -> Table:
    table = Table("", "[b]score[/b]", title="Results")
    table.add_row("base", "0.0 %")
    table.add_row("RL", "[green]94.0 %[/green]")
    return table


def test_a_file_gets_json_lines_only():
    file, clock = io.StringIO(), Clock()
    progress = Progress(Console(file=file), clock=clock)
    with progress.task("rl", total=4, unit="step") as task:
        for _ in range(4):
            clock.now += 2.0
            task.advance(reward=0.4)
        progress.note("half [way]")
        progress.warn("entropy fell")
    progress.table(sample_table())
    events = lines(file)
    assert [e["event"] for e in events] == ["start", *["progress"] * 4, "note", "warning", "end", "table"]
    assert events[2] | {"time": 0} == {
        "event": "progress", "task": "rl", "done": 2, "total": 4, "unit": "step", "elapsed_s": 4.0, "rate": 0.5,
        "left_s": 4.0, "values": {"reward": 0.4}, "time": 0,
    }  # fmt: skip
    assert events[-2]["ok"] is True and events[-2]["done"] == 4
    assert events[-1]["columns"] == ["", "score"]
    assert events[-1]["rows"] == [["base", "0.0 %"], ["RL", "94.0 %"]]
    assert "half [way]" in [e.get("text") for e in events]


def test_advances_are_throttled_but_first_and_last_are_written():
    file, clock = io.StringIO(), Clock()
    with Progress(Console(file=file), clock=clock).task("sft", total=1000) as task:
        for _ in range(1000):
            clock.now += 0.01
            task.advance(loss=1.0)
    events = lines(file)
    shown = [e["done"] for e in events if e["event"] == "progress"]
    assert shown[0] == 1
    assert 9 <= len(shown) <= 11
    assert events[-1]["event"] == "end" and events[-1]["done"] == 1000 and events[-1]["values"] == {"loss": 1.0}


def test_a_resumed_task_counts_its_rate_from_where_it_goes_on():
    file, clock = io.StringIO(), Clock()
    with Progress(Console(file=file), clock=clock).task("rl", total=100, done=50) as task:
        clock.now += 30.0
        task.advance()
    start, shown, _ = lines(file)
    assert (start["done"], start["rate"]) == (50, None)
    assert (shown["done"], shown["rate"], shown["left_s"]) == (51, 0.033, 1470.0)


def test_json_lines_are_ascii_so_that_no_terminal_encoding_stops_a_run():
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Progress(Console(file=file)).note("base → SFT \ud800")
    assert json.loads(file.buffer.getvalue())["text"] == "base → SFT \ud800"


def test_nan_values_are_null():
    file = io.StringIO()
    with Progress(Console(file=file)).task("rl") as task:
        task.advance(reward=float("nan"))
    assert "NaN" not in file.getvalue()
    assert lines(file)[1]["values"] == {"reward": None}
    assert lines(file)[1]["left_s"] is None


def test_a_failing_step_ends_as_not_ok_and_the_error_goes_on():
    file = io.StringIO()
    with pytest.raises(KeyError), Progress(Console(file=file)).task("rl", total=2) as task:
        task.advance()
        raise KeyError("x")
    assert lines(file)[-1]["ok"] is False and lines(file)[-1]["error"] == "KeyError"


@pytest.mark.parametrize("terminal", [True, False])
def test_quiet_keeps_warnings_and_tables(terminal):
    file = io.StringIO()
    progress = Progress(Console(file=file, force_terminal=terminal, width=80), quiet=True)
    with progress.task("rollouts", total=2) as task:
        task.advance()
        progress.note("a note")
    progress.warn("look here")
    progress.table(sample_table())
    text = file.getvalue()
    assert "look here" in text and "94.0 %" in text
    assert "a note" not in text and "rollouts" not in text
    if not terminal:
        assert [e["event"] for e in lines(file)] == ["warning", "table"]


def test_a_terminal_gets_bars_with_rate_and_values_and_no_json():
    file, clock = io.StringIO(), Clock()
    progress = Progress(Console(file=file, force_terminal=True, width=160), clock=clock)
    with progress.task("rl [fast]", total=4, unit="step") as task:
        clock.now += 56.0
        task.advance(2, reward=0.4125, entropy=1.2)
        with progress.task("rollouts", total=8) as inner:
            inner.advance(3)
        progress.note("note with [brackets]")
    text = file.getvalue()
    for piece in ("rl [fast]", "2/4", "28.0 s/step", "reward 0.412", "entropy 1.2", "rollouts", "note with [brackets]"):
        assert piece in text, piece
    assert '{"event"' not in text


def test_finished_inner_steps_do_not_pile_up_and_slow_steps_have_a_time_left():
    file, clock = io.StringIO(), Clock()
    progress = Progress(Console(file=file, force_terminal=True, width=160), clock=clock)
    with progress.task("rl", total=4, unit="step") as task:
        for step in range(2):
            with progress.task(f"rollouts {step}", total=8) as inner:
                inner.advance(8)
            clock.now += 45.0
            task.advance()
        file.truncate(0)
    last = file.getvalue()
    assert "rollouts" not in last and "2/4" in last and "0:01:30" in last


def test_bars_can_start_again_after_they_stopped():
    file = io.StringIO()
    progress = Progress(Console(file=file, force_terminal=True, width=120))
    for name in ("first", "second"):
        with pytest.raises(RuntimeError), progress.task(name, total=1):
            raise RuntimeError
    assert "second" in file.getvalue()


def test_update_sets_and_advance_adds():
    with Progress(Console(file=io.StringIO())).task("x", total=10) as task:
        task.update(4, reward=0.5)
        task.advance(2)
        task.update(total=20)
        assert (task.done, task.total, task.values) == (6, 20, {"reward": 0.5})


@pytest.mark.parametrize(("rate", "text"), [(None, ""), (2.0, "2.0 step/s"), (0.25, "4.0 s/step")])
def test_speed_in_the_readable_direction(rate, text):
    assert speed_text(rate, "step") == text
