"""One trajectory: the agent and its environment take turns until one of them ends it.

Invariants
1. Every call returns exactly one Trajectory with one outcome, whatever breaks; only cancellation propagates.
2. What the engine sampled is stored as it was sampled; what the environment said is never marked as sampled.
3. `env.close()` runs exactly once, and the engine's cache for the trajectory is released.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

from upswing.engine.base import Engine, FinishReason, Sampling, reason_of
from upswing.envs.base import AssistantMessage, Environment, Expert, Observation
from upswing.errors import EnvironmentBroken, UpswingError
from upswing.rollout.limits import Limits
from upswing.seeding import derive_seed
from upswing.trajectory.conversation import Conversation
from upswing.trajectory.render import ChatRenderer
from upswing.trajectory.store import plain
from upswing.trajectory.types import Message, StopReason, Task, ToolCall, ToolRecord, Trajectory
from upswing.trajectory.validate import STOP_REASONS, validate
from upswing.verify.deadline import call_env, to_its_end

_ENDINGS = [reason for reason in StopReason if reason not in (StopReason.ERROR, StopReason.CANCELLED)]
"""What an environment may say of an end."""


class Speaker(Protocol):
    """Who takes the assistant's turns: a policy behind an engine, or a scripted expert."""

    source: str

    async def speak(self, conversation: Conversation, turn: int) -> AssistantMessage | None:
        """Take one turn and record its tokens. None: there is no room left in the context."""
        ...

    def release(self) -> None: ...


@dataclass(kw_only=True)
class PolicySpeaker:
    """Samples turns from an engine."""

    engine: Engine
    sampling: Sampling
    limits: Limits
    session: str
    seed: int
    source: str = "policy"

    async def speak(self, conversation: Conversation, turn: int) -> AssistantMessage | None:
        prompt = conversation.prompt_ids()
        room = min(self.limits.turn_tokens, self.limits.context_tokens - len(prompt))
        if room <= 0:
            return None
        sampling = replace(self.sampling, max_tokens=room, seed=derive_seed(self.seed, turn))
        request = self.engine.generate(prompt, sampling, session=self.session)
        try:
            async with asyncio.timeout(self.limits.turn_timeout_s):
                completion = await request
        except TimeoutError as problem:
            waited = f"sampling a turn took longer than {self.limits.turn_timeout_s:g} s"
            raise UpswingError(waited + reason_of(self.engine)) from problem
        text = conversation.add_completion(completion)
        # An end token exactly at the limit ends the turn, whatever reason the engine gives.
        finished = completion.finish_reason is FinishReason.STOP or conversation.ended(completion.tokens)
        return AssistantMessage(content=text, finished=finished)

    def release(self) -> None:
        self.engine.release(self.session)


@dataclass(kw_only=True)
class ExpertSpeaker:
    """Plays a scripted expert's turns."""

    expert: Expert
    source: str = "expert"

    async def speak(self, conversation: Conversation, turn: int) -> AssistantMessage | None:
        text = self.expert(conversation.messages)
        conversation.add_expert(text)
        return AssistantMessage(content=text)

    def release(self) -> None:
        return None


@dataclass(kw_only=True)
class _Play:
    """One trajectory in play: what is known so far is enough to end it at any moment."""

    task: Task
    trajectory_id: str
    speaker: Speaker
    limits: Limits
    seed: int
    conversation: Conversation | None = None
    records: list[ToolRecord] = field(default_factory=list)
    turn_rewards: list[float] = field(default_factory=list)
    turns: int = 0
    answer: str | None = None
    state: dict[str, Any] = field(default_factory=dict)
    env_s: float = 0.0
    engine_s: float = 0.0
    started: float = field(default_factory=time.perf_counter)
    stop_reason: StopReason | None = None
    error: str | None = None

    async def run(self, env: Environment, renderer: ChatRenderer, end_tokens: tuple[int, ...]) -> None:
        """The loop itself: speak, step, append, until done."""
        observation = await self._observe(env.reset, self.task, self.seed)
        conversation = Conversation(renderer, observation.messages, observation.tools, end_tokens=end_tokens)
        self.conversation = conversation
        while self.stop_reason is None:
            mark = time.perf_counter()
            message = await self.speaker.speak(conversation, self.turns)
            self.engine_s += time.perf_counter() - mark
            if message is None and self.turns == 0:
                raise ValueError(
                    f"the task's prompt has {conversation.num_tokens} tokens, limits.context_tokens is "
                    f"{self.limits.context_tokens}; raise it, or leave the task out"
                )
            if message is None:
                self.stop_reason = StopReason.CONTEXT_OVERFLOW
                return
            self.turns += 1
            observation = await self._observe(env.step, message)
            self.records.extend(observation.tool_records)
            self.turn_rewards.append(float(observation.reward))
            if observation.done:
                self.answer = observation.answer
                self.stop_reason = StopReason(observation.stop_reason or StopReason.ENV_DONE)
            elif not message.finished:
                self.stop_reason = StopReason.MAX_TOKENS
            elif observation.rewrite:
                conversation.rewrite(observation.messages)
            else:
                conversation.add_messages(observation.messages)

    async def _observe(self, method: Callable[..., Any], *args: Any) -> Observation:
        """Call `reset` or `step`. Raises EnvironmentBroken for what can't become part of a trajectory."""
        mark = time.perf_counter()
        seen = await call_env(method, *args, timeout_s=self.limits.env_timeout_s)
        self.env_s += time.perf_counter() - mark
        problem = _problem_of(seen)
        if problem:
            raise EnvironmentBroken(f"{method.__qualname__} returned {problem}")
        return cast(Observation, seen)

    def fail(self, error: str) -> None:
        self.stop_reason, self.error = StopReason.ERROR, error

    def trajectory(self) -> Trajectory:
        reason, conversation = self.stop_reason or StopReason.ERROR, self.conversation
        return Trajectory(
            id=self.trajectory_id,
            task=self.task,
            branches=conversation.branches() if conversation else (),
            messages=conversation.messages if conversation else self.task.messages,
            outcome=next(outcome for outcome, reasons in STOP_REASONS.items() if reason in reasons),
            stop_reason=reason,
            answer=self.answer,
            tool_records=tuple(self.records),
            num_turns=self.turns,
            error=self.error,
            state={**self.state, "env_reward": sum(self.turn_rewards), "turn_rewards": self.turn_rewards},
            drift=conversation.drift if conversation else (),
            source=self.speaker.source,
            seed=self.seed,
            timing={
                "engine_s": self.engine_s,
                "env_s": self.env_s,
                "total_s": time.perf_counter() - self.started,
            },
        )


def _problem_of(seen: Any) -> str | None:
    """What is wrong with what an environment returned, as `<got>; <what to do>`; None when it can be used."""
    if not isinstance(seen, Observation):
        return f"{type(seen).__name__}; return an Observation"
    if not hasattr(seen.reward, "__float__") or not math.isfinite(seen.reward):
        return f"the reward {seen.reward!r}; it must be a number, and finite"
    if not isinstance(seen.answer, str | None):
        return f"the answer {seen.answer!r}; it must be text or None"
    if seen.done and seen.stop_reason is not None and seen.stop_reason not in _ENDINGS:
        return f"the stop_reason {str(seen.stop_reason)!r}; allowed: {', '.join(_ENDINGS)} (raise to say that it broke)"
    for kind, items in ((Message, seen.messages), (ToolRecord, seen.tool_records)):
        wrong = next((item for item in items if not isinstance(item, kind)), None)
        if wrong is not None:
            return f"{wrong!r:.80} where a {kind.__name__} belongs"
    for record in seen.tool_records:
        if not isinstance(record.call, ToolCall) or not isinstance(record.result, str):
            return f"{record!r:.80}; its call must be a ToolCall and its result text"
        plain(record, "tool_record")  # raises TypeError: what can't be stored is this trajectory's end, not the run's
    return None


async def play(
    task: Task,
    *,
    trajectory_id: str,
    make_env: Callable[[], Environment],
    speaker: Speaker,
    renderer: ChatRenderer,
    end_tokens: tuple[int, ...],
    limits: Limits,
    seed: int,
) -> Trajectory:
    """Play one task to its end -> an unscored, validated Trajectory; a broken environment or engine never raises."""
    game = _Play(task=task, trajectory_id=trajectory_id, speaker=speaker, limits=limits, seed=seed)
    env: Environment | None = None
    deadline = asyncio.timeout(limits.rollout_timeout_s)
    try:
        env = make_env()
        async with deadline:
            await game.run(env, renderer, end_tokens)
        state = await call_env(env.state, timeout_s=limits.env_timeout_s)
        game.state = plain(dict(state), "state")  # what can't be stored is this trajectory's end, not the run's
    except (Exception, SystemExit, GeneratorExit) as problem:
        # Only the rollout's own deadline truncates, and only what had begun; any other timeout is somebody's fault.
        if isinstance(problem, TimeoutError) and deadline.expired() and game.turns:
            game.stop_reason = StopReason.TIMEOUT
        else:
            game.fail(f"{type(problem).__name__}: {problem}")
    finally:
        speaker.release()
        if env is not None:
            try:
                await to_its_end(call_env(env.close, timeout_s=limits.env_timeout_s))
            except Exception as problem:
                if game.error is None:
                    game.fail(f"{type(problem).__name__} in close: {problem}")
    trajectory = game.trajectory()
    validate(trajectory)
    return trajectory
