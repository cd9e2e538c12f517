"""The recipe: everything that a run does, in one frozen object."""

from __future__ import annotations

import re
from typing import Annotated, Any, Self

import yaml
from pydantic import Field, field_validator, model_validator

from upswing.errors import did_you_mean
from upswing.recipe.agent import AgentSection
from upswing.recipe.cluster import ClusterSection, check_cluster
from upswing.recipe.distill import DistillStage
from upswing.recipe.engine import EngineSection, check_engine
from upswing.recipe.fields import Bool, Count, CountOrZero, Dtype, Float, Int, Positive, Text
from upswing.recipe.presets import EFFECTS
from upswing.recipe.reward_model import RewardModelStage
from upswing.recipe.rl import RlStage
from upswing.recipe.section import Section, null, opt, refuse
from upswing.recipe.stages import EvalStage, Stage

NO_POLICY = (EvalStage, RewardModelStage)
"""Stages that leave no weights that an agent could be played with."""


class EnvSection(Section):
    """The environment. A plain string is its name."""

    main_key = "name"
    name: Text = Field(
        description="geo_search, lookup, tool, an import path my_pkg.env:MyEnv, or a file path/env.py:MyEnv."
    )
    args: dict[str, Any] = opt(dict, "Keyword arguments of the environment.")


class VerifierSection(Section):
    """One verifier of the rubric. A plain string is its name."""

    main_key = "name"
    name: Text = Field(
        description="strict_match, numeric, math, state, ... (docs/verifiers.md), an import path my_pkg:check, or "
        "path/v.py:check."
    )
    weight: Float = opt(1.0, "Weight in the reward; 0: measured, not rewarded.")
    gate: Bool = opt(False, "Its score, 0 to 1, multiplies what the others add to the reward.")
    weight_from: Float | None = null("The weight at an RL stage's first step, if another.")
    weight_steps: Count | None = null("After how many RL steps `weight` is reached.")
    args: dict[str, Any] = opt(dict, "Keyword arguments of the verifier.")

    @model_validator(mode="after")
    def _weights_go_together(self) -> Self:
        if self.gate and {"weight", "weight_from", "weight_steps"} & self.model_fields_set:
            why = "a gate multiplies the reward and has no weight"
            raise refuse("gate", f"got true, but {why}; leave the weight keys out")
        if (self.weight_from is None) != (self.weight_steps is None):
            missing = "weight_steps" if self.weight_steps is None else "weight_from"
            raise refuse(missing, "got nothing, but weight_from and weight_steps go together")
        if self.weight_from == self.weight:
            raise refuse("weight_from", f"got {self.weight:g}, which weight is too; leave it and weight_steps out")
        return self


class DatasetSection(Section):
    """Tasks from rows with `prompt` (or `messages`) and `answer` (or `answers`): JSON Lines or Parquet files, folders
    of Hugging Face's `datasets`, or datasets of its Hub (`owner/name`; `#part` names a split, such as `#train[:90%]`).
    A plain string is the train rows."""

    main_key = "train"
    train: Text = Field(description="Where the train rows are.")
    dev: Text | None = null("Where the dev rows are; needed by RL's evaluation and eval stages.")
    test: Text | None = null("Where the test rows are.")
    name: Text | None = null("Configuration of a dataset of the Hub, such as gsm8k's main.")
    columns: dict[Text, Text] = opt(dict, "Columns under other names: {prompt: question, answer: solution}.")
    answer_pattern: Text | None = null(
        "Regular expression that finds the answer in its text: the last match's first group; '#### (.+)'."
    )
    shuffle: Bool = opt(True, "Shuffle train rows with the seed; false: keep the order of the file.")
    answer_required: Bool = opt(
        True, "Refuse rows without an answer; false: the environment or a verifier checks otherwise."
    )

    @field_validator("answer_pattern")
    @classmethod
    def _compiles(cls, value: str | None) -> str | None:
        try:
            re.compile(value or "")
        except re.error as problem:
            raise refuse("", f"got {value!r}, no regular expression ({problem})") from None
        return value


class LearnerSection(Section):
    """The learner. Master weights are always float32."""

    dtype: Dtype = opt("auto", "Compute precision; auto: bfloat16 where the processor has it.")


class LimitsSection(Section):
    """What ends a trajectory before it ends itself. Seconds are wall time; deadlines nest."""

    turn_tokens: Count = opt(128, "Tokens one turn may sample; a cut turn ends the trajectory.")
    context_tokens: Count = opt(1024, "Tokens of one branch, prompts and tool results included.")
    env_timeout_s: Positive = opt(60.0, "One step of the environment; past it the trajectory errors.")
    turn_timeout_s: Positive = opt(600.0, "Sampling one turn; past it the trajectory errors.")
    rollout_timeout_s: Positive = opt(1800.0, "The whole trajectory; past it it is truncated.")
    scoring_timeout_s: Positive = opt(60.0, "All verifiers of a trajectory; past it there is no score.")
    group_timeout_s: Positive | None = null(
        "A task's trajectories with their scores and retries, from when the first began; those that are "
        "late are cancelled, have no score, and the group shrinks. null: no limit."
    )
    max_retries: CountOrZero = opt(1, "How often an errored trajectory is tried again.")

    @model_validator(mode="after")
    def _nest(self) -> Self:
        if self.turn_tokens > self.context_tokens:
            allowed = f"up to context_tokens ({self.context_tokens})"
            raise refuse("turn_tokens", f"got {self.turn_tokens}; allowed: {allowed}")
        for key in ("env_timeout_s", "turn_timeout_s"):
            if getattr(self, key) > self.rollout_timeout_s:
                allowed = f"up to rollout_timeout_s ({self.rollout_timeout_s:g})"
                raise refuse(key, f"got {getattr(self, key):g}; allowed: {allowed}")
        inner = self.rollout_timeout_s + self.scoring_timeout_s
        if self.group_timeout_s is not None and self.group_timeout_s < inner:
            allowed = f"rollout_timeout_s + scoring_timeout_s ({inner:g}) and more"
            raise refuse("group_timeout_s", f"got {self.group_timeout_s:g}; allowed: {allowed}")
        return self


class Recipe(Section):
    """A list of stages and what they share."""

    name: Annotated[str, Field(strict=True, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")] = Field(
        description="Name of the recipe: letters, digits, _ . and -; part of the run folder's name."
    )
    model: Text = Field(
        description="The base model: smollm2-135m, tiny, a Hugging Face folder or hub id, or a GGUF file."
    )
    chat_template: Text | None = null(
        "The chat template, in place of the tokenizer's own: a Jinja file, or its text. Checkpoints keep it."
    )
    seed: Int = opt(0, "Everything random is derived from it.")
    env: EnvSection = Field(description="The environment.")
    dataset: DatasetSection | None = null("Tasks for an environment without tasks of its own.")
    agent: AgentSection | None = null("An agent program that plays the tasks; null: the environment's own loop.")
    verifiers: tuple[VerifierSection, ...] = Field(
        min_length=1, description="The rubric: the reward is the weighted sum of these."
    )
    engine: EngineSection = opt(EngineSection, "The engine that samples.")
    learner: LearnerSection = opt(LearnerSection, "The learner.")
    cluster: ClusterSection = opt(ClusterSection, "Where the parts of a run are.")
    limits: LimitsSection = opt(LimitsSection, "What ends a trajectory.")
    stages: tuple[Stage, ...] = Field(min_length=1, description="What is done, in order.")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.engine.kind == "torch" and self.limits.context_tokens > self.engine.max_context:
            allowed = f"up to engine.max_context ({self.engine.max_context})"
            raise refuse("limits.context_tokens", f"got {self.limits.context_tokens}; allowed: {allowed}")
        self._check_verifiers()
        self._check_stage_names()
        self._check_quantize()
        check_engine(self.engine, self.stages, agent=self.agent is not None)
        check_cluster(self.cluster, self.engine, agent=self.agent is not None)
        return self

    def _check_quantize(self) -> None:
        """A sampler that isn't the learner is corrected for."""
        own, vllm = self.engine.quantize, self.engine.options.get("quantization")
        if own is None and vllm is None:
            return
        it = "options.quantization" if own is None else "quantize"
        why = f"but engine.{it} '{own or vllm}' samples from another distribution than the learner's"
        for index, stage in enumerate(self.stages):
            if isinstance(stage, DistillStage) and stage.kl == "sampled":
                raise refuse(f"stages.{index}.kl", f"got 'sampled', {why}; use kl: full, or leave {it} out")
            if not isinstance(stage, RlStage):
                continue
            if stage.old_logprobs == "engine":
                use = f"use old_logprobs: recompute with correction: tis, or leave {it} out"
                raise refuse(f"stages.{index}.old_logprobs", f"got 'engine', {why}; {use}")
            if stage.correction is None:
                add = f"add correction: tis (or seq_tis, mis, seq_mis, icepop), or leave {it} out"
                raise refuse(f"stages.{index}.correction", f"got nothing, {why}; {add}")
            for key, default in EFFECTS["correction"][stage.correction].items():
                if stage.correction in ("geo_rs", "k3_rs") and getattr(stage, key) == default:
                    why += ", so that nearly everything would be rejected; set it wider, or use correction: tis"
                    raise refuse(f"stages.{index}.{key}", f"got {default:g}, {stage.correction}'s default, {why}")

    def _check_verifiers(self) -> None:
        names = [verifier.name for verifier in self.verifiers]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise refuse(f"verifiers.{index}.name", f"got '{name}' twice; allowed: each verifier once")
            samples = any(isinstance(stage, RlStage | DistillStage) for stage in self.stages)
            if self.verifiers[index].weight_from is not None and not samples:
                raise refuse(f"verifiers.{index}.weight_from", "got a value without effect, as there is no rl stage")
        if not any(verifier.weight for verifier in self.verifiers if not verifier.gate):
            raise refuse("verifiers.0.weight", "got 0 for every verifier, so that the reward is always 0")

    def _check_stage_names(self) -> None:
        """Names are unique and every reference is to an earlier stage with weights."""
        weights, reward_models, process = ["base"], list[str](), list[str]()
        for index, stage in enumerate(self.stages):
            key = f"stages.{index}"
            taken = [earlier.name for earlier in self.stages[:index]]
            if stage.name in taken:
                raise refuse(f"{key}.name", f"got '{stage.name}' twice; give each stage a name of its own")
            plain = all(letter.isalnum() or letter in "_-" for letter in stage.name)
            if stage.name in RESERVED_NAMES or stage.name.isdigit() or not plain:
                these = f"letters, digits, _ and -, other than {', '.join(RESERVED_NAMES)}"
                raise refuse(f"{key}.name", f"got '{stage.name}'; allowed: {these}")
            of = stage.of if isinstance(stage, EvalStage) else ()
            references = [("of", name) for name in of] or [("from", getattr(stage, "from_", ""))]
            others = {"time_limit_as": weights[1:], "reward_model": reward_models, "process_reward": process}
            references += [(field, name) for field in others if (name := getattr(stage, field, None)) is not None]
            for field, name in references:
                allowed = others.get(field, ["previous", *weights])
                if name not in allowed:
                    kind = f"reward_model stage{' with labels: process' if field == 'process_reward' else ''}"
                    kind = kind if field in ("reward_model", "process_reward") else "stage with weights"
                    there = f"{did_you_mean(name, allowed)} (allowed: {', '.join(allowed) or 'none yet'})"
                    raise refuse(f"{key}.{field}", f"got '{name}', no earlier {kind}{there}")
            if isinstance(stage, EvalStage) and stage.choose_by in ("min", "product"):
                if stage.reward_model not in process:
                    why = f"'{stage.reward_model}' scores no steps; allowed: last, or one with labels: process"
                    raise refuse(f"{key}.choose_by", f"got '{stage.choose_by}', but {why}")
            elif isinstance(stage, RewardModelStage):
                if stage.labels == "process" and self.agent is not None:
                    why = "an agent program can't be brought back to one of its turns; allowed: pairs, outcome"
                    raise refuse(f"{key}.labels", f"got 'process', but {why}")
                reward_models.append(stage.name)
                process += [stage.name] if stage.labels == "process" else []
            elif not isinstance(stage, NO_POLICY):
                weights.append(stage.name)

    def dump(self) -> str:
        """The resolved recipe as YAML, every key included; `load_recipe` reads it back to an equal recipe."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True, width=100)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-like data, every key included, under the names used in YAML."""
        return self.model_dump(mode="json", by_alias=True)

    def source_of(self, index: int, reference: str = "previous") -> str:
        """The stage name whose final weights `reference` means at stage `index`, or `base`."""
        if reference != "previous":
            return reference
        earlier = [stage.name for stage in self.stages[:index] if not isinstance(stage, NO_POLICY)]
        return earlier[-1] if earlier else "base"


# A stage's name may not hide a key of the recipe in overrides, nor a word with a meaning of its own.
RESERVED_NAMES = ("base", "previous", *Recipe.model_fields)
