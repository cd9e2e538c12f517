"""The `reward_model` stage: scores learned from preference pairs, and what they are worth on held-out prompts."""

from __future__ import annotations

import random
import time
from typing import Any

from upswing.errors import UpswingError
from upswing.learn.reward_model import Pair, RewardModel
from upswing.learn.schedule import Schedule
from upswing.models.heads import scalar_model
from upswing.recipe.reward_model import RewardModelStage
from upswing.seeding import derive_seed
from upswing.stages.context import FINAL, RunContext
from upswing.stages.pairs import collect_pairs, hold_out

CHANCE = 0.55
"""Held-out accuracy below this is hardly better than a coin."""
LENGTH_BIAS = 0.4
"""Above this correlation of score and length a policy will learn to write longer."""


async def run_reward_model(context: RunContext, stage: RewardModelStage, index: int) -> dict[str, Any]:
    """Train and save the final weights -> facts for state.json. A killed stage starts over, with the pairs it had."""
    context.metrics.truncate_after(stage.name, -1)
    source = context.source_model(context.recipe.source_of(index, stage.from_))
    found = hold_out(await collect_pairs(context, stage, source.state_dict()), stage.validation_pairs)
    training, held = ([(p.chosen, p.rejected) for p in part if p.chosen and p.rejected] for part in found)
    if not training:
        raise UpswingError(
            f"{stage.name}: {len(held)} pairs, none left to train on after holding out whole prompts for "
            f"validation_pairs ({stage.validation_pairs}); use fewer, or sample more tasks"
        )
    total = -(-len(training) // stage.batch_size) * stage.epochs
    model = RewardModel(
        context.adapted(scalar_model(source), stage),
        schedule=Schedule(kind=stage.schedule, warmup=min(int(stage.warmup_frac * total), total - 1), total=total),
        **context.trainer_options(stage),
    )
    context.note(f"{stage.name}: {len(training)} pairs to train on, {len(held)} held out")
    started = time.perf_counter()
    before = _measure(context, stage, model, held)
    after = _train(context, stage, model, training, held, total) or before
    seconds = round(time.perf_counter() - started, 1)
    _report(context, stage, before, after, total)
    model.save(context.out / "checkpoints" / stage.name / FINAL, tokenizer=context.tokenizer)
    facts = {"pairs": len(training), "steps": total, "train_s": seconds}
    return {**facts, "held_out": {"before": before, "after": after}}


def _train(
    context: RunContext, stage: RewardModelStage, model: RewardModel, pairs: list[Pair], held: list[Pair], total: int
) -> dict[str, float]:
    """All epochs, each in an order of its own -> the last measurement."""
    after: dict[str, float] = {}
    with context.progress.task(stage.name, total=total, unit="update") as shown:
        for epoch in range(stage.epochs):
            order = list(pairs)
            random.Random(derive_seed(context.recipe.seed, stage.name, "epoch", epoch)).shuffle(order)
            for start in range(0, len(order), stage.batch_size):
                batch = order[start : start + stage.batch_size]
                margins = [stage.margin] * len(batch)
                values = model.pair_update(batch, margins=margins, centring=stage.centring)
                context.metrics.append(stage.name, model.updates, values)
                shown.update(model.updates, loss=round(values["loss"], 4), accuracy=round(values["accuracy"], 3))
                if model.updates == total or (stage.eval_every and model.updates % stage.eval_every == 0):
                    after = _measure(context, stage, model, held)
    return after


def _measure(context: RunContext, stage: RewardModelStage, model: RewardModel, held: list[Pair]) -> dict[str, float]:
    """Loss, accuracy, calibration and length correlation on the held-out pairs; empty without any."""
    if not held:
        return {}
    values = {f"validation_{name}": value for name, value in model.pair_metrics(held).items()}
    context.metrics.append(stage.name, model.updates, values)
    return values


def _report(
    context: RunContext, stage: RewardModelStage, before: dict[str, float], after: dict[str, float], step: int
) -> None:
    if not after:
        return
    names = {"accuracy": "accuracy", "ece": "calibration error", "length_correlation": "correlation with length"}
    moves = [f"{w} {before[f'validation_{n}']:.3f} -> {after[f'validation_{n}']:.3f}" for n, w in names.items()]
    context.note(f"{stage.name}: held-out {', '.join(moves)}")
    accuracy, length = after["validation_accuracy"], after["validation_length_correlation"]
    if accuracy < CHANCE:
        context.warn(
            "the reward model is hardly better than chance",
            evidence=f"it puts {100 * accuracy:.0f} % of held-out pairs in the right order",
            remedy="Use more pairs or epochs or a higher lr before any RL with it.",
            stage=stage.name,
            step=step,
        )
    if length > LENGTH_BIAS:
        context.warn(
            "the reward model likes length",
            evidence=f"its score and a trajectory's sampled tokens have correlation {length:.2f} on held-out pairs",
            remedy="Balance lengths within pairs, or RL with it will make trajectories longer, not better.",
            stage=stage.name,
            step=step,
        )
