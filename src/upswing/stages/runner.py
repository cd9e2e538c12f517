"""Runs a recipe: checks everything that can be checked, loads the model, then one stage after the other."""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import transformers

from upswing.cluster.engines import RayEngines
from upswing.cluster.worlds import RemoteRubric, Workers
from upswing.engine.int8 import check_int8
from upswing.engine.torch import TorchEngine
from upswing.engine.vllm import VllmEngine
from upswing.errors import ConfigError
from upswing.evals.summary import EvalSummary, results_table
from upswing.learn.precision import learner_device, native_bf16
from upswing.models.load import load_model, load_tokenizer
from upswing.models.resolve import TINY, resolve_model
from upswing.monitor.metrics import MetricsLog
from upswing.monitor.progress import Progress
from upswing.preflight.checks import check_template
from upswing.recipe import (
    ClusterSection,
    DistillStage,
    EvalStage,
    PreferenceStage,
    Recipe,
    RewardModelStage,
    RlStage,
    SftStage,
    check_same,
    load_recipe,
)
from upswing.rollout.agent import make_agent
from upswing.rollout.collect import Rollouts
from upswing.rollout.limits import Limits
from upswing.rollout.sessions import tools_place
from upswing.seeding import derive_seed
from upswing.stages.context import AnyEngine, RunContext, RunState, TaskSource
from upswing.stages.distill import check_teacher
from upswing.stages.evaluate import measure, run_eval
from upswing.stages.preference import run_preference
from upswing.stages.reward_model import run_reward_model
from upswing.stages.rl import run_rl
from upswing.stages.run_lock import alone_in
from upswing.stages.servers import RestingRollouts, engine_options, explicit_dtype, server_of
from upswing.stages.sft import run_sft
from upswing.trajectory.render import ChatRenderer
from upswing.trajectory.store import TrajectoryStore
from upswing.view.report import write_report
from upswing.view.run_folder import ENVIRONMENT, RECIPE, RESULTS, read_json, replace_file
from upswing.world import World, preflight

T = TypeVar("T")
ALONE = "start this recipe without torchrun, or with cluster.learners: 1"

RUNNERS: dict[type, Callable[..., Coroutine[Any, Any, dict[str, Any]]]] = {
    SftStage: run_sft,
    RlStage: run_rl,
    PreferenceStage: run_preference,
    RewardModelStage: run_reward_model,
    DistillStage: run_rl,
    EvalStage: run_eval,
}


@dataclass(frozen=True, kw_only=True)
class RunResult:
    out: Path
    report: Path
    results: list[dict[str, Any]]
    """Entries of results.json."""
    wall_s: float


def check(recipe: Recipe, world: World | None = None) -> World:
    """Everything that can be found wrong without loading the model; `world`: of `preflight`, if that was done. Raises
    ConfigError."""
    check_ranks(recipe)
    folder = resolve_model(recipe.model, download=False)
    if recipe.model == TINY or (folder / "tokenizer_config.json").is_file():  # else it is fetched first
        _renderer(recipe)
    if recipe.engine.quantize is not None:
        check_int8(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if recipe.agent is not None:
        make_agent(**recipe.agent.model_dump())
    for index, stage in enumerate(recipe.stages):
        if isinstance(stage, DistillStage):
            check_teacher(recipe, stage, index)
    return world or preflight(recipe)


def check_ranks(recipe: Recipe) -> None:
    """Raises ConfigError for what isn't done on several ranks, if there are: the recipe's, or torchrun's."""
    torchrun = "MASTER_ADDR" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1
    if torchrun and recipe.cluster.learners > 1:
        raise ConfigError("cluster.learners: torchrun has started the ranks already; leave one of them out")
    if not torchrun and recipe.cluster.learners == 1:
        return
    for stage in recipe.stages:
        if isinstance(stage, EvalStage):
            continue
        where = f"stages.{stage.name}"
        if not isinstance(stage, SftStage | RlStage):
            raise ConfigError(f"{where}: a {stage.stage} stage runs on one rank; {ALONE}")
        for key in ("lora", "critic"):
            if getattr(stage, key, None) is not None:
                raise ConfigError(f"{where}.{key} works on one rank; leave it out, or {ALONE}")
        if (wanted := stage.gradient_checkpointing) and wanted is not True:
            raise ConfigError(f"{where}.gradient_checkpointing: {wanted} GB; allowed on several ranks: true, false")


def run_recipe(
    recipe: Recipe, out: Path, *, resume: bool = False, log: Progress | None = None, world: World | None = None
) -> RunResult:
    """Run every stage that isn't done yet and write the report.

    `out` must be empty or new unless `resume`; then finished stages are skipped and the unfinished one goes on from its
    last checkpoint. `world`: of `preflight`, if that was done. Raises ConfigError before anything is loaded, also when
    another process writes `out`; KeyboardInterrupt leaves a folder that resumes.
    """
    log = log or Progress()
    started = time.perf_counter()
    out = Path(out)
    if not resume and out.exists() and any(out.iterdir()):
        raise ConfigError(f"--out: '{out}' isn't empty; use --resume to go on with that run, or another folder")
    world = check(recipe, world)
    if (out / RECIPE).exists():
        check_same(load_recipe(out / RECIPE), recipe, out)
    out.mkdir(parents=True, exist_ok=True)
    with alone_in(out, log):
        report = _run_alone(recipe, out, world, log)
    results = read_json(out / RESULTS) or []
    return RunResult(out=out, report=report, results=results, wall_s=time.perf_counter() - started)


def _run_alone(recipe: Recipe, out: Path, world: World, log: Progress) -> Path:
    """In a folder that nobody else writes -> the report."""
    last_sign_of_life = max((path.stat().st_mtime for path in out.glob("*")), default=0.0)
    context = _context(recipe, out, world, log)
    try:
        asyncio.run(_run(context, world, last_sign_of_life))
    finally:
        report = write_report(out) if (out / RECIPE).exists() else out
    if results := read_json(out / RESULTS):
        log.table(results_table(results, title=recipe.name))
    log.note(f"report: {report}")
    return report


async def _check_template(context: RunContext, world: World) -> None:
    """Raises ConfigError when the chat template drops what the environment sends; an agent program's own
    messages are refused when it sends them."""
    recipe = context.recipe
    if recipe.agent is None:
        tasks = [found[0] for found in world.sampled.values()]
        limit_s, own = recipe.limits.env_timeout_s, recipe.engine.kind != "openai"
        await check_template(context.rollouts.renderer, context.make_env, tasks, timeout_s=limit_s, shows_tools=own)


async def _run(context: RunContext, world: World, last_sign_of_life: float) -> None:
    out, recipe = context.out, context.recipe
    try:
        await _check_template(context, world)  # before the folder is this recipe's: a refused one can be corrected
        replace_file(out / RECIPE, recipe.dump())
        replace_file(out / ENVIRONMENT, json.dumps(_environment(recipe, read_json(out / ENVIRONMENT) or {}), indent=1))
        for index, stage in enumerate(recipe.stages):
            if context.state.is_done(stage.name):
                context.note(f"{stage.name}: done already")
                continue
            context.state.begin(stage.name, last_sign_of_life)
            if isinstance(context.engine, VllmEngine):
                await context.engine.sleep()
            work = RUNNERS[type(stage)](context, stage, index)
            engine = context.engine
            facts = await (engine.cluster.unless_gone(work) if isinstance(engine, RayEngines) else work)
            context.state.finish(stage.name, **facts)
            write_report(context.out)
    finally:
        await context.rollouts.close()
        await context.engine.close()


def _context(recipe: Recipe, out: Path, world: World, log: Progress) -> RunContext:
    """Load the model and put the parts together."""
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.manual_seed(recipe.seed)
    engine: AnyEngine | None = server_of(recipe, log)  # before the model: it may not be there
    try:
        return _with_model(recipe, out, world, log, engine)
    except BaseException:  # what was started on a cluster, or in this process, isn't left behind
        if engine is not None:
            asyncio.run(engine.close())
        raise


def _renderer(recipe: Recipe) -> ChatRenderer:
    """Of the model's tokenizer; no weights are read. Raises ConfigError when no chat can be had with it, or it
    would drop an agent's tools."""
    tokenizer = load_tokenizer(recipe.model, recipe.chat_template)
    try:
        renderer = ChatRenderer(tokenizer)
        renderer.end_of_turn_id()
    except ConfigError as problem:
        raise ConfigError(f"chat_template: {problem}") from None
    if (agent := recipe.agent) is not None:
        tools_place(renderer, agent.tools_in, agent.protocol, "agent.tools_in")
    return renderer


def _with_model(recipe: Recipe, out: Path, world: World, log: Progress, engine: AnyEngine | None) -> RunContext:
    renderer = _renderer(recipe)
    loaded = load_model(recipe.model, tokenizer=renderer.tokenizer)
    if engine is None:
        engine = TorchEngine.from_model(loaded.model, tokenizer=loaded.tokenizer, **engine_options(recipe))
    play_env, rubric = world.make_env, world.rubric
    if isinstance(engine, RayEngines) and recipe.cluster.env_workers:
        workers = Workers(engine.cluster, recipe)
        play_env, rubric = workers.make_env, RemoteRubric(rubric, workers)
    limits = recipe.limits
    if (tokens := limits.context_tokens) > engine.max_request:
        raise ConfigError(f"limits.context_tokens: got {tokens}, above {engine.request_limit(tokens)}")
    rollouts = (RestingRollouts if recipe.engine.sleep else Rollouts)(
        make_env=play_env,
        rubric=rubric,
        renderer=renderer,
        end_tokens=renderer.end_tokens(loaded.stop_tokens),
        limits=Limits(**limits.model_dump(exclude={"max_retries"})),
        engine=engine,
        max_concurrent=min(recipe.engine.max_slots * recipe.cluster.engines, engine.kv_tokens // tokens),
        max_retries=limits.max_retries,
        agent=None if recipe.agent is None else make_agent(**recipe.agent.model_dump()),
    )
    return RunContext(
        recipe=recipe,
        out=out,
        progress=log,
        tokenizer=loaded.tokenizer,
        engine=engine,
        rollouts=rollouts,
        make_env=world.make_env,
        tasks=TaskSource(world.tasks),
        store=TrajectoryStore(out / "trajectories"),
        metrics=MetricsLog(out),
        state=RunState.open(out),
        recovered=world.make_env().recovered,
        rubric=rubric,
        compute_dtype=explicit_dtype(recipe.learner.dtype)
        or (torch.bfloat16 if native_bf16(learner_device().type) else torch.float32),
    )


def _environment(recipe: Recipe, before: dict[str, Any]) -> dict[str, Any]:
    """What a run ran on; `before`: the same of the process that it goes on from."""
    return {
        "upswing": version("upswing"),
        "commits": list(dict.fromkeys([*before.get("commits", []), *_commit()])),
        "started": before.get("started") or datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "native_bf16": native_bf16(),
        "seed": recipe.seed,
    }


def _commit() -> list[str]:
    """Of the checkout that this code is in; none of an installed package."""
    root = Path(__file__).parents[3]
    if not (root / ".git").exists() or shutil.which("git") is None:
        return []
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=root, capture_output=True, text=True)
    return done.stdout.split()


def eval_checkpoint(
    recipe: Recipe, model: str, *, split: str, tasks: int, greedy: bool, samples: int, log: Progress
) -> EvalSummary:
    """Measure any model (a checkpoint folder, a hub id, an alias) on a recipe's environment, without a run folder."""

    async def measured(context: RunContext) -> EvalSummary:
        chosen = context.tasks.take(split, derive_seed(recipe.seed, split, 0), tasks)
        summary, _ = await measure(
            context, chosen, label=model, temperature=0.0 if greedy else 1.0, samples=samples, seed=0
        )
        return summary

    return with_model(recipe, model, log, measured)


def with_model(recipe: Recipe, model: str, log: Progress, work: Callable[[RunContext], Awaitable[T]]) -> T:
    """What `work` makes of a recipe's context with another base model, without a run folder."""
    here = recipe.model_copy(update={"model": model, "cluster": ClusterSection()})
    world = check(here)
    if recipe.engine.kind == "openai" and model != recipe.model:
        raise ConfigError(f"engine.kind: an openai server can't be given '{model}'; use torch, vllm or sglang")

    async def worked(scratch: Path) -> T:
        context = _context(here, scratch, world, log)
        try:
            await _check_template(context, world)
            if recipe.engine.url is not None and context.engine.capabilities.weight_updates:
                await context.push_weights(context.source_weights("base"))
            return await work(context)
        finally:
            await context.rollouts.close()
            await context.engine.close()

    with tempfile.TemporaryDirectory() as scratch:
        return asyncio.run(worked(Path(scratch)))
