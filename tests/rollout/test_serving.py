"""A served run is talked to as its environment talked to it in training: the engine sees the very same ids."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from rollout.test_sessions import letters
from trajectory.conftest import renderers, tokenizer  # noqa: F401
from upswing.cli.serve import manner_of
from upswing.engine.base import Sampling
from upswing.engine.scripted import ScriptedEngine
from upswing.envs import ToolEnv, environment_factory, tool
from upswing.errors import ConfigError
from upswing.recipe import load_recipe
from upswing.rollout.collect import Rollouts
from upswing.rollout.limits import Limits
from upswing.rollout.serving import Serving
from upswing.trajectory.types import Message, Score, Task, ToolCall

TINY = Path(__file__).parents[2] / "recipes" / "tiny.yaml"
LIMITS = Limits(turn_tokens=200, context_tokens=2000)


class Shop(ToolEnv):
    """Two calls and an answer, in any protocol."""

    system = "Be brief."

    @tool()
    def price(self, item: str) -> str:
        """Say what an item costs."""
        return f"{len(item)} euros"

    def tasks(self, split: str, seed: int = 0) -> Iterator[Task]:
        yield Task(id="t", messages=(Message(role="user", content="Tea and milk?"),))

    def said(self, task: Task) -> list[str]:
        calls = [self.parser.render([ToolCall(name="price", arguments={"item": item})]) for item in ("tea", "milk")]
        return [*calls, "<answer>7</answer>" if self.protocol == "tags" else "7"]


class Broken(Shop):
    def tasks(self, split: str, seed: int = 0) -> Iterator[Task]:
        raise OSError("no disk")


class Unjudged:
    async def score(self, episode: Any) -> Score:
        return Score(value=0.0)


def said_by_expert(env: Any, task: Task) -> list[str]:
    """Of lookup: an alias, which takes two calls."""
    policy, heard, lines = env.expert(task, random.Random(0)), list[Message](), list[str]()
    for result in (f"see {task.data['alias']}", task.gold[0], ""):
        lines.append(policy(tuple(heard)))
        heard.append(Message(role="tool", content=result))
    return lines


RUNS = {
    "tiny": ("lookup", {"alias_frac": 1.0}),
    "tags": (f"{__file__}:Shop", {"protocol": "tags"}),
    "hermes": (f"{__file__}:Shop", {"protocol": "hermes"}),
    "hermes, no place in the template": (f"{__file__}:Shop", {"protocol": "hermes", "tools_in_system": True}),
}


@pytest.mark.parametrize("forgets", [False, True], ids=["", "forgets"])
@pytest.mark.parametrize("run", RUNS)
async def test_a_client_plays_a_served_run_and_the_engine_sees_what_it_saw_in_training(
    renderers,  # noqa: F811
    tmp_path: Path,
    run: str,
    forgets: bool,
) -> None:
    name, args = RUNS[run]
    (tmp_path / "recipe.yaml").write_text(TINY.read_text())
    recipe = load_recipe(tmp_path, [f"env={json.dumps({'name': name, 'args': args})}"])
    renderer, make_env = renderers["qwen2_5"], environment_factory(name, args)
    end = renderer.end_of_turn_id()
    env: Any = make_env()
    task = next(env.tasks("train", 0))
    if name == "lookup":
        [(_, alias)] = [(k, v) for k, v in task.data["facts"].items() if v.startswith("see ")]
        lines = said_by_expert(env, Task(**{**vars(task), "data": {**task.data, "alias": alias.removeprefix("see ")}}))
    else:
        lines = env.said(task)
    lines = [f"Let me see. {line}" for line in lines[:-1]] + lines[-1:]
    # What is kept are ids; whoever has forgotten them has the text, which the tokenizer would cut in its own way.
    script = [[*renderer.encode(line), end] if forgets else letters(renderer, line) for line in lines]

    trained = ScriptedEngine(script)
    parts = Rollouts(
        make_env=make_env, rubric=Unjudged(), renderer=renderer, end_tokens=(end,), limits=LIMITS, engine=trained
    )
    [group] = await parts.groups([task], size=1, sampling=Sampling(), seed=0)
    assert group.trajectories[0].num_turns == 3, group.trajectories[0].error

    numbers, manner = count(), await asyncio.to_thread(manner_of, recipe)
    engine = ScriptedEngine(lambda *_: script[next(numbers)])
    serving = Serving(
        name="run",
        engine=engine,
        renderer=renderer,
        end_tokens=(end,),
        limits=LIMITS,
        protocol=manner.protocol,
        tools_in=manner.tools_in,
        system=manner.system,
    )
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app=serving.app()))
    client = openai.AsyncOpenAI(base_url="http://x/v1", api_key="none", http_client=http, max_retries=0)
    schemas: Any = [each.schema for each in env._tools.values()]
    await env.reset(task, 0)
    messages: list[Any] = [{"role": "user", "content": task.messages[0].content}]
    ids = set()
    for _ in range(3):
        serving._held = {} if forgets else serving._held
        found = await client.chat.completions.create(model="m", messages=messages, tools=schemas)
        reply = found.choices[0].message
        messages.append(reply)
        for call in reply.tool_calls or ():
            ids.add(call.id)
            assert reply.content and reply.content.strip() == "Let me see."
            result = await env._tools[call.function.name].call(json.loads(call.function.arguments), lambda: None)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    await client.close()
    assert len(ids) == 2 and reply.content == group.trajectories[0].answer
    assert [call.prompt for call in engine.calls] == [call.prompt for call in trained.calls]
    assert (manner.turn_tokens, manner.context_tokens) == (16, 256)


def test_a_run_whose_tools_are_told_in_words_has_a_system_message() -> None:
    recipe = load_recipe(TINY, [f"env={json.dumps({'name': f'{__file__}:Shop', 'args': {'protocol': 'python'}})}"])
    manner = manner_of(recipe)
    assert manner.system.startswith("Be brief.\n\nTools:") and manner.tools_in == "nowhere"
    manner = manner_of(recipe, tools_in="system", turn_tokens=8, context_tokens=None)
    assert (manner.system, manner.tools_in, manner.turn_tokens, manner.context_tokens) == ("", "system", 8, 256)


def test_a_system_message_that_all_tasks_share_is_the_environments() -> None:
    """A search agent knows its tag from there alone."""
    manner = manner_of(load_recipe(TINY.with_name("demo.yaml")))
    assert (manner.protocol, manner.tools_in) == ("tags", "nowhere")
    assert "<search>" in manner.system and "?" not in manner.system


def test_an_environment_that_opens_no_task_is_said_and_can_be_gone_round() -> None:
    recipe = load_recipe(TINY, [f"env={json.dumps({'name': f'{__file__}:Broken', 'args': {'protocol': 'tags'}})}"])
    with pytest.raises(ConfigError, match=r"--tools-in: environment .*OSError: no disk.*template, system, nowhere"):
        manner_of(recipe)
    assert manner_of(recipe, tools_in="system").protocol == "tags"


def test_an_agent_program_has_said_it_in_its_section() -> None:
    manner = manner_of(load_recipe(TINY.with_name("agent_openai.yaml")))
    assert (manner.protocol, manner.tools_in, manner.turn_tokens) == ("tags", "nowhere", 16)
