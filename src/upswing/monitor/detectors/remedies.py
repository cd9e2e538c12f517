"""Recipe changes that a finding may propose: never one that is made already, nor one that the recipe would refuse."""

from __future__ import annotations

import math
from typing import Any

from upswing.monitor.detectors.readings import Readings, fact
from upswing.monitor.findings import Remedy

EVERY_KIND = {"lr", "tasks_per_step", "group_size", "temperature", "grad_clip", "warmup_steps", "eval_every"}
"""Keys that all stages with samples of their own have; others are the `rl` stage's."""
OF_KL = ("kl_in", "kl_estimator", "kl_target", "kl_horizon", "ref_refresh_steps")
OF_SEVERAL_UPDATES = (
    *("clip_low", "clip_high", "dual_clip", "tau_pos", "tau_neg", "cov_coef", "ratio_level", "old_logprobs", "kl_stop"),
)
"""Refused with one update a batch, whose ratio is 1."""
DUAL = ("ppo_clip", "gspo", "gmpo", "clip_cov", "kl_cov")


class Menu:
    """The remedies that fit a recipe; a method returns None for one that doesn't."""

    def __init__(self, readings: Readings) -> None:
        self.readings, self.facts = readings, readings.facts
        self.minibatches = int(fact(self.facts, "minibatches", 1))
        self.passes = int(fact(self.facts, "updates_per_batch", 1))
        self.several = self.minibatches * self.passes > 1 or "minibatches" not in self.facts
        self.loss, self.advantage = self.facts.get("loss"), self.facts.get("advantage")

    def set(self, text: str, **change: Any) -> Remedy | None:
        """A change of these keys; None when nothing would change or the stage isn't one that has them."""
        known = self.facts
        new = {k: v for k, v in change.items() if (known[k] != v if k in known else v is not None)}
        rl = known.get("stage", "rl") == "rl"
        return Remedy(text=text, change=new) if new and (rl or new.keys() <= EVERY_KIND) else None

    def advise(self, text: str) -> Remedy:
        return Remedy(text=text)

    def lower_lr(self, factor: float = 0.5) -> Remedy | None:
        lr = fact(self.facts, "lr", math.nan)
        if math.isnan(lr):
            return self.advise(
                f"Multiply the learning rate by {factor:g}: smaller steps keep the policy where it works."
            )
        return self.set(
            f"A learning rate {factor:g} times as large moves the policy less a step.", lr=_short(lr * factor)
        )

    def clip_higher(self) -> Remedy | None:
        low = fact(self.facts, "clip_high", 0.2) < 0.28
        if self.several and low and self.loss in (None, "ppo_clip", "clip_cov") and self._dual_above(1.28):
            return self.set("Clip-higher lets unlikely good tokens grow (DAPO).", clip_high=0.28)
        return None

    def _dual_above(self, bound: float) -> bool:
        dual = fact(self.facts, "dual_clip", 0.0)
        return dual == 0 or dual > bound

    def covariance(self) -> Remedy | None:
        """KL-Cov, or Clip-Cov where a batch has one update only."""
        if self.loss not in (None, "ppo_clip") or self.advantage not in (None, "group"):
            return None
        if self.facts.get("algorithm") not in (None, "grpo", "dapo", "custom"):
            return None
        name = "kl_cov" if self.several else "clip_cov"
        keys: dict[str, Any] = {"loss": name}
        if self.facts.get("algorithm") != "custom":
            keys["algorithm"] = name
        if self.several:
            keys |= {"clip_low": None, "clip_high": None}
        return self.set("Hold back the few tokens that use up the entropy (arXiv 2505.22617).", **keys)

    def entropy_bonus(self, target: float) -> Remedy | None:
        coef = fact(self.facts, "entropy_coef", 0.0)
        if coef:
            return self.set("A larger entropy bonus.", entropy_coef=_short(2 * coef))
        text = f"An entropy bonus that grows while entropy is below {target:.2g} nats, and shrinks above."
        return self.set(text, entropy_coef=0.001, entropy_target=_short(target))

    def no_entropy_bonus(self) -> Remedy | None:
        if fact(self.facts, "entropy_coef", 0.0):
            return self.set("Without the entropy bonus.", entropy_coef=0.0, entropy_target=None)
        return None

    def warmer(self) -> Remedy | None:
        now = fact(self.facts, "temperature", 1.0)
        return self.set("Sample more varied attempts.", temperature=1.0 if now < 1 else 1.2) if now < 1.2 else None

    def cooler(self) -> Remedy | None:
        now = fact(self.facts, "temperature", 1.0)
        return self.set("Sample at the temperature of the model itself.", temperature=1.0) if now > 1 else None

    def llds(self) -> Remedy | None:
        if self.facts.get("old_logprobs") == "engine" or self.loss == "policy_gradient":
            return None
        keys: dict[str, Any] = {"llds_coef": _short(min(1.0, max(0.2, 2 * fact(self.facts, "llds_coef", 0.0))))}
        if not self.several:
            if fact(self.facts, "tasks_per_step", 1) % 2:
                return None
            keys["minibatches"] = 2
        return self.set("LLDS: a penalty on good actions that become unlikely (arXiv 2512.04220).", **keys)

    def more_kl(self) -> Remedy | None:
        now = fact(self.facts, "kl_coef", 0.0)
        coef = _short(min(1.0, max(0.1, 3 * now)))  # below 0.1 it holds nothing (`safeguards`' `kl`)
        return self.set("A stronger pull to the reference.", kl_coef=coef)

    def no_kl(self) -> Remedy | None:
        if not fact(self.facts, "kl_coef", 0.0):
            return None
        return self.set("Without the pull to the reference.", kl_coef=0.0, **dict.fromkeys(OF_KL))

    def refresh_reference(self) -> Remedy | None:
        if not fact(self.facts, "kl_coef", 0.0) or self.facts.get("ref_refresh_steps"):
            return None
        return self.set("Measure KL from a newer policy, so that it holds back jumps only.", ref_refresh_steps=50)

    def kl_stop(self) -> Remedy | None:
        if not self.several or self.facts.get("kl_stop"):
            return None
        return self.set("Skip a batch's remaining updates once the policy moved this far.", kl_stop=0.02)

    def dual_clip(self) -> Remedy | None:
        if not self.several or self.loss not in (None, *DUAL) or fact(self.facts, "dual_clip", 0.0) > 0:
            return None
        return self.set("Bound the loss of bad samples that grew likely.", dual_clip=3.0)

    def dynamic_sampling(self) -> Remedy | None:
        if fact(self.facts, "dynamic_sampling", 1) > 1 or self.facts.get("reward_model"):
            return None
        if fact(self.facts, "group_size", 8) < 2:
            return None
        return self.set("Sample on until enough groups have a spread (DAPO).", dynamic_sampling=4)

    def bigger_groups(self) -> Remedy | None:
        size = int(fact(self.facts, "group_size", math.nan)) if self.facts.get("group_size") else 0
        if not 0 < size <= 16:
            return None
        return self.set("Larger groups catch rare successes and rare failures.", group_size=2 * size)

    def fewer_updates(self) -> Remedy | None:
        """Half the passes over a batch, or else half its minibatches."""
        text = "Fewer updates from the same samples."
        tasks = int(fact(self.facts, "tasks_per_step", 8))
        if self.passes > 1:
            change: dict[str, Any] = {"updates_per_batch": self.passes // 2}
        elif self.minibatches > 1 and tasks % (self.minibatches // 2) == 0:
            change = {"minibatches": self.minibatches // 2}
        else:
            return None
        if change.get("updates_per_batch", self.passes) * change.get("minibatches", self.minibatches) == 1:
            if fact(self.facts, "llds_coef", 0.0):
                return None
            change |= {key: None for key in OF_SEVERAL_UPDATES if self.facts.get(key) is not None}
        return self.set(text, **change)

    def overlong(self, length: float) -> Remedy | None:
        if self.facts.get("overlong_length") or self.advantage in ("gdpo", "pass_at_k"):
            return None
        limit = max(16, round(length))
        text = "A penalty that rises with length before the limit (DAPO)."
        return self.set(text, overlong_length=limit, overlong_cache=limit // 2)

    def mask_truncated(self) -> Remedy | None:
        return self.set("Learn nothing from attempts that were cut off.", truncated="mask")

    def token_mean(self) -> Remedy | None:
        """Only from the aggregation that favours long wrong attempts."""
        if self.facts.get("aggregation") != "seq-mean-token-mean" or self.loss in ("gspo", "gmpo", "sapo"):
            return None
        text = "Weigh all tokens alike: a mean a sequence makes each token of a long wrong attempt cheap."
        return self.set(text, aggregation="token-mean")

    def correct(self) -> Remedy | None:
        if self.facts.get("old_logprobs") == "engine":
            return None
        now = self.facts.get("correction")
        if now is None:
            return self.set("Importance weights for tokens that the sampler saw otherwise.", correction="tis")
        if now == "tis":
            fresh = {"correction": "icepop", "correction_low": None, "correction_high": None}
            return self.set("Drop tokens whose probabilities differ too much, rather than weigh them.", **fresh)
        return None

    def fresher(self) -> Remedy | None:
        now = int(fact(self.facts, "max_staleness", 0))
        if not now:
            return None
        keys: dict[str, Any] = {"max_staleness": now // 2}
        return self.set("Learn from newer samples.", **(keys if now > 1 else keys | {"stale": None}))

    def clip_gradient(self) -> Remedy | None:
        now = fact(self.facts, "grad_clip", 1.0)
        return self.set("A smaller largest gradient.", grad_clip=1.0 if now > 1 else _short(max(0.1, now / 2)))

    def warm_up(self) -> Remedy | None:
        steps = int(fact(self.facts, "steps", 100))
        if fact(self.facts, "warmup_steps", 0) or steps < 20:
            return None
        return self.set("Let the learning rate rise over the first steps.", warmup_steps=min(10, steps // 10))


def _short(value: float) -> float:
    """Three significant digits."""
    return float(f"{value:.3g}")
