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

from upswing.cluster.actors import Cluster, Gone, Pool, enter
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
        self._model, self._options = model, options

    async def begin(self) -> dict[str, int]:
        loaded = load_model(self._model)
        self._engine = TorchEngine.from_model(loaded.model, tokenizer=loaded.tokenizer, **self._options)
        return {"kv_tokens": self._engine.kv_tokens, "max_request": self._engine.max_request}

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
        await self._engine.update_weights(_Tensors(dict(zip(weights, arrays, strict=True))), version)


class _Tensors(Mapping[str, torch.Tensor]):
    """Each is copied when it is read: the arrays are Ray's, and read-only."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self._arrays = arrays

    def __getitem__(self, name: str) -> torch.Tensor:
        return torch.tensor(self._arrays[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


class RayEngines:
    """Embedded engines on a Ray cluster. It ends the cluster's actors, all of them, when it is closed."""

    capabilities = Capabilities()

    def __init__(self, cluster: Cluster, model: str, **options: Any) -> None:
        """`options` of each TorchEngine. Raises ConfigError for what it can't be made of."""
        self.cluster, self.version, self._newest = cluster, 0, 0
        self._weights: dict[str, Any] = {}
        """References to the newest ones; empty: those of `model`."""
        self._counted: dict[Any, EngineStats] = {}
        """By actor, the dead ones too."""
        self._closed = False

        def start(place: int) -> Any:
            return cluster.start(EngineActor, place, os.getcwd(), model, options)

        self.pool = Pool(cluster, "engine", start, range(cluster.section.engines), self._catch_up)
        self.kv_tokens = sum(one["kv_tokens"] for one in self.pool.begun)
        """Of all engines together."""
        self.max_request = min(one["max_request"] for one in self.pool.begun)
        self._ranks = ExitStack()
        self._ranks.enter_context(led(cluster))

    def request_limit(self, total: int) -> str:
        """What a request of `total` tokens is above; for messages."""
        return str(self.cluster.wait([self.pool.members[0].actor.request_limit.remote(total)])[0])

    @property
    def stats(self) -> EngineStats:
        each = self._counted.values()
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
        if (holder := self.pool.forget(session)) is not None and not self.cluster.is_gone:
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
        loading = (self.pool.call(member, "load", self._weights, version) for member in up)
        for problem in await asyncio.gather(*loading, return_exceptions=True):
            if isinstance(problem, BaseException) and not isinstance(problem, Gone):
                self._weights, self._newest = before
                raise problem
        self.version = version

    def _put(self, weights: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """One at a time: a lazy mapping makes each when it is read."""
        put = self.cluster.ray.put
        return {name: put(tensor.detach().to("cpu", torch.float32).numpy()) for name, tensor in weights.items()}

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
            self._ranks.close()
            self.pool.close()
            self.cluster.close()
