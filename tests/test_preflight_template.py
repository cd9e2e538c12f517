"""Pre-flight: a chat template that drops or refuses what the environment sends is found before anything is played."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from upswing.envs.base import AssistantMessage, Environment, Observation
from upswing.envs.geo_search import GeoSearch
from upswing.envs.tool_env import ToolEnv
from upswing.errors import ConfigError
from upswing.models.tiny import tiny_tokenizer
from upswing.preflight.checks import check_template
from upswing.trajectory.render import ChatRenderer
from upswing.trajectory.types import Message, Task

TEMPLATES = Path(__file__).parent / "templates"
TASK = Task(id="t", messages=(Message(role="user", content="2 and 3?"),))


def add(a: int, b: int) -> int:
    """Adds."""
    raise AssertionError("no tool runs")


class Hints(Environment):
    """Answers in a role of its own."""

    name = "hints"
    role: str = "tool"
    breaks: bool = False
    closed = 0

    def reset(self, task: Task, seed: int) -> Observation:
        return Observation(messages=task.messages)

    def step(self, message: AssistantMessage) -> Observation:
        if self.breaks:
            raise RuntimeError("broken")
        return Observation(messages=(Message(role=self.role, content="warmer"),))

    def close(self) -> None:
        Hints.closed += 1


async def check(template: str, env: Any, task: Task = TASK, **options: Any) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token = "<|endoftext|>"
    renderer = ChatRenderer(tokenizer, template=(TEMPLATES / f"{template}.jinja").read_text())
    await check_template(renderer, env, [task], timeout_s=5, **options)


@pytest.mark.parametrize("template", ["zephyr", "llama2", "gemma"])
@pytest.mark.parametrize("env", [Hints, lambda: ToolEnv([add], protocol="python"), lambda: ToolEnv([add])])
async def test_results_that_the_agent_would_not_see_are_found(template: str, env: Any) -> None:
    with pytest.raises(ConfigError, match=r"'(tool|system)' messages"):
        await check(template, env)


@pytest.mark.parametrize("template", ["zephyr", "llama2"])
async def test_an_environment_can_say_that_its_answers_are_a_tools(template: str) -> None:
    """One bad turn, as a check would play, ends the episode without any."""
    with pytest.raises(ConfigError, match="'tool' messages"):
        await check(template, lambda: GeoSearch(max_invalid=1))


@pytest.mark.parametrize("template", ["zephyr", "llama2", "gemma", "chatml"])
async def test_what_the_template_has_a_place_for_passes(template: str) -> None:
    closed = Hints.closed
    await check(template, lambda: Hints(role="user"))
    await check(template, lambda: Hints(breaks=True))  # its trajectories say so
    assert Hints.closed == closed + 2


async def test_tools_must_be_shown_by_the_template_the_system_message_or_a_server() -> None:
    await check("qwen3", lambda: ToolEnv([add]))
    with pytest.raises(ConfigError, match=r"doesn't show tools; set env\.args\.tools_in_system: true"):
        await check("chatml", lambda: ToolEnv([add]))
    await check("chatml", lambda: ToolEnv([add], tools_in_system=True))
    await check("chatml", lambda: ToolEnv([add]), shows_tools=False)


async def test_a_system_message_of_a_task_counts() -> None:
    opened = Task(id="s", messages=(Message(role="system", content="Be brief."), *TASK.messages))
    with pytest.raises(ConfigError, match=r"refuses 'system' messages \(System role not supported\)"):
        await check("gemma", lambda: Hints(role="user"), opened)
