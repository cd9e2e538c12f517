"""The `reward_model` stage: scores learned from preference pairs, or chances of success learned from labels, and what
they are worth on held-out prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from upswing.learn.reward_model import RewardModel
from upswing.models.heads import scalar_model
from upswing.recipe.reward_model import RewardModelStage
from upswing.stages.context import FINAL, RunContext
from upswing.stages.offline import Numbers, fit, schedule, split
from upswing.stages.pairs import collect_pairs
from upswing.stages.process_reward import collect_labelled

CHANCE = 0.55
"""Held-out accuracy below this is hardly better than a coin."""
LENGTH_BIAS = 0.4
"""Above this correlation of score and length a policy will learn to write longer."""
PAIR_WORDS = {"accuracy": "accuracy", "ece": "calibration error", "length_correlation": "correlation with length"}
LABEL_WORDS = {"accuracy": "accuracy", "auc": "AUC", "brier": "Brier score", "base_brier": "that of the base rate"}


async def run_reward_model(context: RunContext, stage: RewardModelStage, index: int) -> dict[str, Any]:
    """Train and save the final weights -> facts for state.json. A killed stage starts over, with the data it had."""
    context.metrics.truncate_after(stage.name, -1)
    source = context.source_model(context.recipe.source_of(index, stage.from_))
    in_pairs = stage.labels == "pairs"
    unit = "pairs" if in_pairs else "trajectories"
    collect: Callable[..., Any] = collect_pairs if in_pairs else collect_labelled
    training, held = split(context, stage, await collect(context, stage, source.state_dict()), unit)
    plan, options = schedule(stage, len(training)), context.trainer_options(stage)
    model = RewardModel(context.adapted(scalar_model(source), stage), schedule=plan, **options)
    update, measure = (_pairs if in_pairs else _labels)(stage, model, held)
    facts = fit(
        context,
        stage,
        model,
        training,
        update=update,
        measure=measure if held else None,
        shown=("loss", "accuracy"),
        moved=PAIR_WORDS if in_pairs else LABEL_WORDS,
    )
    for title, evidence, remedy in _findings(facts["held_out"]["after"]):
        context.warn(title, evidence=evidence, remedy=remedy, stage=stage.name, step=facts["steps"])
    model.save(context.out / "checkpoints" / stage.name / FINAL, tokenizer=context.tokenizer)
    return {unit: len(training), **facts}


Learning = tuple[Callable[[Sequence[Any]], Numbers], Callable[[], Numbers]]
"""(update with a batch, measurement of what is held out)."""


def _pairs(stage: RewardModelStage, model: RewardModel, held: Sequence[Any]) -> Learning:
    def update(batch: Sequence[Any]) -> Numbers:
        margins, centring = [stage.margin or 0.0] * len(batch), stage.centring or 0.0
        return model.pair_update([(p.chosen, p.rejected) for p in batch], margins=margins, centring=centring)

    return update, lambda: model.pair_metrics([(p.chosen, p.rejected) for p in held])


def _labels(stage: RewardModelStage, model: RewardModel, held: Sequence[Any]) -> Learning:
    return (
        lambda batch: model.label_update([row for one in batch for row in one.rows]),
        lambda: model.label_metrics([row for one in held for row in one.rows]),
    )


def _findings(after: Mapping[str, float]) -> Iterator[tuple[str, str, str]]:
    """(title, evidence, remedy) of what held-out figures say against the model."""
    figures = {name.removeprefix("validation_"): value for name, value in after.items()}
    if figures.get("brier", 0.0) >= figures.get("base_brier", 0.0) > 0.0:
        yield (
            "the reward model is no better than the base rate",
            f"its held-out Brier score is {figures['brier']:.3f}, that of always saying the mean label "
            f"{figures['base_brier']:.3f}",
            "Use more tasks, samples or epochs or a higher lr before any use of it.",
        )
    if "ece" in figures and figures["accuracy"] < CHANCE:
        yield (
            "the reward model is hardly better than chance",
            f"it puts {100 * figures['accuracy']:.0f} % of held-out pairs in the right order",
            "Use more pairs or epochs or a higher lr before any RL with it.",
        )
    if (length := figures.get("length_correlation", 0.0)) > LENGTH_BIAS:
        yield (
            "the reward model likes length",
            f"its score and a trajectory's sampled tokens have correlation {length:.2f} on held-out pairs",
            "Balance lengths within pairs, or RL with it will make trajectories longer, not better.",
        )
