"""The engine under multi-turn trajectories whose tools take time."""

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest

from upswing.engine.base import Completion, Sampling
from upswing.envs.base import AssistantMessage, Environment, Observation
from upswing.models.load import LoadedModel
from upswing.rollout.collect import Rollouts
from upswing.rollout.limits import Limits
from upswing.trajectory.render import ChatRenderer
from upswing.trajectory.types import Message, Outcome, Score, Task
from upswing.verify.base import Episode

from .conftest import MakeEngine

TURNS = 8


class Rubric:
    async def score(self, episode: Episode) -> Score:
        return Score(value=0.0)


@pytest.mark.parametrize(("max_slots", "size"), [(4, 3), (1, 2), (2, 5)])
async def test_a_running_tool_holds_up_nobody_else(
    make_engine: MakeEngine, tiny: LoadedModel, max_slots: int, size: int
) -> None:
    """The first tool call returns only once the others have sampled 10 tokens meanwhile: it would hang, and its
    trajectory error, if the engine stood still for it, or if with fewer slots than trajectories it kept its slot."""
    engine = make_engine(max_slots=max_slots)
    waited: list[int] = []

    class Tool(Environment):
        def reset(self, task: Task, seed: int) -> Observation:
            self.turns = 0
            return Observation(messages=task.messages)

        def step(self, message: AssistantMessage) -> Observation:
            self.turns += 1
            if not waited:
                before = engine.stats.decode_tokens
                waited.append(before)
                ends = time.monotonic() + 10
                while engine.stats.decode_tokens < before + 10:
                    assert time.monotonic() < ends, "nobody else sampled while this tool ran"
                    time.sleep(0.001)
            heard = Message(role="tool", content="heard you")
            return Observation(messages=(heard,), done=self.turns == TURNS, answer="x")

    renderer = ChatRenderer(tiny.tokenizer)
    parts = Rollouts(
        make_env=Tool,
        rubric=Rubric(),
        renderer=renderer,
        # The random model says nothing that ends a turn: one token in eight shall.
        end_tokens=(*range(20, 928, 8), renderer.end_of_turn_id()),
        limits=Limits(turn_tokens=200, context_tokens=1900, env_timeout_s=15.0),
        engine=engine,
        max_concurrent=size,
        max_retries=0,
    )
    task = Task(id="t", messages=(Message(role="user", content="How many?"),))
    [group] = await parts.groups([task], size=size, sampling=Sampling(temperature=3.0), seed=0)
    assert [(t.outcome, t.error) for t in group.trajectories] == [(Outcome.COMPLETED, None)] * size
    assert waited


async def test_no_token_is_prefilled_twice_across_turns_of_a_group(make_engine: MakeEngine) -> None:
    """Four trajectories of one 60-token prompt, three turns each, tools of different lengths in between."""
    engine = make_engine(max_slots=4)
    prompt = list(range(100, 160))
    sampled = observed = 0

    async def play(i: int) -> None:
        nonlocal sampled, observed
        history: list[int] = [*prompt]
        sampling: Any = Sampling(max_tokens=9, temperature=3.0)
        for turn in range(3):
            done: Completion = await engine.generate(history, replace(sampling, seed=10 * i + turn), session=f"s{i}")
            sampled += len(done.tokens)
            if turn < 2:
                heard = [300 + 40 * i + turn] * (5 + 3 * i + turn)
                observed += len(heard)
                history += [*done.tokens, *heard]
                await asyncio.sleep(0.002 * i)

    await asyncio.gather(*(play(i) for i in range(4)))
    stats = engine.stats
    # The prompt once; what tools said; and each turn's last sampled token, whose keys nobody needed until the next turn
    # began.
    assert stats.prefill_tokens == 60 + observed + 4 * 2
    assert stats.decode_tokens == sampled - 4 * 3
    assert (stats.evictions, stats.preemptions) == (0, 0)
