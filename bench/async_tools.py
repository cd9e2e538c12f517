"""Rollouts whose trajectories don't wait for each other, against a batch that takes its turns together.

    python bench/async_tools.py [--quick]

Batches of 64 trajectories of three turns, each turn a completion of log-normal length (median 30 tokens) and a tool
call of log-normal time with a heavy tail (median 1 s, mean 3 s, one in a hundred above 33 s). All arms run Upswing's
own loop (`Rollouts`, its environments and renderer) in real time with the same draws and with 64 trajectories in
play. In the synchronous arm a batch takes its turns together: nobody's next turn begins before everybody's tools have
answered. The engine is simulated at the cost that the embedded engine has for SmolLM2-135M on this machine, measured
first (a step with one completion, and more for each further one); everything is `SPEEDUP` times as fast.

- `async_vs_sync`: rollout time of a batch, synchronous / asynchronous, where a trajectory waits for nobody. Batches A B
  A B; median over rounds.
- `fraction_of_bound`: what the simulator, which knows no overhead, says of the asynchronous arm, over what it took.
- `refilled_vs_sync`: the same, where the next trajectories begin when others end: batches taken from the `Scheduler`
  with `max_staleness: 1`, which plays stale ones again. Time a batch, from the first of twice as many on.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
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
from upswing.rollout.scheduler import Pace, Scheduler
from upswing.rollout.simulate import Costs, SimulatedEngine, Stream, Turn
from upswing.rollout.virtual import run_virtual
from upswing.trajectory.render import ChatRenderer
from upswing.trajectory.types import Group, Message, StopReason, Task
from upswing.verify import Rubric

TRAJECTORIES, TURNS, BATCHES, STALENESS = 64, 3, 4, 1
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


def draw(rng: random.Random) -> list[Turn]:
    return [
        Turn(
            new_tokens=RESULT_TOKENS,
            sampled_tokens=max(2, round(TOKENS * rng.lognormvariate(0, TOKEN_SPREAD))),
            tool_s=TOOL_S * rng.lognormvariate(0, TOOL_SPREAD) / SPEEDUP,
        )
        for _ in range(TURNS)
    ]


class CostEngine:
    """Samples nothing, at the cost of sampling; `plan` says how long each trajectory's turns are."""

    capabilities = Capabilities()

    def __init__(self, plan: Sequence[Sequence[Turn]], costs: Costs, tokenizer: Any, end: int) -> None:
        self.plan, self.end = plan, end
        self.letter = tokenizer("a")["input_ids"][0]
        self.engine = SimulatedEngine(costs, TRAJECTORIES)
        self.sessions: dict[str | None, tuple[Iterator[Turn], Stream]] = {}
        self.version = 0

    async def generate(self, prompt: Sequence[int], sampling: Sampling, *, session: str | None = None) -> Completion:
        fresh = iter(self.plan[int(str(session).split("/")[0])]), Stream()
        turns, stream = self.sessions.setdefault(session, fresh)
        turn, version = next(turns), self.version
        await self.engine.generate(turn, stream)
        tokens = (self.letter,) * (turn.sampled_tokens - 1) + (self.end,)
        told, versions = (-0.5,) * len(tokens), (version,) * len(tokens)
        return Completion(tokens=tokens, engine_logprobs=told, policy_version=versions, finish_reason=FinishReason.STOP)

    def release(self, session: str) -> None:
        self.sessions.pop(session, None)

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


def prepared(
    plan: Sequence[Sequence[Turn]], costs: Costs, places: int, barrier: asyncio.Barrier | None = None
) -> Rollouts:
    """What plays trajectories as `plan` says, which tasks are numbers of. Inside the event loop."""
    tokenizer = tiny_tokenizer()
    renderer = ChatRenderer(tokenizer)
    end = renderer.end_of_turn_id()
    Tools.plan, Tools.barrier = plan, barrier
    return Rollouts(
        make_env=Tools,
        rubric=Rubric([("none", lambda num_turns: float(num_turns), 1.0)]),
        renderer=renderer,
        end_tokens=(end,),
        limits=Limits(turn_tokens=512, context_tokens=8192),
        engine=CostEngine(plan, costs, tokenizer, end),
        gate=asyncio.Semaphore(places),
        max_retries=0,
    )


async def played(rollouts: Rollouts, numbers: Iterable[int]) -> list[Group]:
    tasks = [Task(id=str(i), messages=(Message(role="user", content="c" * 8),)) for i in numbers]
    groups = await rollouts.groups(tasks, size=1, sampling=Sampling(max_tokens=512), seed=0)
    for group in groups:
        if (one := group.trajectories[0]).num_turns != TURNS:
            raise RuntimeError(f"a trajectory broke: {one.error}")
    return groups


async def batch_s(plan: Sequence[Sequence[Turn]], costs: Costs, *, together: bool) -> float:
    """The loop's seconds for all of `plan` at once."""
    rollouts = prepared(plan, costs, len(plan), asyncio.Barrier(len(plan)) if together else None)
    began = asyncio.get_running_loop().time()
    await played(rollouts, range(len(plan)))
    return asyncio.get_running_loop().time() - began


async def refilled_s(plan: Sequence[Sequence[Turn]], costs: Costs, batches: int, size: int) -> float:
    """The loop's seconds a batch, the first one left out; `plan` must have `STALENESS` batches more."""
    rollouts = prepared(plan, costs, size)
    engine: Any = rollouts.engine

    async def play(number: int, attempt: int) -> int:
        """-> the version that its first token was sampled with."""
        (group,) = await played(rollouts, [number])
        (branch,) = group.trajectories[0].branches
        return int(branch.policy_version[branch.sampled].min())

    pace = Pace(batch=size, max_staleness=STALENESS)
    scheduler = Scheduler(play=play, pace=pace, staleness=lambda oldest: engine.version - oldest)
    ends: list[float] = []
    for _ in range(batches):
        if ends:
            engine.version += 1
            engine.engine.new_weights()
            scheduler.advance()
        await scheduler.take()
        ends.append(asyncio.get_running_loop().time())
    await scheduler.close()
    return (ends[-1] - ends[0]) / (batches - 1)


async def ideal_s(plan: Sequence[Sequence[Turn]], costs: Costs) -> float:
    """Virtual seconds of the asynchronous arm without any overhead."""
    engine = SimulatedEngine(costs, TRAJECTORIES)

    async def one(turns: Sequence[Turn]) -> None:
        stream = Stream()
        for turn in turns:
            await engine.generate(turn, stream)
            await asyncio.sleep(turn.tool_s)

    await asyncio.gather(*map(one, plan))
    return asyncio.get_running_loop().time()


def rounds_of(costs: Costs, rounds: int, batches: int = BATCHES, size: int = TRAJECTORIES) -> dict[str, Figure]:
    """The figures, at SPEEDUP times the speed of `costs`."""
    step, row, token = (s / SPEEDUP for s in (costs.step_s, costs.row_s, costs.prefill_token_s))
    costs = replace(costs, step_s=step, row_s=row, prefill_token_s=token)
    ratios, fractions, refilled, seconds = [], [], [], []
    for number in range(rounds):
        rng = random.Random(number)
        plan = [draw(rng) for _ in range(size * (2 * batches + STALENESS))]
        together = apart = ideal = 0.0
        for first in range(0, size * batches, size):
            batch = plan[first : first + size]
            apart += asyncio.run(batch_s(batch, costs, together=False)) / batches
            together += asyncio.run(batch_s(batch, costs, together=True)) / batches
            ideal += run_virtual(ideal_s(batch, costs)) / batches
        full = asyncio.run(refilled_s(plan, costs, 2 * batches, size))
        ratios.append(together / apart)
        fractions.append(ideal / apart)
        refilled.append(together / full)
        seconds.append((together, apart, full))
    sync, alone, full = (SPEEDUP * statistics.median(column) for column in zip(*seconds, strict=True))
    return {
        "async_vs_sync": Figure(statistics.median(ratios), 2.1, "higher", (min(ratios), max(ratios))),
        "fraction_of_bound": Figure(statistics.median(fractions), 0.9, "higher", (min(fractions), max(fractions))),
        "refilled_vs_sync": Figure(statistics.median(refilled), None, "higher", (min(refilled), max(refilled))),
        "sync_seconds": Figure(sync, None, "lower"),
        "async_seconds": Figure(alone, None, "lower"),
        "refilled_seconds": Figure(full, None, "lower"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two rounds")
    args = parser.parse_args()
    print(describe_machine(("upswing", "torch")))
    measured = measured_costs()
    print(f"engine: a step takes {measured.step_s:.4f} s, and {measured.row_s:.5f} s more a further completion")
    torch.set_num_threads(1)
    return finish("async_tools", args.quick, rounds_of(measured, 2 if args.quick else 5))


if __name__ == "__main__":
    sys.exit(main())
