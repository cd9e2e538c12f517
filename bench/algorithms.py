"""Every named algorithm on one small agent task; each estimator's gradient; and GRPO's memory against PPO's.

    python bench/algorithms.py [--quick] [--seeds 0 1 2 3 4] [--presets grpo rloo ...] [--steps 30] [--workers N]

`worst_gradient_z`: of every advantage estimator, Monte Carlo against the exact gradient (`bench/gradient_oracle.py`).

`steps_to_90.NAME`, `final_success.NAME`: the task is two turns of tool use. `value of c` is answered by
`<get>c</get>`, the tool says `7`, and `<answer>7</answer>` is right. There are 8 keys and 10 values. Once a seed, the
tiny model (0.1 M parameters) learns from demonstrations of an expert whose first call is for a wrong key 6 times out of
10 and who then needs a third turn; the agent has two. All algorithms start from those weights, with the same tasks,
sampling seeds, learning rate and number of trajectories (8 tasks x 8). They differ by their preset only; what else is
set is in SETTINGS, with the reason. Success is the verifier's strict match over *everything* that a step sampled at
temperature 1, dropped groups included. `steps_to_90`: first step after which the mean of the last 3 steps is at least
0.9; a seed that never gets there counts as infinite, and a median that is infinite is null. `final_success`: mean of
the last 5 steps. Spreads are min and max over seeds. Entropy is estimated from the log-probs of what was sampled.

`grpo_over_ppo_memory`: peak resident memory of two updates of the `rl` stage's own code (in the first one's backward
there are no moments yet), above the process's after a toy update has loaded all code. Each arm has a process of its own
and a randomly initialised policy of SmolLM2-135M's shape, float32, AdamW; sampling isn't part of it. GRPO holds the
policy: weights, gradient, two moments, 4 times the weights. PPO adds a separate critic of equal size (3: its gradient
is freed before the policy's is made) and the frozen reference of the KL in the reward (1). So 4 / 8, but for what both
share: activations, and the gradient of the tied embedding, which is made twice.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from common import Figure, cannot_run, describe_machine, finish
from upswing.envs.base import AssistantMessage, Expert, Observation
from upswing.envs.lookup import UNKNOWN, Lookup
from upswing.trajectory.types import Message, Task

KEYS, VALUES = "abcdefgh", "01234567"
CALL_REWARD = 0.3
"""The environment's own reward for a call that found the value; the verifiers don't see it."""
EXPERT_NOISE = 0.6
LR = 7e-4
SETTINGS: dict[str, dict[str, Any]] = {
    "ppo": {"critic": {"lr": LR}},  # the default is a large model's
    # Of the 600 tokens of a batch the published shares pick none or one.
    "clip_cov": {"cov_fraction": 0.02},
    "kl_cov": {"cov_fraction": 0.02},
}
QUICK_PRESETS = ("grpo", "rloo", "ppo")
Z_BATCHES = 100_000


class TwoTurns(Lookup):
    """A call, then an answer; one key is right and every other one is unknown."""

    name = "two_turns"
    max_turns = 2

    def __init__(self, *, max_turns: int = 2) -> None:
        super().__init__(alias_frac=0.0, max_turns=max_turns)

    def tasks(self, split: str, seed: int = 0) -> Iterator[Task]:
        rng = random.Random(f"two turns {split} {seed}")
        episodes = [(key, value) for key in KEYS for value in VALUES]
        while True:
            for key, value in rng.sample(episodes, len(episodes)):
                yield self._task(key, "", value, split)

    async def step(self, message: AssistantMessage) -> Observation:
        seen = await super().step(message)
        found = any(record.ok and record.result != UNKNOWN for record in seen.tool_records)
        return replace(seen, reward=CALL_REWARD * found)

    def expert(self, task: Task, rng: random.Random) -> Expert:
        wrong = rng.choice([key for key in KEYS if key != task.data["key"]]) if rng.random() < EXPERT_NOISE else None

        def act(messages: tuple[Message, ...]) -> str:
            heard = [message.content for message in messages if message.role == "tool"]
            if heard and heard[-1] != UNKNOWN:
                return f"<answer>{heard[-1]}</answer>"
            return f"<get>{task.data['key'] if heard or wrong is None else wrong}</get>"

        return act


# -- learning ------------------------------------------------------------


def recipe(model: str, seed: int, stage: dict[str, Any], verifiers: list[Any] | None = None) -> Any:
    from upswing.recipe import recipe_from

    return recipe_from(
        {
            "name": "algorithms",
            "model": model,
            "seed": seed,
            "env": f"{Path(__file__).resolve()}:TwoTurns",
            "verifiers": verifiers or ["strict_match", {"name": "format", "weight": 0}],
            "engine": {"max_slots": 64, "max_context": 96},
            "limits": {"turn_tokens": 16, "context_tokens": 96},
            "stages": [stage],
        }
    )


def cold_start(seed: int, out: Path) -> str:
    """The weights that every algorithm starts from -> their folder."""
    from upswing.monitor.progress import Progress
    from upswing.stages.runner import run_recipe

    stage = {
        "stage": "sft",
        "demonstrations": 384,
        "validation_demonstrations": 0,
        "env_args": {"max_turns": 3},
        "epochs": 8,
        "batch_size": 16,
        "lr": 3e-3,
        "eval_every": 0,
        "graduation": {"enabled": False},
    }
    run_recipe(recipe("tiny", seed, stage), out, log=Progress(quiet=True))
    return str(out / "checkpoints" / "sft" / "final")


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One algorithm, one seed."""

    name: str
    seed: int
    success: list[float]
    """By step."""
    entropy: float
    """Nats a token in the last step."""
    seconds: float

    @property
    def steps_to_90(self) -> float:
        means = [statistics.fmean(self.success[i - 2 : i + 1]) for i in range(2, len(self.success))]
        return next((i + 3 for i, mean in enumerate(means) if mean >= 0.9), math.inf)

    @property
    def final_success(self) -> float:
        return statistics.fmean(self.success[-5:])


def train(name: str, seed: int, steps: int, start: str, out: Path) -> Curve:
    """Run one algorithm from the weights `start`."""
    from upswing.monitor.progress import Progress
    from upswing.stages.runner import run_recipe
    from upswing.trajectory.store import TrajectoryStore

    # gdpo is about several rewards; the others get the outcome alone.
    verifiers = ["strict_match", {"name": "format", "weight": 0.2}] if name == "gdpo" else None
    stage = {"stage": "rl", "algorithm": name, "steps": steps, "lr": LR, "eval_every": 0, "save_every": 0}
    began = time.perf_counter()
    run_recipe(recipe(start, seed, {**stage, **SETTINGS.get(name, {})}, verifiers), out, log=Progress(quiet=True))
    seconds = time.perf_counter() - began
    by_step: dict[int, list[Any]] = {}
    for stored in TrajectoryStore(out / "trajectories").read("rl"):
        by_step.setdefault(stored.step, []).append(stored.trajectory)
    success = [
        statistics.fmean(t.score.components["strict_match"] for t in by_step[step] if t.score is not None)
        for step in sorted(by_step)
    ]
    last = by_step[max(by_step)]
    sampled = [-float(x) for t in last for b in t.branches for x in b.engine_logprobs[b.sampled]]
    return Curve(name=name, seed=seed, success=success, entropy=statistics.fmean(sampled), seconds=seconds)


def run_learning(presets: list[str], seeds: list[int], steps: int, workers: int) -> list[Curve]:
    """All algorithms from all starts. Every process computes with one thread, so `workers` cores are busy."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(workers, context, initializer=_one_thread) as pool:
            starts = {seed: pool.submit(cold_start, seed, out / f"start-{seed}") for seed in seeds}
            # A seed after the other, so that a run that is cut short has compared all algorithms on the seeds it did.
            jobs = [
                pool.submit(train, name, seed, steps, starts[seed].result(), out / f"{name}-{seed}")
                for seed in seeds
                for name in presets
            ]
            curves = []
            for job in jobs:
                curve = job.result()
                curves.append(curve)
                print(
                    f"  {curve.name}, seed {curve.seed}: {curve.steps_to_90:g} steps to 90 %, "
                    f"{curve.final_success:.2f} at the end, {curve.seconds:.0f} s",
                    flush=True,
                )
            return curves


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def learning_figures(curves: list[Curve], presets: list[str]) -> dict[str, Figure]:
    """Print the table -> the reported figures, medians over seeds."""
    figures: dict[str, Figure] = {}
    print("\nmedian (min to max) over seeds\n")
    print("| algorithm | steps to 90 % | final success | entropy | seconds |\n|---|---|---|---|---|")
    for name in presets:
        own = [curve for curve in curves if curve.name == name]
        columns = ("steps_to_90", "final_success", "entropy", "seconds")
        values = {column: [getattr(curve, column) for curve in own] for column in columns}
        print(f"| `{name}` | " + " | ".join(map(_spread, values.values())) + " |")
        figures[f"steps_to_90.{name}"] = _reported(values["steps_to_90"], better="lower")
        figures[f"final_success.{name}"] = _reported(values["final_success"], better="higher")
    return figures


def _spread(values: list[float]) -> str:
    """`12 (9 to 20)`; what was never reached is `never`."""
    middle, low, high = (f"{x:.3g}" if math.isfinite(x) else "never" for x in _middle_and_range(values))
    return f"{middle} ({low} to {high})"


def _middle_and_range(values: list[float]) -> tuple[float, float, float]:
    return statistics.median_high(values), min(values), max(values)


def _reported(values: list[float], better: str) -> Figure:
    """JSON has no infinity: a median or bound that is infinite is null."""
    middle, *spread = [x if math.isfinite(x) else None for x in _middle_and_range(values)]
    return Figure(middle, better=better, spread=spread)  # type: ignore[arg-type]


# -- memory ------------------------------------------------------------

ARMS: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": "grpo"},
    "grpo with KL": {"algorithm": "grpo", "kl_coef": 0.01},
    "ppo without KL": {"algorithm": "ppo"},
    "ppo": {"algorithm": "ppo", "kl_coef": 0.01},
}
HOLDS = {
    "grpo": "policy",
    "grpo with KL": "policy, reference",
    "ppo without KL": "policy, critic",
    "ppo": "policy, critic, reference",
}
SHAPE = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
GROUPS, GROUP_SIZE, TOKENS = 2, 4, 32


def memory_groups() -> list[Any]:
    """The same few trajectories for every arm: a prompt and sampled tokens, every other one right."""
    import numpy as np

    from upswing.trajectory.types import Branch, Group, Outcome, Score, StopReason, Trajectory

    rng = np.random.default_rng(0)
    sampled = np.arange(TOKENS) >= TOKENS // 2
    groups = []
    for number in range(GROUPS):
        task = Task(id=f"t{number}", messages=(Message(role="user", content="q"),))
        members = tuple(
            Trajectory(
                id=f"t{number}-{i}",
                task=task,
                branches=(
                    Branch(
                        tokens=rng.integers(3, SHAPE["vocab_size"], TOKENS).astype(np.int32),
                        sampled=sampled,
                        engine_logprobs=np.where(sampled, -10.0, np.nan).astype(np.float32),
                        policy_version=np.where(sampled, 1, -1).astype(np.int32),
                        turn=np.zeros(TOKENS, np.int16),
                    ),
                ),
                messages=task.messages,
                outcome=Outcome.COMPLETED,
                stop_reason=StopReason.ANSWERED,
                num_turns=1,
                score=Score(value=float(i % 2)),
            )
            for i in range(GROUP_SIZE)
        )
        groups.append(Group(task=task, trajectories=members))
    return groups


def measure_arm(arm: str) -> None:
    """Print the peak above the baseline, in MB. Called in a process of its own: the kernel's peak never falls."""
    import asyncio
    from types import SimpleNamespace

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from upswing.recipe import RlStage
    from upswing.stages.policy import PolicyMethod

    torch.set_num_threads(1)
    stage = RlStage.model_validate({"steps": 1, "tasks_per_step": GROUPS, "group_size": GROUP_SIZE, **ARMS[arm]})
    groups = memory_groups()
    names = ("lr", "weight_decay", "grad_clip", "max_tokens_per_pack", "gradient_checkpointing")

    def updates(**shape: Any) -> None:
        # What PolicyMethod asks of a run, without an engine, an environment or a folder.
        context: Any = SimpleNamespace(
            recipe=SimpleNamespace(source_of=lambda index, reference: "base"),
            source_model=lambda source: LlamaForCausalLM(LlamaConfig(**SHAPE | shape)),
            adapted=lambda model, stage: model,
            trainer_options=lambda stage: {name: getattr(stage, name) for name in names},
            rubric=SimpleNamespace(at=lambda step: SimpleNamespace(weights={"strict_match": 1.0})),
        )
        method = PolicyMethod(context, stage, 0)
        for step in range(2):
            asyncio.run(method.learn(groups, step))

    updates(num_hidden_layers=1, hidden_size=36, intermediate_size=36)  # so that all code is loaded
    baseline = _status_mb("VmRSS")
    updates()
    print(_status_mb("VmHWM") - baseline)


def _status_mb(field: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024 / 1e6


def memory_figure(rounds: int) -> Figure:
    """Measure all arms in turn, `rounds` times -> grpo's peak over ppo's."""
    peaks: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for _ in range(rounds):
        for arm in ARMS:
            # glibc would otherwise keep what is freed, as holes in its heap: several 100 MB, differently each time.
            given_back = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
            command = [sys.executable, __file__, "--memory-arm", arm]
            done = subprocess.run(command, env=given_back, capture_output=True, text=True, check=False)
            if done.returncode:
                print(f"{arm}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
                return Figure(None, 0.5, "lower")
            peaks[arm].append(float(done.stdout.split()[-1]))
    tokens = GROUPS * GROUP_SIZE * TOKENS
    print(f"\npeak of updates of {tokens} tokens, above the process after its imports (median of {rounds})")
    for arm, values in peaks.items():
        print(f"  {arm:<16}{statistics.median(values):>8.0f} MB   holds: {HOLDS[arm]}")
    ratios = [a / b for a, b in zip(peaks["grpo"], peaks["ppo"], strict=True)]
    return Figure(statistics.median(ratios), 0.5, "lower", (min(ratios), max(ratios)))


# -- gradients ------------------------------------------------------------


def gradient_figure() -> Figure:
    """The worst estimator's distance from its target, in standard errors of the Monte-Carlo mean."""
    import gradient_oracle

    found = {name: gradient_oracle.gradient_z(name, Z_BATCHES, 0) for name in gradient_oracle.ESTIMATORS}
    worst = max(found, key=lambda name: found[name])
    print(f"\n{len(found)} estimators, {Z_BATCHES} batches each: worst gradient is {worst}'s, z = {found[worst]:.2f}")
    return Figure(found[worst], 4.0, "lower")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"one seed of {', '.join(QUICK_PRESETS)}: 5 minutes")
    parser.add_argument("--seeds", type=int, nargs="+", default=None)
    parser.add_argument("--presets", nargs="+", default=None, metavar="NAME")
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="runs at the same time")
    parser.add_argument("--memory-arm", choices=ARMS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    try:
        from upswing.recipe.presets import PRESETS
    except ImportError as error:
        return cannot_run(f"{error}; run `make setup` and use .venv/bin/python")
    if args.memory_arm:
        measure_arm(args.memory_arm)
        return 0
    presets = args.presets or list(QUICK_PRESETS if args.quick else PRESETS)
    unknown = [name for name in presets if name not in PRESETS]
    if unknown:
        return cannot_run(f"no preset '{unknown[0]}'; there are {', '.join(PRESETS)}")
    seeds = args.seeds or ([0] if args.quick else [0, 1, 2, 3, 4])
    steps = args.steps or (12 if args.quick else 30)
    print(describe_machine())
    print(f"{len(presets)} algorithms x {len(seeds)} seeds x {steps} steps, {args.workers} at a time, lr {LR:g}")
    print(f"own settings: {json.dumps(SETTINGS)}; everything else is the preset's", flush=True)
    figures = {
        "worst_gradient_z": gradient_figure(),
        "grpo_over_ppo_memory": memory_figure(1 if args.quick else 2),
        **learning_figures(run_learning(presets, seeds, steps, args.workers), presets),
    }
    return finish("algorithms", args.quick, figures)


if __name__ == "__main__":
    sys.exit(main())
