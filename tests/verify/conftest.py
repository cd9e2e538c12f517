"""A finished episode to score."""

import pytest

from upswing.trajectory.types import Message, Outcome, StopReason, Task
from upswing.verify.base import Episode


@pytest.fixture
def episode():
    def make(answer="Paris", gold=("Paris",), **changes):
        task = Task(
            id="t", messages=(Message(role="user", content="Capital of France?"),), gold=gold, data={"level": 2}
        )
        fields = {
            "task": task,
            "messages": task.messages,
            "answer": answer,
            "gold": gold,
            "data": task.data,
            "tool_records": (),
            "state": {},
            "outcome": Outcome.COMPLETED,
            "stop_reason": StopReason.ANSWERED,
            "num_turns": 2,
        }
        return Episode(**{**fields, **changes})

    return make
