"""The safeguards: what each changes in a stage's keys, within bounds, and which are tried for each failure mode."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

UNGROUPED = ("reinforce", "reinforce_pp", "remax", "gae")
"""Advantages for which a group without a spread of rewards is no waste."""

LEFT_OUT, RESETS, UNPAID = "left_out", "reference_resets", "unpaid"
"""Not keys of the stage, but changed like them: ids of tasks that are no longer played; a count; names of verifiers
that no longer count in the reward."""

Keys = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What a change is computed from."""

    base: Keys
    """The stage's keys as its recipe has them."""
    now: Keys
    """Those in force."""
    normal: Keys = field(default_factory=dict)
    """Medians of the stage's first steps, as `normal_of` has them."""
    decided: Callable[[], Sequence[str]] = tuple
    """Ids of repeated tasks that the agent always solves or never does; slow."""
    blamed: Callable[[str], str | None] = lambda mode: None
    """The part of the reward that pays against success, or for a mode, as `side_part` has it."""
    dropped: bool = False
    """Success has surely lost a tenth of its peak."""
    paid: Callable[[int], bool] = lambda since: False
    """Whether success is surely higher now than before a step."""


@dataclass(frozen=True)
class Safeguard:
    """One kind of action."""

    about: str
    change: Callable[[Situation, str], dict[str, Any] | None]
    """The next value of each key for a mode; None: at its bound, or nothing to change."""
    needs: Callable[[Keys], str | None] = lambda keys: None
    """Why a stage with these keys can't use it; None: it can."""


def is_single(keys: Keys) -> bool:
    """One optimizer step a batch: every ratio is 1."""
    updates: int = (keys["minibatches"] or 1) * keys["updates_per_batch"]
    return updates == 1


def _ratios(keys: Keys) -> str | None:
    why = "a batch has one update, whose ratio is 1; set minibatches or updates_per_batch too"
    return why if is_single(keys) else None


def _entropy(s: Situation, mode: str) -> dict[str, Any] | None:
    coef, target, normal = s.now["entropy_coef"], s.now["entropy_target"], s.normal.get("entropy")
    if mode == "entropy_explosion":
        return {"entropy_coef": 0.0, "entropy_target": None} if coef else None
    if target is not None or not normal:
        return None
    return {"entropy_coef": max(coef, 0.005), "entropy_target": round(normal / 2, 4)}


def _clip_higher(s: Situation, mode: str) -> dict[str, Any] | None:
    clip = s.now["clip_high"]
    return None if clip is None or clip >= 0.4 else {"clip_high": min(0.4, round(1.4 * clip, 4))}


def _has_clip(keys: Keys) -> str | None:
    has = keys["loss"] in ("ppo_clip", "clip_cov")
    return _ratios(keys) if has else f"it raises clip_high, and loss '{keys['loss']}' has none on that scale"


def _kl_cov(s: Situation, mode: str) -> dict[str, Any] | None:
    return {"algorithm": "custom", "loss": "kl_cov"} if s.now["loss"] == "ppo_clip" and not is_single(s.now) else None


def _clips(keys: Keys) -> str | None:
    return _ratios(keys) if keys["loss"] == "ppo_clip" else f"it takes ppo_clip's place, and loss is '{keys['loss']}'"


def _dynamic_sampling(s: Situation, mode: str) -> dict[str, Any] | None:
    batches = s.now["dynamic_sampling"] or 1
    return {"dynamic_sampling": min(4, 2 * batches)} if batches < 4 else None


def _grouped(keys: Keys) -> str | None:
    if keys["reward_model"] is not None:
        return "it judges by the verifiers, and reward_model is the reward"
    if keys["group_size"] == 1:
        return "a group of 1 never has a spread"
    ungrouped = keys["advantage"] in UNGROUPED
    return f"advantage '{keys['advantage']}' learns from groups without a spread too" if ungrouped else None


def _curriculum(s: Situation, mode: str) -> dict[str, Any] | None:
    before = set(s.now.get(LEFT_OUT) or ())
    found = before | set(s.decided())
    return {LEFT_OUT: sorted(found)} if found != before else None


def _llds(s: Situation, mode: str) -> dict[str, Any] | None:
    coef = s.now["llds_coef"]
    return {"llds_coef": min(1.0, max(0.2, 2 * coef))} if coef < 1 else None


def _own_old(keys: Keys) -> str | None:
    return "old_logprobs is 'engine'" if keys["old_logprobs"] == "engine" else None


def _kl(s: Situation, mode: str) -> dict[str, Any] | None:
    """Advantages are divided by their group's deviation, so that k2 balances them at a log-ratio of about 1 / kl_coef
    nats: below 0.1 it holds nothing."""
    coef = s.now["kl_coef"]
    return {"kl_coef": min(1.0, max(0.1, 3 * coef))} if coef < 1 else None


def _fixed_kl(keys: Keys) -> str | None:
    return "kl_target adapts kl_coef already" if keys["kl_target"] is not None else None


def _ref_reset(s: Situation, mode: str) -> dict[str, Any] | None:
    count = s.now.get(RESETS) or 0
    return {RESETS: count + 1} if s.now["kl_coef"] and count < 3 else None


def _lr(s: Situation, mode: str) -> dict[str, Any] | None:
    lr = s.now["lr"] / 2
    return {"lr": lr} if lr >= 0.99 * s.base["lr"] / 8 else None


def _reuse(s: Situation, mode: str) -> dict[str, Any] | None:
    """Half as many updates a batch; never one alone where something would lose its effect by that."""
    passes, parts, tasks = s.now["updates_per_batch"], s.now["minibatches"] or 1, s.now["tasks_per_step"]
    if passes > 1:
        change = {"updates_per_batch": passes // 2}
    elif parts > 1:
        change = {"minibatches": max(n for n in range(1, parts // 2 + 1) if tasks % n == 0)}
    else:
        return None
    needs_ratios = s.now["llds_coef"] or s.now["loss"] == "kl_cov"
    return None if needs_ratios and is_single({**s.now, **change}) else change


def _overlong(s: Situation, mode: str) -> dict[str, Any] | None:
    length, present = s.normal.get("sampled_tokens"), s.now["overlong_length"] is not None
    if mode == "length_collapse":
        return dict.fromkeys(("overlong_length", "overlong_cache", "overlong_factor")) if present else None
    if present or not length:
        return None
    return {"overlong_length": math.ceil(3 * length), "overlong_cache": math.ceil(1.5 * length)}


def _shapeable(keys: Keys) -> str | None:
    reads_reward = keys["advantage"] not in ("gdpo", "pass_at_k")
    return None if reads_reward else f"a length penalty doesn't reach advantage '{keys['advantage']}'"


def _reweight(s: Situation, mode: str) -> dict[str, Any] | None:
    """Never the last part: what is success, or without one the heaviest, is never blamed."""
    blamed, before = s.blamed(mode), list(s.now.get(UNPAID) or ())
    return None if blamed is None or blamed in before else {UNPAID: [*before, blamed]}


def _verified(keys: Keys) -> str | None:
    return None if keys["reward_model"] is None else "reward_model is the reward"


def _correction(s: Situation, mode: str) -> dict[str, Any] | None:
    return {"correction": "tis"} if s.now["correction"] is None else None


def _uncorrected(keys: Keys) -> str | None:
    return _own_old(keys) or (None if keys["correction"] is None else f"correction is '{keys['correction']}' already")


SAFEGUARDS: dict[str, Safeguard] = {
    "entropy": Safeguard("an entropy bonus that adapts to half the first entropy, or none any more", _entropy),
    "clip_higher": Safeguard("clip_high up, to 0.4 at most", _clip_higher, _has_clip),
    "kl_cov": Safeguard("loss kl_cov in ppo_clip's place", _kl_cov, _clips),
    "dynamic_sampling": Safeguard("up to 4 batches a step for groups with a spread", _dynamic_sampling, _grouped),
    "curriculum": Safeguard("repeated tasks always or never solved are left out", _curriculum, _grouped),
    "llds": Safeguard("llds_coef 0.2, then doubled to 1 at most", _llds, lambda keys: _ratios(keys) or _own_old(keys)),
    "kl": Safeguard("kl_coef 0.1, then tripled to 1 at most", _kl, _fixed_kl),
    "ref_reset": Safeguard(
        "the policy becomes the reference", _ref_reset, lambda keys: None if keys["kl_coef"] else "kl_coef is 0"
    ),
    "lr": Safeguard("learning rate halved, to an eighth at most", _lr),
    "reuse": Safeguard("half as many updates a batch", _reuse, _ratios),
    "overlong": Safeguard("a penalty from 1.5 times the first length on, or none any more", _overlong, _shapeable),
    "reweight": Safeguard("weight 0 for a side part of the reward that pays against success", _reweight, _verified),
    "correction": Safeguard("truncated importance sampling", _correction, _uncorrected),
    "rollback": Safeguard(
        "back to the best checkpoint",
        lambda s, mode: None,
        lambda keys: None if keys["save_every"] else "save_every is 0",
    ),
    "stop": Safeguard("the run ends with the reason when nothing helps", lambda s, mode: None),
}

LADDERS: dict[str, tuple[str, ...]] = {
    "entropy_collapse": ("entropy", "clip_higher", "kl_cov", "lr"),
    "entropy_explosion": ("entropy", "llds", "lr", "reuse", "kl"),
    "advantage_collapse": ("curriculum", "dynamic_sampling"),
    "echo_trap": ("reweight", "dynamic_sampling", "clip_higher", "reuse", "lr"),
    "template_collapse": ("dynamic_sampling", "lr"),
    "kl_explosion": ("lr", "reuse", "kl", "ref_reset"),
    "length_explosion": ("reweight", "overlong", "lr"),
    "length_collapse": ("overlong", "reweight", "lr", "kl"),
    "likelihood_displacement": ("llds", "reuse", "lr"),
    "train_inference_mismatch": ("correction", "lr"),
    "tool_call_collapse": ("reweight", "kl", "lr"),
    "repeated_calls": ("reweight", "kl", "lr"),
    "control_token_collapse": ("kl", "lr"),
    "stale_updates": ("reuse", "correction", "lr"),
    "reward_hacking": ("reweight", "kl", "lr"),
    "overfitting": ("kl", "lr"),
    "gradient_instability": ("lr", "reuse"),
}
"""What is tried for each mode, the best first. Others have nothing that a change of keys could help."""

BRAKES = {
    "lr": "lr",
    "kl_coef": "kl",
    "updates_per_batch": "reuse",
    "minibatches": "reuse",
    "dynamic_sampling": "dynamic_sampling",
    LEFT_OUT: "curriculum",
}
"""Keys that only slow learning down, or cost time, and the safeguards that change them: they are let go when a mode is
over. The others took a cause away, or hold it off as LLDS does, and stay."""
