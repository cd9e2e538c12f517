"""Failures of the update itself: the policy moves too far, the wrong way, or from samples that aren't its own."""

from __future__ import annotations

import math

import numpy as np

from upswing.monitor.detectors.base import Signs, Verdict
from upswing.monitor.detectors.exploration import pressure
from upswing.monitor.detectors.readings import LEVEL, NOW, Readings, fact, percent, told, wrong
from upswing.monitor.detectors.remedies import Menu
from upswing.monitor.findings import Severity
from upswing.monitor.stats import MEDIAN_ERROR, median, rolling_median, step_noise

FAST = 0.03
"""Nats a token that good actions lose in each of a run's first three steps or more, where those tell by themselves."""
SPAN = 10
"""Steps in which gradients may jump up twice."""


FAR = 0.2
"""Nats a token that one step may move the policy."""


def _at_peak(r: Readings) -> float:
    """What steps will move the policy at the peak of the learning rate: in a warm-up, the least of the newest three
    from a fifth of it on, as KL grows with its square; NaN where these don't tell."""
    peak, end = fact(r.facts, "lr", math.nan), fact(r.facts, "warmup_steps", 0)
    if r.history.step > end:
        return math.nan
    set_S, lr_S = r.history.series("set_lr"), r.history.series("lr")  # what a safeguard has made of the peak
    share_S = lr_S / np.where(np.isfinite(set_S), set_S, peak)
    moved_S = r.history.series("kl_old")
    known_S = (share_S >= 0.2) & np.isfinite(moved_S)
    newest = (moved_S[known_S] / share_S[known_S] ** 2)[-NOW:]
    return float(newest.min()) if len(newest) == NOW else math.nan


def kl_explosion(r: Readings) -> Verdict | None:
    """KL to the reference above 0.5 nats a token with nothing gained (from 0.1: worth a look), or above 1, or clamped,
    or a step that moved the policy far, or will when the learning rate has warmed up."""
    kl, clamped = r.now("kl"), r.now("kl_clamped_frac", 3)
    doubt = 2 * MEDIAN_ERROR * r.noise("kl") / math.sqrt(LEVEL) if r.has("kl") else 0.0
    moved = r.now("kl_old", 3)
    signs = Signs()
    if kl - doubt > 0.1:
        signs.add(
            r.onset("kl", 0.1, 1),
            f"KL to the reference {kl:.3g} nats a token, {r.shift('kl').start:.3g} at the start (limit: 0.1)",
        )
    if clamped > 0.001:
        signs.add(
            r.onset("kl_clamped_frac", 0.001, 1), f"{percent(clamped)} of the tokens' KL hit the clamp (limit: 0.1 %)"
        )
    if moved > FAR:
        signs.add(r.onset("kl_old", FAR, 1), f"one step moved the policy {moved:.3g} nats a token (limit: {FAR})")
    ahead = _at_peak(r)
    if ahead > FAR >= moved:
        text = (
            f"a step moves the policy {moved:.2g} nats a token, which is {ahead:.2g} at the peak of the learning rate"
        )
        signs.add(r.history.step, f"{text} (limit: {FAR})")
    if not signs:
        return None
    since = signs.since
    lost = kl - doubt > 0.5 and r.helpless(r.onset("kl", 0.25, 1))
    sure = lost or kl >= 1 or clamped > 0.001 or moved > FAR or ahead > FAR
    if not sure and not r.helpless(min(since, r.history.step - 15)):
        return None
    bad = r.dropped and (kl > 0.3 or moved > FAR)
    severity: Severity = "critical" if bad or kl > 3 or clamped > 0.01 or moved > 0.5 else "warning"
    severity = "info" if severity == "warning" and (r.solved or not sure) else severity
    coef = fact(r.facts, "kl_coef", 0.0)
    causes = [
        *pressure(r),
        (1.2 if coef < 0.001 else 0, f"nothing holds the policy near the reference (kl_coef {coef:g})"),
        (0.8 if r.facts.get("kl_estimator") == "k3" else 0, "k3 has a weak gradient far from the reference"),
    ]
    menu = Menu(r)
    remedies = [menu.lower_lr(), menu.more_kl(), menu.kl_stop(), menu.fewer_updates(), menu.refresh_reference()]
    remedies += [menu.dual_clip(), menu.clip_gradient()]
    evidence = [*signs, told("success", r.shift("success"))]
    evidence += [] if r.has("kl") else ["the KL to the reference isn't measured (kl_coef is 0), so it isn't judged"]
    examples = r.examples(lambda t: t.num_sampled_tokens, wrong)
    return Verdict(severity, since, evidence, causes, remedies, examples)


def _loses(r: Readings, name: str) -> float | None:
    """Mean of the newest steps where it surely lies below 0, the surer if it was above that at the start: rare large
    losses among small gains are what LLD looks like, so medians wouldn't do. None: it doesn't."""
    values = r.known(name).values
    if len(values) < 2 * NOW:  # too few to tell their noise: a collapse from the first steps on
        mean = float(values.mean()) if len(values) > 1 else 0.0
        limit = FAST if len(values) >= NOW else FAR  # of few rows, and an optimizer's first steps are its rashest
        return mean if mean < -limit and (values < 0).all() else None
    for count in (NOW, 2 * NOW):
        move, error = r.drift(name, count), r.noise(name) / math.sqrt(count)
        again = (values[-2 * NOW :] < 0).sum() > 1 and (count > NOW or -move.now > move.start)
        if again and move.now < -error * (1 if move.z < -3 else 3):
            return move.now
    return None


def _displaces(r: Readings) -> float | None:
    """Share of good attempts that became less likely of late, where that is surely most of them; else None."""
    for count in (NOW, 2 * NOW):
        share = r.drift("displaced_frac", count)
        if share.now - 0.5 > 3 * r.noise("displaced_frac") / math.sqrt(count) or (share.now > 0.5 and share.z > 2.5):
            return share.now
    return None


def likelihood_displacement(r: Readings) -> Verdict | None:
    """Updates make good actions less likely although reward doesn't fall yet: the LLD death spiral (arXiv 2512.04220).
    Its warnings: E[delta] <= 0, over half of the good attempts displaced, their log-prob falling while reward rises;
    then entropy 30 % above its running minimum and gradients three times their running median."""
    signs, kinds = Signs(), 0
    for name, what in (("delta_good", "good attempts' log-prob"), ("delta_good_first", "that of their first turn")):
        if (lost := _loses(r, name)) is not None:
            signs.add(r.onset(name, 0.0, -1), f"updates change {what} by {lost:.2g} nats a token (limit: 0)")
            kinds = 1
    if (share := _displaces(r)) is not None:
        text = f"{percent(share)} of the sampled good attempts became less likely (limit: 50 %)"
        signs.add(r.onset("displaced_frac", 0.5, 1), text)
        kinds += 1
    level = rolling_median(r.known("logprob_good").values, LEVEL)
    if len(level) >= 15 and r.trend("logprob_good").p < 0.01 and r.trend("logprob_good").slope < 0:
        fall = float(level.max() - level[-1])
        if fall > max(0.1, 0.5 * abs(float(level.max())), 3 * r.noise("logprob_good")):
            text = f"good tokens' log-prob fell from {level.max():.3g} to {level[-1]:.3g} nats"
            signs.add(r.left("logprob_good", -1), text)
            kinds += 1
    known_delta = r.has("displaced_frac") and r.has("delta_good")
    if kinds < 1 + known_delta:
        return None
    smooth = rolling_median(r.known("entropy").values, 3)
    late = []
    if (
        len(smooth) > 3
        and smooth[-1] > 1.3 * smooth[1:].min()
        and smooth[-1] - smooth[1:].min() > 3 * r.noise("entropy")
    ):
        late.append(f"entropy {smooth[-1]:.3g} nats, {smooth[-1] / smooth[1:].min():.2g} times its lowest (limit: 1.3)")
    if r.now("grad_norm", 3) > 3 * r.now("grad_norm", 30):
        late.append(f"gradient norm {r.now('grad_norm', 3):.3g}, three times its running median or more")
    critical = r.dropped or (late and kinds >= 2) or kinds == 3
    severity: Severity = "critical" if critical else "warning"
    if r.solved and not r.dropped:
        severity = "info"
    heavy = r.now("grad_bad") / r.now("grad_good") if r.now("grad_good") > 0 else math.nan
    causes = [
        (2.0, "bad attempts share the good ones' first turns, and pushing them down takes those along"),
        (min(3.0, heavy) if heavy > 1.2 else 0, f"gradients of bad attempts are {heavy:.2g} times those of good ones"),
        (1.0 if r.now("tokens_bad") > 1.3 * r.now("tokens_good") else 0, "bad attempts are longer, so they weigh more"),
        *pressure(r),
    ]
    menu = Menu(r)
    remedies = [menu.llds(), menu.lower_lr(), menu.fewer_updates(), menu.kl_stop(), menu.dual_clip()]
    examples = r.examples(lambda t: t.num_turns, wrong)
    evidence = [*signs, *late, told("success", r.shift("success"))]
    return Verdict(severity, signs.since, evidence, causes, remedies, examples)


def train_inference_mismatch(r: Readings) -> Verdict | None:
    """Sampler and learner give the same tokens other probabilities: mean |difference| above 0.02 nats, k3 above
    1e-3, or an effective sample size below 30 %; ten times that where samples are old on purpose."""
    old = max(fact(r.facts, "max_staleness", 0), r.now("staleness") if r.has("staleness") else 0.0)
    slack = 10.0 if old > 0 else 1.0
    signs, worst = Signs(), 0.0
    for name, limit, what in (
        ("mismatch_abs", 0.02, "mean difference of log-probs"),
        ("mismatch_k3", 1e-3, "KL (k3) from sampler to learner, a token"),
    ):
        now = r.now(name, 3)
        if now > limit * slack:
            signs.add(r.onset(name, limit * slack, 1), f"{what} {now:.2g} nats (limit: {limit * slack:g})")
            worst = max(worst, now / (limit * slack))
    ess = r.now("ess_frac", 3)
    if ess < 0.6:
        signs.add(r.onset("ess_frac", 0.6, -1), f"effective sample size {percent(ess)} of the tokens (limit: 60 %)")
        worst = max(worst, 10.0 if ess < 0.3 else 1.0)
    if not signs:
        return None
    corrected = r.facts.get("correction") is not None
    severity: Severity = "critical" if worst >= 10 or (worst >= 3 and r.dropped) else "warning"
    if corrected and severity == "warning" and not r.dropped:
        severity = "info"
    forks = r.now("num_forks") / max(1.0, r.num_trajectories)
    causes = [
        (3.0 if old > 0 else 0, f"samples are up to {old:.2g} updates old"),
        (2.0 if forks > 0.3 else 0, "turns are re-rendered or re-tokenised: see retokenisation_drift"),
        (1.5 if worst >= 10 else 0.5, "the engine has other weights, another temperature or another distribution"),
        (1.0, "the engine computes in another precision (bf16, int8) or with other kernels"),
    ]
    menu = Menu(r)
    remedies = [menu.correct(), menu.fresher(), menu.lower_lr()]
    remedies.append(
        menu.advise("Give engine and learner the same precision, and check that weights are pushed each step.")
    )
    if r.has("mismatch_max"):
        signs.append(f"largest difference of one token {r.now('mismatch_max', 3):.2g} nats")
    examples = r.examples(lambda t: t.num_sampled_tokens)
    return Verdict(severity, signs.since, signs, causes, remedies, examples)


def stale_updates(r: Readings) -> Verdict | None:
    """Too much is made of one batch, or batches are old: above 0.02 nats a token a step, 30 % of ratios clipped, or a
    mean lag above 4 updates."""
    moved = r.now("kl_old")
    clipped = (
        r.now("clipped_low") + r.now("clipped_high") if r.has("clipped_low") and r.has("clipped_high") else math.nan
    )
    judged = r.facts.get("loss") in (None, "ppo_clip", "clip_cov")  # others clip much by design
    lag, kept = r.now("staleness"), r.now("kept_frac")
    signs, hard = Signs(), False
    if moved > 0.02:
        signs.add(
            r.onset("kl_old", 0.02, 1),
            f"a step moves the policy {moved:.2g} nats a token from the one that sampled (limit: 0.02)",
        )
        hard = moved > 0.2
    if judged and clipped > 0.2:
        signs.add(
            r.onset("clipped_high", r.now("clipped_high") / 2, 1),
            f"{percent(clipped)} of the tokens' ratios are clipped (limit: 20 %)",
        )
        hard = hard or clipped > 0.4
    if lag > 4:
        signs.add(r.onset("staleness", 4, 1), f"samples are {lag:.2g} updates old on average (limit: 4)")
    if kept < 0.5:
        signs.add(
            r.onset("kept_frac", 0.5, -1),
            f"only {percent(kept)} of the samples were young enough to keep (limit: 50 %)",
        )
    if not signs:
        return None
    since = signs.since
    mild = len(signs) == 1 and moved > 0.02 and moved <= 0.05
    if mild and not r.dropped and not (r.helpless(since) and len(r.known("kl_old").values) >= 15):
        return None
    severity: Severity = "critical" if hard or r.dropped else "warning"
    causes = [*pressure(r), (3.0 if lag > 4 else 0, "sampling runs far ahead of learning")]
    menu = Menu(r)
    remedies = [menu.fewer_updates(), menu.fresher(), menu.kl_stop(), menu.lower_lr(), menu.correct()]
    evidence = [*signs, told("success", r.shift("success"))]
    return Verdict(severity, since, evidence, causes, remedies)


def _jumps(r: Readings, clip: float) -> tuple[int, str] | None:
    """Since when gradients are beyond the clip in steps that are too far, or will be after a warm-up; the evidence."""
    known, moved, ahead = r.known("grad_norm"), r.now("kl_old"), _at_peak(r)
    newest = known.values[-SPAN:]
    jumps = np.flatnonzero(newest > max(clip, 2 * median(known.values[-30:])))
    if len(jumps) >= 3 and moved > 0.02 and r.helpless(since := int(known.steps[-SPAN:][jumps[0]])):
        text = f"gradient norm beyond the clip and twice its running median in {len(jumps)} of {SPAN} steps (limit: 3)"
        return since, f"{text}, and a step moves the policy {moved:.2g} nats a token (limit: 0.02)"
    if ahead > FAR and newest[-NOW:].max() > clip:
        text = f"gradient norm {newest[-NOW:].max():.3g} (clip: {clip:g}), and a step will move the policy"
        return r.history.step, f"{text} {ahead:.2g} nats a token at the peak of the learning rate (limit: {FAR})"
    return None


def gradient_instability(r: Readings) -> Verdict | None:
    """Gradients that aren't finite; or three times their running median for several steps and beyond the clip; or again
    and again twice that, while steps move the policy far (0.02 nats a token) and nothing is gained; or beyond the clip
    in a warm-up whose steps will be too far at its end."""
    known = r.known("grad_norm")
    values, clip = known.values, min(fact(r.facts, "grad_clip", 1.0), 1.0)
    broken = r.known("num_nonfinite").values[-5:]
    lost = int((broken > 0).sum())
    signs = Signs()
    severity: Severity = "warning"
    if lost:
        bad = r.known("num_nonfinite")
        since = int(bad.steps[np.flatnonzero(bad.values > 0)[-lost]])
        signs.add(since, f"{lost} of the last {len(broken)} steps had a gradient that wasn't finite")
        severity = "critical" if lost >= 3 else "warning"
    before, now = values[:-3][-30:], r.now("grad_norm", 3)
    if len(before) >= 5 and before.min() > 0:
        usual = min(median(before), median(values[:10]) * 5 / 3)  # a lasting rise becomes its own running median
        spread = max(step_noise(np.log(before)), 0.2) * (1 + 1 / math.sqrt(len(before)))  # few values tell it badly
        far = math.log(now / usual) / spread if now > 0 else 0.0
        if now > 3 * usual and now > clip and far > 3 and values[-3:].min() > 1.5 * usual:
            signs.add(
                r.onset("grad_norm", 2 * usual, 1),
                f"gradient norm {now:.3g}, {now / usual:.2g} times its running median (limit: 3)",
            )
            severity = "critical" if now > 10 * usual or r.dropped else severity
    if (jumped := _jumps(r, clip)) is not None:
        signs.add(*jumped)
        severity = "critical" if r.dropped else severity
    if not signs:
        return None
    causes = [
        *pressure(r),
        (1.5 if r.now("delta_good") < 0 else 0, "good actions become unlikely: see likelihood_displacement"),
        (1.0 if r.now("mismatch_abs") > 0.02 else 0, "sampler and learner disagree: see train_inference_mismatch"),
        (
            1.0 if r.now("tokens_max") > 3 * r.now("sampled_tokens") else 0,
            "a few very long attempts dominate the batch",
        ),
    ]
    menu = Menu(r)
    remedies = [menu.lower_lr(), menu.clip_gradient(), menu.warm_up(), menu.fewer_updates(), menu.dual_clip()]
    examples = r.examples(lambda t: t.num_sampled_tokens)
    return Verdict(severity, signs.since, signs, causes, remedies, examples)
