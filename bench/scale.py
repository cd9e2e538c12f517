"""What a trajectory costs when thousands are in play: our overhead, with an engine that answers from a script.

    python bench/scale.py [--quick]

`overhead_10k_over_100`: CPU seconds a trajectory with 10,000 in play at once against 100. Three turns each, one
tool call a turn that waits 10 ms, 20 tokens a turn; no model runs, so all of it is ours: rendering, environment,
scheduling, validation, scoring. The same number of trajectories in both arms, alternating; medians.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Iterator

from common import Figure, describe_machine, finish
from upswing.engine.base import Sampling
from upswing.engine.scripted import ScriptedEngine
from upswing.envs.base import AssistantMessage, Environment, Observation
from upswing.models.tiny import tiny_tokenizer
from upswing.rollout.collect import Rollouts
from upswing.rollout.limits import Limits
from upswing.trajectory.render import ChatRenderer
from upswing.trajectory.types import Message, Outcome, StopReason, Task
from upswing.verify.rubric import Rubric

TURNS = 3
SCRIPT = ("one two three four five six seven eight nine ten zero start end step try room door key list",) * TURNS


class Waits(Environment):
    """Each turn's tool takes 10 ms of waiting and no work."""

    name = "waits"

    def tasks(self, split: str, seed: int = 0) -> Iterator[Task]:
        raise NotImplementedError

    async def reset(self, task: Task, seed: int) -> Observation:
        self.turn = 0
        return Observation(messages=task.messages)

    async def step(self, message: AssistantMessage) -> Observation:
        self.turn += 1
        await asyncio.sleep(0.01)
        if self.turn == TURNS:
            return Observation(done=True, stop_reason=StopReason.ANSWERED, answer="ten")
        return Observation(messages=(Message(role="tool", content="nothing found"),))


def cost(concurrent: int, count: int) -> float:
    """CPU seconds a trajectory."""
    tokenizer = tiny_tokenizer()
    engine = ScriptedEngine(SCRIPT, tokenizer=tokenizer, end_token=tokenizer.convert_tokens_to_ids("<|im_end|>"))
    rollouts = Rollouts(
        make_env=Waits,
        rubric=Rubric([("right", lambda answer: answer == "ten", 1.0)]),
        renderer=ChatRenderer(tokenizer),
        end_tokens=(engine.end_token or 0,),
        limits=Limits(turn_tokens=64, context_tokens=1024),
        engine=engine,
        max_concurrent=concurrent,
    )
    tasks = [Task(id=str(i), messages=(Message(role="user", content="find the key"),)) for i in range(count)]
    began = time.process_time()
    groups = asyncio.run(rollouts.groups(tasks, size=1, sampling=Sampling(max_tokens=64), seed=0))
    seconds = time.process_time() - began
    assert len(groups) == count
    assert all(t.outcome is Outcome.COMPLETED and t.reward == 1.0 for group in groups for t in group.trajectories)
    return seconds / count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round")
    args = parser.parse_args()
    print(describe_machine(("upswing",)))
    arms = (100, 10_000) if args.quick else (1, 10, 100, 1_000, 10_000)
    cost(100, 200)  # warm up
    seconds: dict[int, list[float]] = {arm: [] for arm in arms}
    for _ in range(1 if args.quick else 3):
        for arm in arms:
            # One at a time waits 30 ms each: fewer will do.
            seconds[arm].append(cost(arm, 10_000 if arm >= 100 else 200))
            print(f"{arm:>6} in play: {1e3 * seconds[arm][-1]:.2f} ms CPU a trajectory")
    ratios = [large / small for small, large in zip(seconds[100], seconds[10_000], strict=True)]
    figures = {"overhead_10k_over_100": Figure(statistics.median(ratios), 1.2, "lower", (min(ratios), max(ratios)))}
    figures |= {f"ms_per_trajectory.{arm}": Figure(1e3 * statistics.median(values)) for arm, values in seconds.items()}
    return finish("scale", args.quick, figures)


if __name__ == "__main__":
    sys.exit(main())
