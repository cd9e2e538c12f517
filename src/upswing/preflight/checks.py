"""What can be found wrong with a recipe before anything is sampled: options, chat template, room for the answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from upswing.envs.base import AssistantMessage, Environment
from upswing.errors import ConfigError
from upswing.monitor.findings import Finding, Severity
from upswing.preflight.advice import found
from upswing.recipe import Recipe, RlStage
from upswing.recipe.rl import GROUPED
from upswing.trajectory.conversation import Conversation
from upswing.trajectory.render import ChatRenderer
from upswing.trajectory.types import Message, Task
from upswing.verify.deadline import call_env, to_its_end

MIN_GROUP, MIN_UPDATE = 4, 16
"""Trajectories of a group with a baseline, and of an optimizer step."""
FULL_LR, LORA_LR = ((1e9, 1e-5), (1e8, 1e-4)), 1e-3
"""From how many parameters on, the largest learning rate. Published RL runs of 1B and more use 1e-6 to 3e-6 (DAPO
2503.14476, R1 2501.12948), the recipes here with 135M up to 5e-5; smaller models stand more."""


class Rule(NamedTuple):
    """Options that fight each other. `why` is a format string over s (stage) and r (recipe)."""

    mode: str
    when: Callable[[Recipe, RlStage], Any]
    why: str
    remedy: str
    change: Callable[[Recipe, RlStage], dict[str, Any]]


# fmt: off
RULES = (
    Rule("small_group", lambda r, s: s.advantage in GROUPED and s.group_size < MIN_GROUP,
         "with group_size {s.group_size} the baseline is mostly noise, and few groups have a spread",
         "Sample more of each task.", lambda r, s: {"group_size": 8}),
    Rule("small_batch", lambda r, s: s.tasks_per_step * s.group_size < MIN_UPDATE * (s.minibatches or 1),
         "{s.tasks_per_step} tasks of {s.group_size} in {s.minibatches} minibatch(es): so few give a noisy gradient",
         "Take more tasks a step.",
         lambda r, s: {"tasks_per_step": (s.minibatches or 1) * math.ceil(MIN_UPDATE / s.group_size)}),
    Rule("bonus_against_kl_stop", lambda r, s: s.entropy_coef and (s.kl_stop or 1) < 0.005,
         "entropy_coef {s.entropy_coef:g} pushes the policy away, and kl_stop {s.kl_stop:g} ends the batch for it",
         "Let kl_stop catch runaway updates only.", lambda r, s: {"kl_stop": 0.02}),
    Rule("large_entropy_bonus", lambda r, s: s.entropy_coef > 0.01 and s.entropy_target is None,
         "entropy_coef {s.entropy_coef:g} without a target pays for noise more than for the reward",
         "Take a small one, or an entropy_target.", lambda r, s: {"entropy_coef": 0.001}),
    Rule("tempered_entropy_target", lambda r, s: s.entropy_target and s.temperature < 1,
         "the target is for the sampled distribution, which temperature {s.temperature:g} sharpens",
         "Sample at 1.", lambda r, s: {"temperature": 1.0}),
    Rule("stale_without_correction", lambda r, s: s.max_staleness and s.correction is None,
         "max_staleness {s.max_staleness} without a correction: samples of old weights pass for the policy's own, or "
         "with old_logprobs engine are clipped before anything is learned",
         "Take the ratio to the policy before the update, and correct for the sampler.",
         lambda r, s: {"old_logprobs": None, "correction": "tis"}),
    Rule("reference_follows_policy", lambda r, s: s.kl_coef and s.ref_refresh_steps == 1,
         "the reference is the policy of one step ago, so kl_coef {s.kl_coef:g} holds nothing",
         "Keep the reference, or refresh it after hundreds of steps.", lambda r, s: {"ref_refresh_steps": None}),
    Rule("reward_model_without_kl", lambda r, s: s.reward_model and not s.kl_coef,
         "the reward is a model and kl_coef is 0: the policy is free to go where that model errs",
         "Stay near the reference.", lambda r, s: {"kl_coef": 0.02}),
    Rule("many_updates_of_a_batch", lambda r, s: (s.minibatches or 1) * s.updates_per_batch >= 16,
         "{s.updates_per_batch} passes of {s.minibatches} minibatches: the last learn from another policy's samples",
         "Take fewer, or sample smaller batches.", lambda r, s: {"updates_per_batch": 2, "minibatches": 1}),
    Rule("length_penalty_out_of_reach",
         lambda r, s: s.overlong_length and s.overlong_length - (s.overlong_cache or 0) >= r.limits.context_tokens,
         "it begins {s.overlong_cache} tokens before overlong_length {s.overlong_length}, the context ends at "
         "{r.limits.context_tokens}", "Let it begin before.",
         lambda r, s: {"overlong_length": r.limits.context_tokens, "overlong_cache": r.limits.context_tokens // 4}),
)
# fmt: on


def option_findings(recipe: Recipe, stage: RlStage, num_parameters: int = 0) -> list[Finding]:
    """By the recipe alone; with the model's size also whether the learning rate is beyond what works."""
    findings = [
        found(one.mode, "warning", stage.name, one.why.format(s=stage, r=recipe), one.remedy, one.change(recipe, stage))
        for one in RULES
        if one.when(recipe, stage)
    ]
    limit = next((lr for size, lr in FULL_LR if num_parameters >= size), math.inf)
    limit = LORA_LR if stage.lora is not None else limit
    if num_parameters and stage.lr > limit:
        why = f"lr {stage.lr:g} with {num_parameters:.3g} parameters; runs that worked stayed below {limit:g}"
        findings.append(found("high_lr", "warning", stage.name, why, "Lower it.", {"lr": limit / 5}))
    return findings


def template_findings(renderer: ChatRenderer, end_tokens: tuple[int, ...], stage: str) -> list[Finding]:
    """Whether a prompt with a turn and what follows it begins with exactly the tokens that the model saw and said."""
    said = {"history_rewritten": "It is 7.", "thinking_stripped": "<think>\nI should look.\n</think>\n\nIt is 7."}
    for mode, text in said.items():
        for role in ("tool", "user"):
            talk = Conversation(renderer, [Message(role="user", content="Go.")], end_tokens=end_tokens)
            talk.add_expert(text)
            try:
                talk.add_messages([Message(role=role, content="Go on.")])
            except ConfigError:  # a role that the template doesn't know: trajectories that need it say so
                continue
            if any(event.forked for event in talk.drift):
                why = f"after a {role} message the chat template writes earlier turns differently"
                why += ", so that each turn is a row of its own, computed anew"
                remedy = "If the agent takes several turns, set chat_template to one that keeps them."
                return [found(mode, "warning", stage, why, remedy)]
    return []


async def check_template(
    renderer: ChatRenderer,
    make_env: Callable[[], Environment],
    tasks: Sequence[Task],
    *,
    timeout_s: float,
    shows_tools: bool = True,
) -> None:
    """Whether the chat template writes what the environment sends in these tasks: the opening, the answer to a turn and
    the tools (unless a server shows them). Raises ConfigError; an environment that breaks says so where it is played.
    """
    for task in tasks:
        env = make_env()
        has_tools = bool(getattr(env, "_tools", ())) or getattr(env, "answers_as_tool", False)
        try:
            opening = seen = await call_env(env.reset, task, 0, timeout_s=timeout_s)
            if not has_tools:  # else the answer is a tool's, and no tool need run to know it
                seen = await call_env(env.step, AssistantMessage(content="x"), timeout_s=timeout_s)
            roles = {message.role for message in (*opening.messages, *seen.messages)}
            tools = bool(opening.tools)
        except Exception:
            continue
        finally:
            with suppress(Exception):
                await to_its_end(call_env(env.close, timeout_s=timeout_s))
        renderer.require(roles | {"tool"} if has_tools or tools else roles, tools)
        if tools and shows_tools:
            renderer.require_tools()


class Size(NamedTuple):
    """Tokens of a task's right play: its longest turn, and all of it."""

    turn: int
    total: int


def room_findings(
    recipe: Recipe, stage: str, sizes: Sequence[Size], *, has_tools: bool = False, max_turns: int | None = None
) -> list[Finding]:
    """Right plays that don't fit the limits, and tools that no turn is left for."""
    limits, findings = recipe.limits, list[Finding]()
    if has_tools and max_turns == 1:
        why, change = "the only turn is the answer's", {"env.args.max_turns": 4}
        findings.append(found("tool_unreachable", "critical", stage, why, "Give turns for calls.", change))
    context = max([limits.context_tokens, *(size.total for size in sizes)])
    held = {"engine.max_context": recipe.engine.max_context, "limits.context_tokens": limits.context_tokens}
    room = {key: context for key, tokens in held.items() if context > tokens}
    for key, needs in (("context_tokens", [size.total for size in sizes]), ("turn_tokens", [s.turn for s in sizes])):
        beyond = [need for need in needs if need > getattr(limits, key)]
        if beyond:
            why = f"the right play of {len(beyond)} in {len(needs)} tasks needs up to {max(beyond)} tokens, "
            why += f"limits.{key} is {getattr(limits, key)}"
            severity: Severity = "critical" if 2 * len(beyond) > len(needs) else "warning"
            change = {**room, f"limits.{key}": max(beyond)}
            findings.append(found("answer_unreachable", severity, stage, why, "Raise it, or drop long tasks.", change))
    return findings
