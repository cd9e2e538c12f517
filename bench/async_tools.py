"""Rollouts whose trajectories don't wait for each other, against a batch that takes its turns together.

    python bench/async_tools.py [--quick]

Batches of 64 trajectories of three turns, each turn a completion of log-normal length (median 30 tokens) and a tool
call of log-normal time with a heavy tail (median 1 s, mean 3 s, one in a hundred above 33 s). Both arms run Upswing's
own loop (`Rollouts`, its environments and renderer) in real time with the same draws and with 64 trajectories in
play. In the synchronous arm a batch takes its turns together: nobody's next turn begins before everybody's tools have
answered, and no batch before the last one has ended. In the asynchronous one a trajectory waits for nobody, and the
next batch's begin where others end. The engine is simulated at the cost that the embedded engine has for SmolLM2-135M
on this machine, measured first (a step with one completion, and more for each further one); everything is `SPEEDUP`
times as fast.

`async_vs_sync`: synchronous / asynchronous rollout time of all batches, median over rounds A B A B.
`one_batch`: the same where only one batch is played, so that nothing is refilled. `fraction_of_bound`: what the
simulator, which knows no overhead, says of the asynchronous arm, over what it took.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from common import Figure, describe_machine, finish
from upswing.engine.base import Capabilities, Completion, FinishReason, Sampling
from upswing.engine.torch import TorchEngine
from upswing.envs.base import AssistantMessage, Environment, Observation
from upswing.models.load import load_model
from upswing.models.tiny import tiny_tokenizer
from upswing.rollout.collect import Rollouts
from upswing.rollout.limits import Limits
from upswing.rollout.simulate import Costs, SimulatedEngine, Turn, run_virtual
from upswing.trajectory.render import ChatRenderer
from upswing.trajectory.types import Message, StopReason, Task
from upswing.verify import Rubric

TRAJECTORIES, TURNS, BATCHES = 64, 3, 4
TOKENS, TOKEN_SPREAD = 30, 0.4
TOOL_S, TOOL_SPREAD = 1.0, 1.5
RESULT_TOKENS = 8
SPEEDUP = 20.0


def measured_costs() -> Costs:
    """Of the embedded engine: seconds of a decoding step with 1 and with 64 completions."""
    loaded = load_model("smollm2-135m")
    engine = TorchEngine.from_model(loaded.model, tokenizer=loaded.tokenizer, max_slots=TRAJECTORIES)

    async def seconds(rows: int, tokens: int) -> float:
        prompts = [[5 + i, 6, 7, 8] for i in range(rows)]
        began = time.perf_counter()
        await asyncio.gather(*(engine.generate(p, Sampling(max_tokens=tokens, seed=i)) for i, p in enumerate(prompts)))
        return (time.perf_counter() - began) / tokens

    async def both() -> tuple[float, float]:
        await seconds(8, 4)
        found = [(await seconds(1, 24), await seconds(TRAJECTORIES, 12)) for _ in range(3)]
        await engine.close()
        return statistics.median(one for one, _ in found), statistics.median(many for _, many in found)

    one, many = asyncio.run(both())
    row = max(0.0, many - one) / (TRAJECTORIES - 1)
    return Costs(step_s=one, row_s=row, prefill_token_s=row, train_token_s=0.0)


def draw(seed: int, batches: int) -> list[list[Turn]]:
    rng = random.Random(seed)
    return [
        [
            Turn(
                new_tokens=RESULT_TOKENS,
                sampled_tokens=max(2, round(TOKENS * rng.lognormvariate(0, TOKEN_SPREAD))),
                tool_s=TOOL_S * rng.lognormvariate(0, TOOL_SPREAD),
            )
            for _ in range(TURNS)
        ]
        for _ in range(TRAJECTORIES * batches)
    ]


class CostEngine:
    """Samples nothing, at the cost of sampling; `plan` says how long each trajectory's turns are."""

    capabilities = Capabilities()

    def __init__(self, plan: Sequence[Sequence[Turn]], costs: Costs, tokenizer: Any, end: int) -> None:
        self.plan, self.end = plan, end
        self.letter = tokenizer("a")["input_ids"][0]
        self.engine = SimulatedEngine(costs, TRAJECTORIES)
        self.turn: dict[str | None, int] = {}

    async def generate(self, prompt: Sequence[int], sampling: Sampling, *, session: str | None = None) -> Completion:
        number = self.turn[session] = self.turn.get(session, -1) + 1
        turn = self.plan[int(str(session).split("/")[0])][number]
        await self.engine.generate(turn)
        tokens = (self.letter,) * (turn.sampled_tokens - 1) + (self.end,)
        told = (-0.5,) * len(tokens)
        return Completion(
            tokens=tokens, engine_logprobs=told, policy_version=(0,) * len(tokens), finish_reason=FinishReason.STOP
        )

    def release(self, session: str) -> None:
        self.turn.pop(session, None)

    async def update_weights(self, weights: Any, version: int) -> None: ...

    async def close(self) -> None: ...


class Tools(Environment):
    """Each turn waits for its tool; with a barrier, for everybody's."""

    plan: Sequence[Sequence[Turn]] = ()
    barrier: asyncio.Barrier | None = None

    def reset(self, task: Task, seed: int) -> Observation:
        self.turns, self.number = 0, int(task.id)
        return Observation(messages=task.messages)

    async def step(self, message: AssistantMessage) -> Observation:
        turn, self.turns = self.plan[self.number][self.turns], self.turns + 1
        await asyncio.sleep(turn.tool_s)
        if self.barrier is not None:
            await self.barrier.wait()
        if self.turns == TURNS:
            return Observation(done=True, stop_reason=StopReason.ENV_DONE)
        return Observation(messages=(Message(role="tool", content="b" * RESULT_TOKENS),))


async def rollout_s(plan: Sequence[Sequence[Turn]], costs: Costs, *, together: bool) -> float:
    """Real seconds of all batches."""
    tokenizer = tiny_tokenizer()
    renderer = ChatRenderer(tokenizer)
    end = renderer.end_of_turn_id()
    Tools.plan, Tools.barrier = plan, asyncio.Barrier(TRAJECTORIES) if together else None
    rollouts = Rollouts(
        make_env=Tools,
        rubric=Rubric([("none", lambda num_turns: float(num_turns), 1.0)]),
        renderer=renderer,
        end_tokens=(end,),
        limits=Limits(turn_tokens=512, context_tokens=8192),
        engine=CostEngine(plan, costs, tokenizer, end),
        max_concurrent=TRAJECTORIES,
        max_retries=0,
    )
    tasks = [Task(id=str(i), messages=(Message(role="user", content="c" * 8),)) for i in range(len(plan))]
    size = TRAJECTORIES if together else len(tasks)
    began = time.perf_counter()
    played = []
    for first in range(0, len(tasks), size):
        played += await rollouts.singles(tasks[first : first + size], sampling=Sampling(max_tokens=512), seed=0)
    seconds = time.perf_counter() - began
    if any(t.num_turns != TURNS for t in played):
        raise RuntimeError(f"a trajectory broke: {next(t.error for t in played if t.num_turns != TURNS)}")
    return seconds


async def ideal(plan: Sequence[Sequence[Turn]], costs: Costs) -> float:
    """Virtual seconds of the asynchronous arm without any overhead."""
    engine, gate = SimulatedEngine(costs, TRAJECTORIES), asyncio.Semaphore(TRAJECTORIES)

    async def one(turns: Sequence[Turn]) -> None:
        async with gate:
            for turn in turns:
                await engine.generate(turn)
                await asyncio.sleep(turn.tool_s)

    await asyncio.gather(*map(one, plan))
    return asyncio.get_running_loop().time()


def faster(costs: Costs, plan: Sequence[Sequence[Turn]]) -> tuple[Costs, list[list[Turn]]]:
    """Both at SPEEDUP times the speed."""
    quick = replace(
        costs,
        step_s=costs.step_s / SPEEDUP,
        row_s=costs.row_s / SPEEDUP,
        prefill_token_s=costs.prefill_token_s / SPEEDUP,
    )
    return quick, [[replace(turn, tool_s=turn.tool_s / SPEEDUP) for turn in turns] for turns in plan]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two rounds")
    args = parser.parse_args()
    print(describe_machine(("upswing", "torch")))
    measured = measured_costs()
    print(f"engine: a step takes {measured.step_s:.4f} s, and {measured.row_s:.5f} s more a further completion")
    torch.set_num_threads(1)
    ratios, single, fractions, seconds = [], [], [], []
    for number in range(2 if args.quick else 5):
        costs, plan = faster(measured, draw(number, BATCHES))
        apart = asyncio.run(rollout_s(plan, costs, together=False))
        together = asyncio.run(rollout_s(plan, costs, together=True))
        ratios.append(together / apart)
        fractions.append(run_virtual(ideal(plan, costs)) / apart)
        seconds.append((together * SPEEDUP, apart * SPEEDUP))
        one = plan[:TRAJECTORIES]
        alone = asyncio.run(rollout_s(one, costs, together=False))
        single.append(asyncio.run(rollout_s(one, costs, together=True)) / alone)
    figures = {
        "async_vs_sync": Figure(statistics.median(ratios), 2.1, "higher", (min(ratios), max(ratios))),
        "fraction_of_bound": Figure(statistics.median(fractions), 0.9, "higher", (min(fractions), max(fractions))),
        "one_batch": Figure(statistics.median(single), None, "higher", (min(single), max(single))),
        "sync_seconds": Figure(statistics.median(one for one, _ in seconds), None, "lower"),
        "async_seconds": Figure(statistics.median(one for _, one in seconds), None, "lower"),
    }
    return finish("async_tools", args.quick, figures)


if __name__ == "__main__":
    sys.exit(main())
