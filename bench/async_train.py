"""Whole training, asynchronous against synchronous, and the simulator against real runs.

    python bench/async_train.py [--quick] [--seeds 0 1 2 3 4]

The learning is real: the tiny agent of `bench/algorithms.py` learns two turns of tool use with the product's own `rl`
stage, engine, verifiers and scheduler, one update of 8 tasks x 8 samples a step. What the devices take is simulated, in
virtual time: one engine and one learner of the kind that `upswing plan` assumes by default (7 billion parameters,
3 TB/s, 900 TFLOP/s at 40 %, 2 s for the weights), turns of log-normal length (median 200 tokens, deviation of the
logarithm 1), tools of log-normal time (median 1 s, deviation 1), prompts of 500 tokens and results of 200. A prompt is
read once a group, and with new weights all that is in play is read again. Python's own time isn't counted.

- `step_speedup`: time of a step, synchronous / asynchronous (`max_staleness: 2`), median over seeds. That is all in
  which the two recipes differ: the asynchronous one corrects as it does by default, by the ratio of the policy before
  the update to the sampler, truncated (`tis`).
- `speedup_equal_bypass`: the same number, with the target for arms of which neither runs a forward for the log-probs
  before the update. With one update a batch neither needs one, as they are those of the update's own forward.
- `reward_gap_in_seed_sd`: how far the asynchronous arm's success over the last 5 steps is below that of the synchronous
  one, in standard deviations of the latter over the seeds (at least 0.02: the noise of 320 samples).
- `simulator_error`: in real time, on this machine. `upswing plan` is fitted to a real synchronous run of the tiny agent
  with slow tools, and predicts the steps of runs with twice the batch, tools three times as slow, and asynchronous with
  such tools; the largest relative error of the median step time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from algorithms import LR, TwoTurns, cold_start, recipe
from common import Figure, describe_machine, finish
from upswing.cli.plan import assumed, measured
from upswing.engine.torch import TorchEngine
from upswing.envs.base import AssistantMessage, Observation
from upswing.monitor.metrics import MetricsLog
from upswing.monitor.progress import Progress
from upswing.rollout.scheduler import Pace
from upswing.rollout.simulate import Layout, SimulatedEngine, Stream, Turn, simulate
from upswing.rollout.virtual import run_virtual
from upswing.stages import rl
from upswing.stages.policy import PolicyMethod
from upswing.stages.runner import run_recipe
from upswing.trajectory.types import Task

STEPS, QUICK_STEPS, LAST = 30, 8, 5
TASKS, SAMPLES, STALENESS = 8, 8, 2
TURN_TOKENS, TURN_SPREAD, PROMPT_TOKENS, RESULT_TOKENS = 200, 1.0, 500, 200
TOOL_S, TOOL_SPREAD = 1.0, 1.0
COSTS = assumed(7e9, 3e12, 9e14, 2.0)
SLOTS = TASKS * SAMPLES * (STALENESS + 1)

REAL, QUICK_REAL = (0.4, 12), (0.2, 5)
"""Median time of the tools and number of steps, of runs in real time."""


class SlowTools(TwoTurns):
    """Its tool takes a while: seconds by `tool_s`, drawn for each trajectory."""

    name = "slow_tools"

    def __init__(self, *, tool_s: float = TOOL_S) -> None:
        super().__init__()
        self.tool_s = tool_s

    def reset(self, task: Task, seed: int) -> Observation:
        self._draw = random.Random(f"tool {task.id} {seed}")
        return super().reset(task, seed)

    async def step(self, message: AssistantMessage) -> Observation:
        seen = await super().step(message)
        if seen.tool_records:
            await asyncio.sleep(self.tool_s * self._draw.lognormvariate(0, TOOL_SPREAD))
        return seen


def slow_recipe(model: str, seed: int, *, tool_s: float = TOOL_S, tasks: int = TASKS, **more: Any) -> Any:
    stage = {"stage": "rl", "tasks_per_step": tasks, "group_size": SAMPLES, "lr": LR}
    stage |= {"steps": STEPS, "eval_every": 0, "save_every": 0, **more}
    plain = recipe(model, seed, stage)
    env = plain.env.model_copy(update={"name": f"{Path(__file__).resolve()}:SlowTools", "args": {"tool_s": tool_s}})
    return plain.model_copy(update={"env": env, "engine": plain.engine.model_copy(update={"max_slots": SLOTS})})


# -- real learning on simulated devices ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A whole training."""

    step_s: float
    """Mean, of the steps after the first third."""
    success: float
    staleness: float


class Devices:
    """One engine and one learner, in virtual time. Made inside the event loop."""

    def __init__(self) -> None:
        self.engine = SimulatedEngine(COSTS, SLOTS)
        self.streams: dict[str, Stream] = {}

    async def generate(self, session: str, seed: int | None) -> None:
        """A turn of `session`, of a length drawn by the seed of its sampling. Members of a group differ in what is
        after the last dash."""
        stream = self.streams.setdefault(session, Stream(group=session.rpartition("-")[0]))
        sampled = max(1, round(TURN_TOKENS * random.Random(f"length {seed}").lognormvariate(0, TURN_SPREAD)))
        new = PROMPT_TOKENS if stream.prompt is None else RESULT_TOKENS
        await self.engine.generate(Turn(new_tokens=new, sampled_tokens=sampled), stream)

    async def learn(self, turns: Sequence[int]) -> None:
        """An update from trajectories of so many turns each, and new weights for the engine."""
        sampled = sum(turns) * TURN_TOKENS * math.exp(TURN_SPREAD**2 / 2)
        given = len(turns) * PROMPT_TOKENS + sum(count - 1 for count in turns) * RESULT_TOKENS
        await asyncio.sleep((sampled + given) * COSTS.train_token_s)
        self.engine.stand_still(COSTS.sync_s)
        await asyncio.sleep(COSTS.sync_s)
        self.engine.new_weights()


def train(model: str, seed: int, out: Path, **keys: Any) -> Arm:
    """Run the recipe with every device's time simulated."""
    ends: list[float] = []
    devices: list[Devices] = []
    own = TorchEngine.generate, PolicyMethod.learn, rl._step, asyncio.run

    async def generate(self: TorchEngine, prompt: Sequence[int], sampling: Any, **more: Any) -> Any:
        if not devices:
            devices.append(Devices())
        done = await own[0](self, prompt, sampling, **more)
        await devices[0].generate(more["session"], sampling.seed)
        return done

    async def learn(self: PolicyMethod, groups: Any, step: int) -> Any:
        found = await own[1](self, groups, step)
        await devices[0].learn([max(1, t.num_turns) for group in groups for t in group.trajectories])
        return found

    async def step(*args: Any) -> None:
        await own[2](*args)
        ends.append(asyncio.get_running_loop().time())

    TorchEngine.generate, PolicyMethod.learn, rl._step = generate, learn, step  # type: ignore[method-assign]
    asyncio.run = run_virtual  # type: ignore[assignment]
    try:
        run_recipe(slow_recipe(model, seed, **keys), out, log=Progress(quiet=True))
    finally:
        TorchEngine.generate, PolicyMethod.learn, rl._step, asyncio.run = own  # type: ignore[method-assign]
    rows = [row for row in MetricsLog(out).read("rl") if "reward" in row]
    warm = len(ends) // 3
    return Arm(
        step_s=(ends[-1] - ends[warm]) / (len(ends) - 1 - warm),
        success=statistics.fmean(row["score_strict_match"] for row in rows[-LAST:]),
        staleness=statistics.fmean(row.get("staleness", 0.0) for row in rows),
    )


ARMS: dict[str, dict[str, Any]] = {
    "sync": {},
    "async": {"max_staleness": STALENESS},
}


def trained(models: Mapping[int, str], folder: Path, steps: int) -> dict[str, list[Arm]]:
    """`models`: seed -> the weights to start from."""
    found: dict[str, list[Arm]] = {name: [] for name in ARMS}
    for seed, model in models.items():
        for name, keys in ARMS.items():
            found[name].append(train(model, seed, folder / f"{name}-{seed}", steps=steps, **keys))
        told = ", ".join(f"{name} {arms[-1].step_s:.1f} s, {arms[-1].success:.2f}" for name, arms in found.items())
        print(f"seed {seed}: a step and the last success: {told}", flush=True)
    return found


# -- the simulator against real time --------------------------------------------------------------------------------


def real_step_s(model: str, out: Path, **keys: Any) -> float:
    """Median of a real run's steps, the first two left out."""
    run_recipe(slow_recipe(model, 0, **keys), out, log=Progress(quiet=True))
    steps = [row["step_s"] for row in MetricsLog(out).read("rl") if "step_s" in row]
    return statistics.median(steps[2:])


def simulator_errors(model: str, folder: Path, tool_s: float, steps: int) -> dict[str, float]:
    """Relative error of the predicted step time, by what was changed."""
    real_step_s(model, folder / "fit", tool_s=tool_s, steps=steps)
    with contextlib.redirect_stdout(io.StringIO()):
        fit = measured(folder / "fit")
    slower: Callable[[random.Random], Sequence[Turn]] = lambda rng: [  # noqa: E731
        replace(turn, tool_s=3 * turn.tool_s) for turn in fit.plays(rng)
    ]
    together = Layout(engines=1, learners=1, slots=SLOTS, shared=True)
    apart = replace(together, shared=False)
    slow = {"tool_s": 3 * tool_s}
    cases: dict[str, tuple[dict[str, Any], Any, Pace, Layout]] = {
        "twice the batch": ({"tasks": 2 * fit.batch, "tool_s": tool_s}, fit.plays, Pace(batch=2 * fit.batch), together),
        "slower tools": (slow, slower, Pace(batch=fit.batch), together),
        "slower tools, asynchronous": (
            {**slow, "max_staleness": 1},
            slower,
            Pace(batch=fit.batch, max_staleness=1),
            apart,
        ),
    }
    errors = {}
    for name, (keys, drawn, pace, layout) in cases.items():
        real = real_step_s(model, folder / name.replace(" ", "-"), steps=steps, **keys)
        said = simulate(
            plays=drawn, pace=pace, group_size=fit.group, costs=fit.costs, layout=layout, steps=steps
        ).step_s
        errors[name] = abs(said / real - 1)
        print(f"{name}: a real step {real:.2f} s, predicted {said:.2f} s", flush=True)
    return errors


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two seeds, fewer steps")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    args = parser.parse_args()
    if len(args.seeds) < 2:
        parser.error("--seeds: give two or more; the gap in success is judged by the spread of the seeds")
    print(describe_machine(("upswing", "torch")))
    began, seeds = time.perf_counter(), args.seeds[:2] if args.quick else args.seeds
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = {seed: cold_start(seed, folder / f"start-{seed}") for seed in seeds}
        errors = simulator_errors(models[seeds[0]], folder, *(QUICK_REAL if args.quick else REAL))
        arms = trained(models, folder, QUICK_STEPS if args.quick else STEPS)
    print(f"{time.perf_counter() - began:.0f} s")
    return finish("async_train", args.quick, figures_of(arms, errors))


def figures_of(arms: dict[str, list[Arm]], errors: dict[str, float]) -> dict[str, Figure]:
    ratios = [slow.step_s / fast.step_s for slow, fast in zip(arms["sync"], arms["async"], strict=True)]
    faster = partial(Figure, statistics.median(ratios), better="higher", spread=(min(ratios), max(ratios)))
    success = {name: [arm.success for arm in found] for name, found in arms.items()}
    sd = max(0.02, statistics.stdev(success["sync"]))
    gap = (statistics.fmean(success["sync"]) - statistics.fmean(success["async"])) / sd
    staleness = [arm.staleness for arm in arms["async"]]
    return {
        "step_speedup": faster(target=2.67),
        "speedup_equal_bypass": faster(target=2.0),
        "reward_gap_in_seed_sd": Figure(gap, 1.0, "lower"),
        "simulator_error": Figure(max(errors.values()), 0.10, "lower", (min(errors.values()), max(errors.values()))),
        "staleness": Figure(statistics.fmean(staleness), None, "lower"),
        **{
            f"success.{name}": Figure(statistics.fmean(all_), None, "higher", (min(all_), max(all_)))
            for name, all_ in success.items()
        },
    }


if __name__ == "__main__":
    sys.exit(main())
