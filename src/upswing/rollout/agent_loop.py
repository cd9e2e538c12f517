"""One trajectory: the agent and its environment take turns until one of them ends it.

Invariants
1. Every call returns exactly one Trajectory with one outcome, whatever breaks; only cancellation propagates.
2. What the engine sampled is stored as it was sampled; what the environment said is never marked as sampled.
3. `env.close()` runs exactly once, and the engine's cache for the trajectory is released.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from upswing.engine.base import Engine, FinishReason, Sampling
from upswing.envs.base import AssistantMessage, Environment, Expert, Observation
from upswing.errors import EnvironmentBroken, UpswingError
from upswing.rollout.limits import Limits
from upswing.seeding import derive_seed
from upswing.trajectory.conversation import Conversation
from upswing.trajectory.render import ChatRenderer
from upswing.trajectory.types import Outcome, StopReason, Task, ToolRecord, Trajectory
from upswing.trajectory.validate import validate
from upswing.verify.deadline import DeadlineExceeded, call_with_deadline

COMPLETED = {StopReason.ANSWERED, StopReason.ENV_DONE}


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
            completion = await asyncio.wait_for(request, self.limits.turn_timeout_s)
        except TimeoutError as problem:
            raise UpswingError(f"sampling a turn took longer than {self.limits.turn_timeout_s:g} s") from problem
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
class _Progress:
    """What is known of a trajectory so far; enough to end it at any moment."""

    conversation: Conversation | None = None
    records: list[ToolRecord] = field(default_factory=list)
    turn_rewards: list[float] = field(default_factory=list)
    turns: int = 0
    answer: str | None = None
    env_s: float = 0.0
    engine_s: float = 0.0
    stop_reason: StopReason | None = None


async def call_env(method: Callable[..., Any], *args: Any, timeout_s: float) -> Any:
    """Call a plain or async environment method; plain ones run in a thread so that they never block the others.

    Raises EnvironmentBroken when it takes longer than `timeout_s`; whatever else it raises is passed on.
    """
    try:
        result = await call_with_deadline(functools.partial(method, *args), {}, timeout_s)
        return await asyncio.wait_for(result, timeout_s) if inspect.isawaitable(result) else result
    except (DeadlineExceeded, TimeoutError) as error:
        raise EnvironmentBroken(f"{method.__qualname__} took longer than {timeout_s:g} s") from error


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
    progress = _Progress()
    started = time.perf_counter()
    error: str | None = None
    state: dict[str, Any] = {}
    env: Environment | None = None
    deadline = asyncio.timeout(limits.rollout_timeout_s)
    try:
        env = make_env()
        async with deadline:
            await _turns(task, env, speaker, renderer, end_tokens, limits, seed, progress)
        state = dict(env.state())
    except Exception as problem:
        # Only the rollout's own deadline truncates, and only what had begun; any other timeout is somebody's fault.
        if isinstance(problem, TimeoutError) and deadline.expired() and progress.turns:
            progress.stop_reason = StopReason.TIMEOUT
        else:
            progress.stop_reason, error = StopReason.ERROR, f"{type(problem).__name__}: {problem}"
    finally:
        speaker.release()
        close_error = await _close(env, limits) if env is not None else None
    if close_error and error is None:
        progress.stop_reason, error = StopReason.ERROR, close_error
    trajectory = _trajectory(task, trajectory_id, progress, speaker.source, error, state, seed, started)
    validate(trajectory)
    return trajectory


async def _turns(
    task: Task,
    env: Environment,
    speaker: Speaker,
    renderer: ChatRenderer,
    end_tokens: tuple[int, ...],
    limits: Limits,
    seed: int,
    progress: _Progress,
) -> None:
    """The loop itself: speak, step, append, until done."""
    mark = time.perf_counter()
    observation: Observation = await call_env(env.reset, task, seed, timeout_s=limits.env_timeout_s)
    progress.env_s += time.perf_counter() - mark
    conversation = Conversation(renderer, observation.messages, observation.tools, end_tokens=end_tokens)
    progress.conversation = conversation
    while progress.stop_reason is None:
        mark = time.perf_counter()
        message = await speaker.speak(conversation, progress.turns)
        progress.engine_s += time.perf_counter() - mark
        if message is None and progress.turns == 0:
            raise ValueError(
                f"the task's prompt has {conversation.num_tokens} tokens, limits.context_tokens is "
                f"{limits.context_tokens}; raise it, or leave the task out"
            )
        if message is None:
            progress.stop_reason = StopReason.CONTEXT_OVERFLOW
            return
        progress.turns += 1
        mark = time.perf_counter()
        observation = await call_env(env.step, message, timeout_s=limits.env_timeout_s)
        progress.env_s += time.perf_counter() - mark
        progress.records.extend(observation.tool_records)
        progress.turn_rewards.append(observation.reward)
        if observation.done:
            progress.answer = observation.answer
            progress.stop_reason = observation.stop_reason or StopReason.ENV_DONE
        elif not message.finished:
            progress.stop_reason = StopReason.MAX_TOKENS
        else:
            conversation.add_messages(observation.messages)


async def _close(env: Environment, limits: Limits) -> str | None:
    try:
        await call_env(env.close, timeout_s=limits.env_timeout_s)
    except Exception as problem:
        return f"{type(problem).__name__} in close: {problem}"
    return None


def _outcome(reason: StopReason) -> Outcome:
    if reason is StopReason.ERROR:
        return Outcome.ERRORED
    if reason is StopReason.CANCELLED:
        return Outcome.CANCELLED
    return Outcome.COMPLETED if reason in COMPLETED else Outcome.TRUNCATED


def _trajectory(
    task: Task,
    trajectory_id: str,
    progress: _Progress,
    source: str,
    error: str | None,
    state: dict[str, Any],
    seed: int,
    started: float,
) -> Trajectory:
    conversation = progress.conversation
    reason = progress.stop_reason or StopReason.ERROR
    return Trajectory(
        id=trajectory_id,
        task=task,
        branches=conversation.branches() if conversation else (),
        messages=conversation.messages if conversation else task.messages,
        outcome=_outcome(reason),
        stop_reason=reason,
        answer=progress.answer,
        tool_records=tuple(progress.records),
        num_turns=progress.turns,
        error=error,
        state={**state, "env_reward": sum(progress.turn_rewards), "turn_rewards": progress.turn_rewards},
        drift=conversation.drift if conversation else (),
        source=source,
        seed=seed,
        timing={
            "engine_s": progress.engine_s,
            "env_s": progress.env_s,
            "total_s": time.perf_counter() - started,
        },
    )
