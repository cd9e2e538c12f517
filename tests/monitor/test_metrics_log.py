"""The run's series survive NaN, kills, resumes and several writers."""

from __future__ import annotations

import json
import math
import threading

import numpy as np
import pytest
import torch

from upswing.monitor.metrics import MetricsLog


def test_every_line_is_valid_json_without_nan(tmp_path):
    log = MetricsLog(tmp_path)
    log.append("rl", 1, {"reward": math.nan, "kl": math.inf, "list": [1.0, -math.inf], "nested": {"x": math.nan}})
    text = (tmp_path / "metrics.jsonl").read_text()
    row = json.loads(text, parse_constant=lambda name: pytest.fail(f"bare {name}"))
    assert row["reward"] is None and row["kl"] is None
    assert row["list"] == [1.0, None] and row["nested"] == {"x": None}
    assert (row["stage"], row["step"]) == ("rl", 1) and row["time"] > 1e9


def test_numpy_and_torch_numbers_are_numbers(tmp_path):
    log = MetricsLog(tmp_path)
    log.append(
        "rl", 1, {"a": np.float32(0.5), "b": torch.tensor(2.0), "c": np.int64(3), "d": np.array([1, 2]), "e": True}
    )
    (row,) = log.read()
    assert (row["a"], row["b"], row["c"], row["d"], row["e"]) == (0.5, 2.0, 3, [1, 2], True)


def test_reserved_names_are_refused(tmp_path):
    with pytest.raises(ValueError, match="'step'"):
        MetricsLog(tmp_path).append("rl", 1, {"step": 5})


def test_a_line_cut_by_a_kill_is_skipped_and_repaired(tmp_path):
    log = MetricsLog(tmp_path)
    log.append("rl", 1, {"reward": 0.1})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"stage": "rl", "step": 2, "rew')
    assert [row["step"] for row in log.read()] == [1]
    again = MetricsLog(tmp_path)
    again.append("rl", 2, {"reward": 0.2})
    assert [row["step"] for row in again.read()] == [1, 2]


def test_truncate_after_forgets_what_will_be_done_again(tmp_path):
    log = MetricsLog(tmp_path)
    for stage, step in [("sft", 1), ("sft", 2), ("rl", 1), ("rl", 2), ("rl", 3), ("eval", 0)]:
        log.append(stage, step, {"x": step})
    assert log.truncate_after("rl", 2) == 2
    assert [(row["stage"], row["step"]) for row in log.read()] == [("sft", 1), ("sft", 2), ("rl", 1), ("rl", 2)]
    assert log.truncate_after("rl", 2) == 0
    assert log.truncate_after("rl", -1) == 2
    assert log.truncate_after("unknown", 0) == 0
    assert [row["stage"] for row in log.read()] == ["sft", "sft"]
    assert not list(tmp_path.glob("*.tmp"))


def test_rows_of_one_stage(tmp_path):
    log = MetricsLog(tmp_path)
    log.append("sft", 1, {})
    log.append("rl", 1, {})
    assert [row["stage"] for row in log.read("rl")] == ["rl"]
    assert MetricsLog(tmp_path / "new" / "run").read() == []


def test_writers_in_threads_never_mix_their_lines(tmp_path):
    log = MetricsLog(tmp_path)

    def write(name: str) -> None:
        for step in range(200):
            log.append(name, step, {"text": name * 200})

    threads = [threading.Thread(target=write, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows = log.read()
    assert len(rows) == 800
    assert all(row["text"] == row["stage"] * 200 for row in rows)


def test_events_and_findings_stay_on_one_line(tmp_path):
    log = MetricsLog(tmp_path)
    log.event("first\nsecond", level="warning")
    log.finding("entropy fell", evidence="1.2 -> 0.1", remedy="raise clip_high", stage="rl", step=7)
    (line,) = (tmp_path / "events.log").read_text().splitlines()
    assert line.split(" ", 2)[1:] == ["warning", "first second"]
    finding = json.loads((tmp_path / "findings.jsonl").read_text())
    assert (finding["title"], finding["stage"], finding["step"]) == ("entropy fell", "rl", 7)
