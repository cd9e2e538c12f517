"""The loop of stages that learn from what is there before they start: epochs, batches, held-out measurements."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from upswing.errors import UpswingError
from upswing.learn.schedule import Schedule
from upswing.learn.trainer import Trainer
from upswing.recipe.offline import PairStage
from upswing.seeding import derive_seed
from upswing.stages.context import RunContext
from upswing.stages.pairs import Prompted, hold_out

Item = TypeVar("Item")
PromptedItem = TypeVar("PromptedItem", bound=Prompted)
Numbers = dict[str, float]


def split(context: RunContext, stage: PairStage, items: Sequence[PromptedItem], unit: str) -> list[list[PromptedItem]]:
    """[to train on, held out]. Raises UpswingError when there is nothing to train on."""
    training, held = hold_out(items, stage.validation_pairs)
    if not training:
        why = f"after holding out whole prompts for validation_pairs ({stage.validation_pairs})"
        how = "use fewer, or sample more tasks"
        raise UpswingError(f"{stage.name}: {len(items)} {unit}, none left to train on {why}; {how}")
    context.note(f"{stage.name}: {len(training)} {unit} to train on, {len(held)} held out")
    return [training, held]


def schedule(stage: PairStage, count: int) -> Schedule:
    """The learning rate's, for `count` items."""
    total = _updates(stage, count)
    return Schedule(kind=stage.schedule, warmup=min(int(stage.warmup_frac * total), total - 1), total=total)


def _updates(stage: PairStage, count: int) -> int:
    return -(-count // stage.batch_size) * stage.epochs


def fit(
    context: RunContext,
    stage: PairStage,
    trainer: Trainer,
    items: Sequence[Item],
    *,
    update: Callable[[Sequence[Item]], Numbers],
    measure: Callable[[], Numbers] | None,
    shown: Sequence[str],
    moved: Mapping[str, str],
) -> dict[str, Any]:
    """All epochs, each in an order of its own -> facts for state.json.

    `update` learns a batch and says the update's metrics, of which `shown` go to the progress bar. `measure` says what
    the held-out figures are now (None: nothing is held out); `moved`: which of them to tell of, and in what words.
    """

    def measured() -> Numbers:
        values = {f"validation_{name}": value for name, value in measure().items()} if measure else {}
        if values:
            context.metrics.append(stage.name, trainer.updates, values)
        return values

    started, total = time.perf_counter(), _updates(stage, len(items))
    before = after = measured()
    with context.progress.task(stage.name, total=total, unit="update") as progress:
        for epoch in range(stage.epochs):
            order = list(items)
            random.Random(derive_seed(context.recipe.seed, stage.name, "epoch", epoch)).shuffle(order)
            for start in range(0, len(order), stage.batch_size):
                values = update(order[start : start + stage.batch_size])
                context.metrics.append(stage.name, trainer.updates, values)
                progress.update(trainer.updates, **{name: round(values[name], 3) for name in shown})
                if trainer.updates == total or (stage.eval_every and trainer.updates % stage.eval_every == 0):
                    after = measured()
    found = {words: f"validation_{name}" for name, words in moved.items() if f"validation_{name}" in after}
    if found:
        moves = [f"{words} {before[name]:.3f} -> {after[name]:.3f}" for words, name in found.items()]
        context.note(f"{stage.name}: held-out {', '.join(moves)}")
    seconds = round(time.perf_counter() - started, 1)
    return {"steps": total, "train_s": seconds, "held_out": {"before": before, "after": after}}
