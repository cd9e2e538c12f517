"""An environment and verifiers for workers: they import no torch, so that a worker starts soon."""

import os
import signal
import time
from pathlib import Path
from typing import Any

from upswing.envs.base import AssistantMessage, Environment, Observation
from upswing.trajectory.types import Message, StopReason, Task, ToolCall, ToolRecord

SECRET = "broken"


class Unreadable:
    """Is sent, but can't be received."""

    def __reduce__(self) -> Any:
        return refuse, ()


def refuse() -> None:
    raise ValueError("nobody reads me")


class Counting(Environment):
    """A tool turn, then an answer. `dies_at`: a file; the process that finds it takes it, and dies."""

    name = "counting"
    dies_at: str | None = None

    def tasks(self, split: str, seed: int = 0) -> Any:
        for number in range(10_000):
            yield Task(id=f"{split}{number}", messages=(Message(role="user", content=f"say {number % 7}"),))

    def reset(self, task: Task, seed: int) -> Observation:
        if task.data.get(SECRET):
            raise OSError("the disk is gone")
        self.turns, self.odd = 0, task.data.get("odd")
        return Observation(messages=task.messages)

    def step(self, message: AssistantMessage) -> Observation:
        if self.dies_at is not None:
            try:
                Path(self.dies_at).rename(f"{self.dies_at}.taken")
            except FileNotFoundError:
                pass
            else:
                os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(60)
        self.turns += 1
        if self.turns == 1:
            record = ToolRecord(call=ToolCall(name="count"), result="ok", ok=True, turn=0)
            seen = Message(role="tool", content=str(len(message.content) % 2))
            return Observation(messages=(seen,), tool_records=(record,))
        return Observation(done=True, stop_reason=StopReason.ANSWERED, answer=message.content)

    def state(self) -> dict[str, Any]:
        return {"turns": self.turns, "pid": os.getpid(), **({"odd": Unreadable()} if self.odd else {})}


def even(messages: tuple[Message, ...]) -> float:
    return 1.0 - sum(map(ord, messages[-1].content)) % 2


def here() -> float:
    """Which process scores."""
    return float(os.getpid())
