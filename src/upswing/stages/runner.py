"""Runs a recipe: checks everything that can be checked, loads the model, then one stage after the other."""

from __future__ import annotations

import asyncio
import datetime
import json
import platform
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from upswing.engine.torch import TorchEngine
from upswing.envs import environment_factory, tasks_from_jsonl
from upswing.envs.base import Environment
from upswing.errors import ConfigError
from upswing.evals.summary import EvalSummary, results_table
from upswing.learn.precision import native_bf16
from upswing.models.load import load_model, resolve_model
from upswing.monitor.metrics import MetricsLog
from upswing.monitor.progress import Progress
from upswing.recipe import EvalStage, Recipe, RlStage, SftStage
from upswing.rollout.collect import Rollouts
from upswing.rollout.limits import Limits
from upswing.seeding import derive_seed
from upswing.stages.context import RunContext, RunState, TaskSource
from upswing.stages.evaluate import measure, run_eval
from upswing.stages.rl import run_rl
from upswing.stages.sft import run_sft
from upswing.trajectory.render import ChatRenderer
from upswing.trajectory.store import TrajectoryStore
from upswing.trajectory.types import Task
from upswing.verify import rubric_from
from upswing.verify.rubric import Rubric
from upswing.view.report import write_report
from upswing.view.run_folder import ENVIRONMENT, RECIPE, RESULTS, read_json, replace_file

RUNNERS: dict[type, Callable[..., Awaitable[dict[str, Any]]]] = {
    SftStage: run_sft,
    RlStage: run_rl,
    EvalStage: run_eval,
}


@dataclass(frozen=True, kw_only=True)
class RunResult:
    out: Path
    report: Path
    results: list[dict[str, Any]]
    """Entries of results.json."""
    wall_s: float


@dataclass(frozen=True, kw_only=True)
class Checked:
    """The parts of a recipe that were found good without loading a model."""

    make_env: Callable[[], Environment]
    rubric: Rubric
    tasks: TaskSource
    recovered: Callable[..., bool | None] | None


def check_recipe(recipe: Recipe, base: Path = Path(".")) -> Checked:
    """Build environment, verifiers and tasks, and look at one task of each split used. Raises ConfigError.

    `base`: folder that dataset paths are relative to.
    """
    resolve_model(recipe.model, download=False)
    make_env = environment_factory(recipe.env.name, recipe.env.args)
    rubric = rubric_from(recipe.verifiers)
    tasks = _task_source(recipe, make_env, base)
    for split in sorted(_splits(recipe)):
        if not tasks.take(split, derive_seed(recipe.seed, "check"), 1):
            raise ConfigError(f"env: '{recipe.env.name}' has no tasks in split '{split}', which the stages use")
    return Checked(
        make_env=make_env, rubric=rubric, tasks=tasks, recovered=getattr(make_env(), "recovered", None)
    )


def _splits(recipe: Recipe) -> set[str]:
    splits: set[str] = set()
    for stage in recipe.stages:
        if isinstance(stage, EvalStage):
            splits.add(stage.split)
        else:
            splits.add("train")
        if isinstance(stage, RlStage) and stage.eval_every:
            splits.add("dev")
    return splits


def _task_source(recipe: Recipe, make_env: Callable[[], Environment], base: Path) -> TaskSource:
    if recipe.dataset is None:
        env = make_env()
        return TaskSource(lambda split, seed: env.tasks(split, seed))
    dataset = recipe.dataset
    paths = {"train": dataset.train, "dev": dataset.dev, "test": dataset.test}
    rows = {
        split: tasks_from_jsonl(base / path, env=recipe.env.name, split=split)
        for split, path in paths.items()
        if path is not None
    }

    def stream(split: str, seed: int) -> Any:
        """Train repeats, in an order of its own each time when shuffled; other splits are read once, in order."""
        found: list[Task] = rows.get(split, [])
        if split != "train":
            yield from found
            return
        epoch = 0
        while found:
            order = list(found)
            if dataset.shuffle:
                random.Random(derive_seed(seed, "epoch", epoch)).shuffle(order)
            yield from order
            epoch += 1

    return TaskSource(stream)


def run_recipe(
    recipe: Recipe, out: Path, *, resume: bool = False, log: Progress | None = None, base: Path = Path(".")
) -> RunResult:
    """Run every stage that isn't done yet and write the report.

    `out` must be empty or new unless `resume`; then finished stages are skipped and the unfinished one goes on from its
    last checkpoint. Raises ConfigError before anything is loaded; KeyboardInterrupt leaves a folder that resumes.
    """
    log = log or Progress()
    started = time.perf_counter()
    out = Path(out)
    if not resume and out.exists() and any(out.iterdir()):
        raise ConfigError(f"--out: '{out}' isn't empty; use --resume to go on with that run, or another folder")
    checked = check_recipe(recipe, base)
    out.mkdir(parents=True, exist_ok=True)
    replace_file(out / RECIPE, recipe.dump())
    replace_file(out / ENVIRONMENT, json.dumps(_environment(recipe), indent=1))
    try:
        asyncio.run(_run(recipe, out, checked, log))
    finally:
        report = write_report(out)
    results = read_json(out / RESULTS) or []
    if results:
        log.table(results_table(results, title=recipe.name))
    log.note(f"report: {report}")
    return RunResult(out=out, report=report, results=results, wall_s=time.perf_counter() - started)


async def _run(recipe: Recipe, out: Path, checked: Checked, log: Progress) -> None:
    context = _context(recipe, out, checked, log)
    try:
        for index, stage in enumerate(recipe.stages):
            if context.state.is_done(stage.name):
                context.note(f"{stage.name}: done already")
                continue
            started = time.perf_counter()
            facts = await RUNNERS[type(stage)](context, stage, index)
            context.state.finish(stage.name, wall_s=round(time.perf_counter() - started, 1), **facts)
            write_report(out)
    finally:
        await context.engine.close()


def _context(recipe: Recipe, out: Path, checked: Checked, log: Progress) -> RunContext:
    """Load the model and put the parts together."""
    torch.manual_seed(recipe.seed)
    loaded = load_model(recipe.model)
    engine = TorchEngine.from_model(
        loaded.model,
        max_slots=recipe.engine.max_slots,
        max_context=recipe.engine.max_context,
        prefill_chunk=recipe.engine.prefill_chunk,
        dtype=compute_dtype(recipe.engine.dtype),
    )
    limits = recipe.limits
    rollouts = Rollouts(
        make_env=checked.make_env,
        rubric=checked.rubric,
        renderer=ChatRenderer(loaded.tokenizer),
        end_tokens=loaded.stop_tokens,
        limits=Limits(**limits.model_dump(exclude={"max_retries"})),
        engine=engine,
        max_concurrent=recipe.engine.max_slots,
        max_retries=limits.max_retries,
    )
    return RunContext(
        recipe=recipe,
        out=out,
        progress=log,
        loaded=loaded,
        engine=engine,
        rollouts=rollouts,
        make_env=checked.make_env,
        tasks=checked.tasks,
        store=TrajectoryStore(out / "trajectories"),
        metrics=MetricsLog(out),
        state=RunState.open(out),
        recovered=checked.recovered,
        compute_dtype=compute_dtype(recipe.learner.dtype),
    )


def compute_dtype(name: str) -> torch.dtype:
    """`auto` is bfloat16 where the processor multiplies it in hardware, float32 elsewhere."""
    if name == "auto":
        return torch.bfloat16 if native_bf16() else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def _environment(recipe: Recipe) -> dict[str, Any]:
    """What a run ran on."""
    return {
        "upswing": version("upswing"),
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "native_bf16": native_bf16(),
        "seed": recipe.seed,
    }


def eval_checkpoint(
    recipe: Recipe, model: str, *, split: str, tasks: int, greedy: bool, samples: int, log: Progress
) -> EvalSummary:
    """Measure any model (a checkpoint folder, a hub id, an alias) on a recipe's environment, without a run folder."""
    checked = check_recipe(recipe)

    async def measured() -> EvalSummary:
        with_model = recipe.model_copy(update={"model": model})
        context = _context(with_model, Path("."), checked, log)
        try:
            chosen = checked.tasks.take(split, derive_seed(recipe.seed, split, 0), tasks)
            summary, _ = await measure(
                context, chosen, label=model, temperature=0.0 if greedy else 1.0, samples=samples, seed=0
            )
            return summary
        finally:
            await context.engine.close()

    return asyncio.run(measured())
