"""Failures of what the agent does: lengths, tool calls, markup, and episodes that break."""

from __future__ import annotations

import math

import numpy as np

from upswing.monitor.detectors.base import Signs, Verdict
from upswing.monitor.detectors.exploration import pressure
from upswing.monitor.detectors.readings import LEVEL, NOW, Missing, Readings, fact, percent, told, wrong
from upswing.monitor.detectors.remedies import Menu
from upswing.monitor.findings import Severity
from upswing.monitor.stats import median
from upswing.trajectory.types import Outcome, Trajectory
from upswing.verify.rubric import GATED

PERSISTS, FELT, DECIDES, SOLVES = 6, 0.3, 0.5, 0.02
"""Steps; correlation; share of the reward's variance; success from which on it varies."""
HEAVY = 0.25
"""Share of the best success from which on a mean charge for length outweighs it."""


LURES = {
    "length_explosion": ("side_length_corr", 1),
    "length_collapse": ("side_length_corr", -1),
    "tool_call_collapse": ("side_calls_corr", -1),
    "repeated_calls": ("side_repeats_corr", 1),
}
"""Modes that a reward can pay for, and the sign of what says so."""


def lured_by(r: Readings, mode: str) -> str | None:
    """Evidence that what the reward has beside success pays for more or less of something: within groups they go
    together, persistently, and it is most of the reward's variance, so that a small charge is none. Before anything
    moves. Where nothing is solved yet, only what lowers the reward: all else is the way in."""
    name, sign = LURES[mode]
    together = sign * r.history.series(name)[-PERSISTS:]
    if len(together) < PERSISTS or not (together > FELT).all():
        return None
    if not (r.now("success", PERSISTS) > SOLVES or r.now("reward", PERSISTS) < 0):
        return None
    main = {f"variance_share_{part.removesuffix(GATED)}" for part in r.history.paid}
    shares = [one for one in r.history.names if one.startswith("variance_share_") and one not in main]
    share = sum(median(r.history.series(one)[-PERSISTS:]) for one in shares)
    if not share >= DECIDES:
        return None
    return f"{percent(share)} of the reward's variance isn't success, and goes with it: correlation {r.now(name):.2f}"


def length_explosion(r: Readings) -> Verdict | None:
    """Attempts grow without gain: cut off (10 to 20 %), repeating themselves (over 0.2 of 4-grams), paid for it, or
    only the failed ones (Dr. GRPO's length bias)."""
    length, cut, again = r.shift("sampled_tokens"), r.shift("truncated_frac"), r.shift("repetition")
    good, bad = r.shift("tokens_good"), r.shift("tokens_bad")
    grown = length.z >= 3.5 and length.ratio >= 1.4
    cut_more = cut.now >= 0.15 and r.rose("truncated_frac", 0.1)
    signs = []
    if cut_more:
        signs.append(told("share of attempts cut off:", cut, "0.1 more"))
    if again.now >= 0.2 and r.rose("repetition", 0.1):
        signs.append(told("share of 4-grams that repeat within an attempt:", again, "0.2"))
    if grown and r.rose("tokens_bad", 0.4 * bad.start) and good.ratio < 1.2:
        signs.append(
            f"failed attempts grew from {bad.start:.3g} to {bad.now:.3g} tokens, good ones hardly ({good.now:.3g})"
        )
    paying = r.now("reward_length_corr")
    bought = length.ratio >= 1.2 and length.z >= 3 and paying > 0.4
    only_cut = length.ratio >= 1.15 and length.z >= 3 and cut_more and cut.diff >= 0.25
    seen = (grown and signs) or (grown and length.ratio >= 2) or only_cut or bought
    lure = lured_by(r, "length_explosion")
    if not (seen or lure):
        return None
    signs += [lure] if lure else []
    since = r.left("sampled_tokens", 1) if seen else int(r.history.steps_S[0])
    if not r.helpless(since):
        return None
    severity: Severity = "critical" if r.dropped or (cut.now >= 0.5 and cut_more) else "warning"
    causes = [
        (3.0 if paying > 0.3 else 0, f"reward grows with length (rank correlation {paying:.2g})"),
        (
            2.0 if r.facts.get("aggregation") == "seq-mean-token-mean" else 0,
            "a mean a sequence excuses long wrong attempts",
        ),
        (1.5 if again.now >= 0.2 else 0, "attempts fall into loops and never end"),
        (1.0, "nothing makes an attempt end: neither penalty nor turn limit"),
    ]
    menu = Menu(r)
    remedies = [menu.token_mean(), menu.overlong(1.5 * length.start), menu.mask_truncated(), menu.lower_lr()]
    evidence = [told("sampled tokens of an attempt:", length, "1.4 times"), *signs, told("success", r.shift("success"))]
    examples = r.examples(lambda t: t.num_sampled_tokens, wrong)
    return Verdict(severity, since, evidence, causes, remedies, examples)


def _charge(r: Readings) -> float:
    """What is taken off for length now, on average: what the verifiers give less the reward; NaN when unknown."""
    parts = [weight * r.history.series(f"score_{name}") for name, weight in (r.facts.get("weights") or {}).items()]
    taken_S = (np.sum(parts, axis=0) if parts else math.nan) - r.history.series("reward")
    return median(taken_S[np.isfinite(taken_S)][-NOW:])


def length_collapse(r: Readings) -> Verdict | None:
    """Attempts shrink below 30 % of their length at the start (60 % where that is paid), or are empty, without a
    gain in success; or a length penalty begins below the length of good attempts, so that they will: a warning where it
    is heavy, or success has fallen."""
    length, empty = r.shift("sampled_tokens"), r.shift("empty_frac")
    penalised = bool(r.facts.get("overlong_length")) or r.now("reward_length_corr") < -0.3
    short = length.z <= -3.5 and length.ratio < (0.6 if penalised else 0.5)
    hollow = empty.now >= 0.1 and r.rose("empty_frac", 0.08)
    free = fact(r.facts, "overlong_length", math.nan) - fact(r.facts, "overlong_cache", 0.0)
    good = median(r.known("tokens_good").values[:LEVEL])
    early = len(r.known("sampled_tokens").values) < 6
    short, hollow = short and not early, hollow and not early
    charge, lure = _charge(r), lured_by(r, "length_collapse")
    charged = good > free and not charge < 0.01
    if not (short or hollow or charged or lure):
        return None
    first = int(r.known("sampled_tokens").steps[0])
    since = r.left("sampled_tokens", -1) if short else r.left("empty_frac", 1) if hollow else first
    if not r.helpless(since):
        return None
    far = length.ratio < 0.3
    severity: Severity = "critical" if (empty.now >= 0.5 and hollow) or ((far or hollow) and r.dropped) else "warning"
    heavy = charged and charge >= HEAVY * r.ceiling
    if not (far or hollow or r.dropped or (short and penalised) or heavy or lure):
        severity = "info"
    evidence = [told("sampled tokens of an attempt:", length, "30 % of it")]
    evidence += [lure] if lure else []
    if charged:
        evidence.append(f"good attempts had {good:.3g} tokens, and the length penalty begins at {free:.0f}")
    if r.has("empty_frac"):
        evidence.append(told("share of empty attempts:", empty, "0.1"))
    evidence.append(told("success", r.shift("success")))
    causes = [
        (2.5 if penalised else 0, "the reward pays for being short"),
        (1.5 if hollow else 0.5, "ending at once has become the likeliest first token"),
        *pressure(r),
    ]
    menu = Menu(r)
    remedies = [
        menu.set("Without the length penalty.", overlong_length=None, overlong_cache=None, overlong_factor=None)
        if r.facts.get("overlong_length")
        else None,
        menu.advise("Score an empty or too short answer 0, with a gate verifier, and take penalties on length away."),
        menu.more_kl(),
        menu.lower_lr(),
    ]
    examples = r.examples(lambda t: -t.num_sampled_tokens, wrong)
    return Verdict(severity, since, evidence, causes, remedies, examples)


def _with_tools(r: Readings) -> None:
    """Raises Missing where calls mean nothing: no tools, or a single turn, or none in all the run."""
    tools = r.facts.get("tools")
    count = tools if isinstance(tools, int) else len(tools) if isinstance(tools, (list, tuple, dict)) else None
    if count == 0 or r.facts.get("max_turns") == 1:
        raise Missing("tools")
    if count is None and not (r.known("tool_calls").values > 0).any() and not r.now("invalid_call_frac") > 0:
        raise Missing("tools")


def tool_call_collapse(r: Readings) -> Verdict | None:
    """Calls a trajectory fall below 0.2, or below 30 % of their number at the start, with nothing gained: "interaction
    collapse" (arXiv 2602.01204)."""
    _with_tools(r)
    calls, none = r.shift("tool_calls"), r.shift("no_call_frac")
    fewer = calls.start >= 0.3 and calls.z <= -3.5 and (calls.now < 0.2 or calls.ratio < 0.5)
    silent = none.now >= 0.5 and r.rose("no_call_frac", 0.3)
    never = calls.now < 0.05 and calls.start < 0.05
    lure = lured_by(r, "tool_call_collapse")
    if not (fewer or silent or never or lure):
        return None
    since = r.left("tool_calls", -1) if fewer else r.left("no_call_frac", 1) if silent else int(r.history.steps_S[0])
    if not r.helpless(since):
        return None
    gone = silent or (fewer and (calls.now < 0.2 or calls.ratio < 0.3))
    serious = gone or lure or (fewer and r.dropped)  # never to have called one may be fine, where tools are optional
    severity: Severity = "critical" if gone and r.dropped else "warning" if serious else "info"
    evidence = [told("tool calls a trajectory:", calls, "0.2, or 30 % of it"), *([lure] if lure else [])]
    if r.has("no_call_frac"):
        evidence.append(told("share of trajectories without a call:", none, "0.5"))
    evidence.append(told("success", r.shift("success")))
    weights = r.facts.get("weights") or {}
    causes = [
        (2.5 if min(weights.values(), default=0.0) < 0 else 0, "a penalty makes calls dear before they pay"),
        (2.0 if r.now("invalid_call_frac") > 0.2 else 0, "calls often fail: see control_token_collapse"),
        (1.0, "some tasks can be answered, or guessed, without a tool, and those are rewarded sooner"),
        (0.8 if r.now("delta_good") < 0 else 0, "calls of good attempts become unlikely: see likelihood_displacement"),
    ]
    menu = Menu(r)
    remedies = [
        menu.advise("Take tasks that can't be solved without the tool, and no penalty a call in the first steps."),
        menu.llds(),
        menu.lower_lr(),
        menu.advise("Start again from SFT on traces with many calls."),
    ]
    examples = r.examples(lambda t: -len(t.tool_records), wrong)
    return Verdict(severity, since, evidence, causes, remedies, examples)


def _repeats(trajectory: Trajectory) -> int:
    """Calls that had been made before in it."""
    made = [record.call for record in trajectory.tool_records if record.call.name]
    calls = [(call.name, str(sorted(call.arguments.items()))) for call in made]
    return len(calls) - len(set(calls))


def repeated_calls(r: Readings) -> Verdict | None:
    """More than 30 % of the calls were made before in the same trajectory; many trajectories run out of turns."""
    _with_tools(r)
    again, ended = r.shift("duplicate_call_frac"), r.shift("max_turns_frac")
    now = again.now
    more = r.rose("duplicate_call_frac", 0.1)
    many, lure = now >= 0.3 and (more or now >= 0.4), lured_by(r, "repeated_calls")
    first = int(r.history.steps_S[0])
    if not (many or (lure and r.helpless(first))):
        return None
    since = r.onset("duplicate_call_frac", 0.3, 1) if many else first
    stuck = ended.now >= 0.5 and r.rose("max_turns_frac", 0.2)
    severity: Severity = "critical" if many and (now >= 0.6 or r.dropped or stuck) else "warning"
    if r.solved and not r.dropped:
        severity = "info"
    evidence = [told("share of calls made before in the same trajectory:", again, "0.3"), *([lure] if lure else [])]
    if r.has("max_turns_frac"):
        evidence.append(told("share of trajectories that ran out of turns:", ended, "0.3"))
    if r.has("novelty"):
        evidence.append(told("share of observations that were new:", r.shift("novelty")))
    evidence += [told("tool calls a trajectory:", r.shift("tool_calls")), told("success", r.shift("success"))]
    paying = r.shift("reward").diff > 0 and r.shift("tool_calls").ratio > 1.2
    causes = [
        (2.5 if paying else 0, "reward and calls rise together: a reward a call pays for repeating one"),
        (1.5 if r.now("invalid_call_frac") > 0.2 else 0, "failing calls are tried again unchanged"),
        (1.0, "the same question gives the same answer, and nothing in it says so"),
    ]
    menu = Menu(r)
    remedies = [
        menu.advise("Take away any reward a call; count different calls only."),
        menu.advise("Let the tool answer a repeated call with a notice, and lower the environment's turn limit."),
        menu.mask_truncated(),
        menu.lower_lr(),
    ]
    examples = r.examples(_repeats, lambda t: _repeats(t) > 0)
    return Verdict(severity, since, evidence, causes, remedies, examples)


def control_token_collapse(r: Readings) -> Verdict | None:
    """Markup breaks: under 75 % of the calls are valid and they get worse (arXiv 2606.26027). Up to a half only where
    nothing is gained and success falls or more attempts are hit: one that is stuck makes the same bad call again and
    again, so that the share of calls may rise alone."""
    _with_tools(r)
    bad = r.shift("invalid_call_frac")
    worse = bad.now >= 0.25 and r.rose("invalid_call_frac", 0.15)
    never = bad.now >= 0.5 and bad.start >= 0.5 and r.now("success") < 0.1 and bad.diff > -0.1
    if not (worse or never):
        return None
    since = r.left("invalid_call_frac", 1) if worse else int(r.known("invalid_call_frac").steps[0])
    more_hit = not r.has("invalid_attempt_frac") or r.rose("invalid_attempt_frac", 0, 2)
    if bad.now < 0.5 and (r.paid(since) or not (more_hit or r.dropped)):
        return None
    severity: Severity = "critical" if worse and (bad.now >= 0.5 or r.dropped) else "warning"
    evidence = [told("share of calls that are invalid:", bad, "0.25"), told("success", r.shift("success"))]
    for name, what in (
        ("invalid_attempt_frac", "share of attempts with an invalid call:"),
        ("empty_frac", "share of empty attempts:"),
        ("entropy", "entropy"),
        ("kl", "KL to the reference"),
    ):
        if r.has(name):
            evidence.append(told(what, r.shift(name)))
    causes = [
        (2.0 if never else 0, "the model never learned the format: RL can't find it"),
        (1.5 if r.shift("kl").now > 0.1 else 0, "the policy is far from its reference"),
        (1.2 if r.now("delta_good") < 0 else 0, "tokens of good calls become unlikely: see likelihood_displacement"),
        *pressure(r),
    ]
    menu = Menu(r)
    remedies = [
        menu.advise("Run SFT on valid calls first, with some that recover from errors.") if never else menu.lower_lr(),
        menu.llds(),
        menu.more_kl(),
        menu.advise("Run SFT on valid calls before this stage, or between parts of it."),
    ]
    examples = r.examples(
        lambda t: sum(not record.ok for record in t.tool_records), lambda t: any(not one.ok for one in t.tool_records)
    )
    return Verdict(severity, since, evidence, causes, remedies, examples)


def _forks(trajectory: Trajectory) -> int:
    return sum(event.forked for event in trajectory.drift)


def retokenisation_drift(r: Readings) -> Verdict | None:
    """Prompts that don't extend what the model had seen, at many of the joints between turns. Each opens a branch,
    which costs compute; where log-probs disagree too, exactness. Drift that could be extended over costs nothing.
    What a template makes of gibberish, before anything works, says nothing of the template."""
    joints = r.num_trajectories * max(1.0, (r.now("turns") if r.has("turns") else 2.0) - 1)
    share = r.now("num_forks") / joints
    if not share >= 0.15:
        return None
    off = r.now("mismatch_abs", 3) > 0.02 or r.now("mismatch_max", 3) > 5
    gibberish = r.now("invalid_call_frac") >= 0.5 and r.now("success") < 0.05
    severity: Severity = "critical" if off and share >= 0.3 else "warning" if off or share >= 0.3 else "info"
    severity = "info" if gibberish and not off else severity
    evidence = [
        f"{percent(share)} of the joints between turns opened a branch (limit: 30 %), {r.now('num_forks'):.3g} a step"
    ]
    if r.has("mismatch_max"):
        evidence.append(
            f"largest difference of log-probs between sampler and learner {r.now('mismatch_max', 3):.2g} nats"
        )
    examples = r.examples(_forks, lambda t: _forks(t) > 0)
    causes = [
        (2.0, "the chat template re-renders earlier turns, for instance without their thinking"),
        (1.5, "the environment, or the program that plays, rewrites the conversation"),
        (3.0 if gibberish else 0, "no turn can be read yet, and no template keeps gibberish as it is"),
    ]
    menu = Menu(r)
    remedies = [
        menu.advise("Keep token ids between turns: append the tool's tokens to what was sampled, and never re-render."),
        menu.advise("Take a chat template that leaves earlier turns as they are (`upswing check` tells)."),
        menu.correct() if off else None,
    ]
    since = r.onset("num_forks", 0.15 * joints, 1)
    return Verdict(severity, since, evidence, causes, remedies, examples)


def error_storm(r: Readings) -> Verdict | None:
    """A tenth of the trajectories break, or can't be scored: they count for nothing, and may be the hard ones."""
    signs, worst = Signs(), 0.0
    for name, count, what in (
        ("errored_frac", "num_errored", "broke"),
        ("unscored_frac", "num_unscored", "had no score"),
    ):
        one = name if r.has(name) else count
        if not r.has(one):
            continue
        whole = 1.0 if one == name else r.num_trajectories
        share, last = r.now(one, 3) / whole, r.now(one, 1) / whole
        if share >= 0.1 or last >= 0.5:
            signs.add(
                r.onset(one, 0.1 * whole, 1) if share >= 0.1 else r.history.step,
                f"{percent(max(share, last))} of the trajectories {what} (limit: 10 %)",
            )
            worst = max(worst, share, last)
    if not signs:
        return None
    broken = r.examples(lambda t: 1.0, lambda t: t.outcome == Outcome.ERRORED or t.reward is None)
    severity: Severity = "critical" if worst >= 0.3 else "warning"
    causes = [(1.0, "a tool, a server or the environment fails"), (0.8, "a verifier raises, or runs past its deadline")]
    limit = fact(r.facts, "turn_tokens", math.nan)
    causes.append((0.5 if r.now("truncated_frac") > 0.5 else 0, f"attempts are cut at {limit:.0f} tokens a turn"))
    remedies = [
        Menu(r).advise("Read the errors of these trajectories, and mend what breaks: learning from the rest is biased.")
    ]
    return Verdict(severity, signs.since, signs, causes, remedies, broken)
