"""Environments and verifiers in worker processes, each of which holds many of them."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from upswing.cluster.actors import Cluster, Gone, Pool, enter
from upswing.envs import Environment, environment_factory
from upswing.envs.base import AssistantMessage, Observation
from upswing.errors import EnvironmentBroken, UpswingError
from upswing.recipe import Recipe, VerifierSection
from upswing.recipe.models import LimitsSection
from upswing.trajectory.types import Score, Task
from upswing.verify import Rubric, rubric_from
from upswing.verify.base import Episode
from upswing.verify.deadline import call_env, call_with_deadline, off_the_clock

TRIES = 3
"""Workers that may die while they score one trajectory."""


class WorldActor:
    """Plays many episodes at once, each in an environment of its own, and scores trajectories."""

    def __init__(
        self,
        folder: str,
        env: str,
        args: Mapping[str, Any],
        verifiers: Sequence[VerifierSection],
        limits: LimitsSection,
    ) -> None:
        enter(folder)
        self._made_of = (env, args, verifiers)
        self._limits = limits
        self._episodes: dict[str, Environment] = {}

    async def begin(self) -> None:
        env, args, verifiers = self._made_of
        self._make = environment_factory(env, args)
        self._rubric = rubric_from(verifiers)

    async def play(self, episode: str, method: str, *args: Any) -> tuple[Any, str | None]:
        """(what a method of the episode's environment returns, None), or (None, what it raises)."""
        try:
            if method == "reset":
                self._episodes[episode] = await asyncio.to_thread(self._make)  # taking long is no sign of hanging
            elif method == "close" and episode not in self._episodes:
                return None, None  # its reset never came
            env = self._episodes.pop(episode) if method == "close" else self._episodes[episode]
            return await call_env(getattr(env, method), *args, timeout_s=self._limits.env_timeout_s), None
        except (Exception, SystemExit, GeneratorExit) as problem:
            return None, f"{type(problem).__name__}: {problem}"

    async def answer(self) -> None:
        """At once: what is played and scored runs in threads, or awaits."""

    async def score(self, episode: Episode) -> dict[str, Score]:
        """What each verifier says. Raises DeadlineExceeded when they take too long."""

        async def scores() -> list[Score]:
            return await asyncio.gather(*(verifier(episode) for _, verifier, _ in self._rubric.items))

        found = await call_with_deadline(scores, {}, self._limits.scoring_timeout_s)
        return {name: score for (name, _, _), score in zip(self._rubric.items, found, strict=True)}


class Workers:
    """The processes, shared by all episodes."""

    def __init__(self, cluster: Cluster, recipe: Recipe) -> None:
        """Raises ConfigError when they can't make the environment or the verifiers."""
        self.cluster, section = cluster, cluster.section
        made_of = (recipe.env.name, recipe.env.args, recipe.verifiers, recipe.limits)

        def start(place: int) -> Any:
            return cluster.start(WorldActor, place, os.getcwd(), *made_of)

        places = range(section.engines, section.engines + section.env_workers)
        self.pool = Pool(cluster, "env worker", start, places, patience_s=recipe.limits.env_timeout_s)

    def make_env(self) -> Environment:
        """In place of `world.make_env`, for what is played."""
        return RemoteEnvironment(self)


class RemoteEnvironment(Environment):
    """An environment that a worker plays."""

    name = "remote"

    def __init__(self, workers: Workers) -> None:
        self._workers, self._episode = workers, uuid.uuid4().hex
        self._where: Any = None

    async def _play(self, method: str, *args: Any) -> Any:
        """Raises EnvironmentBroken for what the environment raises and for a worker that died: the trajectory is
        errored, and played again. When the cluster is gone it only waits for the end of the run."""
        pool, cluster = self._workers.pool, self._workers.cluster
        if self._where is None:
            with off_the_clock():
                member = await pool.pick(self._episode)
            self._where = (member, member.actor)
        member, actor = self._where
        try:
            if member.actor is not actor or not member.up:
                raise Gone("under another call")
            with off_the_clock():  # the worker keeps the time, and doesn't count what waits there for a free thread
                found, problem = await pool.call(member, "play", self._episode, method, *args)
        except Gone as gone:
            if not await cluster.check():
                if method == "close":
                    return None
                await asyncio.Event().wait()
            raise EnvironmentBroken(f"the environment's worker died ({gone})") from None
        if problem is not None:
            raise EnvironmentBroken(problem)
        return found

    async def reset(self, task: Task, seed: int) -> Observation:
        found: Observation = await self._play("reset", task, seed)
        return found

    async def step(self, message: AssistantMessage) -> Observation:
        found: Observation = await self._play("step", message)
        return found

    async def state(self) -> Mapping[str, Any]:  # type: ignore[override]
        found: Mapping[str, Any] = await self._play("state")
        return found

    async def close(self) -> None:
        """Where there is something (still) to close."""
        if self._workers.pool.forget(self._episode) is not None and not self._workers.cluster.is_gone:
            await self._play("close")


class RemoteRubric(Rubric):
    """A rubric whose verifiers run in the workers; those of whole groups run here."""

    def __init__(self, rubric: Rubric, workers: Workers) -> None:
        vars(self).update(vars(rubric))
        self._workers = workers

    async def score(self, episode: Episode) -> Score:
        pool, why = self._workers.pool, ""
        for _ in range(TRIES):
            with off_the_clock():  # the worker keeps the time
                member = await pool.pick()
                try:
                    return self._total({}, [], await pool.call(member, "score", episode))
                except Gone as problem:
                    why = str(problem)
        raise UpswingError(f"{TRIES} workers were lost while they scored; the last: {why}")
