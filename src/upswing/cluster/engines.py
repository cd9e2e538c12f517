"""Engines as actors: together one `Engine`. A trajectory stays where its cache is; a dead engine's requests are sampled
again by the others, and its replacement has the newest weights before it is used."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import fields
from typing import Any

import numpy as np
import torch

from upswing.cluster.actors import START_S, Cluster, Gone, Member, Pool, enter
from upswing.cluster.ranks import led
from upswing.engine.base import Capabilities, Completion, EngineStats, FinishReason, Sampling
from upswing.engine.torch import TorchEngine
from upswing.errors import UpswingError
from upswing.models.load import load_model

TRIES = 4
"""Engines that may die of, or under, one request."""


class EngineActor:
    """An embedded engine in a process of its own."""

    def __init__(self, folder: str, model: str, options: Mapping[str, Any]) -> None:
        enter(folder)
        self._model, self._options, self._loads = model, options, False

    async def begin(self) -> dict[str, Any]:
        loaded = load_model(self._model)
        engine = TorchEngine.from_model(loaded.model, tokenizer=loaded.tokenizer, **self._options)
        self._engine, dtype = engine, torch.float32 if self._options.get("quantize") else engine.model.dtype
        return {"kv_tokens": engine.kv_tokens, "max_request": engine.max_request, "weights": dtype}

    async def request_limit(self, total: int) -> str:
        return self._engine.request_limit(total)

    async def generate(
        self, prompt: list[int], sampling: Sampling, session: str | None
    ) -> tuple[Completion, EngineStats]:
        return await self._engine.generate(prompt, sampling, session=session), self._engine.stats

    async def release(self, session: str) -> None:
        self._engine.release(session)

    async def load(self, weights: Mapping[str, Any], version: int) -> None:
        """`weights`: names -> references to arrays, which are fetched while it still samples."""
        arrays = await asyncio.gather(*weights.values())
        self._loads = True
        try:
            await self._engine.update_weights(Received(dict(zip(weights, arrays, strict=True))), version)
        finally:
            self._loads = False

    async def answer(self) -> None:
        """Once its thread has done what it is at; to load weights may take longer."""
        if not self._loads:
            await self._engine._exclusively(lambda: None)


def sent(tensor: torch.Tensor, dtype: torch.dtype) -> np.ndarray:
    """As it is put into the object store, from where engines read it without a copy each; bfloat16 as int16, for NumPy
    has none."""
    held = tensor.detach().to("cpu", dtype)
    found: np.ndarray = (held.view(torch.int16) if dtype == torch.bfloat16 else held).numpy()
    return found


class Received(Mapping[str, torch.Tensor]):
    """Of arrays that `sent` made. Each is copied when it is read: they are Ray's, and read-only."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self._arrays = arrays

    def __getitem__(self, name: str) -> torch.Tensor:
        found = torch.tensor(self._arrays[name])
        return found.view(torch.bfloat16) if found.dtype == torch.int16 else found

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


class RayEngines:
    """Embedded engines on a Ray cluster. It ends the cluster's actors, all of them, when it is closed."""

    capabilities = Capabilities()

    def __init__(self, cluster: Cluster, model: str, *, turn_timeout_s: float = 600.0, **options: Any) -> None:
        """`options` of each TorchEngine. One that doesn't answer for half of `turn_timeout_s` is replaced: the other
        half is left for its requests. Raises ConfigError for what it can't be made of."""
        self.cluster, self.version, self._newest = cluster, 0, 0
        self._weights: dict[str, Any] = {}
        """References to the newest ones; empty: those of `model`."""
        self._counted: dict[Any, EngineStats] = {}
        """By actor, the dead ones too."""
        self._given = EngineStats()
        """What was put into the object store."""
        self._closed = False

        def start(place: int) -> Any:
            return cluster.start(EngineActor, place, os.getcwd(), model, options)

        with ExitStack() as parts:  # nothing stays behind when one of them can't start
            parts.callback(cluster.close)
            places = range(cluster.section.engines)
            self.pool = Pool(cluster, "engine", start, places, self._catch_up, patience_s=turn_timeout_s / 2)
            parts.callback(self.pool.close)
            parts.enter_context(led(cluster))
            self._parts = parts.pop_all()
        begun = self.pool.begun
        self.kv_tokens = sum(one["kv_tokens"] for one in begun)
        """Of all engines together."""
        self.max_request = min(one["max_request"] for one in begun)
        self._dtype: torch.dtype = max((one["weights"] for one in begun), key=lambda dtype: dtype.itemsize)
        """Of weights on their way: what the engines would make of them anyway; of products in int8, what they are made
        from."""

    def request_limit(self, total: int) -> str:
        """What a request of `total` tokens is above; for messages."""
        return str(self.cluster.wait([self.pool.members[0].actor.request_limit.remote(total)])[0])

    @property
    def stats(self) -> EngineStats:
        each = (*self._counted.values(), self._given)
        return EngineStats(**{one.name: sum(getattr(s, one.name) for s in each) for one in fields(EngineStats)})

    async def generate(self, prompt: Sequence[int], sampling: Sampling, *, session: str | None = None) -> Completion:
        """Sample one completion; see `Engine.generate`. Raises UpswingError when TRIES engines were lost over it."""
        why = ""
        for _ in range(TRIES):
            member, begun = await self.pool.pick(session), self.version
            actor = member.actor
            try:
                done, stats = await self.pool.call(member, "generate", list(prompt), sampling, session)
            except Gone as problem:
                why = str(problem)
                if self._closed:
                    return Completion(
                        tokens=(), engine_logprobs=(), policy_version=(), finish_reason=FinishReason.CANCELLED
                    )
                continue
            self._counted[actor] = stats
            if all(begun <= version <= self._newest for version in done.policy_version):
                found: Completion = done
                return found
            why = f"its tokens are of versions {sorted(set(done.policy_version))}, not {begun} to {self._newest}"
            self.pool.lose(member, actor, why)
        raise UpswingError(f"{TRIES} engines were lost over one request; the last: {why}")

    def release(self, session: str) -> None:
        """Free what is kept for a session. Unknown sessions are ignored."""
        if (holder := self.pool.forget(session)) is not None and not (self.cluster.is_gone or self._closed):
            with suppress(Exception):  # it has died, and its cache with it
                holder.actor.release.remote(session)

    async def update_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Load weights, put once into Ray's object store, into every engine, while completions run.

        Does nothing when the cluster is gone: the run then ends by itself, with what the learner has.
        """
        if not await self.cluster.check():
            return
        before = self._weights, self._newest
        self._weights, self._newest = await asyncio.to_thread(self._put, weights), version
        up = [member for member in self.pool.members if member.up]
        for problem in await asyncio.gather(*map(self._load, up), return_exceptions=True):
            if problem is not None:
                self._weights, self._newest = before
                raise problem
        self.version = version

    async def _load(self, member: Member) -> None:
        """The newest weights into one engine; one that dies, or hangs, is replaced. Raises what loading raises."""
        actor = member.actor
        try:
            await asyncio.wait_for(self.pool.call(member, "load", self._weights, self._newest), START_S)
        except TimeoutError:
            self.pool.lose(member, actor, f"it took longer than {START_S:g} s to load weights")
        except Gone:
            pass

    def _put(self, weights: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """One at a time: a lazy mapping makes each when it is read."""
        put = {}
        for name, tensor in weights.items():
            put[name] = self.cluster.ray.put(array := sent(tensor, self._dtype))
            self._given.weight_bytes += array.nbytes
        return put

    async def _catch_up(self, actor: Any) -> None:
        """Give a new engine the newest weights, and those that came meanwhile."""
        given = 0
        while given != self._newest:
            given = self._newest
            await self.cluster.call(actor.load, self._weights, given)

    async def close(self) -> None:
        """Stop; requests still running end as cancelled."""
        if not self._closed:
            self._closed = True
            self._parts.close()
