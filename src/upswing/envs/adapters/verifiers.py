"""Environments of the `verifiers` package (0.4): tasksets, their tools and rewards, and `Env.run` around one agent.

verifiers drives its agent, Upswing is driven; so `Env.run` plays in a task of its own, and its agent is a seat whose
turns are handed to Upswing's loop and back. Tools run in this process. Stops, finalize, rewards, metrics and judges are
the package's own. What needs a container, a second agent or `@vf.intercept` is refused.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from upswing.envs.adapters import library
from upswing.envs.base import AssistantMessage, Observation, check_split
from upswing.envs.dataset import check_disjoint
from upswing.envs.generated import split_of
from upswing.envs.tool_env import ToolEnv
from upswing.errors import ConfigError, EnvironmentBroken
from upswing.plugins import load_object
from upswing.trajectory.types import Message, StopReason, Task, ToolRecord
from upswing.verify.options import REQUIRED
from upswing.verify.text import one_line


class Verifiers(ToolEnv):
    """Plays a taskset of the `verifiers` package. Its reward comes with the last step (verifier `env_reward`); the
    state holds each reward and metric.

    Options: `taskset`, an installed one's id or an import path of a Taskset class; `config`, its configuration; `env`,
    an id or class when the taskset doesn't bring its own; `env_config`; `splits`, split -> what its configuration
    changes (without it, tasks are split by their content: three in five train, one dev, one test).
    """

    name = "verifiers"
    fixed = ToolEnv.fixed | {"tools", "mcp", "source", "system", "in_order"}
    taskset: str = REQUIRED
    config: Mapping[str, Any] = {}
    env: str | None = None
    env_config: Mapping[str, Any] = {}
    splits: Mapping[str, Mapping[str, Any]] = {}
    _game: asyncio.Task[Any] | None = None

    def __init__(self, **options: Any) -> None:
        """Raises ConfigError for what isn't there, or can't be played here."""
        super().__init__(**options)
        for split in self.splits:
            check_split(self.name, split)
        self.shared = self._world("train")
        self.seat: Any = None
        self.ended: StopReason | None = None

    def _world(self, split: str) -> _World:
        config = json.dumps({**self.config, **self.splits.get(split, {})})
        return _world(self.taskset, config, self.env, json.dumps(dict(self.env_config)))

    def tasks(self, split: str, seed: int = 0) -> Iterator[Task]:
        """`train`: pass after pass, shuffled with the seed, or on and on when the taskset is infinite; other splits
        once, in order. Raises ConfigError for splits that share a task."""
        check_split(self.name, split)
        if self.splits and split not in self.splits:
            raise ConfigError(f"verifiers: splits has no '{split}'; there are: {', '.join(self.splits)}")
        taskset = self._world(split).taskset
        if self.splits and all(self._world(each).taskset.bounded for each in self.splits):
            check_disjoint({each: [self._task(each, one) for one in self._world(each).taskset] for each in self.splits})
        return self._stream(split, taskset, random.Random(f"{self.name} {split} {seed}"))

    def _stream(self, split: str, taskset: Any, rng: random.Random) -> Iterator[Task]:
        found = (task for one in taskset if (task := self._task(split, one)).split == split)
        if split != "train" or not taskset.bounded:
            yield from found
            return
        rows = list(found)
        while rows:
            yield from rng.sample(rows, len(rows))

    def _task(self, split: str, one: Any) -> Task:
        """`data['row']` is the task's data, of which the package's own task is made again."""
        from upswing.envs.adapters.exchange import as_message

        row = one.data.model_dump(mode="json", exclude_none=True, exclude={"idx"})
        prompt = one.data.prompt if isinstance(one.data.prompt, list) else []
        text = one.data.prompt if isinstance(one.data.prompt, str) else one.data.name or one.key
        messages = tuple(map(as_message, prompt)) or (Message(role="user", content=text),)
        own = split if self.splits else split_of(json.dumps(row, sort_keys=True))
        return Task(id=f"{self.name}-{one.key[:16]}", messages=messages, data={"row": row}, env=self.name, split=own)

    async def reset(self, task: Task, seed: int) -> Observation:
        """Starts the game, as far as the agent's first turn."""
        if "row" not in task.data:
            raise EnvironmentBroken("the task isn't one of a verifiers taskset; leave the recipe's dataset out")
        await super().reset(task, seed)
        self._asks, self._says = asyncio.Queue[Observation](), asyncio.Queue[AssistantMessage]()
        self._records, self.ended = list[ToolRecord](), None
        self.seat = None
        self._game = asyncio.create_task(self._play_game(self.shared.task_of(task.data["row"])))
        seen = await self._next()
        if seen.done:
            raise EnvironmentBroken("the episode ended before the agent had its first turn")
        return seen

    async def step(self, message: AssistantMessage) -> Observation:
        self._says.put_nowait(message)
        return await self._next()

    async def close(self) -> None:
        if self._game is not None:
            self._game.cancel()
            await asyncio.wait({self._game})

    def state(self) -> Mapping[str, Any]:
        """The counts of calls, `rewards` and `metrics` by name, and whether all rewards are there: `scored`."""
        trace = self.seat.trace if self.seat is not None else SimpleNamespace(rewards={}, metrics={})
        rewards = {name: None if found is None else found.value for name, found in trace.rewards.items()}
        scored = bool(rewards) and None not in rewards.values() and self._game is not None and self._game.done()
        return {**super().state(), "rewards": rewards, "metrics": dict(trace.metrics), "scored": scored}

    async def _next(self) -> Observation:
        """What the game asks for next, or its end. Raises EnvironmentBroken when it broke."""
        assert self._game is not None
        asked = asyncio.ensure_future(self._asks.get())
        try:
            await asyncio.wait({asked, self._game}, return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                return asked.result()
        finally:
            asked.cancel()
        if self._game.cancelled() or (problem := self._game.exception()) is not None:
            problem = None if self._game.cancelled() else problem
            raise EnvironmentBroken(f"verifiers: {type(problem).__name__}: {problem}") from problem
        trace, records = self.seat.trace, self._flush()
        reason = self.ended or (StopReason.ENV_DONE if trace.stop_condition in self.seat.stops else StopReason.ANSWERED)
        answer = trace.last_reply if reason is StopReason.ANSWERED else None
        return Observation(done=True, stop_reason=reason, answer=answer, reward=trace.reward, tool_records=records)

    async def ask(self, messages: tuple[Message, ...], tools: tuple[Mapping[str, Any], ...] = ()) -> AssistantMessage:
        """The agent's next turn (for the seat)."""
        self._asks.put_nowait(Observation(messages=messages, tools=tools, tool_records=self._flush()))
        said = await self._says.get()
        self._turns += 1
        return said

    async def act(self, said: AssistantMessage) -> tuple[ToolRecord, ...] | None:
        """Run a turn's calls; None when it has none (for the seat). Sets `ended` when Upswing's limits are reached."""
        if not said.finished:
            self.ended = StopReason.MAX_TOKENS
            return ()
        parsed = self.parser.parse(said.content)
        if parsed.answer is not None:
            return None
        records = await self._play(parsed, self._turns - 1)
        self._records += records
        self.ended = self._end_reason()
        return records

    def cut(self) -> bool:
        """Whether Upswing's limits allow no further turn."""
        self.ended = self.ended or self._end_reason()
        return self.ended is not None

    def _flush(self) -> tuple[ToolRecord, ...]:
        records, self._records = tuple(self._records), []
        return records

    async def _play_game(self, task: Any) -> None:
        """One episode, as the package's own runner plays it."""
        from verifiers.v1 import EnvInfo, Episode
        from verifiers.v1.trace import TraceTask

        from upswing.envs.adapters.exchange import Agent

        world = self.shared
        await world.begin()
        described = TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        episode = Episode(env=EnvInfo(id=world.env.config.env_id), task=described)
        seats = SimpleNamespace(**{world.agent: Agent(self, episode)})
        await world.env.setup(seats)
        await world.env.run(task, seats)
        if not episode.traces:
            raise EnvironmentBroken(f"{type(world.env).__name__}.run() ran no agent")
        await world.env.finalize(task, episode)
        if not episode.traces[0].rewards:
            raise EnvironmentBroken(f"nothing rewards {type(task).__name__}; it needs a @vf.reward")


@dataclass(kw_only=True, eq=False)
class _World:
    """What all plays share: the taskset, the Env around it, and the tools of all tasks."""

    taskset: Any
    env: Any
    agent: str
    """Name of the Env's one agent."""
    toolsets: list[Any] = field(default_factory=list)
    _begun: asyncio.Future[None] | None = None

    @functools.cached_property
    def prototype(self) -> Any:
        return next(iter(self.taskset))

    def task_of(self, row: Mapping[str, Any]) -> Any:
        task = copy.copy(self.prototype)
        task.data = type(task.data).model_validate(dict(row))
        return task

    async def begin(self) -> None:
        """Once: the Env's own resources and the shared tools."""
        if self._begun is None:
            self._begun = asyncio.ensure_future(self._begin())
        try:
            await asyncio.shield(self._begun)
        except Exception:
            self._begun = None  # the next play tries again
            raise

    async def _begin(self) -> None:
        self.toolsets = self.taskset.toolsets(self.taskset.config)
        for toolset in self.toolsets:
            await toolset.setup()
        await self.env.start()


@functools.lru_cache(maxsize=32)
def _world(taskset: str, config: str, env: str | None, env_config: str) -> _World:
    """Raises ConfigError for what isn't there, or can't be played here."""
    vf = library("verifiers.v1", "verifiers")
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils import loaders
    from verifiers.v1.utils.generic import concrete_type

    try:
        cls = _found(taskset, "verifiers taskset", loaders.taskset_class)
        config_cls = concrete_type(cls, vf.TasksetConfig, origin=vf.Taskset) or vf.TasksetConfig
        made = cls(config_cls.model_validate({"id": "" if ":" in taskset else taskset, **json.loads(config)}))
        env_cls = vf.SingleAgentEnv if ":" in taskset else loaders.environment_class(taskset)
        if env is not None:
            env_cls = _found(env, "verifiers environment", lambda name: loaders.environment_class("", name))
    except ConfigError:
        raise
    except Exception as problem:
        raise ConfigError(f"verifiers taskset '{taskset}': {type(problem).__name__}: {one_line(problem)}") from problem
    played = env_cls.__new__(env_cls)  # its own constructor loads the programs that agents run in, which Upswing is
    env_config_cls = concrete_type(env_cls, vf.EnvConfig, origin=vf.Env) or vf.EnvConfig
    try:
        played.config = env_config_cls.model_validate(json.loads(env_config))
    except Exception as problem:
        raise ConfigError(f"verifiers option env_config: {one_line(problem)}") from problem
    played.taskset = made
    agents = list(agent_config_fields(played.config))
    if len(agents) != 1:
        there = ", ".join(agents) or "none"
        raise ConfigError(f"verifiers environment {env_cls.__name__} has the agents {there}; Upswing plays one")
    world = _World(taskset=made, env=played, agent=agents[0])
    _check_task(world, vf)
    return world


def _check_task(world: _World, vf: Any) -> None:
    from verifiers.v1.session import hook_boundary
    from verifiers.v1.utils.decorators import discover_decorated

    try:
        task = world.prototype
    except StopIteration:
        raise ConfigError(f"verifiers taskset {type(world.taskset).__name__} has no tasks") from None
    what = f"verifiers task {type(task).__name__}"
    if task.NEEDS_CONTAINER or task.data.image is not None:
        raise ConfigError(f"{what} needs a container, which Upswing has none of; run it with verifiers' own runner")
    typed = [fn for fn in task.hooks("stop") if hook_boundary(fn, allow_trace=True) is not vf.Trace]
    if typed or discover_decorated(task, "intercept"):
        raise ConfigError(f"{what} looks into requests or responses (@vf.intercept, @vf.stop), which Upswing has not")


def _found(given: str, kind: str, by_id: Callable[[str], Any]) -> Any:
    return load_object(given, kind, {}) if ":" in given else by_id(given)
