"""What engines behind a server share: requests that are tried again, new weights through a folder, answers that are
checked, and a server that was restarted, which is noticed by the version of its tokens and gets the weights again."""

from __future__ import annotations

import asyncio
import math
import shutil
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import httpx2
import torch
from safetensors.torch import save_file

from upswing.engine.base import NEEDED, Capabilities, Completion, EngineStats, FinishReason, Sampling
from upswing.errors import ConfigError, UpswingError
from upswing.trajectory.validate import LOGPROB_SLACK

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TRIES = 4
"""Of a request that the server answers with an error of its own or not at all, and of a completion thrown away."""
BACKOFF_S = 0.5
CONTROL_S = 900.0
"""A server that takes longer for anything but sampling hangs; sampling has the turn's own limit."""
PROBE_S = 60.0
MEMORY = Path("/dev/shm")
OVERLOADED = 429


class ServerRefused(UpswingError, ValueError):
    """The server says that the request itself is wrong: asking again won't help."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class Caller(Protocol):
    """What takes an engine's calls: a `Server`, or one's insides in this process."""

    url: str

    async def call(
        self, path: str, *, method: str = "POST", timeout_s: float | None = CONTROL_S, **content: Any
    ) -> dict[str, Any]: ...

    async def close(self) -> None: ...


class Server:
    """An HTTP server, asked again when it fails."""

    def __init__(self, name: str, url: str, api_key: str | None = None) -> None:
        self.name, self.url, self.api_key = name, url.rstrip("/"), api_key
        self._client: httpx2.AsyncClient | None = None

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}

    def probe(self) -> httpx2.Client:
        """For finding out, before there is an event loop."""
        return httpx2.Client(base_url=self.url, timeout=PROBE_S, headers=self.headers)

    async def call(
        self, path: str, *, method: str = "POST", timeout_s: float | None = CONTROL_S, **content: Any
    ) -> dict[str, Any]:
        """The JSON object that it answers; `{}` for anything else.

        Raises ServerRefused for a status below 500, UpswingError once TRIES attempts have failed.
        """
        if self._client is None:  # in the event loop that it is used in
            limits = httpx2.Limits(max_connections=None)
            self._client = httpx2.AsyncClient(base_url=self.url, limits=limits, headers=self.headers)
        problem = ""
        for attempt in range(TRIES):
            if attempt:
                await asyncio.sleep(BACKOFF_S * 2**attempt)
            try:
                answer = await self._client.request(method, path, timeout=timeout_s, **content)
                if answer.status_code < 400:
                    found = answer.json() if answer.content else {}
                    return found if isinstance(found, dict) else {}
            except httpx2.TransportError as error:
                problem = f"{type(error).__name__}: {error}"
                continue
            except ValueError:  # a proxy's page, say
                return {}
            problem = f"status {answer.status_code}: {answer.text[:300]}"
            if answer.status_code < 500 and answer.status_code != OVERLOADED:
                raise ServerRefused(f"the {self.name} server refused {path}: {problem}", answer.status_code)
        raise UpswingError(f"the {self.name} server at {self.url} failed at {path} {TRIES} times; the last: {problem}")

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A completion as the server tells it, not yet checked."""

    tokens: tuple[int, ...]
    engine_logprobs: tuple[float, ...]
    finish_reason: FinishReason
    label: str | None = None
    """Of the weights that the last token was sampled with; None: not told."""
    spans: tuple[tuple[str, int, int], ...] = ()
    """(label, first token, end) of each set of weights; empty: not told."""


class HttpEngine(ABC):
    """An `Engine` that is a server; `connect` finds out what it can do. Subclasses speak a server's own protocol."""

    name: ClassVar[str]
    start: ClassVar[str]
    """The command that starts one which can be trained with."""
    best: ClassVar[Capabilities] = Capabilities()
    """What a server that was started so can do."""
    remedies: ClassVar[Mapping[str, str]]
    """What to do about a capability that is missing."""
    reserved: ClassVar[int] = 0
    """Tokens of the server's context that a request can't have."""

    def __init__(
        self, server: Caller, *, max_context: int, capabilities: Capabilities, weights_dir: Path | None = None
    ) -> None:
        self.server, self.max_context, self.capabilities = server, max_context, capabilities
        self.version = self._loaded = 0
        self.stats = EngineStats()
        self._parent = weights_dir or (MEMORY if MEMORY.is_dir() else Path(tempfile.gettempdir()))
        self._folder: Path | None = None
        """Made with the first weights, so that a server that is refused or only evaluated leaves nothing behind."""
        self._newest: tuple[Path, str] | None = None
        """The weights that were given last, and their label."""
        self._lock: asyncio.Lock | None = None

    @classmethod
    def connect(cls, url: str, *, weights_dir: Path | None = None, api_key: str | None = None) -> Self:
        """Raises ConfigError, with what to do, when there is no such server or it takes no token ids."""
        server = Server(cls.name, url, api_key)
        with server.probe() as client:
            try:
                models = client.get("/v1/models").raise_for_status().json()["data"]
                limit = int(models[0].get("max_model_len") or 2**31) - cls.reserved
                capabilities = cls._probe(client)
            except ConfigError:
                raise
            except (httpx2.HTTPError, LookupError, TypeError, ValueError) as problem:
                raise ConfigError(
                    f"engine.url: no {cls.name} server answers at '{url}' ({type(problem).__name__}: {problem}); "
                    f"start one: {cls.start}"
                ) from None
        return cls(server, max_context=limit, capabilities=capabilities, weights_dir=weights_dir)

    def require_training(self) -> None:
        """Raises ConfigError for what the server lacks; it may still evaluate."""
        for name in self.capabilities.missing():
            raise ConfigError(
                f"engine.url: the {self.name} server {NEEDED[name]}, so it can only evaluate; {self.remedies[name]}"
            )

    @property
    def kv_tokens(self) -> int:
        """The server's own affair: it puts requests back when its cache is full."""
        return sys.maxsize

    @property
    def max_request(self) -> int:
        """Tokens, prompt and completion together, that one request may have."""
        return self.max_context

    def request_limit(self, total: int) -> str:
        """What a request of `total` tokens is above; for messages."""
        return f"the server's max_model_len of {self.max_context + self.reserved}" + (
            f" less {self.reserved}" if self.reserved else ""
        )

    async def generate(self, prompt: Sequence[int], sampling: Sampling, *, session: str | None = None) -> Completion:
        """Sample one completion; see `Engine.generate`. The server finds cached prefixes by itself.

        Raises ValueError for what the server refuses, UpswingError when it fails, breaks off or its tokens are of
        other weights, each time after several attempts.
        """
        if (total := len(prompt) + sampling.max_tokens) > self.max_context:
            raise ValueError(
                f"prompt of {len(prompt)} tokens plus max_tokens {sampling.max_tokens} is {total}, above "
                f"{self.request_limit(total)}"
            )
        why = ""
        for attempt in range(TRIES):
            if attempt:
                await self._give_back()
            begun = self._loaded
            try:
                answer = await self._sample([int(token) for token in prompt], sampling)
            except (LookupError, TypeError, ValueError) as problem:
                if isinstance(problem, ServerRefused):
                    raise
                raise UpswingError(f"the {self.name} server's answer lacks tokens or log-probs ({problem!r})") from None
            self._check(answer, sampling)
            versions = self._versions(answer, begun)
            if versions is not None and answer.finish_reason is not FinishReason.CANCELLED:
                self.stats.prefill_tokens += len(prompt)
                self.stats.decode_tokens += len(answer.tokens)
                return Completion(
                    tokens=answer.tokens,
                    engine_logprobs=answer.engine_logprobs,
                    policy_version=versions,
                    finish_reason=answer.finish_reason,
                )
            why = "samples with weights that it wasn't given" if versions is None else "breaks completions off"
        raise UpswingError(f"the {self.name} server at {self.server.url} {why}")

    def release(self, session: str) -> None:
        """Nothing is kept for a session: the server's prefix cache drops what is oldest."""
        return

    async def update_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Load weights (Hugging Face parameter names) as policy `version`, while completions run."""
        folder = await self._write(weights, str(version))
        async with self._loading():
            await self._replace(folder, str(version), version)

    async def _write(self, weights: Mapping[str, torch.Tensor], name: str) -> Path:
        """-> the folder that they are in now."""
        folder = self._place(name)
        folder.mkdir(exist_ok=True)
        held = {name: tensor.detach().to("cpu").contiguous() for name, tensor in weights.items()}
        if EMBEDDING in held:  # where they are tied, a server may have its own copy and would keep the old one
            held[HEAD] = held.get(HEAD, held[EMBEDDING]).clone()
        await asyncio.to_thread(save_file, held, folder / "model.safetensors", {"format": "pt"})
        self.stats.weight_bytes += sum(tensor.nbytes for tensor in held.values())
        return folder

    def _place(self, name: str) -> Path:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="upswing-weights-", dir=self._parent))
        return self._folder / name

    async def _replace(self, folder: Path, label: str, version: int) -> None:
        """Load what is in `folder`, as policy `version`, and delete what it replaces."""
        old, self._newest, self.version = self._newest, (folder, label), version
        await self._load(folder, label)
        self._loaded = version
        if old is not None and old[0] != folder:
            shutil.rmtree(old[0], ignore_errors=True)

    async def close(self) -> None:
        """The server goes on; what was written for it goes."""
        await self.server.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    # -- what each server has its own words for -----------------------------------------------------------------------

    @classmethod
    @abstractmethod
    def _probe(cls, client: httpx2.Client) -> Capabilities:
        """What the server can do. Raises ConfigError when it takes no token ids."""

    @abstractmethod
    async def _sample(self, prompt: list[int], sampling: Sampling) -> Answer:
        """One request. Raises LookupError, TypeError or ValueError for an answer that it can't read."""

    @abstractmethod
    async def _load(self, folder: Path, label: str) -> None:
        """Load the weights in `folder` and forget the cache, so that no token is of a mixture."""

    @abstractmethod
    async def _label(self) -> str:
        """Of the weights that the server has."""

    # -- what is checked ----------------------------------------------------------------------------------------------

    def _check(self, answer: Answer, sampling: Sampling) -> None:
        """Raises UpswingError for what can't be a completion."""
        tokens, logprobs = len(answer.tokens), len(answer.engine_logprobs)
        wrong = f"{tokens} tokens and {logprobs} log-probs" if tokens != logprobs else ""
        if tokens > sampling.max_tokens:
            wrong = f"{tokens} tokens where {sampling.max_tokens} were asked for"
        if not tokens and answer.finish_reason is not FinishReason.CANCELLED:
            wrong = "no token at all"
        odd = [p for p in answer.engine_logprobs if not (math.isfinite(p) and p <= LOGPROB_SLACK)]
        if wrong or odd:
            raise UpswingError(f"the {self.name} server gave {wrong or f'the log-prob {odd[0]}'}")

    def _versions(self, answer: Answer, begun: int) -> tuple[int, ...] | None:
        """The policy version of each token; None when it is none that this engine gave, or can't be known.

        A server that only tells the last token's is believed where no weights were loaded since `begun`, the version
        that it had when it was asked.
        """
        count = len(answer.tokens)
        if self._newest is None:  # nothing was given yet: the server's own weights are version 0
            return (0,) * count
        spans = answer.spans
        if not spans and answer.label == str(begun) and self._loaded == begun:
            spans = ((str(begun), 0, count),)
        found = [-1] * count
        for label, start, end in spans:
            if not label.isdigit() or int(label) > self.version:
                return None
            found[start:end] = [int(label)] * (min(end, count) - start)
        return None if -1 in found else tuple(found)

    def _loading(self) -> asyncio.Lock:
        """One load at a time."""
        if self._lock is None:
            self._lock = asyncio.Lock()
        return self._lock

    async def _give_back(self) -> None:
        """A server that was restarted has its first weights again: give it the newest ones."""
        async with self._loading():
            if self._newest is not None and await self._label() != self._newest[1]:
                await self._load(*self._newest)
                self._loaded = self.version
