"""vLLM: a server that you start, or its engine in this process; token ids in and out, new weights while it serves.

Start a server so that its log-probs are those of the sampling distribution and its weights may be changed (0.30 or
newer):

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enable-scale-out --logprobs-mode processed_logprobs

New weights go through a folder that both sides see (memory, where there is `/dev/shm`). Running completions are frozen
meanwhile, their cache is dropped, and they go on with the new weights; the server says which weights sampled which
tokens, and what it says is checked.

Adapters: the frozen weights go once, then each update's adapter goes by itself, under a name of its own. Nothing stops
for it: running completions end with the adapter that they began with, and vLLM keeps the caches of adapters apart.
(Replacing one in place, `load_inplace`, has vLLM 0.32 read it from disk again for every batch, and a batch with
completions from before and after the change can't tell the two apart.)
"""

from __future__ import annotations

import contextlib
import math
import shutil
import weakref
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import httpx2
import torch

from upswing.engine.adapter import Adapter
from upswing.engine.base import Capabilities, FinishReason, Sampling
from upswing.engine.http import PROBE_S, Answer, Caller, HttpEngine, Server, ServerDown, ServerRefused
from upswing.engine.vllm_local import LocalVllm
from upswing.errors import ConfigError, UpswingError

_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
_LOAD, _UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


def max_lora_rank(rank: int) -> int:
    """The smallest that vLLM can be started with which has room for adapters of `rank`."""
    return next(one for one in _RANKS if one >= rank)


@dataclass(kw_only=True)
class _Loaded:
    """An adapter that the server has."""

    name: str
    folder: Path
    version: int
    users: int = 0
    """Completions that are being sampled with it: until they end, vLLM may read the folder again."""


class VllmEngine(HttpEngine):
    name = "vLLM"
    start = "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enable-scale-out --logprobs-mode processed_logprobs"
    remedies: ClassVar = {
        "exact_logprobs": "start it with --logprobs-mode processed_logprobs",
        "weight_updates": "start it with VLLM_SERVER_DEV_MODE=1 in its environment (and let nobody else reach it)",
        "versions": "a newer vLLM is needed, with weight_versions in its answers (0.32 has them)",
    }

    def __init__(self, server: Caller, **options: Any) -> None:
        super().__init__(server, **options)
        self._adapts = self._sleeps = self._asleep = False
        self._users = 0
        self._base: weakref.ref[object] | None = None
        """Whose frozen weights the server has, below the adapters."""
        self._adapter: _Loaded | None = None
        """What policy `version` is sampled with; None: whole weights."""
        self._earlier: list[_Loaded] = []

    @classmethod
    def here(cls, given: Mapping[str, Any], options: Mapping[str, Any], *, weights_dir: Path | None = None) -> Self:
        """In this process; see LocalVllm."""
        local = LocalVllm(given, options)
        return cls(local, max_context=local.max_context, capabilities=cls.best, weights_dir=weights_dir)

    def use(self, *, adapter_rank: int | None = None, adapters: int = 2, sleep: bool = False) -> None:
        """Take adapters of up to that rank, so many at once, and sleep where `in_use` and `sleep` say so.

        Raises ConfigError for what a server was not started for.
        """
        if isinstance(self.server, Server) and (adapter_rank or sleep):
            with self.server.probe() as client:
                try:
                    asked = {"config_format": "json"}  # takes seconds: it looks at its machine, too
                    config = client.get("/server_info", params=asked, timeout=self.server.outage_s).json()[
                        "vllm_config"
                    ]
                    loads = client.get(_LOAD).status_code != 404  # 405: it is there, for POST
                    takes = (config["lora_config"] if loads else None) or {"max_lora_rank": 0, "max_loras": 0}
                    most, room = int(takes["max_lora_rank"]), int(takes["max_loras"])
                    can_sleep = bool(config["model_config"]["enable_sleep_mode"])
                except (httpx2.HTTPError, LookupError, TypeError, ValueError) as problem:
                    raise ConfigError(
                        f"engine.url: the vLLM server doesn't say what it was started with, at /server_info "
                        f"({type(problem).__name__}: {problem}); {self.remedies['weight_updates']}"
                    ) from None
            if adapter_rank and (adapter_rank > most or adapters > room):
                has = f"takes {room} adapters at once, of rank {most} at most" if most else "takes no adapters"
                raise ConfigError(
                    f"engine.adapters: the vLLM server {has}; needed are {adapters} (max_staleness + 2: completions "
                    f"end with their own) of rank {adapter_rank} (lora.r); start it with "
                    f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and --enable-lora --max-lora-rank "
                    f"{max_lora_rank(adapter_rank)} --max-loras {adapters}, or leave adapters out"
                )
            if sleep and not can_sleep:
                raise ConfigError("engine.sleep: the vLLM server can't; start it with --enable-sleep-mode (GPUs only)")
        self._adapts, self._sleeps = adapter_rank is not None, sleep

    @classmethod
    def _probe(cls, client: httpx2.Client) -> Capabilities:
        versions = True

        def best(temperature: float) -> float:
            """The likeliest first token's log-prob."""
            nonlocal versions
            params = {"max_tokens": 1, "temperature": temperature, "logprobs": 1, "seed": 0, "detokenize": False}
            answer = client.post("/inference/v1/generate", json={"token_ids": [1, 2, 3], "sampling_params": params})
            if answer.status_code >= 400:
                raise ConfigError(
                    f"engine.url: the server doesn't take token ids (status {answer.status_code} at "
                    f"/inference/v1/generate); vLLM 0.30 or newer is needed, started with --enable-scale-out: "
                    f"{cls.start}"
                )
            choice = answer.json()["choices"][0]
            versions = versions and bool(choice.get("weight_versions"))
            one = choice["logprobs"]["content"][0]
            return max(float(each["logprob"]) for each in (one, *one["top_logprobs"]))

        return Capabilities(
            exact_logprobs=best(0.5) != best(2.0),  # else they are taken before the temperature
            weight_updates=client.get("/weight_info").status_code == 200,
            versions=versions,
        )

    async def _sample(self, prompt: list[int], sampling: Sampling) -> Answer:
        params: dict[str, Any] = {
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "seed": sampling.seed % 2**63,
            "stop_token_ids": list(sampling.stop_tokens),
            "ignore_eos": True,  # what ends a turn is said above, and only that
            "logprobs": 0,
            "detokenize": bool(sampling.stop_strings),
        }
        if sampling.stop_strings:
            params["stop"] = list(sampling.stop_strings)
        await self._wake()
        body = {"token_ids": prompt, "sampling_params": params}
        with self._adapted(body) as (adapter, label):
            try:
                answer = await self.server.call("/inference/v1/generate", timeout_s=math.inf, json=body)
            except ServerRefused as problem:
                if adapter is None or problem.status != 404:
                    raise
                return Answer(tokens=(), engine_logprobs=(), finish_reason=FinishReason.CANCELLED)  # it was restarted
        choice = answer["choices"][0]
        tokens = tuple(int(token) for token in choice["token_ids"])
        told = choice.get("weight_versions") or ()
        spans = tuple((str(span["version"]), int(span["start"]), int(span["end"])) for span in told)
        if adapter is not None:  # what is told is of the weights below it, which must have been its own
            own = {span[0] for span in spans} == {label}
            spans = ((self._label_of(adapter.version) if own else "weights below the adapter", 0, len(tokens)),)
        return Answer(
            tokens=tokens,
            engine_logprobs=tuple(float(one["logprob"]) for one in choice["logprobs"]["content"]),
            finish_reason=_REASONS.get(str(choice.get("finish_reason")), FinishReason.CANCELLED),
            spans=spans,
        )

    @contextlib.contextmanager
    def _adapted(self, body: dict[str, Any]) -> Iterator[tuple[_Loaded | None, str | None]]:
        """Adds the adapter to a request -> (it, the label of the weights below it)."""
        adapter = self._adapter
        if adapter is None:
            yield None, None
            return
        body["model"] = adapter.name
        adapter.users += 1
        try:
            yield adapter, self._newest and self._newest[1]
        finally:
            adapter.users -= 1

    # -- new weights ----------------------------------------------------------------------------------------------

    async def update_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """As every engine's; of weights with an adapter, that alone where `use` said so."""
        await self._wake()
        adapter: Adapter | None = getattr(weights, "adapter", None) if self._adapts else None
        if adapter is not None:
            await self._update_adapter(adapter, version)
            return
        folder = await self._write(weights, str(version))
        async with self._loading():
            self._base = None
            self._retire()
            await self._replace(folder, self._label_of(version), version)

    async def _update_adapter(self, adapter: Adapter, version: int) -> None:
        def save(folder: Path) -> int:
            adapter.save(folder)
            return sum(path.stat().st_size for path in folder.iterdir())

        below = None
        if self._base is None or self._base() is not adapter.of:
            below = await self._write(adapter.frozen, f"below-{version}")
        folder = await self._written(f"adapter-{version}", save)
        async with self._loading():
            if below is not None:
                self._retire()
                # A label with a longer tag: a token of those weights alone is of no version.
                await self._replace(below, f"{self._tag}-below-{version}", self.version)
                self._base = weakref.ref(adapter.of)
            new = _Loaded(name=self._label_of(version), folder=folder, version=version)
            await self.server.persist(partial(self._load_adapter, new))
            self._retire()
            self._adapter, self.version, self._loaded = new, version, version
            await self._forget_unused()

    async def _load_adapter(self, adapter: _Loaded) -> None:
        load = {"lora_name": adapter.name, "lora_path": str(adapter.folder)}
        try:
            await self.server.call(_LOAD, json=load)
        except ServerRefused:  # it knows one of that name: its answer was lost, or the weights below it are new
            with contextlib.suppress(ServerRefused):
                await self.server.call(_UNLOAD, json={"lora_name": adapter.name})
            try:
                await self.server.call(_LOAD, json=load)
            except ServerRefused as problem:
                raise self._unseen(adapter.folder, problem) from None

    def _retire(self) -> None:
        if self._adapter is not None:
            self._earlier.append(self._adapter)
            self._adapter = None

    async def _forget_unused(self) -> None:
        """Of earlier adapters, those that no completion is sampled with."""
        for old in [one for one in self._earlier if not one.users]:
            self._earlier.remove(old)
            with contextlib.suppress(ServerRefused, ServerDown):  # it was restarted since, or is going to be
                await self.server.call(_UNLOAD, json={"lora_name": old.name})
            shutil.rmtree(old.folder, ignore_errors=True)

    async def _load(self, folder: Path, label: str) -> None:
        await self.server.call("/pause", params={"mode": "keep"})
        try:
            await self._reload(folder)
            dropped = await self.server.call("/reset_prefix_cache", params={"reset_running_requests": "true"})
            if dropped.get("success") is False:
                raise UpswingError("the vLLM server could not drop the cache of the old weights")
            await self.server.call("/update_weight_version", json={"new_version": label})
        finally:
            await self.server.call("/resume", timeout_s=PROBE_S)
        if self._adapter is not None:  # given back: the server lost it, or vLLM did with the weights below it
            await self._load_adapter(self._adapter)

    async def _reload(self, folder: Path) -> None:
        call = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        try:
            await self.server.call("/collective_rpc", json=call)
        except ServerDown as down:
            if down.status != 500:
                raise
            await self.server.call("/health", method="GET")  # else it is down indeed
            raise self._unseen(folder, down) from None

    async def _label(self) -> str:
        return str((await self.server.call("/weight_info", method="GET", timeout_s=PROBE_S)).get("weight_version"))

    async def _held_in(self) -> torch.dtype | None:
        asked = {"config_format": "json"}
        try:
            told = await self.server.call("/server_info", method="GET", params=asked)
            found = getattr(torch, str(told["vllm_config"]["model_config"]["dtype"]).removeprefix("torch."), None)
        except (ServerRefused, LookupError, TypeError):
            return None
        return found if isinstance(found, torch.dtype) else None

    # -- a GPU that is shared with the learner --------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def in_use(self) -> AsyncIterator[None]:
        """While something samples; once nothing does, it sleeps."""
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            if not self._users:
                await self.sleep()

    async def sleep(self) -> None:
        """Leave the GPU's memory to a learner until the next completion or weights. Nothing unless `use` said so."""
        async with self._loading():
            if self._sleeps and not self._asleep:
                self._asleep = True  # first: who comes meanwhile waits, and wakes it
                await self.server.persist(partial(self.server.call, "/sleep", params={"level": 1, "mode": "keep"}))

    async def _wake(self) -> None:
        if self._asleep:
            async with self._loading():
                if self._asleep:
                    torch.cuda.empty_cache()  # what the learner's allocator keeps but doesn't use
                    await self.server.persist(partial(self.server.call, "/wake_up"))
                    self._asleep = False
