"""A Ray cluster, joined or started; actors placed on it, replaced when they die; and what is done when it is gone."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import os
import random
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from upswing.envs.adapters import library
from upswing.errors import ConfigError, UpswingError
from upswing.recipe import ClusterSection
from upswing.verify.deadline import DeadlineExceeded, call_with_deadline

T = TypeVar("T")
PLACE_S = 60.0
"""A cluster that hasn't the room for all actors by then won't have it."""
BEAT_S = 2.0
ANSWER_S = 10.0
START_S = 600.0
"""An actor that isn't ready by then, or an engine that hasn't loaded its weights, hangs."""
AT_ONCE = 100_000
"""Calls of an async actor that run at the same time. With Ray's own limit of 1000 a sign of life would wait behind what
is played."""
DEATHS = 5
"""Of an actor in a row; its place then stays empty."""
AGAIN = "start the run again with --resume"


class Gone(UpswingError):
    """An actor has died or can't be reached; what it was asked may have been done or not."""


def connect(section: ClusterSection) -> tuple[Any, bool]:
    """Ray, connected; and whether the connection is ours to end. Raises ConfigError."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # For so long Ray lets a process live whose cluster is gone: a last checkpoint may take a while.
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "600")
    ray = library("ray", "ray")
    if ray.is_initialized():
        return ray, False
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    if section.address is None:
        room = room_here(section)
        check_room(section, [room])
        with _gpus_hidden(_gpus_of_the_run(section) if room["GPU"] else 0):
            ray.init("local", num_cpus=room["CPU"], num_gpus=room["GPU"], include_dashboard=False, **quiet)
        return ray, True
    host, _, port = section.address.rpartition(":")
    try:
        if host and port.isdigit():  # Ray itself would try for a minute
            socket.create_connection((host, int(port)), ANSWER_S).close()
        ray.init(section.address, **quiet)
    except (OSError, RuntimeError, ValueError) as problem:
        raise ConfigError(
            f"cluster.address: no Ray cluster answers at '{section.address}' ({first_line(problem)}); start one there "
            "(ray start --head), or leave the address out: one is then started on this machine"
        ) from None
    return ray, True


def room_here(section: ClusterSection) -> dict[str, float]:
    """What a Ray that is started on this machine has: as many CPUs as are asked for, and all GPUs but the one that the
    process of the run learns on. Raises ConfigError for more ranks than GPUs."""
    import torch  # not for workers

    if 0 < (gpus := torch.cuda.device_count()) < section.learners:
        raise ConfigError(
            f"cluster.learners: got {section.learners}, but each takes a GPU, and this machine has {gpus}; use "
            f"{gpus}, or hide the GPUs (CUDA_VISIBLE_DEVICES='')"
        )
    cpus = max(os.cpu_count() or 1, math.ceil(sum(place["CPU"] for place in places(section, 0))))
    return {"CPU": cpus, "GPU": max(gpus - _gpus_of_the_run(section), 0)}


def _gpus_of_the_run(section: ClusterSection) -> int:
    """One for its learner; a learner without further ranks shares the only GPU of a machine with an engine."""
    import torch

    return int(section.learners > 1 or torch.cuda.device_count() > 1)


@contextmanager
def _gpus_hidden(count: int) -> Iterator[None]:
    """The first ones, from a Ray that is started inside."""
    name = "CUDA_VISIBLE_DEVICES"
    before = os.environ.get(name)
    if count:
        seen = before.split(",") if before else list(map(str, range(64)))
        os.environ[name] = ",".join(seen[count:])
    try:
        yield
    finally:
        if before is not None:
            os.environ[name] = before
        elif count:
            del os.environ[name]


def places(section: ClusterSection, gpus_there: float) -> list[dict[str, float]]:
    """What each actor takes of a cluster with so many GPUs: engines, then env workers, then ranks."""
    gpus = section.engine_gpus if section.engine_gpus is not None else min(1.0, gpus_there)
    engine, rank = {"CPU": section.engine_cpus, "GPU": gpus}, {"CPU": section.learner_cpus, "GPU": min(1.0, gpus_there)}
    worker = {"CPU": section.env_cpus}
    found = [engine] * section.engines + [worker] * section.env_workers + [rank] * (section.learners - 1)
    return [{name: amount for name, amount in one.items() if amount} for one in found]


def check_room(section: ClusterSection, nodes: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """`places`. Raises ConfigError when the nodes have less than all of them take, or none has enough for one."""
    there = {name: sum(node.get(name, 0) for node in nodes) for name in ("CPU", "GPU")}
    wanted = places(section, there["GPU"])
    total = {name: sum(one.get(name, 0) for one in wanted) for name in there}
    for name, have in there.items():
        if total[name] > have:
            keys = "engines, env_workers, learners" if name == "CPU" else "engines, engine_gpus, learners"
            raise ConfigError(
                f"cluster: {total[name]:g} {name}s are needed, but there are {have:g}; use less of: {keys}"
            )
    for need in [total] if section.placement == "strict_pack" else wanted:
        if not any(all(node.get(name, 0) >= amount for name, amount in need.items()) for node in nodes):
            raise ConfigError(
                f"cluster: no node has the {shown(need)} that must be on one ({section.placement}); there are: "
                f"{_listed(nodes)}; use less, or another cluster.placement"
            )
    if section.placement == "strict_spread" and len(wanted) > len(nodes):
        raise ConfigError(
            f"cluster.placement: strict_spread puts each of {len(wanted)} actors on a node of its own, but there are "
            f"{len(nodes)}; use spread"
        )
    return wanted


def live_nodes(ray: Any) -> list[dict[str, float]]:
    """What each node has."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def shown(place: Mapping[str, float]) -> str:
    found = [(name, place[name]) for name in ("CPU", "GPU") if place.get(name)]
    return " + ".join(f"{amount:g} {name}{'s' * (amount > 1)}" for name, amount in found) or "nothing"


def _listed(nodes: Sequence[Mapping[str, float]]) -> str:
    return ", ".join(f"{count} with {what}" for what, count in Counter(map(shown, nodes)).items())


def first_line(problem: BaseException) -> str:
    """With Ray's account of an actor that couldn't be made, the last: what was raised there."""
    lines = str(problem).strip().splitlines() or [""]
    said = lines[-1 if "creation task" in lines[0] else 0].strip()
    return f"{type(problem).__name__}: {said}".rstrip(": ")


class Cluster:
    """A connection, with room for all actors of a recipe."""

    def __init__(self, section: ClusterSection, warn: Callable[[str], None]) -> None:
        """Raises ConfigError when it can't be reached or has too little."""
        self.section, self.warn = section, warn
        self._gone, self._why = asyncio.Event(), ""
        self._group: Any = None
        self.ray, self._ours = connect(section)
        try:
            nodes = live_nodes(self.ray)
            self.places = check_room(section, nodes)
            here = self.ray.get_runtime_context()
            [node] = [node for node in self.ray.nodes() if node["NodeID"] == here.get_node_id()]
            head, _, port = here.gcs_address.rpartition(":")
            self._ports = ((head, int(port)), (node["NodeManagerAddress"], int(node["NodeManagerPort"])))
            self._group = self.ray.util.placement_group(self.places, strategy=section.placement.upper())
            if not self._group.wait(PLACE_S):
                raise ConfigError(
                    f"cluster: there is no room ({section.placement}) for {_listed(self.places)} on nodes as "
                    f"{_listed(nodes)}, or others use it; use fewer, or another cluster.placement"
                )
        except BaseException:
            self.close()
            raise

    def start(self, kind: type, place: int, *args: Any) -> Any:
        """An actor in its place; it dies once and for all."""
        strategies = library("ray.util.scheduling_strategies", "ray")
        options = {
            "num_cpus": self.places[place].get("CPU", 0),
            "num_gpus": self.places[place].get("GPU", 0),
            "scheduling_strategy": strategies.PlacementGroupSchedulingStrategy(self._group, place),
        }
        if inspect.iscoroutinefunction(getattr(kind, "answer", None)):  # others would have so many threads
            options["max_concurrency"] = AT_ONCE
        return self.ray.remote(kind).options(**options).remote(*args)

    async def call(self, method: Any, *args: Any) -> Any:
        """What an actor's method returns. Raises what it raises, what arguments raise that can't be sent (UpswingError
        for answers that can't), and Gone."""
        errors = self.ray.exceptions
        try:
            answer = method.remote(*args)
        except (errors.RayError, OSError) as problem:
            raise Gone(first_line(problem)) from problem
        try:
            return await answer
        except asyncio.CancelledError:
            with suppress(Exception):
                if self.ray.is_initialized():  # else it would start another one
                    self.ray.cancel(answer)
            raise
        except errors.RayTaskError as problem:
            raise problem.cause from None
        except Exception as problem:
            unread = isinstance(getattr(problem, "client_exc", None), Exception)  # else what client_exc says is text
            if unread or isinstance(problem, errors.UnserializableException):
                raise UpswingError(f"what it answered can't be read here: {first_line(problem)}") from problem
            raise Gone(first_line(problem)) from None

    def wait(self, answers: Sequence[Any]) -> list[Any]:
        """What actors return, before there is an event loop. Raises what they raise."""
        try:
            return list(self.ray.get(list(answers)))
        except self.ray.exceptions.RayTaskError as problem:
            raise problem.cause from None
        except self.ray.exceptions.RayError as problem:
            raise UpswingError(f"cluster: an actor can't start: {first_line(problem)}") from None

    def close(self) -> None:
        """Ends all actors."""
        if self._ours:
            self.ray.shutdown()
        elif self._group is not None and self._answers():
            self.ray.util.remove_placement_group(self._group)

    # -- the cluster itself -------------------------------------------------------------------------------------------

    def _answers(self) -> bool:
        """Ray's own calls may hang, or end this process, when the head or this machine's node is gone."""
        try:
            for address in self._ports if self.ray.is_initialized() else ():
                socket.create_connection(address, ANSWER_S / 3).close()
        except OSError:
            return False
        return bool(self.ray.is_initialized())

    async def check(self) -> bool:
        """Whether it is there; once it isn't, it is gone."""
        for _ in range(2):
            with suppress(DeadlineExceeded):
                if await call_with_deadline(self._answers, {}, ANSWER_S):
                    break
        else:
            self.give_up("the Ray cluster is gone (its head, or the node of this process, doesn't answer)")
        return not self.is_gone

    @property
    def is_gone(self) -> bool:
        return self._gone.is_set()

    def give_up(self, why: str) -> None:
        self._why = self._why or why
        self._gone.set()

    async def unless_gone(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` returns. When the cluster is gone it is cancelled, as by an interrupt; raises UpswingError."""
        job = asyncio.ensure_future(work)
        watch = asyncio.ensure_future(self._watch())
        try:
            await asyncio.wait({job, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not job.done():
                job.cancel()
                await asyncio.wait({job})
            if job.cancelled():
                raise UpswingError(f"{self._why}; {AGAIN}")
            return job.result()
        finally:
            watch.cancel()
            if not job.done():
                job.cancel()
                await asyncio.wait({job})

    async def _watch(self) -> None:
        while await self.check():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._gone.wait(), BEAT_S)


@dataclass(eq=False)
class Member:
    """A place and the actor in it."""

    place: int
    actor: Any
    up: bool = True
    running: int = 0
    names: set[str] = field(default_factory=set)
    """Of what it holds from call to call."""
    deaths: int = 0
    """In a row."""
    task: asyncio.Task[None] | None = None
    """Its replacement, on the way."""
    watch: asyncio.Task[None] | None = None
    """Whether it hangs, while it is asked for something."""


class Pool:
    """Actors of one kind. Each has a `begin()`, which is called once, and an `answer()`, which returns soon unless it
    hangs. Who dies or hangs is replaced."""

    def __init__(
        self,
        cluster: Cluster,
        what: str,
        start: Callable[[int], Any],
        places: range,
        welcome: Callable[[Any], Awaitable[None]] | None = None,
        *,
        patience_s: float,
    ) -> None:
        """`welcome(actor)`: what one that replaces another is told before it is used. `patience_s`: for how long one
        may not answer, ANSWER_S at least. Raises what `begin` raises."""
        self._cluster, self._what, self._start, self._welcome = cluster, what, start, welcome
        self._patience_s = max(patience_s, ANSWER_S)
        self.members = [Member(place, start(place)) for place in places]
        self.begun = cluster.wait([member.actor.begin.remote() for member in self.members])
        self._holders: dict[str, Member] = {}
        self._changed, self._closed, self._rng = asyncio.Event(), False, random.Random(0)

    async def pick(self, name: str | None = None) -> Member:
        """Who holds `name`, else the less busy of two, who then does. Waits while there is none."""
        while True:
            if (holder := self._holders.get(name or "")) is not None:
                return holder
            up = [member for member in self.members if member.up]
            if up:
                two = self._rng.sample(up, min(2, len(up)))
                chosen = min(two, key=lambda member: len(member.names) + member.running)
                if name:
                    self._holders[name] = chosen
                    chosen.names.add(name)
                return chosen
            self._changed.clear()
            await self._changed.wait()

    def forget(self, name: str) -> Member | None:
        """Who held it."""
        holder = self._holders.pop(name, None)
        if holder is not None:
            holder.names.discard(name)
        return holder

    async def call(self, member: Member, method: str, *args: Any) -> Any:
        """Raises what the method raises, and Gone; the actor is then being replaced."""
        actor = member.actor
        member.running += 1
        if member.watch is None or member.watch.done():
            member.watch = asyncio.ensure_future(self._watch(member))
        try:
            found = await self._cluster.call(getattr(actor, method), *args)
        except Gone as problem:
            self.lose(member, actor, str(problem))
            raise
        finally:
            member.running -= 1
        member.deaths = 0
        return found

    def lose(self, member: Member, actor: Any, why: str) -> None:
        """What it held is held by nobody."""
        if member.up and member.actor is actor and not self._closed:
            member.up = False
            for name in tuple(member.names):
                self.forget(name)
            member.task = asyncio.ensure_future(self._replace(member, why))

    async def _watch(self, member: Member) -> None:
        """A busy event loop, or a lock that is never freed, is seen by this alone: the process is alive."""
        while member.running and member.up:
            actor = member.actor
            try:
                await asyncio.wait_for(self._cluster.call(actor.answer), self._patience_s)
            except TimeoutError:
                self.lose(member, actor, f"it has not answered for {self._patience_s:g} s")
            except Gone as problem:
                self.lose(member, actor, str(problem))
            await asyncio.sleep(BEAT_S)

    async def _replace(self, member: Member, why: str) -> None:
        number = self.members.index(member) + 1
        while member.deaths < DEATHS and await self._cluster.check():
            member.deaths += 1
            self._cluster.warn(f"{self._what} {number} of {len(self.members)} is replaced: {why}")
            try:
                self._cluster.ray.kill(member.actor)
                member.actor = self._start(member.place)
                await asyncio.wait_for(self._ready(member.actor), START_S)
            except TimeoutError:
                why = f"it took longer than {START_S:g} s to start"
            except Exception as problem:
                why = first_line(problem)
            else:
                member.up = True
                self._changed.set()
                return
        if not any(other.up or other.deaths < DEATHS for other in self.members):
            self._cluster.give_up(f"no {self._what} stays alive (the last: {why})")

    async def _ready(self, actor: Any) -> None:
        await self._cluster.call(actor.begin)
        if self._welcome is not None:
            await self._welcome(actor)

    def close(self) -> None:
        """Nobody is replaced any more. The actors end with the cluster's places; who waits for one gets one, and
        learns that it has ended."""
        self._closed = True
        for member in self.members:
            member.up = True
            for task in (member.task, member.watch):
                if task is not None:
                    task.cancel()
        self._changed.set()


def enter(folder: str) -> None:
    """In an actor: be where the run was started, so that relative paths mean the same."""
    with suppress(OSError):  # another machine: only names that mean the same there can be used
        os.chdir(folder)
