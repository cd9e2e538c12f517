"""An environment and a recipe of a user's own, for tests that need no model."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

# The suite says the same thing of the same code every time; `HYPOTHESIS_PROFILE=explore` looks for new counterexamples.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

ECHO_ENV = '''
from upswing.envs import AssistantMessage, Environment, Observation
from upswing.trajectory.types import Message, StopReason, Task, ToolCall, ToolRecord


class Echo(Environment):
    """Say the word; `look` shows it."""

    name = "echo"

    def __init__(self, word: str = "lima", has_expert: bool = True, broken: bool = False):
        self.word, self.has_expert, self.broken = word, has_expert, broken

    def tasks(self, split, seed=0):
        for index in range({"train": 3, "dev": 2, "test": 0}[split]):
            text = f"Say {self.word}-{seed}-{index}."
            yield Task(id=f"{split}-{index}", messages=(Message(role="user", content=text),),
                       gold=(f"{self.word}-{seed}-{index}",), split=split)

    def reset(self, task, seed):
        self.task = task
        return Observation(messages=task.messages)

    async def step(self, message):
        if self.broken:
            raise OSError("the disk is gone")
        if message.content == "look":
            record = ToolRecord(call=ToolCall(name="look"), result=self.task.gold[0], ok=True, turn=0)
            return Observation(messages=(Message(role="tool", name="look", content=self.task.gold[0]),),
                               tool_records=(record,))
        return Observation(done=True, stop_reason=StopReason.ANSWERED, answer=message.content, reward=0.25)

    def expert(self, task, rng):
        if not self.has_expert:
            raise NotImplementedError
        return lambda messages: task.gold[0] if messages[-1].role == "tool" else "look"


class Taskless(Echo):
    def tasks(self, split, seed=0):
        return Environment.tasks(self, split, seed)
'''

ECHO_RECIPE = """\
name: echo
model: tiny
env: echo_env.py:Echo
verifiers:
  - exact_match
  - {name: f1, weight: 0.5}
stages:
  - stage: sft
  - {stage: rl, steps: 2}
"""


@pytest.fixture
def echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Path of a recipe over the environment above; the current directory is its folder."""
    (tmp_path / "echo_env.py").write_text(ECHO_ENV)
    path = tmp_path / "echo.yaml"
    path.write_text(ECHO_RECIPE)
    monkeypatch.chdir(tmp_path)
    return path
