"""The `rl` stage of a recipe. Null means: as the algorithm has it (`presets.py`); a resolved recipe shows it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import field_serializer, field_validator, model_validator

from upswing.errors import did_you_mean
from upswing.monitor.safeguards import SAFEGUARDS
from upswing.recipe.fields import Bool, Count, CountOrZero, Float, Fraction, NotNegative, Positive, Text, UpToOne
from upswing.recipe.presets import EFFECTS, LENGTH_NORMALISED, PRESETS, SEQUENCES
from upswing.recipe.rl_base import CriticSection, CurriculumSection, RlBase
from upswing.recipe.section import null, opt, refuse, said

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
Algorithm = Literal["custom", *PRESETS]  # type: ignore[valid-type]
Advantage = Literal[*EFFECTS["advantage"]]  # type: ignore[valid-type]
Loss = Literal[*EFFECTS["loss"]]  # type: ignore[valid-type]
Correction = Literal[*EFFECTS["correction"]]  # type: ignore[valid-type]

SEQUENCE_LOSSES = ("gspo", "gmpo", "sapo")
RATIO_FREE = {"cov_fraction"}
"""Options of a loss that work at a ratio of 1 too."""
RATIO_KEYS = ("old_logprobs", "kl_stop", *sorted({k for keys in EFFECTS["loss"].values() for k in keys} - RATIO_FREE))
"""Keys without effect when a batch has a single update."""
KL_IN_REWARD = ("reinforce", "reinforce_pp", "rloo", "remax", "gae")
"""Advantages that a KL in the reward can enter: those that don't divide it by a group's spread."""
STEPWISE = ("gigpo", "turn", "process")
"""Advantages that read step scores."""
GROUPED = ("group", "rloo", "reinforce_pp_baseline", "opo", "gpg", "pass_at_k", "gdpo", "gigpo", "turn", "process")


class RlStage(RlBase):
    """Policy-gradient learning from verified multi-turn trajectories. `upswing algorithms` lists the algorithms."""

    stage: Literal["rl"] = opt("rl", "Kind of stage.")
    name: Text = opt("rl", "Name of the stage: its folder, and what later stages refer to.")
    algorithm: Algorithm = opt(
        "grpo",
        "Named choice of the keys below (`upswing algorithms`); custom: advantage, loss and aggregation "
        "are yours to combine.",
    )
    advantage: Advantage | None = null("Advantage estimator; set by the algorithm.")
    normalize_std: Bool | None = null("Divide advantages by the group's standard deviation (group, gigpo).")
    baseline: Literal["batch", "ema", "none"] | None = null(
        "What reinforce subtracts: mean of the rest of the batch, moving average, nothing."
    )
    baseline_decay: Fraction | None = null("Share of the old moving average kept a step.")
    pass_k: Count | None = null("Size of the sets that pass_at_k rewards.")
    gamma: Fraction | None = null(
        "Discount: a token (reinforce_pp, gae over tokens) or a turn (gigpo, gae over turns)."
    )
    lam: Fraction | None = null("Lambda of GAE: 1 is Monte-Carlo, 0 one step.")
    gae_over: Literal["tokens", "turns"] | None = null("What a step of GAE is: a sampled token, or a whole turn.")
    step_weight: NotNegative | None = null("Weight of the step advantage beside the outcome's (gigpo, turn, process).")
    process_form: Literal["step_end", "min", "potential"] | None = null(
        "How the environment's step scores become credit: the sum of later ones, their soft minimum "
        "(PURE), or as potentials of the states after each turn, which leave the best policy what it is."
    )
    scale_rewards: Bool | None = null(
        "Divide gae's token rewards by their batch's deviation, so that returns keep a scale."
    )
    critic: CriticSection | None = null("The critic (ppo).")
    loss: Loss | None = null("Policy loss; set by the algorithm.")
    ratio_level: Literal["sequence", "turn"] | None = null(
        "What gspo takes the ratio of: the whole sequence, or each turn."
    )
    clip_low: UpToOne | None = null(
        "The ratio is clipped below 1 - clip_low; 1: not; for gmpo it is the log-ratio that is."
    )
    clip_high: Positive | None = null("The ratio is clipped above 1 + clip_high.")
    dual_clip: Float | None = null("Bound on the loss of a bad sample that grew likely, above 1 + clip_high; 0: none.")
    tau_pos: Positive | None = null("sapo's temperature for positive advantages.")
    tau_neg: Positive | None = null("sapo's temperature for the others.")
    cov_fraction: Fraction | None = null("Share of tokens that clip_cov or kl_cov picks.")
    cov_coef: Positive | None = null("Weight of kl_cov's penalty.")
    aggregation: Aggregation | None = null(
        "How token losses become one number: token-mean (all tokens alike), seq-mean-token-mean (all "
        "trajectories alike), seq-mean-token-sum, seq-mean-token-sum-norm (sum over norm_length; dr_grpo)."
    )
    norm_length: Count | None = null(
        "Tokens that seq-mean-token-sum-norm divides by (256 by default); other aggregations: null."
    )
    minibatches: Count | None = null("Updates that a batch is split into, by whole groups.")
    updates_per_batch: Count = opt(1, "Passes over a batch.")
    old_logprobs: Literal["recompute", "engine"] | None = null(
        "Log-probs before the update, when a batch has several: recompute (the default, one more forward) "
        "or engine (the sampler's own; exact where engine and learner compute alike, see mismatch_max); null for one, "
        "or with max_staleness engine, whose ratio is then not 1."
    )
    kl_stop: Positive | None = null(
        "Skip a batch's remaining updates when the KL to the policy before it is above this."
    )
    correction: Correction | Literal["none"] | None = null(
        "Importance correction where sampler and learner differ: truncated (tis, seq_tis), masked (mis, "
        "seq_mis, icepop) or rejected (geo_rs, k3_rs); null: tis with max_staleness, else none; none: none whatever."
    )
    correction_low: NotNegative | None = null("Lower bound on learner / sampler.")
    correction_high: Positive | None = null("Upper bound on it (k3_rs: on the mean k3).")
    opsm_delta: Positive | None = null(
        "Leave out bad trajectories (negative advantage) that the policy has moved away from by more than "
        "so many nats a token since they were sampled."
    )
    kl_coef: NotNegative = opt(0.0, "Weight of the KL to the reference; 0: none.")
    kl_in: Literal["loss", "reward"] | None = null(
        "Where that KL is: a term of the loss, or subtracted from each token's reward."
    )
    kl_estimator: Literal["k1", "k2", "k3", "k3_ratio"] | None = null(
        "In the loss k2 (default), k3 (as GRPO was published) or k3_ratio: k1 has no gradient there; in the reward k1."
    )
    kl_target: Positive | None = null("Adapt kl_coef towards this KL a token; null: fixed.")
    kl_horizon: Count | None = null("Trajectories over which kl_coef adapts (10000).")
    ref_refresh_steps: Count | None = null("Steps after which the reference becomes the current policy; null: never.")
    entropy_coef: NotNegative = opt(0.0, "Weight of an entropy bonus; 0: none.")
    entropy_target: Positive | None = null(
        "Adapt the bonus: it grows by entropy_coef a step below this entropy, else shrinks."
    )
    llds_coef: NotNegative = opt(0.0, "Weight of the penalty on good actions that become unlikely (LLDS); 0: none.")
    llds_gate: Literal["action", "response", "token"] | None = null(
        "What must have become unlikelier as a whole for that penalty to act."
    )
    llds_answer_weight: Fraction | None = null("Weight of the final turn's tokens in that penalty (LLDS-MA); null: 1.")
    overlong_length: Count | None = null(
        "Sampled tokens from which a trajectory has the whole length penalty; null: none."
    )
    overlong_cache: Count | None = null("Tokens before that over which the penalty rises.")
    overlong_factor: Positive | None = null("The whole penalty, in units of reward (1).")
    dynamic_sampling: Count | None = null(
        "Sample up to so many batches a step until tasks_per_step groups have a spread of rewards (and of strict_match "
        "where that is part of the reward); 1 or null: one."
    )
    curriculum: CurriculumSection | None = null(
        "Choose tasks by the success of their kind; null: as the stream has them."
    )
    max_staleness: CountOrZero = opt(
        0,
        "Steps (weight pushes, however many updates each has) that may lie between sampling a token and learning from "
        "it: sampling then goes on during updates, and correction is tis unless you choose; 0: they take turns.",
    )
    stale: Literal["requeue", "drop", "keep"] | None = null(
        "What becomes of groups that are older: their tasks are played again (requeue, the default), they "
        "are given up (drop), or learned from all the same (keep)."
    )
    oversample: CountOrZero = opt(
        0,
        "Groups started beyond tasks_per_step; the last to finish are cancelled and their tasks played in "
        "the next step.",
    )
    truncated: Literal["as_is", "zero", "mask"] = opt(
        "as_is",
        "Truncated trajectories keep their score (as_is), score 0 (zero), or keep it in the group's "
        "baseline without entering the loss (mask).",
    )
    reward_model: Text | None = null("Earlier reward_model stage whose score is the reward; null: the verifiers.")
    process_reward: Text | None = null(
        "Earlier reward_model stage with labels: process, whose chances of success make the step scores "
        "(gigpo, turn, process): a turn's is what it adds to the chance, or with process_form min and potential the "
        "chance after it; null: the environment's rewards."
    )

    safeguards: Literal["off", "auto"] | tuple[Text, ...] = opt(
        "off",
        "What may be done about findings while training (docs/safeguards.md): off; auto: all that this "
        f"stage can use; or a list of {', '.join(SAFEGUARDS)}.",
    )

    @field_validator("safeguards", mode="before")
    @classmethod
    def _known(cls, value: Any) -> Any:
        if value is False or value in ("off", "auto"):  # YAML reads off as false
            return value or "off"
        names = [str(name) for name in value] if isinstance(value, list | tuple) else [str(value)]
        allowed = ("off", "auto", *SAFEGUARDS)
        for name in names or [""]:
            if name not in SAFEGUARDS:
                known = f"off, auto, or a list of {', '.join(SAFEGUARDS)}"
                raise refuse("", f"got '{name}'{did_you_mean(name, allowed)} (allowed: {known})")
        return tuple(names)

    @field_validator("correction")
    @classmethod
    def _no_correction(cls, value: str | None) -> str | None:
        """`none` keeps the default away; from here on None says that there is none."""
        return None if value == "none" else value

    @field_serializer("correction", when_used="json")
    def _chosen_correction(self, value: str | None) -> str | None:
        """As a recipe has to have it to be read back equal."""
        return "none" if value is None and self.max_staleness and self.old_logprobs != "engine" else value

    @classmethod
    def derived(cls, data: dict[str, Any]) -> dict[str, Any]:
        """What the algorithm and the other keys make of null ones, beside the others."""
        preset = PRESETS.get(str(data.get("algorithm", "grpo")))
        nullable = {name for name, field in cls.model_fields.items() if field.default is None}
        filled = {key: value for key, value in data.items() if value is not None or key not in nullable}
        more = {} if preset is None else preset.choices
        filled = {**{key: value for key, value in more.items() if key != "kl_in"}, **filled}
        filled.setdefault("minibatches", 1)
        if _positive(filled, "max_staleness"):
            filled.setdefault("stale", "requeue")
            if filled.get("old_logprobs") != "engine":  # else the policy ratio is over the sampler's log-probs already
                filled.setdefault("correction", "tis")
        _fill_choices(filled)
        if _positive(filled, "kl_coef"):
            filled.setdefault("kl_in", more.get("kl_in", "loss"))
            filled.setdefault("kl_estimator", "k1" if filled["kl_in"] == "reward" else "k2")
            if "kl_target" in filled:
                filled.setdefault("kl_horizon", 10_000)
        if _positive(filled, "llds_coef"):
            filled.setdefault("llds_gate", "action")
        if "overlong_length" in filled:
            filled.setdefault("overlong_factor", 1.0)
        if filled.get("aggregation") == LENGTH_NORMALISED:
            filled.setdefault("norm_length", 256)
        return filled

    def changed(self, changes: Mapping[str, Any]) -> Self:
        """With other values, and without what loses its effect by them; safeguards are off in it.

        Raises ValidationError for what a recipe couldn't have.
        """
        kept = self.model_dump()
        if self.max_staleness and self.correction is None and self.old_logprobs != "engine":
            kept["correction"] = "none"
        data = {**kept, **changes, "safeguards": "off"}
        for choice, table in EFFECTS.items():
            before, now = getattr(self, choice), data[choice]
            if now != before:
                data |= dict.fromkeys(table.get(before, {}).keys() - table.get(now, {}).keys())
        if data["minibatches"] * data["updates_per_batch"] == 1:
            data |= dict.fromkeys(["kl_stop"] if _over_old_samples(data) else RATIO_KEYS)
        return type(self).model_validate(data)

    @property
    def overlong(self) -> tuple[int, int, float] | None:
        """(length, cache, factor) of the length penalty; None: there is none."""
        if self.overlong_length is None:
            return None
        return self.overlong_length, self.overlong_cache or 0, self.overlong_factor or 1.0

    @property
    def single_update(self) -> bool:
        """One optimizer step a batch: the policy of the step is the one before it, and every ratio to that is 1."""
        return (self.minibatches or 1) * self.updates_per_batch == 1

    @model_validator(mode="after")
    def _effective(self) -> Self:
        """Refuse what would be ignored or would silently train something else."""
        self._check_algorithm()
        self._check_choices()
        self._check_batch()
        self._check_loss()
        self._check_kl()
        self._check_rest()
        return self

    def _check_algorithm(self) -> None:
        preset = PRESETS.get(self.algorithm)
        if preset is None:
            for key in ("advantage", "loss", "aggregation"):
                if getattr(self, key) is None:
                    some = "token-mean, seq-mean-token-mean, seq-mean-token-sum, ..."
                    allowed = ", ".join(EFFECTS.get(key, {})) or some
                    raise refuse(key, f"got nothing, but algorithm 'custom' needs it; allowed: {allowed}")
            return
        fixed = ("advantage", "loss", *(("normalize_std",) if "normalize_std" in preset.choices else ()))
        if self.algorithm == "dr_grpo":
            fixed += ("aggregation",)
        for key in fixed:
            if getattr(self, key) != preset.choices[key]:
                means = f"but {self.algorithm} means {said(preset.choices[key])}"
                raise refuse(key, f"got {said(getattr(self, key))}, {means}; leave it out, or use algorithm: custom")

    def _check_choices(self) -> None:
        """Every key that belongs to a choice not made is refused."""
        for choice, table in EFFECTS.items():
            chosen = getattr(self, choice)
            for key in dict.fromkeys(key for keys in table.values() for key in keys):
                if key not in table.get(chosen, {}):
                    users = ", ".join(name for name, keys in table.items() if key in keys)
                    self.refuse_given([key], f"as {choice} is {chosen}; it is for {users}")

    def _check_batch(self) -> None:
        minibatches = self.minibatches or 1
        if self.advantage in GROUPED and self.group_size < 2:
            raise refuse("group_size", "got 1, but an advantage is relative to the group; allowed: 2 and more")
        if self.pass_k is not None and self.pass_k >= self.group_size:
            why = "a set of the whole group leaves nothing to compare"
            raise refuse("pass_k", f"got {self.pass_k}; allowed: 1 to {self.group_size - 1}, below group_size ({why})")
        if minibatches > self.tasks_per_step or self.tasks_per_step % minibatches:
            why = f"which doesn't divide the {self.tasks_per_step} tasks_per_step into equal sets of whole groups"
            raise refuse("minibatches", f"got {minibatches}, {why}; allowed: {divisors(self.tasks_per_step)}")
        if self.single_update:
            why = "as a batch has one update, whose ratio is 1; set minibatches or updates_per_batch too"
            self.refuse_given(["kl_stop"] if _over_old_samples(dict(self)) else RATIO_KEYS, why)
            if self.llds_coef:
                raise refuse("llds_coef", f"got {self.llds_coef:g} without effect, {why}")
        elif self.loss == "policy_gradient":
            key = "minibatches" if minibatches > 1 else "updates_per_batch"
            why = "but loss 'policy_gradient' has no ratio and is wrong after the first update of a batch"
            allowed = "1, or a loss with a ratio such as ppo_clip"
            raise refuse(key, f"got {max(minibatches, self.updates_per_batch)}, {why}; allowed: {allowed}")

    def _check_loss(self) -> None:
        if self.dual_clip and self.dual_clip <= 1 + (self.clip_high or 0):
            allowed = f"more than 1 + clip_high = {1 + (self.clip_high or 0):g}, or 0 for none"
            raise refuse("dual_clip", f"got {self.dual_clip:g}; allowed: {allowed}")
        if self.aggregation != LENGTH_NORMALISED:
            self.refuse_given(["norm_length"], f"as aggregation is '{self.aggregation}'")
        if self.loss in SEQUENCE_LOSSES and self.aggregation != SEQUENCES:
            why = f"but loss '{self.loss}' is a mean over sequences"
            raise refuse("aggregation", f"got '{self.aggregation}', {why}; allowed: {SEQUENCES}")
        if self.correction is not None and self.old_logprobs == "engine":
            why = "with old_logprobs 'engine', whose ratio already holds the correction"
            raise refuse("correction", f"got '{self.correction}' {why}; use one of them")
        low, high = self.correction_low, self.correction_high
        if low is not None and high is not None and low >= high:
            raise refuse("correction_low", f"got {low:g}; allowed: below correction_high ({high:g})")

    def _check_kl(self) -> None:
        if self.kl_coef == 0:
            keys = ("kl_in", "kl_estimator", "kl_target", "kl_horizon", "ref_refresh_steps")
            return self.refuse_given(keys, "as kl_coef is 0; set it too")
        if self.kl_target is None:
            self.refuse_given(["kl_horizon"], "as kl_target is null; set it too")
        if self.kl_in == "reward":
            if self.advantage not in KL_IN_REWARD:
                why = f"but advantage '{self.advantage}' would rescale the KL by each group's rewards"
                raise refuse("kl_in", f"got 'reward', {why}; use loss, or an advantage of {', '.join(KL_IN_REWARD)}")
            if self.kl_estimator != "k1":
                why = "in the reward only k1 gives the gradient of the KL"
                raise refuse("kl_estimator", f"got '{self.kl_estimator}'; {why}; allowed: k1")
        elif self.kl_estimator == "k1":
            why = "as a loss its gradient is zero in expectation, so it would only add noise"
            raise refuse("kl_estimator", f"got 'k1': {why}; allowed: k2, k3_ratio, k3")

    def _check_reward(self) -> None:
        """What the reward is made of must reach the advantage."""
        shaped = {"reward_model": self.reward_model, "overlong_length": self.overlong_length}
        if self.advantage in ("gdpo", "pass_at_k"):
            reads = "each verifier's own score" if self.advantage == "gdpo" else "rewards of 0 and 1"
            for key, value in shaped.items():
                if value is not None:
                    why = f"but advantage '{self.advantage}' reads {reads}; leave it out"
                    raise refuse(key, f"got {said(value)}, {why}")
        if self.advantage not in STEPWISE:
            why = f"as advantage is {self.advantage}; it is for {', '.join(STEPWISE)}"
            self.refuse_given(["process_reward"], why)
        if self.truncated == "zero" and (self.advantage == "gdpo" or self.reward_model is not None):
            own = self.advantage == "gdpo"
            why = "each verifier's own score is read" if own else "0 is no bad score of such a model"
            raise refuse("truncated", f"got 'zero', but {why}; allowed: as_is, mask")
        if self.stale is not None and not self.max_staleness:
            raise refuse("stale", f"got '{self.stale}' without effect: with max_staleness 0 no group is ever stale")
        if self.oversample and self.max_staleness:
            why = "with max_staleness late groups come later"
            raise refuse("oversample", f"got {self.oversample} without effect: {why}")
        if (self.dynamic_sampling or 1) > 1:
            if self.group_size == 1:
                raise refuse("dynamic_sampling", f"got {self.dynamic_sampling}, but a group of 1 never has a spread")
            if self.reward_model is not None:
                why = "but it judges by the verifiers, and reward_model is the reward"
                raise refuse("dynamic_sampling", f"got {self.dynamic_sampling}, {why}")
        if self.critic is not None and (got := self.critic.warmup_steps) >= self.steps:
            raise refuse("critic.warmup_steps", f"got {got}; allowed: fewer than the {self.steps} steps")

    def _check_rest(self) -> None:
        self._check_reward()
        for name in () if isinstance(self.safeguards, str) else self.safeguards:
            if (why := SAFEGUARDS[name].needs(dict(self))) is not None:
                raise refuse("safeguards", f"got '{name}' without effect: {why}")
        if self.llds_coef and self.old_logprobs == "engine":
            raise refuse("old_logprobs", "got 'engine', but mismatch would then act as lost likelihood; use recompute")
        if self.entropy_target is not None and not self.entropy_coef:
            raise refuse("entropy_target", "got a target without effect, as entropy_coef is 0; set it too (the step)")
        if not self.llds_coef:
            self.refuse_given(("llds_gate", "llds_answer_weight"), "as llds_coef is 0; set it too")
        if self.overlong_length is None:
            self.refuse_given(("overlong_cache", "overlong_factor"), "as overlong_length is null")
        elif self.overlong_cache is None or self.overlong_cache > self.overlong_length:
            allowed = f"1 to overlong_length ({self.overlong_length})"
            raise refuse("overlong_cache", f"got {self.overlong_cache}; allowed: {allowed}")


def _fill_choices(filled: dict[str, Any]) -> None:
    """Defaults of the keys that belong to the choices made."""
    counts = [filled.get("minibatches", 1), filled.get("updates_per_batch", 1)]
    single = counts == [1, 1] and not _over_old_samples(filled)
    for choice, table in EFFECTS.items():
        for key, value in table.get(str(filled.get(choice)), {}).items():
            if not (choice == "loss" and single and key not in RATIO_FREE):
                filled.setdefault(key, value)


def _over_old_samples(data: Mapping[str, Any]) -> bool:
    """Whether the ratio is to what sampled, maybe steps ago: then it isn't 1 in the only update of a batch either."""
    ratio = data.get("old_logprobs") == "engine" and data.get("loss") != "policy_gradient"
    return ratio and _positive(data, "max_staleness")


def _positive(data: Mapping[str, Any], key: str) -> bool:
    value = data.get(key)
    return isinstance(value, (int, float)) and value > 0


def divisors(number: int) -> str:
    """`1, 2, 4, 8` of 8."""
    return ", ".join(str(i) for i in range(1, number + 1) if number % i == 0)
