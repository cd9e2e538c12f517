"""The `preference` stage: pairs of a better and a worse trajectory, sampled and judged or from a file, and what is
learned from them. The reference is the stage's own start, so its log-probs come from the learner before any update."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any

from upswing.errors import UpswingError
from upswing.learn.learner import Learner
from upswing.learn.preference import Candidate, PreferenceOptions, candidates, preference_metrics, preference_update
from upswing.learn.schedule import Schedule
from upswing.recipe.offline import LOSS_DEFAULTS, PreferenceStage
from upswing.seeding import derive_seed
from upswing.stages.context import FINAL, RunContext
from upswing.stages.pairs import Pair, collect_pairs, hold_out


@dataclass(frozen=True, kw_only=True, eq=False)
class _Data:
    """Pairs as the losses read them: chosen and rejected apart, in order; a side that a pair lacks is left out."""

    pairs: list[tuple[Candidate | None, Candidate | None]]

    @classmethod
    def of(cls, learner: Learner, pairs: list[Pair], loss: str) -> _Data:
        sides = [side for pair in pairs for side in (pair.chosen, pair.rejected)]
        known = iter(candidates(learner, [side for side in sides if side is not None], loss=loss))
        found = [None if side is None else next(known) for side in sides]
        return cls(pairs=list(zip(found[0::2], found[1::2], strict=True)))

    def sides(self) -> tuple[list[Candidate], list[Candidate]]:
        chosen, rejected = zip(*self.pairs, strict=True) if self.pairs else ((), ())
        return [c for c in chosen if c is not None], [c for c in rejected if c is not None]

    def batches(self, size: int, seed: int) -> list[_Data]:
        """Minibatches of one epoch, in an order of its own; the last one may be smaller."""
        order = list(self.pairs)
        random.Random(seed).shuffle(order)
        return [_Data(pairs=order[start : start + size]) for start in range(0, len(order), size)]


async def run_preference(context: RunContext, stage: PreferenceStage, index: int) -> dict[str, Any]:
    """Train and save the final weights -> facts for state.json. A killed stage starts over, with the pairs it had."""
    context.metrics.truncate_after(stage.name, -1)
    model = context.source_model(context.recipe.source_of(index, stage.from_))
    pairs = await collect_pairs(context, stage, model.state_dict(), paired=stage.loss != "kto")
    training_pairs, held_pairs = hold_out(pairs, stage.validation_pairs)
    if not training_pairs:
        raise UpswingError(
            f"{stage.name}: {len(pairs)} pairs, none left to train on after holding out whole prompts for "
            f"validation_pairs ({stage.validation_pairs}); use fewer, or sample more tasks"
        )
    total = -(-len(training_pairs) // stage.batch_size) * stage.epochs
    learner = Learner(
        context.adapted(model, stage),
        schedule=Schedule(kind=stage.schedule, warmup=min(int(stage.warmup_frac * total), total - 1), total=total),
        **context.trainer_options(stage),
    )
    training = _Data.of(learner, training_pairs, stage.loss)
    held = _Data.of(learner, held_pairs, stage.loss)
    context.note(f"{stage.name}: {len(training_pairs)} pairs to train on, {len(held_pairs)} held out")
    facts = _train(context, stage, learner, training, held, total)
    learner.save(context.out / "checkpoints" / stage.name / FINAL, tokenizer=context.tokenizer)
    return {"pairs": len(training_pairs), **facts}


def _options(stage: PreferenceStage) -> PreferenceOptions:
    return PreferenceOptions(loss=stage.loss, **{key: getattr(stage, key) for key in LOSS_DEFAULTS[stage.loss]})


def _train(
    context: RunContext, stage: PreferenceStage, learner: Learner, training: _Data, held: _Data, total: int
) -> dict[str, Any]:
    options, seed = _options(stage), derive_seed(context.recipe.seed, stage.name)
    started = time.perf_counter()
    before = after = _measure(context, stage, learner, held, options)
    with context.progress.task(stage.name, total=total, unit="update") as shown:
        for epoch in range(stage.epochs):
            for batch in training.batches(stage.batch_size, derive_seed(seed, "epoch", epoch)):
                values = preference_update(learner, *batch.sides(), options)
                context.metrics.append(stage.name, learner.updates, values)
                shown.update(
                    learner.updates,
                    loss=round(values["loss"], 4),
                    accuracy=round(values["preference_accuracy"], 3),
                    shift=round(values["chosen_shift"], 2),
                )
                if learner.updates == total or (stage.eval_every and learner.updates % stage.eval_every == 0):
                    after = _measure(context, stage, learner, held, options)
    seconds = round(time.perf_counter() - started, 1)
    _report(context, stage, before, after, total)
    return {"steps": total, "train_s": seconds, "held_out": {"before": before, "after": after}}


def _measure(
    context: RunContext, stage: PreferenceStage, learner: Learner, held: _Data, options: PreferenceOptions
) -> dict[str, float]:
    """Loss, accuracy, margin and shifts on the held-out pairs; empty without any."""
    if not held.pairs:
        return {}
    found = preference_metrics(learner, *held.sides(), options, unchanged=learner.updates == 0)
    values = {f"validation_{name}": value for name, value in found.items()}
    context.metrics.append(stage.name, learner.updates, values)
    return values


def _report(
    context: RunContext, stage: PreferenceStage, before: dict[str, float], after: dict[str, float], step: int
) -> None:
    if not after:
        return
    names = [name for name in ("preference_accuracy", "reward_margin", "chosen_shift") if f"validation_{name}" in after]
    moves = [f"{n.replace('_', ' ')} {before[f'validation_{n}']:.3f} -> {after[f'validation_{n}']:.3f}" for n in names]
    context.note(f"{stage.name}: held-out {', '.join(moves)}")
    shift = after["validation_chosen_shift"]
    if shift < -1.0:
        context.warn(
            "likelihood displacement",
            evidence=f"the chosen side of held-out pairs lost {-shift:.1f} nats of log-prob on average",
            remedy="Set nll_coef (0.2 to 1), raise beta, or train less." if stage.loss != "kto" else "Train less.",
            stage=stage.name,
            step=step,
        )
