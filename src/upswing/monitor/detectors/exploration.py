"""Failures of exploration: entropy that is used up or runs away, groups without a spread, the same text everywhere."""

from __future__ import annotations

import math

import numpy as np

from upswing.monitor.detectors.base import Signs, Verdict
from upswing.monitor.detectors.readings import NOW, Readings, fact, percent, right, told, wrong
from upswing.monitor.detectors.remedies import Menu
from upswing.monitor.findings import Severity
from upswing.monitor.stats import median, rolling_median

LEAST = 5
"""Steps after which even a run without any signal is called so."""


def pressure(r: Readings) -> list[tuple[float, str]]:
    """What pushes a policy too far a step: causes that many failures share, weighed by the signals."""
    kl_old, ratio = r.now("kl_old"), r.now("ratio_p99")
    updates = fact(r.facts, "minibatches", 1) * fact(r.facts, "updates_per_batch", 1)
    return [
        (
            1 + kl_old / 0.02 if kl_old > 0.005 else 0,
            f"steps are large: the policy moves {kl_old:.2g} nats a token in one",
        ),
        (1.2 if ratio > 1.5 else 0, f"1 % of the tokens became {ratio:.2g} times as likely within one batch or more"),
        (updates / 4 if updates > 2 else 0, f"each batch is used for {updates:.0f} updates"),
        (0.5, "the learning rate is too high for this model and batch"),
    ]


def entropy_collapse(r: Readings) -> Verdict | None:
    """Entropy below 0.1 to 0.2 nats with nothing gained for it: R = -a exp(H) + b (arXiv 2505.22617) makes entropy a
    budget that reward is bought with. Low entropy at high reward is success."""
    h = r.shift("entropy")
    unique, hard = r.shift("unique_frac"), r.now("too_hard_frac")
    spent = h.now < 0.2 and h.now < 0.3 * h.start and h.z < -3
    alike = unique.now < 0.35 and hard >= 0.25
    since = r.onset("entropy", 0.5 * h.start, -1) if h.z < -3 else int(r.known("entropy").steps[0])
    # Half of it gone while groups die out in failure: attempts become copies that don't work.
    dying = h.now < 0.5 * h.start and h.z < -3 and unique.now < 0.75 * unique.start and r.helpless(since)
    dying = dying and r.rose("too_hard_frac", 0.1, 2) and r.rose("zero_variance_frac", 0.2, 3)
    if not (spent or dying or (h.now < 0.05 and alike)) or r.solved:
        return None
    gained, won = r.gained, r.shift("success")
    wasted = gained < 0.3 if not math.isnan(gained) else not r.paid(since)
    severity: Severity = "warning" if wasted or alike or dying else "info"
    if severity == "warning" and (r.dropped or (h.now < 0.1 * h.start and hard >= 0.5)):
        severity = "critical"
    evidence = [told("entropy", h, "30 % of it, and 0.2", " nats"), told("success", won)]
    if r.has("unique_frac"):
        evidence.append(told("different attempts in a group, as a share:", unique, "0.35"))
    if hard >= 0.25:
        evidence.append(f"{percent(hard)} of the groups fail alike: no attempt differs in reward (limit: 25 %)")
    positive = r.now("grad_bad") < 0.1 * r.now("grad_good")
    causes = [
        *pressure(r),
        (1.5 if positive else 0, "only good attempts are learned from: bad ones keep entropy up"),
        (1.1 if fact(r.facts, "clip_high", 0.28) < 0.2 else 0, "a low clip_high holds down unlikely good tokens"),
        (1.1 if fact(r.facts, "temperature", 1.0) < 0.9 else 0, "sampling is too cold to explore"),
    ]
    menu = Menu(r)
    remedies = [
        menu.entropy_bonus(max(0.1, h.start / 2)),
        menu.clip_higher(),
        menu.covariance(),
        menu.lower_lr(),
        menu.fewer_updates(),
        menu.warmer(),
    ]
    examples = r.examples(lambda t: -t.num_sampled_tokens, wrong)
    return Verdict(severity, since, evidence, causes, remedies, examples)


def _climbs(r: Readings) -> bool:
    """Whether entropy surely rose over the newest eight steps, by a tenth and more than noise."""
    newest, trend = r.known("entropy").values[-8:], r.trend("entropy", 8)
    enough = max(0.1 * median(newest), 3 * r.noise("entropy"))
    return len(newest) == 8 and trend.p < 0.01 and 7 * trend.slope > enough


def entropy_explosion(r: Readings) -> Verdict | None:
    """Entropy half as high again as its running minimum while reward is flat (arXiv 2512.04220, phase III); where a
    bonus without a target pushes it, any sure rise over eight steps."""
    known = r.known("entropy")
    smooth = rolling_median(known.values, 3)
    at = int(np.flatnonzero(smooth == smooth[1:].min())[-1])
    low, now, noise = float(smooth[at]), float(smooth[-1]), r.noise("entropy")
    rise = now - low
    bonus, target = r.setting("entropy_coef", 0.0), r.setting("entropy_target", math.nan)
    if bonus > 0 and now < 1.5 * target:  # a bonus lifts it there on purpose
        return None
    pushed = bonus > 0.01 and math.isnan(target) and _climbs(r)
    if not pushed and (now < 1.5 * low or rise < max(0.15, 4 * noise)):
        return None
    since = max(int(known.steps[at]), r.onset("entropy", low + max(2 * noise, 0.05), 1))
    if not r.helpless(min(since, int(known.steps[-8])) if pushed else since):
        return None
    held = r.now("entropy")  # over five steps: a few hard tasks in a row have more of it too
    large = (now >= 2 * low and rise >= 0.3) or (held >= 2 * low and held - low >= 0.2)
    severity: Severity = "critical" if (large and r.dropped) or (now >= 3 * low and rise >= 1) else "warning"
    severity = severity if large or r.dropped or pushed else "info"
    evidence = [
        f"entropy {now:.3g} nats, {now / low:.1f} times its lowest, {low:.3g} at step {known.steps[at]} (limit: 1.5)",
        *([f"it surely rose over the last eight steps, with a bonus of {bonus:g} and no target"] if pushed else []),
        told("success", r.shift("success")),
    ]
    displaced = r.now("delta_good") < 0
    causes = [
        (3.0 if bonus else 0, f"the entropy bonus ({bonus:g}) outweighs the reward"),
        (2.0 if displaced else 0, "good actions become unlikely: see likelihood_displacement"),
        (1.5 if r.now("grad_bad") > 3 * r.now("grad_good") else 0, "pushing bad attempts down spreads mass everywhere"),
        (1.2 if fact(r.facts, "temperature", 1.0) > 1.1 else 0, "sampling is hotter than the model"),
        *pressure(r),
    ]
    menu = Menu(r)
    remedies = [menu.no_entropy_bonus(), menu.llds(), menu.lower_lr(), menu.dual_clip(), menu.cooler(), menu.more_kl()]
    examples = r.examples(lambda t: t.num_sampled_tokens, wrong)
    return Verdict(severity, since, evidence, causes, remedies, examples)


def _dies_out(r: Readings) -> bool:
    """Whether groups of one reward, and of them those that fail alike, surely become more while nothing is gained."""
    for count in (NOW, 2 * NOW):
        flat = r.drift("zero_variance_frac", count)
        hard = (r.drift("too_hard_frac", count, recent=recent) for recent in (False, True))
        harder = any(one.diff >= 0.2 and one.z >= 2 for one in hard)
        if flat.now >= 0.6 and flat.diff >= 0.2 and flat.z >= 3 and harder:
            return r.helpless(r.onset("zero_variance_frac", 0.5, 1))
    return False


def advantage_collapse(r: Readings) -> Verdict | None:
    """More than half of the groups have one reward only, so that they teach nothing (DAPO, RAGEN). That they surely
    become more is a warning from 60 % on, that they are many from 70 % on."""
    count = 4
    flat, easy, hard = (
        r.mean("zero_variance_frac", count),
        r.mean("too_easy_frac", count),
        r.mean("too_hard_frac", count),
    )
    steps = min(count, len(r.known("zero_variance_frac").values))
    groups = r.num_trajectories / fact(r.facts, "group_size", 8)
    groups = groups if groups >= 1 else 8.0
    error = math.sqrt(max(flat * (1 - flat), 0.02) / (groups * steps))
    dying = _dies_out(r)
    if flat - 2 * error < 0.5 and not dying:
        return None
    won = r.shift("success")
    grown = won.z >= 2 or won.diff >= 0.2
    mostly_easy = easy > 0.6 * flat
    dead = flat - 2 * error >= 0.7 and hard >= 0.2  # nothing is left to learn from, and a fifth never works
    if grown and (mostly_easy or r.solved) and not (dead or dying):
        return None
    start = median(r.known("zero_variance_frac").values[:3])
    mild = not dying and (flat < 0.7 or (mostly_easy and start < 0.5 and not dead))
    lost = flat >= 0.97 and len(r.known("zero_variance_frac").values) >= LEAST
    severity: Severity = "info" if mild else "critical" if lost else "warning"
    evidence = [
        f"{percent(flat)} of the groups had one reward only (limit: 50 %), {percent(start)} at the start",
        f"{percent(easy)} of the groups all succeed, {percent(hard)} all fail alike",
    ]
    if r.has("effective_frac"):
        evidence.append(told("effective share of the batch", r.shift("effective_frac")))
    size = fact(r.facts, "group_size", 8)
    causes = [
        (2 * easy, "tasks are too easy for this policy"),
        (2 * hard if not math.isnan(hard) else 1.0, "tasks are too hard for this policy"),
        (1.5 if size <= 4 else 0, f"groups of {size:.0f} rarely hold both outcomes"),
        (1.0 if r.now("unique_frac") < 0.35 else 0, "attempts at a task are nearly the same: see entropy_collapse"),
    ]
    menu = Menu(r)
    advice = "Take harder tasks." if mostly_easy else "Take easier tasks first, give partial credit, or run more SFT."
    remedies = [menu.dynamic_sampling(), menu.bigger_groups(), menu.advise(advice)]
    since = r.onset("zero_variance_frac", 0.5, 1)
    examples = r.examples(lambda t: t.num_sampled_tokens, right if mostly_easy else wrong)
    return Verdict(severity, since, evidence, causes, remedies, examples)


def _sameness(r: Readings) -> list[str]:
    """Which signs there are that text repeats itself, as sentences."""
    signs = []
    for name, what, by in (
        ("unique_frac", "different attempts in a group", 0.6),
        ("distinct_4", "different 4-grams", 0.6),
    ):
        shift = r.shift(name)
        if shift.now < by * shift.start and shift.z < -3:
            signs.append(told(f"{what}, as a share:", shift, f"{percent(by)} of it"))
    for name, what, rise in (
        ("repetition", "share of 4-grams that repeat within an attempt:", 0.1),
        ("same_first_turn_frac", "share of tasks with the commonest first turn:", 0.25),
    ):
        if r.rose(name, rise, 3):
            signs.append(told(what, r.shift(name), f"{rise:g} more"))
    text = ("unique_frac", "distinct_4", "repetition", "same_first_turn_frac")
    if not any(r.has(name) for name in text) and r.shift("entropy").ratio < 0.5:
        signs.append(told("entropy", r.shift("entropy"), "half of it"))
    return signs


def echo_trap(r: Readings) -> Verdict | None:
    """The groups' reward spread falls first, then attempts repeat one another (RAGEN, arXiv 2504.20073); a tenth of the
    first ten steps' mean spread is their limit for stopping."""
    name = "group_reward_std" if r.has("group_reward_std") else "reward_std"
    spread, won, signs = r.shift(name), r.shift("success"), _sameness(r)
    if not (spread.now < 0.6 * spread.start and spread.z < -3 and signs) or r.solved:
        return None
    if r.gained >= 0.5 and not r.now("too_hard_frac", NOW) >= 0.2:
        return None
    if min(won.start, won.now) >= 0 and max(won.start, won.now) <= 1 == r.ceiling:
        explained = math.sqrt(max(won.now * (1 - won.now), 1e-3) / max(won.start * (1 - won.start), 1e-3))
        if spread.ratio > 0.7 * explained:
            return None
    first_ten = float(r.known(name).values[:10].mean())
    spike = r.now("grad_norm", 3) > 3 * r.now("grad_norm", 30)
    severity: Severity = "critical" if r.dropped or spike or spread.now < 0.1 * first_ten else "warning"
    evidence = [told("spread of rewards within a group", spread, "60 % of it"), *signs, told("success", won)]
    causes = [
        *pressure(r),
        (0.8 if fact(r.facts, "dynamic_sampling", 1) < 2 else 0, "groups without a spread are kept in the batch"),
        (0.6, "start states or tasks are few, so one pattern wins"),
    ]
    menu = Menu(r)
    remedies = [menu.dynamic_sampling(), menu.fewer_updates(), menu.clip_higher(), menu.kl_stop(), menu.no_kl()]
    remedies += [menu.lower_lr(), menu.advise("Go back to the checkpoint before this, and add more varied tasks.")]
    examples = r.examples(lambda t: t.num_sampled_tokens)
    since = r.left(name, -1)
    return Verdict(severity, since, evidence, causes, remedies, examples)


def template_collapse(r: Readings) -> Verdict | None:
    """First turns no longer depend on the task: their mutual information goes to 0 and retrieval to chance, at a normal
    entropy (RAGEN-2). A third of what they told is gone on average, and all signals together say so (Stouffer's z)."""
    losses, sure, moved = [], [], []
    for name, count, none, what in (
        ("mi_share", 1, 0.0, "information on the task in first turns, as a share of the most:"),
        ("mi_retrieval", 1, 1 / r.now("mi_pairs"), "tasks told by their first turns:"),
        ("same_first_turn_frac", NOW, 1.0, "share of tasks with the commonest first turn:"),
    ):
        shift, sign = r.drift(name, count), 1 if none == 1 else -1
        if abs(shift.start - none) > 0.05 and math.isfinite(shift.z):
            losses.append((shift.now - shift.start) / (none - shift.start))
            sure.append(sign * shift.z)
            moved.append((name, sign, told(what, shift, f"{none:.2g} says nothing")))
    if not moved or sum(losses) < len(losses) / 3 or sum(sure) < 2.5 * math.sqrt(len(sure)):
        return None
    signs = Signs()
    for name, sign, text in moved:
        signs.add(r.left(name, sign), text)
    if not r.helpless(signs.since):
        return None
    severity: Severity = "critical" if r.dropped else "warning"
    coef, kl = fact(r.facts, "entropy_coef", 0.0), fact(r.facts, "kl_coef", 0.0)
    evidence = [*signs, told("entropy", r.shift("entropy"), unit=" nats"), told("success", r.shift("success"))]
    causes = [
        (2.0 if coef and kl else 1.0 if coef or kl else 0, "entropy bonus and KL outweigh a reward with little spread"),
        (1.5 if r.now("zero_variance_frac") > 0.4 else 0, "few groups have a spread, so regularisers decide"),
        (0.6, "the reward doesn't depend on what the first turn says"),
    ]
    menu = Menu(r)
    remedies = [menu.dynamic_sampling(), menu.no_entropy_bonus(), menu.refresh_reference(), menu.no_kl()]
    remedies += [menu.bigger_groups(), menu.advise("Reward what the first turn must get right, or add varied tasks.")]
    examples = r.examples(lambda t: -t.num_sampled_tokens)
    return Verdict(severity, signs.since, evidence, causes, remedies, examples)
