"""The Episode that verifiers read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from upswing.trajectory.types import Message, Outcome, StopReason, Task, ToolRecord, Trajectory


@dataclass(frozen=True, kw_only=True)
class Episode:
    """A read-only view of a finished trajectory. A verifier is a function whose parameters are named like these
    fields, such as `def correct(answer, gold): ...`; it returns a float, a bool, None (could not score) or a Score.
    A task without a gold is refused under a verifier that asks for it, unless by a parameter with a default."""

    task: Task
    messages: tuple[Message, ...]
    answer: str | None
    """The final answer, or None when the agent gave none."""
    gold: tuple[str, ...]
    """The task's accepted answers."""
    data: Mapping[str, Any]
    """The task's data."""
    tool_records: tuple[ToolRecord, ...]
    state: Mapping[str, Any]
    """The environment's final state."""
    outcome: Outcome
    stop_reason: StopReason
    num_turns: int
    env_reward: float = 0.0

    @classmethod
    def of(cls, trajectory: Trajectory) -> Episode:
        """The view of a trajectory (`state['env_reward']` carries the environment's own reward)."""
        return cls(
            task=trajectory.task,
            messages=trajectory.messages,
            answer=trajectory.answer,
            gold=trajectory.task.gold,
            data=trajectory.task.data,
            tool_records=trajectory.tool_records,
            state=trajectory.state,
            outcome=trajectory.outcome,
            stop_reason=trajectory.stop_reason,
            num_turns=trajectory.num_turns,
            env_reward=float(trajectory.state.get("env_reward", 0.0)),
        )
