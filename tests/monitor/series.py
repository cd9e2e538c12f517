"""Synthetic runs for the detectors: batches of Bernoulli rewards in groups, with the signals that go with them, healthy
or with one fault that sets in at a third of the run and makes success fall later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

GROUP, PAIRS = 8, 6
Row = dict[str, Any]
Array = npt.NDArray[Any]
FACTS: dict[str, Any] = {
    "stage": "rl",
    "algorithm": "grpo",
    "advantage": "group",
    "normalize_std": True,
    "loss": "ppo_clip",
    "aggregation": "token-mean",
    "steps": 200,
    "tasks_per_step": 8,
    "group_size": GROUP,
    "lr": 1e-3,
    "minibatches": 2,
    "updates_per_batch": 2,
    "clip_low": 0.2,
    "clip_high": 0.2,
    "dual_clip": 0.0,
    "kl_coef": 0.0,
    "entropy_coef": 0.0,
    "temperature": 1.0,
    "grad_clip": 1.0,
    "llds_coef": 0.0,
    "eval_tasks": 64,
    "weights": {"answer": 1.0, "strict": 0.0},
    "tools": 2,
    "max_turns": 6,
    "turn_tokens": 64,
}

# kind of healthy run -> (success at the start, at the end, entropy at the end, tokens at the end / start, calls too)
HEALTHY: dict[str, tuple[float, float, float, float, float]] = {
    "learns": (0.3, 0.95, 0.1, 1.0, 1.0),
    "solved": (0.5, 0.995, 0.04, 0.9, 0.9),
    "saturates": (0.3, 0.7, 0.2, 1.1, 1.0),
    "slow": (0.2, 0.4, 0.4, 1.0, 1.0),
    "shorter": (0.3, 0.9, 0.12, 0.55, 0.5),
    "longer": (0.3, 0.85, 0.15, 1.6, 1.2),
    "flat": (0.5, 0.5, 0.5, 1.0, 1.0),
}


def _side(row: Row, success: float, form: float, share: float) -> Row:
    """Paid for strict_match and, by 0.2, for a form that longer attempts with more calls have less often."""
    scores = dict.fromkeys(("score_strict_match", "score_answer", "score_strict"), success)
    scores |= {"score_format": form, "reward": success + 0.2 * form}
    shares = {"variance_share_format": share, "variance_share_strict_match": 1 - share}
    return {**scores, **shares, "side_length_corr": -0.4, "side_calls_corr": -0.4}


def _cold(row: Row) -> Row:
    """Nothing is solved in the first ten steps, and the form is learned first."""
    step = row["step"]
    success = row["reward"] * min(1.0, max(0.0, (step - 10) / 15))
    return _side(row, success, min(1.0, step / 10), 0.1 if success > 0.02 else 1.0)


def _warming(row: Row) -> Row:
    share = min(1.0, row["step"] / 31)
    return {"lr": 1e-3 * share, "kl_old": 0.009 + row["kl_old"] * share**2}


def _lifted(row: Row) -> Row:
    """The entropy safeguard lifts entropy to its target."""
    far = max(0, row["step"] - 10)
    put = {"set_entropy_coef": 0.02, "set_entropy_target": 0.4} if far else {}
    return {"entropy": row["entropy"] / 0.8 * 0.01 + min(0.4, 0.08 + 0.012 * far), **put}


_FORM = {"weights": {"strict_match": 1.0, "format": 0.2}}
MORE: dict[str, tuple[dict[str, Any], Callable[[Row], Row]]] = {
    "form": (_FORM, lambda row: _side(row, row["reward"], min(1.0, 0.5 + row["step"] / 40), 0.1)),
    "cold": (_FORM, _cold),
    "bonus": ({"entropy_coef": 0.02}, lambda row: {}),
    "lifted": ({"entropy_coef": 0.02}, _lifted),
    "warming": ({"warmup_steps": 30}, _warming),
    "overlong": (
        {"overlong_length": 90, "overlong_cache": 40},
        lambda row: {"reward": row["reward"] - 0.02 - 0.2 * max(0, row["sampled_tokens"] - 50) / 40},
    ),
    "no calls": ({}, lambda row: {"tool_calls": 0.0, "no_call_frac": 1.0, "turns": 1.0, "num_forks": 0.0}),
}
"""What a healthy run may have besides -> its facts, and what it changes in a row."""

Fault = Callable[[dict[str, float], float, float], None]
"""(levels of this step, how far the fault has gone in [0, 1], how far its harm) -> changes the levels."""


def _mix(levels: dict[str, float], far: float, **ends: float) -> None:
    for name, end in ends.items():
        levels[name] += far * (end - levels[name])


def _harm(levels: dict[str, float], share: float) -> None:
    levels["success"] *= 1 - share


def entropy_collapse(v: dict[str, float], far: float, harm: float) -> None:
    _harm(v, 0.6 * harm)
    v["extreme"] = far
    _mix(v, min(1.0, 1.6 * far), entropy=0.02, unique_frac=0.13, distinct_4=0.2)


def entropy_explosion(v: dict[str, float], far: float, harm: float) -> None:
    _harm(v, 0.9 * harm)
    _mix(v, far, entropy=3.0, kl=0.08)


def advantage_collapse(v: dict[str, float], far: float, harm: float) -> None:
    _harm(v, 0.5 * harm)
    v["extreme"] = min(1.0, 1.5 * far)


def echo_trap(v: dict[str, float], far: float, harm: float) -> None:
    _harm(v, 0.7 * harm)
    v["extreme"] = min(1.0, 1.4 * far)
    _mix(v, far, unique_frac=0.2, repetition=0.4, distinct_4=0.15, grad_norm=0.5 + 4 * harm, entropy=0.3)


def template_collapse(v: dict[str, float], far: float, harm: float) -> None:
    _harm(v, 0.5 * harm)
    _mix(v, far, mi_first_turn=0.02, mi_retrieval=1 / 6, same_first_turn_frac=0.97)


def kl_explosion(v: dict[str, float], far: float, harm: float) -> None:
    _harm(v, 0.9 * harm)
    _mix(v, far, kl=1.5, kl_old=0.012)


def length_explosion(v: dict[str, float], far: float, harm: float) -> None:
    _harm(v, 0.6 * harm)
    tokens = v["sampled_tokens"]
    _mix(v, far, sampled_tokens=2.5 * tokens, tokens_bad=3 * tokens, truncated_frac=0.5, repetition=0.4)


def length_collapse(v: dict[str, float], far: float, harm: float) -> None:
    _harm(v, 0.7 * harm)
    _mix(v, far, sampled_tokens=4.0, tokens_good=5.0, tokens_bad=4.0, empty_frac=0.3)


def likelihood_displacement(v: dict[str, float], far: float, harm: float) -> None:
    _harm(v, 0.9 * harm - 0.15 * far)
    _mix(v, far, delta_good=-0.04, delta_good_first=-0.06, displaced_frac=0.85, logprob_good=-0.7)
    _mix(v, harm, entropy=1.6, grad_norm=5.0)


def train_inference_mismatch(v: dict[str, float], far: float, harm: float) -> None:
    _harm(v, 0.5 * harm)
    _mix(v, far, mismatch_abs=0.08, mismatch_k3=0.02, ess_frac=0.5)


def tool_call_collapse(v: dict[str, float], far: float, harm: float) -> None:
    _harm(v, 0.4 * harm)
    _mix(v, far, tool_calls=0.05, no_call_frac=0.95, turns=1.1)


def repeated_calls(v: dict[str, float], far: float, harm: float) -> None:
    _harm(v, 0.4 * harm)
    _mix(v, far, duplicate_call_frac=0.7, tool_calls=5.0, max_turns_frac=0.6, novelty=0.3)


def control_token_collapse(v: dict[str, float], far: float, harm: float) -> None:
    _harm(v, 0.95 * harm)
    _mix(v, far, invalid_call_frac=0.95)


def retokenisation_drift(v: dict[str, float], far: float, harm: float) -> None:
    _harm(v, 0.3 * harm)
    _mix(v, far, drift=1.5)


def stale_updates(v: dict[str, float], far: float, harm: float) -> None:
    _harm(v, 0.7 * harm)
    _mix(v, far, kl_old=0.15, clipped_low=0.15, clipped_high=0.2, ratio_p99=3.0)


def reward_hacking(v: dict[str, float], far: float, harm: float) -> None:
    v["strict"] = 0.95 * v["success"] * (1 - 0.9 * far)
    v["success"] += 0.8 * far * (0.98 - v["success"])


def overfitting(v: dict[str, float], far: float, harm: float) -> None:
    v["eval"] = v["success"] * (1 - 0.5 * harm)
    v["success"] += 0.8 * far * (0.98 - v["success"])


def gradient_instability(v: dict[str, float], far: float, harm: float) -> None:
    _harm(v, 0.7 * harm)
    _mix(v, far, grad_norm=8.0)


def error_storm(v: dict[str, float], far: float, harm: float) -> None:
    v["errored"] = 0.45 * far


FAULTS: dict[str, Fault] = {
    fault.__name__: fault
    for fault in (
        *(entropy_collapse, entropy_explosion, advantage_collapse, echo_trap, template_collapse, kl_explosion),
        *(length_explosion, length_collapse, likelihood_displacement, train_inference_mismatch, tool_call_collapse),
        *(repeated_calls, control_token_collapse, retokenisation_drift, stale_updates, reward_hacking, overfitting),
        *(gradient_instability, error_storm),
    )
}

SHARES = ("truncated_frac", "invalid_call_frac", "duplicate_call_frac", "max_turns_frac", "no_call_frac", "empty_frac")
SHARES += ("unique_frac", "repetition", "distinct_4", "novelty", "same_first_turn_frac", "mi_retrieval")
SHARES += ("displaced_frac",)
TINY = ("mismatch_abs", "mismatch_k3", "kl", "kl_old", "clipped_low", "clipped_high")


def levels_of(kind: str, done: float) -> dict[str, float]:
    """Expected values in a healthy run when a share `done` of the learning is done."""
    start, end, entropy, tokens, calls = HEALTHY[kind]
    length = 60 * (1 + done * (tokens - 1))
    return {
        "success": start + done * (end - start),
        "extreme": 0.0,
        "errored": 0.0,
        "drift": 0.1,
        "eval": -1.0,
        "entropy": 0.8 + done * (entropy - 0.8),
        "grad_norm": 0.5,
        "sampled_tokens": length,
        "tokens_good": 0.9 * length,
        "tokens_bad": 1.15 * length,
        "turns": 1 + 2.4 * (1 + done * (calls - 1)),
        "tool_calls": 2.4 * (1 + done * (calls - 1)),
        "truncated_frac": 0.1 * (1 - 0.6 * done),
        "invalid_call_frac": 0.08 * (1 - 0.8 * done),
        "duplicate_call_frac": 0.06,
        "max_turns_frac": 0.08,
        "no_call_frac": 0.03,
        "empty_frac": 0.005,
        "unique_frac": 0.95 - 0.6 * done * (1 - entropy),
        "repetition": 0.05,
        "distinct_4": 0.7 - 0.2 * done,
        "novelty": 0.8,
        "same_first_turn_frac": 0.3,
        "mi_first_turn": 1.4,
        "mi_retrieval": 0.8,
        "kl": 0.06 * done,
        "kl_old": 0.002,
        "clipped_low": 0.004,
        "clipped_high": 0.004,
        "ratio_p99": 1.2,
        "mismatch_abs": 0.004,
        "mismatch_k3": 1e-4,
        "ess_frac": 0.99,
        "delta_good": 0.01,
        "delta_good_first": 0.008,
        "delta_bad": -0.02,
        "displaced_frac": 0.32,
        "logprob_good": -0.15,
        "logprob_bad": -0.5,
        "grad_good": 1.0,
        "grad_bad": 1.1,
        "reward_length_corr": 0.0,
    }


def run(
    kind: str, seed: int, *, steps: int = 60, batch: int = 64, fault: str | None = None, first: int = 1
) -> tuple[list[Row], list[float]]:
    """(rows, expected success by step). The fault sets in, and learning stops, after a third; its harm comes
    when most of it is there."""
    rng = np.random.default_rng([seed, steps, batch])
    onset, ramp = steps // 3, max(4, steps // 4)
    levels = []
    for t in range(steps):
        learned = t if fault is None else min(t, onset)
        levels.append(levels_of(kind, 1 - float(np.exp(-3 * learned / steps))))
        if fault is not None:
            harm = float(np.clip((t - onset - 0.6 * ramp) / ramp, 0, 1))
            FAULTS[fault](levels[-1], float(np.clip((t - onset) / ramp, 0, 1)), harm)
    v_T = {name: np.array([level.get(name, np.nan) for level in levels]) for name in (*levels[0], "strict")}
    columns = {**_batches(v_T, batch, rng), **_signals(v_T, batch, rng)}
    every_fifth = ("mi_first_turn", "mi_retrieval", "mi_pairs", "eval_reward", "eval_low", "eval_high")
    rows: list[Row] = []
    for t in range(steps):
        known = {name: float(values[t]) for name, values in columns.items() if t % 5 == 0 or name not in every_fifth}
        rows.append({"step": first + t, **known})
    return rows, [level["success"] for level in levels]


def _batches(v_T: dict[str, Array], batch: int, rng: np.random.Generator) -> dict[str, Array]:
    """Rewards of groups whose tasks differ, and what is counted of them; `extreme`: each task always or never works."""
    spread, steps = 1.5, len(v_T["success"])
    level_T1 = np.log(v_T["success"] / (1 - v_T["success"]))[:, None] * np.sqrt(1 + spread**2 / 3)
    chance_TP = 1 / (1 + np.exp(-(level_T1 + spread * rng.normal(size=(steps, batch // GROUP)))))
    sure_TP = rng.random(chance_TP.shape) < v_T["extreme"][:, None]
    chance_TP = np.where(sure_TP, rng.random(chance_TP.shape) < chance_TP, chance_TP)
    rewards_TPG = (rng.random((*chance_TP.shape, GROUP)) < chance_TP[..., None]).astype(float)
    mean_TP, reward_T = rewards_TPG.mean(2), rewards_TPG.mean((1, 2))
    strict_T = np.where(np.isnan(v_T["strict"]), 0.95 * reward_T, v_T["strict"])
    return {
        "reward": reward_T,
        "reward_std": rewards_TPG.std((1, 2)),
        "group_reward_std": rewards_TPG.std(2).mean(1),
        "too_easy_frac": (mean_TP == 1).mean(1),
        "too_hard_frac": (mean_TP == 0).mean(1),
        "zero_variance_frac": ((mean_TP == 0) | (mean_TP == 1)).mean(1),
        "num_trajectories": np.full(steps, batch),
        "score_answer": reward_T,
        "score_strict": rng.binomial(batch, strict_T) / batch,
        "num_errored": rng.binomial(batch, v_T["errored"]),
        "num_unscored": np.zeros(steps),
        "num_forks": rng.binomial(3 * batch, np.minimum(1, v_T["drift"] * (v_T["turns"] - 1) / 3)),
    }


def _signals(v_T: dict[str, Array], batch: int, rng: np.random.Generator) -> dict[str, Array]:
    """Everything else about its level, with noise that falls with the batch."""
    fine, steps = 8 / np.sqrt(batch), len(v_T["success"])
    few = {"displaced_frac": max(4, batch // 16), "same_first_turn_frac": batch // GROUP, "mi_retrieval": PAIRS}
    found = {name: rng.binomial(few.get(name, batch), np.clip(v_T[name], 0, 1)) for name in SHARES}
    found = {name: counts / few.get(name, batch) for name, counts in found.items()}
    scatter = {
        **dict.fromkeys(TINY, 0.3),
        **dict.fromkeys(("entropy", "sampled_tokens", "tokens_good", "tokens_bad"), 0.08),
        **dict.fromkeys(("tool_calls", "turns", "ratio_p99"), 0.08),
        **dict.fromkeys(("grad_norm", "grad_good", "grad_bad"), 0.35),
        **dict.fromkeys(("logprob_good", "logprob_bad"), 0.3),
        "mi_first_turn": 0.2 / fine,
    }
    found |= {name: v_T[name] * rng.lognormal(0, share * fine, steps) for name, share in scatter.items()}
    for name, by in {
        "delta_good": 0.01,
        "delta_good_first": 0.01,
        "delta_bad": 0.01,
        "reward_length_corr": 0.12,
    }.items():
        found[name] = v_T[name] + rng.normal(0, by * fine, steps)
    found["ess_frac"] = np.minimum(1, v_T["ess_frac"] + rng.normal(0, 0.005, steps))
    held_T = rng.binomial(64, np.where(v_T["eval"] >= 0, v_T["eval"], v_T["success"])) / 64
    width_T = 1.96 * np.sqrt(np.maximum(held_T * (1 - held_T), 0.01) / 64)
    found |= {"eval_reward": held_T, "eval_low": held_T - width_T, "eval_high": held_T + width_T}
    found |= {"tokens_max": 3 * v_T["sampled_tokens"], "mi_pairs": np.full(steps, float(PAIRS))}
    return found | {"num_nonfinite": np.zeros(steps), "lr": np.full(steps, 1e-3), "num_steps": np.full(steps, 4.0)}
