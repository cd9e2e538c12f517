"""Upswing and TRL as the two sides of a comparison: each a process of its own that does a training step when told.

The parent starts a `Side` each and calls `step()` in turn (A B A B). The worker's end is a `Gate`: `run_upswing` puts
it around each step of the product's own `rl` stage, `run_trl` around each step of TRL's own trainer. Both time from the
first prompt to the new weights, sampling, tools, rewards and advantages included. While one side works, the other waits
for a line on its standard input.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from arms import Worker

MISSING = 'this comparison needs TRL: pip install "upswing[bench]"'


def has_trl() -> bool:
    return all(find_spec(name) is not None for name in ("trl", "datasets", "accelerate"))


class Side(Worker):
    """The parent's end of one side: `python script --worker JOB`. Returns once it has loaded everything."""

    def __init__(self, script: str, name: str, folder: Path, **job: Any) -> None:
        job |= {"arm": name, "out": str(folder / name)}
        super().__init__(name, [sys.executable, script, "--worker", json.dumps(job)], {"TRL_EXPERIMENTAL_SILENCE": "1"})
        self("ready")

    def step(self) -> dict[str, float]:
        """One step: `seconds`, `reward`, `tokens` of all rows, `sampled` ones, and `peak_mb` of the process so far."""
        found: dict[str, float] = self("step")
        self("ready")  # what it does between two steps doesn't slow the other side down
        return found


class Gate:
    """The worker's end. Whatever else is printed goes to stderr."""

    def __init__(self) -> None:
        self._replies = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._began = 0.0

    def wait(self) -> None:
        """Until the parent asks for a step; the process ends here when the parent has had enough."""
        while (line := sys.stdin.readline()) and json.loads(line)[0] == "ready":
            self._reply({})
        if not line:
            os._exit(0)
        self._began = time.perf_counter()

    def report(self, **facts: float) -> None:
        seconds = time.perf_counter() - self._began
        peak_mb = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024
        self._reply({"seconds": seconds, "peak_mb": peak_mb, **facts})

    def _reply(self, value: dict[str, float]) -> None:
        print(json.dumps({"value": value}), file=self._replies, flush=True)


def run_upswing(gate: Gate, recipe: Any, out: str) -> None:
    """The product's `rl` stage, metrics and stored trajectories included, with the gate around each step."""
    from upswing.monitor.progress import Progress
    from upswing.stages import rl
    from upswing.stages.runner import run_recipe
    from upswing.trajectory.types import Trajectory

    own_step, own_groups = rl._step, rl._groups
    played: list[Trajectory] = []

    async def groups(*args: Any) -> Any:
        found = await own_groups(*args)
        played[:] = [t for group in found for t in group.trajectories]
        return found

    async def step(*args: Any) -> None:
        gate.wait()
        await own_step(*args)
        branches = [branch for t in played for branch in t.branches]
        gate.report(
            reward=statistics.fmean(t.reward for t in played if t.reward is not None),
            tokens=sum(len(branch.tokens) for branch in branches),
            sampled=sum(int(branch.sampled.sum()) for branch in branches),
        )

    rl._step, rl._groups = step, groups
    run_recipe(recipe, Path(out), log=Progress(quiet=True))


def trl_config(*, batch: int, micro_batch: int, turn_tokens: int, **more: Any) -> Any:
    """TRL's settings for the same GRPO: token mean over the batch, no KL, AdamW without decay, gradient norm 1.

    As fast as TRL is on a CPU: no gradient checkpointing, saving or logging; one generate call a turn for the whole
    batch, of `turn_tokens` at most. `batch` rows a step, `micro_batch` of them at once in the forward and backward.
    """
    from trl import GRPOConfig

    from upswing.learn.precision import native_bf16

    return GRPOConfig(
        use_cpu=True,
        bf16=native_bf16(),  # autocast over fp32 weights, as in Upswing's learner
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=batch // micro_batch,
        shuffle_dataset=False,
        dataloader_pin_memory=False,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        weight_decay=0.0,
        max_grad_norm=1.0,
        loss_type="dapo",
        scale_rewards="group",
        beta=0.0,
        temperature=1.0,
        generation_kwargs={"max_new_tokens": turn_tokens},
        gradient_checkpointing=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **more,
    )


def run_trl(
    gate: Gate,
    config: Any,
    *,
    model: str,
    tokenizer: Any,
    rows: Sequence[Mapping[str, Any]],
    rewards: Callable[..., list[float]],
    prepare: Callable[[Any], None] = lambda trainer: None,
    **tools: Any,
) -> None:
    """TRL's trainer over `rows` (a prompt each, in order) with the gate around each step.

    `rewards` is a reward function as TRL has them; `prepare` may patch the trainer.
    """
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    facts: dict[str, float] = {}

    def reward(**batch: Any) -> list[float]:
        found = rewards(**batch)
        facts["reward"] = statistics.fmean(found)
        return found

    class Steps(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            gate.wait()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            gate.report(**facts)

    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list([dict(row) for row in rows]),
        processing_class=tokenizer,
        callbacks=[Steps()],
        **tools,
    )
    generate = trainer._generate_and_score_completions

    def counted(inputs: Any) -> Any:
        out = generate(inputs)
        facts["tokens"] = int(out["prompt_mask"].sum() + out["completion_mask"].sum())
        facts["sampled"] = int((out["completion_mask"] * out.get("tool_mask", 1)).sum())
        return out

    trainer._generate_and_score_completions = counted
    prepare(trainer)
    trainer.train()
