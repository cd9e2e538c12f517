"""How a stage stands: what was normal, which checkpoint was best, and which part of its reward pays against success."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from statistics import fmean

import numpy as np

from upswing.monitor.detectors.conduct import LURES, lured_by
from upswing.monitor.detectors.readings import Readings
from upswing.monitor.history import SUCCESS, History
from upswing.monitor.stats import median

FIRST = 10
"""Steps whose medians are what was normal."""
SMOOTH = 5
"""Steps over which success in training is averaged."""
MOST = 0.5
"""Share of the reward's variance from which on a part other than success decides what is learned."""
APART = 2.0
"""Standard errors of its rise, and of success's fall."""


def normal_of(history: History) -> dict[str, float]:
    """Medians of entropy and length over the first steps."""
    found = {name: history.known(name)[1][:FIRST] for name in ("entropy", "sampled_tokens")}
    return {name: median(values) for name, values in found.items() if len(values)}


def best_checkpoint(history: History, saved: Sequence[int]) -> int | None:
    """The step of the best saved one: by the success of the last evaluation up to it, without any by its smoothed
    success in training, which also tells those after one evaluation apart; of equals the newest. None without any to
    judge by. Without an evaluation, of which there is one batch only, step 0 is the best where there is no other."""
    evaluated = _eval(history) is not None
    saved = [step for step in saved if step or evaluated or len(saved) == 1]
    scores = {step: _eval(history, step) if evaluated else _trained(history, step) for step in saved}
    known = [(score, _trained(history, step) or 0.0, step) for step, score in scores.items() if score is not None]
    return max(known)[-1] if known else None


def is_worse(history: History, best: int) -> bool:
    """Whether the newest evaluation's success, or that in training, is below that of a checkpoint."""
    pairs = [(_eval(history, best), _eval(history)), (_trained(history, best), _trained(history))]
    return any(then is not None and now is not None and now < then for then, now in pairs)


def _eval(history: History, step: float = math.inf) -> float | None:
    found = _until(history, "eval_", step)
    return float(found[-1]) if len(found) else None


def _trained(history: History, step: float = math.inf) -> float | None:
    """A step's success is of the weights before it, so the first one is that of the start weights, step 0."""
    found = _until(history, "score_", step)[-SMOOTH:] if step else _until(history, "score_", math.inf)[:1]
    return fmean(found.tolist()) if len(found) else None


def _until(history: History, prefix: str, step: float) -> np.ndarray:
    values_S = history.success(prefix)
    found: np.ndarray = values_S[np.isfinite(values_S) & (history.steps_S <= step)]
    return found


def side_part(history: History, weights: Mapping[str, float], gone: Collection[str] = (), mode: str = "") -> str | None:
    """The verifier whose part of the reward is to blame where success fails: a penalty (a negative weight, or a score
    that is below 0 and never above), of several the one with most of the reward's variance; else, where `strict_match`
    is paid, a part that has most of it, at the start or now, and whose score rose while success fell, or while success
    hasn't risen what such parts pay for is just what `mode` was found by. None: there is none.

    `weights`: the rubric's, by verifier. Never `strict_match`, nor without a weight on it the heaviest; nor one of
    those that are `gone`.
    """
    main = SUCCESS if weights.get(SUCCESS, 0) > 0 else max(weights, key=lambda name: weights[name], default="")
    r, found = Readings(history), []
    paid_for = mode in LURES and lured_by(r, mode) is not None and not r.rose("success", 0, APART)
    for name in sorted(weights.keys() - {main, *gone}):
        values = history.known(f"variance_share_{name}")[1]
        share = max(abs(median(values[:FIRST])), abs(median(values[-SMOOTH:]))) if len(values) else 0.0
        scores = history.known(f"score_{name}")[1]
        penalty = weights[name] < 0 or (weights[name] > 0 and scores.max(initial=-1) <= 0 and scores.min(initial=0) < 0)
        lures = main == SUCCESS and weights[name] > 0 and share >= MOST
        if penalty or (lures and (paid_for or (r.rose(f"score_{name}", 0, APART) and r.fell("success", 0, APART)))):
            found.append((penalty, share, name))
    return max(found)[-1] if found else None
