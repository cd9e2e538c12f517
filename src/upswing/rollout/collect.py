"""Many trajectories at once: groups of a task, batches of groups, demonstrations.

Trajectories run concurrently; the engine batches their turns, and a slow tool holds up only its own trajectory.
"""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from upswing.engine.base import Engine, Sampling
from upswing.engine.openai import OpenAIEngine
from upswing.envs.base import Environment
from upswing.rollout.agent import Agent
from upswing.rollout.agent_loop import ExpertSpeaker, PolicySpeaker, Speaker, play
from upswing.rollout.chat_speaker import ChatSpeaker
from upswing.rollout.limits import Limits
from upswing.seeding import derive_seed
from upswing.trajectory.render import ChatRenderer
from upswing.trajectory.types import Group, Outcome, Score, StopReason, Task, Trajectory
from upswing.verify import Rubric
from upswing.verify.base import Episode
from upswing.verify.deadline import DeadlineExceeded, call_with_deadline
from upswing.verify.functions import finite

OnDone = Callable[[Trajectory], None]


class Scorer(Protocol):
    async def score(self, episode: Episode) -> Score: ...


@dataclass(kw_only=True)
class Rollouts:
    """Plays tasks into scored trajectories."""

    make_env: Callable[[], Environment]
    rubric: Scorer
    renderer: ChatRenderer
    end_tokens: tuple[int, ...]
    limits: Limits
    engine: Engine
    max_concurrent: int = 64
    """Trajectories in play at once; more wait, so that each one in play keeps its place in the engine's cache."""
    gate: asyncio.Semaphore | None = None
    """Where calls of `groups` at the same time share that limit; None: each has its own."""
    max_retries: int = 1
    """How often an errored trajectory is tried again (with another seed)."""
    agent: Agent | None = None
    """Plays in place of the environment's own loop; demonstrations stay the environment's."""

    async def groups(
        self, tasks: Sequence[Task], *, size: int, sampling: Sampling, seed: int, on_done: OnDone | None = None
    ) -> list[Group]:
        """Play each task `size` times -> one Group a task, in order. Errored attempts stay in their group, marked so;
        each is followed by up to `max_retries` new attempts. What is late (`limits.group_timeout_s`) is cancelled."""
        sampling = replace(sampling, stop_tokens=tuple(sorted({*sampling.stop_tokens, *self.end_tokens})))
        gate = self.gate or asyncio.Semaphore(self.max_concurrent)
        tried: dict[tuple[int, int], list[Trajectory]] = {(r, i): [] for r in range(len(tasks)) for i in range(size)}
        began = [asyncio.Event() for _ in tasks]

        def name_of(row: int, task: Task, index: int, attempt: int) -> str:
            """The row is in it because a batch may hold the same task twice."""
            return f"{task.id}/{seed}/{row}-{index}" + (f".{attempt}" if attempt else "")

        async def attempts(row: int, task: Task, index: int) -> None:
            mine = tried[row, index]
            for attempt in range(self.max_retries + 1):
                async with gate:
                    began[row].set()
                    name = name_of(row, task, index, attempt)
                    mine.append(await self._sampled(task, name, sampling, derive_seed(seed, row, index, attempt)))
                if mine[-1].outcome is not Outcome.ERRORED:
                    break
            if on_done:
                on_done(mine[-1])

        async def in_time(row: int, task: Task) -> None:
            """Cancel what is late, and note it as that: never an outcome of the agent's."""
            await began[row].wait()
            _, late = await asyncio.wait(jobs[row], timeout=self.limits.group_timeout_s)
            for job in late:
                job.cancel()
            await asyncio.gather(*late, return_exceptions=True)  # their environments have closed
            for index, job in enumerate(jobs[row]):
                if job in late and job.cancelled():
                    mine = tried[row, index]
                    mine.append(cancelled(task, name_of(row, task, index, len(mine))))
                    if on_done:
                        on_done(mine[-1])

        async def group(row: int, task: Task) -> Group:
            if self.limits.group_timeout_s is not None:
                await in_time(row, task)
            await asyncio.gather(*(job for job in jobs[row] if not job.cancelled()))
            played = [trajectory for index in range(size) for trajectory in tried[row, index]]
            found = await judge_group(played, self.rubric, self.limits.scoring_timeout_s)
            return Group(task=task, trajectories=found)

        jobs = [[asyncio.ensure_future(attempts(row, task, i)) for i in range(size)] for row, task in enumerate(tasks)]
        groups = [asyncio.ensure_future(group(row, task)) for row, task in enumerate(tasks)]
        try:
            with rare_full_gc():
                return [await one for one in groups]
        except BaseException:
            running = [*groups, *(job for row in jobs for job in row)]
            for job in running:
                job.cancel()
            await asyncio.gather(*running, return_exceptions=True)  # their environments close before this returns
            raise

    async def singles(
        self, tasks: Sequence[Task], *, sampling: Sampling, seed: int, on_done: OnDone | None = None
    ) -> list[Trajectory]:
        """One trajectory a task, in order: the last attempt where earlier ones errored."""
        groups = await self.groups(tasks, size=1, sampling=sampling, seed=seed, on_done=on_done)
        return [group.trajectories[-1] for group in groups]

    async def demonstrations(
        self,
        tasks: Iterable[Task],
        *,
        count: int,
        seed: int,
        min_reward: float,
        make_env: Callable[[], Environment] | None = None,
        on_done: OnDone | None = None,
    ) -> tuple[list[Trajectory], list[Trajectory]]:
        """Let the environment's scripted expert play until `count` trajectories reach `min_reward`.

        `make_env`: the environment to demonstrate in, when it isn't the one of the rollouts.

        Returns (kept, rejected). Stops early when the tasks run out, or when about nine in ten are rejected.
        """
        kept: list[Trajectory] = []
        rejected: list[Trajectory] = []
        for task in tasks:
            if len(kept) >= count or len(rejected) >= 20 + 9 * len(kept):
                break
            env = (make_env or self.make_env)()
            task_seed = derive_seed(seed, "expert", task.id)
            expert = ExpertSpeaker(expert=env.expert(task, random.Random(task_seed)))
            trajectory = await self._played(task, f"{task.id}/expert/{seed}", lambda env=env: env, expert, task_seed)  # type: ignore[misc]
            good = trajectory.reward is not None and trajectory.reward >= min_reward
            (kept if good else rejected).append(trajectory)
            if on_done and good:
                on_done(trajectory)
        return kept, rejected

    async def _sampled(self, task: Task, name: str, sampling: Sampling, seed: int) -> Trajectory:
        if self.agent is not None:
            return await self._scored(
                await self.agent.play(
                    task,
                    trajectory_id=name,
                    engine=self.engine,
                    sampling=sampling,
                    renderer=self.renderer,
                    end_tokens=self.end_tokens,
                    limits=self.limits,
                    seed=seed,
                )
            )
        speaker: Speaker
        if isinstance(self.engine, OpenAIEngine):
            speaker = ChatSpeaker(engine=self.engine, sampling=sampling, limits=self.limits, make_env=self.make_env)
        else:
            speaker = PolicySpeaker(engine=self.engine, sampling=sampling, limits=self.limits, session=name, seed=seed)
        return await self._played(task, name, self.make_env, speaker, seed)

    async def _played(
        self, task: Task, name: str, make_env: Callable[[], Environment], speaker: Speaker, seed: int
    ) -> Trajectory:
        trajectory = await play(
            task,
            trajectory_id=name,
            make_env=make_env,
            speaker=speaker,
            renderer=self.renderer,
            end_tokens=self.end_tokens,
            limits=self.limits,
            seed=seed,
        )
        return await self._scored(trajectory)

    async def _scored(self, trajectory: Trajectory) -> Trajectory:
        return replace(trajectory, score=await judge(trajectory, self.rubric, self.limits.scoring_timeout_s))

    async def close(self) -> None:
        """Stop what an agent's trajectories share."""
        if self.agent is not None:
            await self.agent.proxy.close()


def cancelled(task: Task, name: str) -> Trajectory:
    """What is left of a trajectory that was stopped: that it was."""
    return Trajectory(
        id=name,
        task=task,
        branches=(),
        messages=task.messages,
        outcome=Outcome.CANCELLED,
        stop_reason=StopReason.CANCELLED,
    )


async def judge(trajectory: Trajectory, rubric: Scorer, timeout_s: float) -> Score | None:
    """What the rubric says of a trajectory; None for errored and cancelled ones. A hung or crashed verifier gives a
    score without a value, never 0."""
    if trajectory.outcome in (Outcome.ERRORED, Outcome.CANCELLED):
        return None
    try:
        return finite(await call_with_deadline(rubric.score, {"episode": Episode.of(trajectory)}, timeout_s))
    except DeadlineExceeded:
        return Score(value=None, reason=f"scoring took longer than {timeout_s:g} s")
    except Exception as problem:
        return Score(value=None, reason=f"{type(problem).__name__}: {problem}")


async def judge_group(trajectories: Sequence[Trajectory], rubric: Scorer, timeout_s: float) -> tuple[Trajectory, ...]:
    """A finished group, judged one by one, with what the rubric's verifiers of whole groups say, if it has any. Those
    without a score, the errored ones, take no part."""
    if not isinstance(rubric, Rubric) or not rubric.grouped:
        return tuple(trajectories)
    alone = {i: one.score for i, one in enumerate(trajectories) if one.score is not None}
    scores = await rubric.score_group([Episode.of(trajectories[i]) for i in alone], list(alone.values()), timeout_s)
    told = dict(zip(alone, map(finite, scores), strict=True))
    return tuple(replace(one, score=told.get(i)) for i, one in enumerate(trajectories))


_in_play, _usual_thresholds = 0, gc.get_threshold()


@contextmanager
def rare_full_gc() -> Iterator[None]:
    """Full garbage collections become rare meanwhile: each looks at all that is alive, so that with thousands of
    trajectories in play a trajectory would cost the more the more there are. Young garbage goes as always."""
    global _in_play, _usual_thresholds
    if _in_play == 0:
        _usual_thresholds = gc.get_threshold()
        gc.set_threshold(20_000, 50, 1_000)
    _in_play += 1
    try:
        yield
    finally:
        _in_play -= 1
        if _in_play == 0:
            gc.set_threshold(*_usual_thresholds)
