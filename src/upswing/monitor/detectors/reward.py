"""Failures of the measure: reward without the thing it stands for, and success on the training tasks alone."""

from __future__ import annotations

import math

import numpy as np

from upswing.monitor.detectors.base import Signs, Verdict
from upswing.monitor.detectors.readings import LEVEL, WIDE, Missing, Readings, Shift, fact, percent, right, told
from upswing.monitor.detectors.remedies import Menu
from upswing.monitor.findings import Severity
from upswing.monitor.stats import MEDIAN_ERROR, median, rolling_median
from upswing.trajectory.types import Trajectory

LEAST_TRAINED = 10
"""Steps without which nothing can be overfitted."""


def _unpaid(r: Readings) -> list[str]:
    """Scores that are measured but not in the reward: by the rubric's weights, or where those aren't known, by being
    another series than the reward."""
    weights = r.facts.get("weights")
    reward = r.history.series("reward")
    found = []
    for name in r.history.names:
        if not name.startswith("score_") or not r.has(name):
            continue
        if weights:
            if weights.get(name.removeprefix("score_"), 0) == 0:
                found.append(name)
        elif np.nanmax(np.abs(r.history.series(name) - reward), initial=0.0) > 0.02:
            found.append(name)
    held_out = [f"eval_{name.removeprefix('score_')}" for name in found]
    return found + [name for name in held_out if len(r.known(name).values) >= 4]


def reward_hacking(r: Readings) -> Verdict | None:
    """Reward rises while another measure of the same attempts falls, or stays where it was and the gap opens (z > 3);
    a component takes the reward over while another falls; reward follows length (rank correlation above 0.4) alone."""
    won, others = r.shift("reward", WIDE), _unpaid(r)
    several = [name for name in r.history.names if name.startswith("variance_share_")]
    if not others and len(several) < 2 and not r.has("reward_length_corr"):
        raise Missing("a score outside the reward (a verifier of weight 0)")
    rising = won.z >= 2.5 and won.diff >= 0.03
    signs, serious, fooled = Signs(), False, ""
    for name in others:
        one = r.shift(name, WIDE)
        what = name.removeprefix("score_")
        gone = one.now <= 0.5 * one.start and won.diff >= 0.03  # reward has risen enough where the rest collapses
        if (rising or gone) and r.fell(name, max(0.03, 0.2 * one.start), 3, WIDE):
            signs.add(r.left(name, -1), f"{told(what, one)}, while reward rose from {won.start:.3g} to {won.now:.3g}")
            serious = serious or (one.now <= 0.5 * one.start and won.diff >= 0.1)
            fooled = fooled or what
        elif rising and _gap_opens(r, name, won, one):
            signs.add(
                r.left("reward", 1),
                f"reward rose from {won.start:.3g} to {won.now:.3g}, {what} didn't follow ({one.now:.3g})",
            )
            fooled = fooled or what
    _taken_over(r, several, signs)
    corr, length = r.now("reward_length_corr", 10), r.shift("sampled_tokens")
    follows = any(r.shift(name).z > 2 for name in others)
    if corr > 0.5 and length.ratio > 1.3 and length.z > 3.5 and rising and not follows:
        signs.add(
            r.left("sampled_tokens", 1),
            f"reward goes with length: rank correlation {corr:.2g} (limit: 0.4), {told('tokens', length)}",
        )
    if not signs:
        return None
    severity: Severity = "critical" if serious else "warning"

    def shows(t: Trajectory) -> bool:
        value = None if t.score is None or not fooled else t.score.components.get(fooled)
        return right(t) and (not fooled or (value is not None and value <= 0))

    causes = [
        (2.0 if fooled else 0, f"what is rewarded accepts more than '{fooled}' does"),
        (1.5 if corr > 0.4 else 0, "longer attempts score higher, whatever they say"),
        (1.0 if len(several) > 1 else 0, "one part of the reward is easier to raise than the others"),
        (1.0 if r.facts.get("reward_model") else 0, "the policy has left what the reward model was trained on"),
    ]
    menu = Menu(r)
    remedies = [
        menu.advise(
            f"Make '{fooled}' the reward, or a gate of it." if fooled else "Cap or gate the part that is farmed."
        ),
        menu.advise("Run `upswing audit` on the verifiers, and read the trajectories named here."),
        menu.more_kl(),
        menu.overlong(1.5 * length.start) if corr > 0.4 else None,
    ]
    examples = r.examples(lambda t: t.reward or 0.0, shows)
    return Verdict(severity, signs.since, signs, causes, remedies, examples)


def _gap_opens(r: Readings, name: str, won: Shift, one: Shift) -> bool:
    """Reward left a score behind that had been like it."""
    gap = won.diff - one.diff
    error = MEDIAN_ERROR * math.hypot(r.noise("reward"), r.noise(name)) * math.sqrt(2 / 5)
    like = one.start >= 0.5 * won.start > 0
    return like and one.now < won.now and gap >= 0.15 and gap / error > 3.5 and one.z < 1


def _taken_over(r: Readings, shares: list[str], signs: Signs) -> None:
    """A component that rises and has most of the reward's variance, while another falls."""
    weights = r.facts.get("weights") or {}
    for name in shares:
        part, score = name.removeprefix("variance_share_"), f"score_{name.removeprefix('variance_share_')}"
        losers = [f"score_{other}" for other, weight in weights.items() if weight > 0 and other != part]
        lost = [one for one in losers if r.fell(one, max(0.05, 0.2 * r.shift(one).start), 3, WIDE)]
        if r.now(name) >= 0.5 and r.rose(score, 0.05, 3) and lost:
            signs.append(f"{told(part, r.shift(score))}, has {percent(r.now(name))} of the reward's variance")
            for one in lost:
                signs.add(r.left(one, -1), told(one.removeprefix("score_"), r.shift(one)))


def overfitting(r: Readings) -> Verdict | None:
    """Success on held-out tasks falls, or stays, while that on the training tasks rises."""
    known, train = r.known("eval_success"), r.known("success")
    held, width = known.values, r.history.series("eval_high") - r.history.series("eval_low")
    if len(train.values) < LEAST_TRAINED:
        return None
    tasks = fact(r.facts, "eval_tasks", 64)
    width = width[np.isfinite(width)]
    error = median(width) / 3.92 if len(width) else 0.5 / math.sqrt(tasks)
    usual = min(max(median(held), 0.02), 0.98)
    error = max(error, math.sqrt(usual * (1 - usual) / tasks))
    smooth, first = rolling_median(held, 3), median(held[:2])
    at = int(smooth[2:].argmax()) + 2
    best, now = float(smooth[at]), float(smooth[-1])
    since = int(known.steps[at])
    won = r.shift("success", WIDE)
    before = median(train.values[train.steps <= max(since, int(train.steps[0]))][-5:])
    moved = won.now - before
    fell = (best - now) / (MEDIAN_ERROR * error * math.sqrt(2 / 3))
    by_chance = math.hypot(error * math.sqrt(2 / 3), r.noise("success") * math.sqrt(1 / LEVEL + 1 / WIDE))
    gap = (won.diff - (now - first)) / (MEDIAN_ERROR * by_chance)
    signs = []
    if best - now >= 0.05 and fell >= 3.5 and moved > -0.05:
        signs.append(f"held-out success {now:.3g}, {best:.3g} at step {since} ({fell:.1f} standard errors)")
    room = won.diff >= 0.15 and won.z >= 3.5
    if room and now - first < 0.25 * won.diff and gap >= 4 and won.now > now + 0.1:
        signs.append(f"training success rose by {won.diff:.2g}, held-out by {now - first:.2g}")
    if not signs:
        return None
    signs.append(f"training success {won.now:.3g}, {won.start:.3g} at the start")
    severity: Severity = "critical" if fell >= 5 and now < float(held[0]) - 2 * error else "warning"
    causes = [
        (1.5, "tasks are few for so many steps: their answers are learned by heart"),
        (1.0, "held-out tasks differ from the training tasks"),
    ]
    menu = Menu(r)
    advice = menu.advise(f"Take the checkpoint of step {since}; more or newly generated tasks help further.")
    remedies = [advice, menu.more_kl(), menu.lower_lr(), menu.fewer_updates()]
    return Verdict(severity, since, signs, causes, remedies)
