"""What an `rl` stage starts from, measured: success, format, speed, memory. And what is said of it before step 1."""

from __future__ import annotations

import asyncio
import math
import os
import random
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from upswing.audit import audit
from upswing.engine.kv_cache import KVCache
from upswing.engine.torch import TorchEngine
from upswing.evals.stats import Interval, bootstrap_mean_ci, pass_at_k
from upswing.evals.summary import record_of
from upswing.learn.activations import Fits
from upswing.learn.logits import CHUNK_ELEMENTS
from upswing.learn.precision import compute_context
from upswing.learn.sharded import on_several_ranks
from upswing.learn.trainer import CPU_PACK, GPU_PACK
from upswing.monitor.findings import Finding
from upswing.monitor.safeguards import usable
from upswing.preflight.advice import FEW_TASKS, UNKNOWN, Measured, advise, found, measured_findings, shown
from upswing.preflight.checks import Size, option_findings, room_findings, template_findings
from upswing.recipe import DistillStage, Recipe, RlStage
from upswing.seeding import derive_seed
from upswing.stages.context import RunContext
from upswing.stages.evaluate import SUCCESS
from upswing.stages.graduation import is_well_formed, pace_of
from upswing.stages.policy import PolicyMethod
from upswing.stages.probe import FORWARDS
from upswing.stages.spelling import REMEDY, respelt
from upswing.trajectory.types import Group, Outcome, Score, Task, Trajectory
from upswing.verify import Rubric
from upswing.verify.deadline import call_env, is_async, to_its_end
from upswing.verify.text import TimedReader
from upswing.world import World

CALL_TOKENS = 16
"""What a call takes at least."""
AUDITED, AUDIT_S = 4, 5.0
"""The first train tasks that a run audits its reward on, and for how long at most."""


class Played(NamedTuple):
    """What was sampled for an evaluation, and how long it took."""

    seconds: float
    trajectories: Sequence[Trajectory]


async def take_stock(
    context: RunContext, stage: RlStage, count: int, samples: int, known: Measured
) -> tuple[Measured, list[Finding]]:
    """Play `count` train tasks, learn once on a copy, estimate. The recipe of `context` has the base model that the
    stage, its only one, starts from; `known`: what was measured without them."""
    rollouts, recipe, env = context.rollouts_at(0), context.recipe, context.make_env()
    seed = derive_seed(recipe.seed, stage.name, "tasks")
    tasks = context.tasks.take("train", seed, count)
    model = context.adapted(context.source_model("base"), stage)
    findings = option_findings(recipe, stage, sum(p.numel() for p in model.parameters()))
    findings += template_findings(rollouts.renderer, rollouts.end_tokens, stage.name)
    memory, machine = _memory_gb(context, stage, model), machine_bytes(next(model.parameters()).device) / 1e9
    del model
    tools = bool(getattr(env, "_tools", ()))
    if recipe.agent is None:
        sizes, plays = await _sizes(context, tasks, tools)
        tools, turns = tools or any(play.tool_records for play in plays), getattr(env, "max_turns", None)
        findings += room_findings(recipe, stage.name, sizes, has_tools=tools, max_turns=turns)
        spelt = respelt([branch for play in plays for branch in play.branches], rollouts.renderer.decode)
        if spelt and not known.base:
            findings.append(found("names_respelt", "warning", stage.name, spelt, REMEDY))
    began = time.perf_counter()
    with context.progress.task("check: rollouts", total=len(tasks) * samples, unit="trajectory") as told:
        groups = await rollouts.groups(
            tasks,
            size=samples,
            sampling=context.sampling(temperature=stage.temperature),
            seed=derive_seed(recipe.seed, stage.name, "check"),
            on_done=lambda trajectory: told.advance(1),
        )
    rollout_s = time.perf_counter() - began
    measured = replace(
        known,
        **_success([t for group in groups for t in group.trajectories]),
        has_tools=tools,
        samples=samples,
        distinct_tasks=float(len({task.id for task in context.tasks.take("train", seed, 2 * FEW_TASKS)})),
        sampled_per_s=sum(t.num_sampled_tokens for group in groups for t in group.trajectories) / rollout_s,
        memory_gb=memory,
        machine_gb=machine,
    )
    if measured.memory_frac < 1 and measured.format.n:
        measured = await _timed(context, stage, groups, measured, rollout_s / (len(tasks) * samples))
    return measured, findings


def _success(played: Sequence[Trajectory]) -> dict[str, Any]:
    """The fields of Measured that trajectories say, with intervals over tasks."""
    counted = [t for t in played if t.outcome in (Outcome.COMPLETED, Outcome.TRUNCATED)]
    graded = [t for t in counted if t.reward is not None]
    right = {t.id: float((_value(t) or 0.0) >= 1 - 1e-9) for t in graded}
    won, rewards = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    for trajectory in graded:
        won[trajectory.task.id].append(right[trajectory.id])
        rewards[trajectory.task.id].append(float(trajectory.reward or 0.0))
    k = min(map(len, won.values()), default=0)

    def mean(values: dict[str, float], of: Sequence[Trajectory] = ()) -> Interval:
        return bootstrap_mean_ci(list(values.values()), clusters=[t.task.id for t in of] or None)

    formed = [t for t in graded if is_well_formed(t)]
    return {
        "pass_1": mean(right, graded),
        "pass_k": mean({task: pass_at_k(len(found), int(sum(found)), k) for task, found in won.items()}),
        "mixed": mean({task: float(0 < sum(found) < len(found)) for task, found in won.items()}),
        "spread": mean({task: float(np.ptp(found) > 1e-6) for task, found in rewards.items()}),
        "format": mean({t.id: float(is_well_formed(t)) for t in counted}, counted),
        "pass_formed": mean({t.id: right[t.id] for t in formed}, formed),
        "truncated": mean({t.id: float(t.outcome is Outcome.TRUNCATED) for t in counted}, counted),
        "calls": mean({t.id: float(record_of(t).tool_calls) for t in counted}, counted),
        "turns": float(np.mean([t.num_turns for t in counted])) if counted else math.nan,
        "errored": 1 - len(counted) / len(played),
    }


def _value(trajectory: Trajectory) -> float | None:
    """What says whether it succeeded."""
    score = trajectory.score
    return None if score is None else score.components.get(SUCCESS, score.value)


async def _timed(
    context: RunContext, stage: RlStage, groups: Sequence[Group], measured: Measured, trajectory_s: float
) -> Measured:
    """With one real update of a copy: seconds a step and hours in all. Warm-up counts, so it is rather too much."""
    method = PolicyMethod(context, stage, 0)
    began = time.perf_counter()
    some = [_half_right(group) for group in groups[: stage.tasks_per_step]]
    batch, *_ = await method.learn(some, 1 + (0 if stage.critic is None else stage.critic.warmup_steps))
    update_s = time.perf_counter() - began
    measured = replace(measured, trained_per_s=sum(len(row.tokens) for row in batch.rows) / update_s)
    return _in_time(stage, measured, trajectory_s, update_s / len(batch.trajectories))


def _in_time(stage: RlStage, measured: Measured, played_s: float, learned_s: float) -> Measured:
    """With seconds a step and hours in all, by the seconds that a trajectory takes to play and to learn from."""
    a_step, mixed = stage.tasks_per_step * stage.group_size, measured.mixed.mean
    batches = min(float(stage.dynamic_sampling or 1), 1 / mixed if mixed > 0 else math.inf)
    sampled_s, update_s = played_s * a_step * batches, learned_s * a_step
    step_s = max(sampled_s, update_s) if stage.max_staleness else sampled_s + update_s
    evaluated = stage.eval_tasks * (1 + stage.steps // stage.eval_every) if stage.eval_every else 0
    total_s, limit_s = stage.steps * step_s, stage.time_limit_s or math.inf
    return replace(
        measured,
        step_s=step_s,
        hours=(min(total_s, limit_s) + evaluated * played_s) / 3600,
        steps_frac=min(1.0, limit_s / total_s) if stage.time_limit_s else math.nan,
    )


def _half_right(group: Group) -> Group:
    """Every second trajectory called right: no row's gradient is zero, so that the update costs what it can cost."""
    scored = [(t, t.score) for t in group.trajectories if t.score is not None]
    scores = [Score(value=i % 2, components=dict.fromkeys(old.components, i % 2)) for i, (_, old) in enumerate(scored)]
    return replace(group, trajectories=tuple(replace(t, score=new) for (t, _), new in zip(scored, scores, strict=True)))


async def _sizes(context: RunContext, tasks: Sequence[Task], has_tools: bool) -> tuple[list[Size], list[Trajectory]]:
    """Each task's right play in tokens, the expert's or else the prompt and the shortest accepted answer; and the
    expert's plays."""
    try:
        context.make_env().expert(tasks[0], random.Random(0))
    except NotImplementedError:
        return [await _least(context, task, has_tools) for task in tasks], []
    kept, failed = await context.rollouts.demonstrations(tasks, count=len(tasks), seed=0, min_reward=-math.inf)
    plays = [play for play in (*kept, *failed) if play.branches]
    turns = [max(np.bincount(b.turn[b.sampled], minlength=1).max() for b in play.branches) for play in plays]
    return [Size(int(turn), max(map(len, play.branches))) for turn, play in zip(turns, plays, strict=True)], plays


async def _least(context: RunContext, task: Task, has_tools: bool) -> Size:
    env, renderer, timeout_s = context.make_env(), context.rollouts.renderer, context.rollouts.limits.env_timeout_s
    try:
        seen = await call_env(env.reset, task, 0, timeout_s=timeout_s)
    finally:
        await to_its_end(call_env(env.close, timeout_s=timeout_s))
    prompt = len(renderer.encode(renderer.render_text(seen.messages, seen.tools)))
    answer = 1 + min((len(renderer.encode(renderer.guard(gold))) for gold in task.gold), default=0)
    return Size(turn=answer, total=prompt + answer + CALL_TOKENS * has_tools)


def _memory_gb(context: RunContext, stage: RlStage, model: Any) -> dict[str, float]:
    """An estimate of what the learner's device must hold at once, by what takes it; 1e9 bytes."""
    recipe, engine, device = context.recipe, context.engine, next(model.parameters()).device
    fits = Fits.measure(model, lambda: compute_context(device.type, context.compute_dtype), 1.0)
    parts = learner_bytes(recipe, stage, model, fits, context.compute_dtype, device.type)
    if isinstance(engine, TorchEngine) and engine.model.device == device:
        slots = min(context.rollouts.max_concurrent, stage.tasks_per_step * stage.group_size)
        tokens = min(slots * recipe.limits.context_tokens, engine.kv_tokens)
        parts["keys and values"] = tokens * KVCache(engine.model, max_slots=1, max_positions=1).token_bytes
        weights = list(engine.model.parameters())
        once = {p.dtype for p in weights} == {torch.float32} and not recipe.engine.quantize
        if not once or stage.lora is not None or stage.max_staleness or stage.oversample:  # else they share memory
            parts["the engine's weights"] = sum(p.nbytes for p in weights)
    return {what: size / 1e9 for what, size in parts.items() if size}


def _pack_tokens(stage: RlStage, device: str) -> int:
    return stage.max_tokens_per_pack or (CPU_PACK if device == "cpu" else GPU_PACK)


def learner_bytes(
    recipe: Recipe, stage: RlStage, model: Any, fits: Fits, dtype: torch.dtype, device: str, ranks: int = 1
) -> dict[str, float]:
    """What a rank of the learner holds, by what takes it; `fits`: of 1 GB. The model's weights may be on meta."""
    may_pull = stage.kl_coef or "kl" in usable(stage.safeguards, dict(stage))  # by a safeguard, in mid-run
    weights = list(model.parameters())
    held = sum(p.nbytes for p in weights)
    trained = held + 12 * sum(p.numel() for p in weights if p.requires_grad)  # gradient and two moments in float32
    pack = max(_pack_tokens(stage, device), recipe.limits.context_tokens)
    kept, choice = pack / fits.kept, stage.gradient_checkpointing
    activations = min(kept, pack / fits.recomputed if choice is True else choice or kept)
    return {
        "the policy's weights, gradients and moments": trained / ranks,
        "weights in 16 bits": 0 if dtype == torch.float32 else 2 * _cast(model, choice is True),
        "the reference": held / ranks if may_pull and stage.lora is None else 0,
        "the critic": trained if stage.critic is not None and stage.critic.kind == "separate" else 0,
        "activations": 1e9 * activations + 8 * min(CHUNK_ELEMENTS, pack * model.config.vocab_size),
    }


def _cast(model: Any, recomputed: bool) -> float:
    """Numbers that a forward and backward hold in the compute precision at once: of the whole model but what is only
    looked up; where layers are recomputed, of a layer or the head."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    apart = 0 if head is embedding else embedding.numel()
    every = float(sum(p.numel() for p in model.parameters()) - apart)
    return max((every - head.numel()) / model.config.num_hidden_layers, head.numel()) if recomputed else every


def machine_bytes(device: torch.device) -> float:
    """Memory of a device; of the CPU what this process may take."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    found = [float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))]
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # another system, or "max"
            found.append(float(Path(limit).read_text()))
    return min(found)


async def announce(
    context: RunContext, stage: RlStage | DistillStage, model: Any, evaluated: Played | None = None
) -> None:
    """Before step 1 of the first `rl` stage: the findings that need no sampling, then the three questions as far as a
    short audit, the evaluation on dev, the stage before and a few short forwards answer them, and the advice that this
    gives. Nothing of the run depends on it."""
    recipe, rollouts = context.recipe, context.rollouts
    if not isinstance(stage, RlStage) or any(
        isinstance(one, RlStage) for one in recipe.stages[: _index(recipe, stage)]
    ):
        return
    findings = option_findings(recipe, stage, sum(p.numel() for p in model.parameters()))
    findings += template_findings(rollouts.renderer, rollouts.end_tokens, stage.name)
    source, dev = recipe.source_of(_index(recipe, stage), stage.from_), _dev(context, stage)
    graded = context.state.stages.get(source, {}).get("graduation", {})
    known, why_not = await _audited(context, stage, _known(context, stage, model, source, dev, evaluated))
    for finding in [*findings, *measured_findings(known, recipe, stage)]:
        context.found(finding)
    answers: dict[str, dict[str, Interval | float]] = {
        "is the reward clean": {}
        if why_not
        else {"wrong answers accepted": known.false_accept, "right answers refused": known.false_reject},
        "can RL learn": {
            "dev success": dev,
            "pass@1": _point(graded.get("pass_1")),
            "pass@k": known.pass_k,
            "tasks strictly between": known.mixed,
            "in the right format": known.format,
        },
        "is there enough compute": {
            "sampled tokens/s": known.sampled_per_s,
            "trained tokens/s": known.trained_per_s,
            "share of the machine's memory": known.memory_frac,
            "hours": known.hours,
        },
    }
    for question, facts in answers.items():
        said = [f"{name} {found if (found := shown(one)) != '-' else 'not measured'}" for name, one in facts.items()]
        context.note(f"{stage.name}: pre-flight: {question}? {', '.join(said) or f'audit not measured ({why_not})'}")
    advice = advise(known)
    more = "" if advice.kind == "go" else f": {advice.why}. {advice.remedy}"
    context.note(
        f"{stage.name}: pre-flight: advice: {advice.kind}{more} (upswing check {context.out} measures the rest)"
    )


def _dev(context: RunContext, stage: RlStage) -> Interval:
    row = next((row for row in context.metrics.read(stage.name) if row["step"] == 0 and "eval_low" in row), {})
    dev = row.get(f"eval_{SUCCESS}", row.get("eval_reward"))
    return UNKNOWN if dev is None else Interval(dev, row["eval_low"], row["eval_high"], stage.eval_tasks)


def _known(
    context: RunContext, stage: RlStage, model: Any, source: str, dev: Interval, evaluated: Played | None
) -> Measured:
    """What was measured before the stage anyway, and the memory where that takes a few short forwards of `model`."""
    before = context.state.stages.get(source, {})
    graded, pace = before.get("graduation", {}), before.get("pace")
    rows = [one for one in context.metrics.read(source) if one.get("num_tokens") and one.get("seconds")]
    rates = [one["num_tokens"] / one["seconds"] for one in rows]
    memory = dict[str, float]()
    if not (on_several_ranks() or stage.gradient_checkpointing):  # a forward of all ranks; or one that keeps less
        with suppress(Exception):  # architectures differ, and an estimate stops no run
            memory = _memory_gb(context, stage, model)
    known = Measured(
        pass_1=dev if dev.n else _point(graded.get("pass_1")),
        pass_k=_point(graded.get("pass_k")),
        format=_point(graded.get("format_valid_frac")),
        mixed=_point(graded.get("mixed_frac")),
        base=source == "base",
        trained_per_s=float(np.median(rates)) if rates else math.nan,
        memory_gb=memory,
        machine_gb=machine_bytes(next(model.parameters()).device) / 1e9,
    )
    if evaluated is not None and evaluated.trajectories:
        pace = pace_of(evaluated.trajectories, evaluated.seconds)
    if not pace:
        return known
    known = replace(known, sampled_per_s=pace["sampled_per_s"])
    if not rates:
        return known
    looks = 1 + bool(stage.kl_coef)  # log-probs of before the update, and the reference's
    forwards = stage.updates_per_batch + looks / FORWARDS
    room = _pack_tokens(stage, next(model.parameters()).device.type) - pace["prompt_tokens"]
    sharing = min(max(1.0, room / max(1.0, pace["further_tokens"])), stage.group_size)  # a prompt once a pack
    tokens = pace["further_tokens"] + pace["prompt_tokens"] / sharing
    return _in_time(stage, known, pace["trajectory_s"], forwards * tokens / known.trained_per_s)


async def _audited(context: RunContext, stage: RlStage, known: Measured) -> tuple[Measured, str]:
    """With the audit's rates on the first tasks, where that is free and quick; or else why not. Whatever goes wrong
    stops no run, and what is drawn at random is as if nothing had been drawn."""
    recipe = context.recipe
    if stage.reward_model or stage.process_reward:
        return known, "a model is the reward"
    if elsewhere := ["cluster.env_workers"] if recipe.cluster.env_workers else _awaited(context.rubric):
        return known, f"{', '.join(elsewhere)} may cost time or money"
    world = World(make_env=context.make_env, rubric=context.rubric, tasks=context.tasks.stream)
    limit = asyncio.timeout(AUDIT_S)
    try:
        with _nothing_drawn():
            async with limit:
                tasks = context.tasks.take("train", derive_seed(recipe.seed, stage.name, "tasks"), AUDITED)
                report = await audit(world, tasks, seed=recipe.seed, programs=False)
    except Exception as problem:
        if limit.expired():
            return known, f"not done within {AUDIT_S:g} s"
        return known, " ".join(f"{type(problem).__name__}: {problem}".split())[:200]
    return replace(known, **report.rates), report.why_not


def _awaited(rubric: Rubric) -> list[str]:
    """Verifiers that wait for something outside: a judge, a server, a sandbox. A worker of this machine is none."""
    functions = {name: verifier.function for name, verifier, _ in rubric.items}
    return [name for name, one in functions.items() if is_async(one) and not isinstance(one, TimedReader)]


@contextmanager
def _nothing_drawn() -> Iterator[None]:
    """Leaves the global random states as they were, whatever a user's environment draws from them."""
    python, arrays, tensors = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)
        torch.set_rng_state(tensors)


def _index(recipe: Any, stage: RlStage) -> int:
    return next(i for i, one in enumerate(recipe.stages) if one.name == stage.name)


def _point(value: float | None) -> Interval:
    return UNKNOWN if value is None or math.isnan(value) else Interval(value, math.nan, math.nan, 1)
