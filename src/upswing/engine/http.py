"""What engines behind a server share: an outage is waited out, new weights go through a folder, answers are checked,
and a server that was restarted is noticed by the label of its tokens' weights and gets the newest again."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import math
import os
import platform
import shutil
import sys
import tempfile
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self, TypeVar

import httpx2
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from upswing.engine.base import NEEDED, Capabilities, Completion, EngineStats, FinishReason, Sampling
from upswing.errors import ConfigError, UpswingError
from upswing.trajectory.validate import LOGPROB_SLACK

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TRIES = 4
"""Of a completion that is broken off, or sampled with other weights than were given."""
OUTAGE_S = 900.0
"""How long a server may be away, unless told otherwise; also what new weights, or any other call but sampling, may take
in all."""
WARN_S = 30.0
BACKOFF_S, MAX_BACKOFF_S = 0.5, 10.0
PROBE_S = 60.0
MEMORY = Path("/dev/shm")
FOLDER = "upswing-weights-"
OVERLOADED = 429

T = TypeVar("T")
Warn = Callable[[str], object]


class ServerRefused(UpswingError, ValueError):
    """The server says that the request itself is wrong: asking again won't help."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class ServerDown(UpswingError):
    """The server doesn't answer (status 0), is overloaded or has an error of its own: asking again may help."""

    def __init__(self, message: str, status: int = 0, after: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.after_s = float(after) if after.isdigit() else 0.0
        """What it asks to wait for at least."""


class Caller(Protocol):
    """What takes an engine's calls: a `Server`, or one's insides in this process."""

    url: str

    async def call(
        self, path: str, *, method: str = "POST", timeout_s: float | None = None, **content: Any
    ) -> dict[str, Any]:
        """`timeout_s`: None: as long as an outage may last; inf: no limit."""
        ...

    async def persist(self, action: Callable[[], Awaitable[T]], *, sampling: bool = False) -> T: ...

    async def close(self) -> None: ...


class Server:
    """An HTTP server. `warn` is told, once an outage, what is waited for; `outage_s`: for how long."""

    def __init__(
        self, name: str, url: str, *, api_key: str | None = None, warn: Warn | None = None, outage_s: float = OUTAGE_S
    ) -> None:
        self.name, self.url, self.api_key, self.outage_s = name, url.rstrip("/"), api_key, outage_s
        self._client: httpx2.AsyncClient | None = None
        self._warn = warn or logging.getLogger("upswing").warning
        self._warned = False
        self.problem = ""
        """What was wrong the last time that it was asked; empty: nothing."""

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}

    def probe(self) -> httpx2.Client:
        """For finding out, before there is an event loop."""
        return httpx2.Client(base_url=self.url, timeout=PROBE_S, headers=self.headers)

    async def call(
        self, path: str, *, method: str = "POST", timeout_s: float | None = None, **content: Any
    ) -> dict[str, Any]:
        """The JSON object that it answers; `{}` for anything else.

        Raises ServerDown without an answer and for a status of 500 or more, or 429; ServerRefused for others from 400.
        """
        if self._client is None:  # in the event loop that it is used in
            limits = httpx2.Limits(max_connections=None)
            self._client = httpx2.AsyncClient(base_url=self.url, limits=limits, headers=self.headers)
        limit_s = {None: self.outage_s, math.inf: None}.get(timeout_s, timeout_s)
        try:
            answer = await self._client.request(method, path, timeout=limit_s, **content)
        except httpx2.TransportError as error:
            raise ServerDown(f"{path}: {type(error).__name__} {error}".rstrip()) from None
        status = answer.status_code
        if status >= 400:
            problem = f"status {status}: {answer.text[:300]}"
            if status >= 500 or status == OVERLOADED:
                raise ServerDown(f"{path}: {problem}", status, answer.headers.get("Retry-After", ""))
            raise ServerRefused(f"the {self.name} server refused {path}: {problem}", status)
        try:
            found = answer.json()
        except ValueError:  # nothing, or a proxy's page
            return {}
        return found if isinstance(found, dict) else {}

    async def persist(self, action: Callable[[], Awaitable[T]], *, sampling: bool = False) -> T:
        """What `action` gives, begun again each time that it finds the server down.

        Raises UpswingError after `outage_s` in all; with `sampling`, which takes as long as it takes and whose caller
        has a limit of its own, after `outage_s` of failures in a row, and after WARN_S of a server that is well
        otherwise.
        """
        loop = asyncio.get_running_loop()
        problem, since, pause_s = "it hangs", None if sampling else loop.time(), BACKOFF_S
        failures = 0

        def say() -> None:
            if not self._warned:
                self._warned = True
                self._warn(f"waiting for the {self.name} server at {self.url}, up to {self.outage_s:g} s ({problem})")

        timer = None if sampling else loop.call_later(WARN_S, say)
        try:
            async with asyncio.timeout(None if sampling else self.outage_s):
                while True:
                    try:
                        found = await action()
                        self._warned, self.problem = False, ""
                        return found
                    except ServerDown as down:
                        problem, since = str(down), since or loop.time()
                        self.problem, failures = problem, failures + (down.status >= 500)
                        lasting = failures >= TRIES and loop.time() - since >= WARN_S
                        if sampling and lasting and await self._is_well():
                            why = f"is well, but failed {failures} times at one request; the last: {problem}"
                            raise UpswingError(f"the {self.name} server at {self.url} {why}") from None
                        if loop.time() - since >= WARN_S:
                            say()
                        if loop.time() - since >= self.outage_s:
                            raise TimeoutError from None
                        await asyncio.sleep(max(pause_s, down.after_s))
                        pause_s = min(2 * pause_s, MAX_BACKOFF_S)
        except TimeoutError:
            why = f"has failed for {self.outage_s:g} s; the last: {problem}; restart it, or raise engine.outage_s"
            raise UpswingError(f"the {self.name} server at {self.url} {why}") from None
        finally:
            if timer is not None:
                timer.cancel()

    async def _is_well(self) -> bool:
        """Whether it answers anything but that it is down; not every server has a page for it."""
        try:
            await self.call("/health", method="GET", timeout_s=PROBE_S)
        except ServerDown:
            return False
        except ServerRefused:
            pass
        return True

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A completion as the server tells it, not yet checked."""

    tokens: tuple[int, ...]
    engine_logprobs: tuple[float, ...]
    finish_reason: FinishReason
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
        self._tag = f"upswing-{uuid.uuid4().hex[:8]}"
        """Of the names that the server is told: another run's are none of this engine's."""
        self._parent = weights_dir or (MEMORY if MEMORY.is_dir() else Path(tempfile.gettempdir()))
        self._folder: Path | None = None
        """Made with the first weights, so that a server that is refused or only evaluated leaves nothing behind."""
        self._hold: int | None = None
        """Keeps it from being swept."""
        self._dtype: torch.dtype | None = None
        """What the server holds weights in; None: not known."""
        self._newest: tuple[Path, str] | None = None
        """The weights that were given last, and their label."""
        self._lock: asyncio.Lock | None = None

    @classmethod
    def connect(cls, url: str, *, weights_dir: Path | None = None, **options: Any) -> Self:
        """`options`: of `Server`.

        Raises ConfigError, with what to do, when there is no such server or it takes no token ids.
        """
        server = Server(cls.name, url, **options)
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

        An outage is waited out. Raises ValueError for what the server refuses, UpswingError when it is away too long,
        and, after several attempts, when it breaks completions off or samples with other weights.
        """
        if (total := len(prompt) + sampling.max_tokens) > self.max_context:
            raise ValueError(
                f"prompt of {len(prompt)} tokens plus max_tokens {sampling.max_tokens} is {total}, above "
                f"{self.request_limit(total)}"
            )
        begun = asked = 0

        async def ask() -> Answer:
            nonlocal begun, asked
            if asked:  # it may have been restarted
                await self._give_back()
            begun, asked = self._loaded, asked + 1
            return await self._sample([int(token) for token in prompt], sampling)

        why = ""
        for _ in range(TRIES):
            try:
                answer = await self.server.persist(ask, sampling=True)
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
            why = "breaks completions off"
            if versions is None:
                labels = ", ".join(sorted({span[0] for span in answer.spans})) or "nothing"
                why = (
                    f"samples with other weights than it was given last (they are labelled {labels}): another client, "
                    "such as another run, changes them, or several servers answer there; give this run its own"
                )
        raise UpswingError(f"the {self.name} server at {self.server.url} {why}")

    def release(self, session: str) -> None:
        """Nothing is kept for a session: the server's prefix cache drops what is oldest."""
        return

    async def update_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Load weights (Hugging Face parameter names) as policy `version`, while completions run."""
        folder = await self._write(weights, str(version))
        async with self._loading():
            await self._replace(folder, self._label_of(version), version)

    def _label_of(self, version: int) -> str:
        return f"{self._tag}-{version}"

    async def _write(self, weights: Mapping[str, torch.Tensor], name: str) -> Path:
        """-> the folder that they are in now."""
        if self._newest is None:
            self._dtype = await self.server.persist(self._held_in)
        return await self._written(name, partial(_save, weights, self._dtype))

    async def _written(self, name: str, save: Callable[[Path], int]) -> Path:
        """-> the new folder that `save` filled. In a thread: merging and copying take long, and completions run.

        Raises UpswingError, with what to do, when there is no room.
        """
        folder = None
        try:
            if self._folder is None:
                _sweep(self._parent)
                self._folder = Path(tempfile.mkdtemp(f"-{platform.node()}", FOLDER, self._parent))
                self._hold = _lock(self._folder)
            folder = self._folder / name
            shutil.rmtree(folder, ignore_errors=True)
            self.stats.weight_bytes += await asyncio.to_thread(save, folder)
        except (OSError, SafetensorError) as problem:
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
            raise UpswingError(
                f"engine.weights_dir: new weights can't be written to '{self._parent}' ({problem}); name a folder that "
                "has room for two sets of them and that the server sees too"
            ) from problem
        return folder

    def _unseen(self, folder: Path, problem: object) -> UpswingError:
        """What to raise for weights that the server could not load."""
        return UpswingError(
            f"engine.weights_dir: the {self.name} server could not load the new weights in '{folder}' ({problem}); if "
            "it doesn't see that folder, name one on a disk that it shares with this process"
        )

    async def _replace(self, folder: Path, label: str, version: int) -> None:
        """Load what is in `folder`, as policy `version`, and delete what it replaces."""
        old, self._newest, self.version = self._newest, (folder, label), version
        await self.server.persist(partial(self._load, folder, label))
        self._loaded = version
        if old is not None and old[0] != folder:
            shutil.rmtree(old[0], ignore_errors=True)

    async def close(self) -> None:
        """The server goes on; what was written for it goes."""
        await self.server.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        if self._hold is not None:
            os.close(self._hold)
            self._hold = None

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

    async def _held_in(self) -> torch.dtype | None:
        """The number format of its weights, where it says so: then no more than that is written."""
        return None

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
        """The policy version of each token; None where they aren't told, or are of weights that this engine didn't give
        the server since `begun`, the version that it had when it was asked."""
        count = len(answer.tokens)
        if self._newest is None:  # nothing was given yet: the server's own weights are version 0
            return (0,) * count
        found = [-1] * count
        for label, start, end in answer.spans:
            tag, _, number = label.rpartition("-")
            if tag != self._tag or not number.isdigit() or not begun <= int(number) <= self.version:
                return None
            found[start:end] = [int(number)] * (min(end, count) - start)
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


def _save(weights: Mapping[str, torch.Tensor], dtype: torch.dtype | None, folder: Path) -> int:
    """-> bytes. Vectors keep their format: they weigh nothing, and servers keep some of them in float32."""
    folder.mkdir()
    held = {}
    for name, tensor in weights.items():
        narrow = dtype is not None and tensor.is_floating_point() and tensor.dim() > 1
        held[name] = tensor.detach().to(dtype if narrow else tensor.dtype).to("cpu").contiguous()
    if EMBEDDING in held:  # where they are tied, a server may have its own copy and would keep the old one
        held[HEAD] = held.get(HEAD, held[EMBEDDING]).clone()
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    return sum(tensor.nbytes for tensor in held.values())


def _lock(folder: Path) -> int | None:
    """A lock that goes with this process, however it ends; None: another has it, or such a disk has none."""
    handle = None
    try:
        handle = os.open(folder, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return handle
    except OSError:
        if handle is not None:
            os.close(handle)
        return None


def _sweep(parent: Path) -> None:
    """Delete what killed processes left behind: memory, where it is /dev/shm. Elsewhere only this machine's: on a disk
    that others share, a lock may hold nobody up but who is on the same machine."""
    for folder in parent.glob(f"{FOLDER}*"):
        host = folder.name.removeprefix(FOLDER).partition("-")[2]
        if parent != MEMORY and host != platform.node():
            continue
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > PROBE_S and (handle := _lock(folder)) is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(handle)
