"""The `preference` stage: pairs of a better and a worse trajectory, sampled and judged or from a file, and what is
learned from them. The reference is the stage's own start, so its log-probs come from the learner before any update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from upswing.learn.learner import Learner
from upswing.learn.preference import Candidate, PreferenceOptions, candidates, preference_metrics, preference_update
from upswing.recipe.offline import LOSS_DEFAULTS, PreferenceStage
from upswing.stages.context import FINAL, RunContext
from upswing.stages.offline import fit, schedule, split
from upswing.stages.pairs import Pair, collect_pairs

Sides = tuple[Candidate | None, Candidate | None]
"""(chosen, rejected) of a pair, as the losses read them; only KTO may lack one."""


async def run_preference(context: RunContext, stage: PreferenceStage, index: int) -> dict[str, Any]:
    """Train and save the final weights -> facts for state.json. A killed stage starts over, with the pairs it had."""
    context.metrics.truncate_after(stage.name, -1)
    model = context.source_model(context.recipe.source_of(index, stage.from_))
    pairs = await collect_pairs(context, stage, model.state_dict(), paired=stage.loss != "kto")
    parts = split(context, stage, pairs, "pairs")
    plan, options = schedule(stage, len(parts[0])), context.trainer_options(stage)
    learner = Learner(context.adapted(model, stage), schedule=plan, **options)
    training, held = (_couples(learner, part, stage.loss) for part in parts)
    how = PreferenceOptions(loss=stage.loss, **{key: getattr(stage, key) for key in LOSS_DEFAULTS[stage.loss]})

    def measure() -> dict[str, float]:
        return preference_metrics(learner, *_sides(held), how, unchanged=learner.updates == 0)

    facts = fit(
        context,
        stage,
        learner,
        training,
        update=lambda batch: preference_update(learner, *_sides(batch), how),
        measure=measure if held else None,
        shown=("loss", "preference_accuracy", "chosen_shift"),
        moved={name: name.replace("_", " ") for name in ("preference_accuracy", "reward_margin", "chosen_shift")},
    )
    shift = facts["held_out"]["after"].get("validation_chosen_shift", 0.0)
    if shift < -1.0:
        context.warn(
            "likelihood displacement",
            evidence=f"the chosen side of held-out pairs lost {-shift:.1f} nats of log-prob on average",
            remedy="Set nll_coef (0.2 to 1), raise beta, or train less." if stage.loss != "kto" else "Train less.",
            stage=stage.name,
            step=facts["steps"],
        )
    learner.save(context.out / "checkpoints" / stage.name / FINAL, tokenizer=context.tokenizer)
    return {"pairs": len(training), **facts}


def _couples(learner: Learner, pairs: Sequence[Pair], loss: str) -> list[Sides]:
    rows = [side for pair in pairs for side in (pair.chosen, pair.rejected)]
    known = iter(candidates(learner, [row for row in rows if row is not None], loss=loss))
    found = [None if row is None else next(known) for row in rows]
    return list(zip(found[0::2], found[1::2], strict=True))


def _sides(couples: Sequence[Sides]) -> tuple[list[Candidate], list[Candidate]]:
    """Chosen and rejected apart, in order; a side that a pair lacks is left out."""
    chosen, rejected = ([side for side in part if side is not None] for part in zip(*couples, strict=True))
    return chosen, rejected
