"""A turn that can't be read is invalid, and no call: not by the evaluation's figures and not by a batch's."""

from __future__ import annotations

import pytest

from upswing.evals.summary import record_of, summarize
from upswing.monitor.detectors.conduct import _repeats
from upswing.stages.rl_metrics import batch_metrics
from upswing.trajectory.types import Group, Outcome, StopReason, Task, ToolCall, ToolRecord, Trajectory

TASK = Task(id="t", messages=())
MALFORMED = ToolRecord(call=ToolCall(name=""), result="Invalid.", ok=False, turn=0)
CALL = ToolRecord(call=ToolCall(name="search", arguments={"query": "x"}), result="y", ok=True, turn=0)


def played(*records: ToolRecord) -> Trajectory:
    return Trajectory(
        id=f"t{len(records)}", task=TASK, branches=(), messages=(), outcome=Outcome.TRUNCATED,
        stop_reason=StopReason.INVALID_CALLS, tool_records=records, num_turns=len(records),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("records", "calls", "repeated", "invalid_frac"),
    [((MALFORMED, MALFORMED), 0, 0, 1.0), ((CALL, MALFORMED, MALFORMED, CALL), 2, 1, 0.5), ((CALL,), 1, 0, 0.0)],
)
def test_malformed_turns_are_no_calls(
    records: tuple[ToolRecord, ...], calls: int, repeated: int, invalid_frac: float
) -> None:
    one = played(*records)
    row, found = record_of(one), summarize([one], resamples=10)
    assert (row.tool_calls, row.duplicate_calls, row.malformed) == (calls, repeated, len(records) - calls)
    assert row.invalid_calls == row.malformed and _repeats(one) == repeated
    assert found.invalid_call_frac == invalid_frac and found.costs["tool_calls"].mean == calls
    values = batch_metrics([Group(task=TASK, trajectories=(one,))], [0.0])
    assert values["no_call_frac"] == (calls == 0) and values["tool_calls"] == calls
    assert values["invalid_call_frac"] == invalid_frac
    with_a_good_one = [Group(task=TASK, trajectories=(one, played(CALL, CALL)))]
    assert batch_metrics(with_a_good_one, [0.0, 0.0])["invalid_attempt_frac"] == (0.5 if invalid_frac else 0)
