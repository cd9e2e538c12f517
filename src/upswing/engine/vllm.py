"""vLLM over HTTP: a server that you start, token ids in and out, new weights while it serves.

Start it so that its log-probs are those of the sampling distribution and its weights may be changed (0.30 or newer):

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enable-scale-out --logprobs-mode processed_logprobs

New weights go through a folder that both sides see (memory, where there is `/dev/shm`). Running completions are frozen
meanwhile, their cache is dropped, and they go on with the new weights; the server says which weights sampled which
tokens, and what it says is checked.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx2
import torch
from safetensors.torch import save_file

from upswing.engine.base import Capabilities, Completion, EngineStats, FinishReason, Sampling
from upswing.errors import ConfigError, UpswingError

START = "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enable-scale-out --logprobs-mode processed_logprobs"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_TRIES = 4
"""Of a request that the server answers with an error of its own, or doesn't answer for want of a connection."""
_BACKOFF_S = 0.5
_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


class VllmEngine:
    """An `Engine` that is a vLLM server. `connect` finds out what it can do."""

    def __init__(self, url: str, *, max_context: int, capabilities: Capabilities, weights_dir: Path) -> None:
        self.url, self.max_context, self.capabilities = url, max_context, capabilities
        self.version = 0
        self.stats = EngineStats()
        self._parent = weights_dir
        self._folder: Path | None = None
        """Made with the first weights, so that a server that is refused or only evaluated leaves nothing behind."""
        self._newest: Path | None = None
        self._client: httpx2.AsyncClient | None = None
        self._lock: asyncio.Lock | None = None

    @classmethod
    def connect(cls, url: str, *, weights_dir: Path | None = None) -> VllmEngine:
        """Raises ConfigError, with what to do, when there is no server or it can't be trained with."""
        url = url.rstrip("/")
        with httpx2.Client(base_url=url, timeout=60.0) as client:
            try:
                models = client.get("/v1/models").raise_for_status().json()["data"]
            except (httpx2.HTTPError, KeyError, ValueError) as problem:
                raise ConfigError(
                    f"engine.url: no vLLM server answers at '{url}' ({type(problem).__name__}: {problem}); start one: "
                    f"{START}"
                ) from None
            capabilities = Capabilities(
                exact_logprobs=_are_processed(client),
                weight_updates=client.get("/weight_info").status_code == 200,
            )
        shared = Path("/dev/shm")
        folder = weights_dir or (shared if shared.is_dir() else Path(tempfile.gettempdir()))
        limit = int(models[0].get("max_model_len") or 2**31)
        return cls(url, max_context=limit, capabilities=capabilities, weights_dir=folder)

    def require_training(self) -> None:
        """Raises ConfigError for what the server lacks; it may still evaluate."""
        if not self.capabilities.exact_logprobs:
            raise ConfigError(
                "engine.url: the server's log-probs are not those of the sampling distribution, so nothing can be "
                "learned from its samples; start it with --logprobs-mode processed_logprobs"
            )
        if not self.capabilities.weight_updates:
            raise ConfigError(
                "engine.url: the server takes no new weights; start it with VLLM_SERVER_DEV_MODE=1 in its environment "
                "(and let nobody else reach it)"
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
        return f"the server's max_model_len of {self.max_context}"

    async def generate(self, prompt: Sequence[int], sampling: Sampling, *, session: str | None = None) -> Completion:
        """Sample one completion; see `Engine.generate`. The server finds cached prefixes by itself.

        Raises ValueError for what the server refuses, UpswingError when it fails or its tokens are of other weights.
        """
        for again in (False, True):
            answer = await self._post("/inference/v1/generate", json=self._request(prompt, sampling))
            completion = self._completion(answer, prompt)
            if completion is not None:
                return completion
            if not again:
                await self._give_back()
        raise UpswingError(f"the vLLM server at {self.url} samples with weights that it wasn't given")

    def release(self, session: str) -> None:
        """Nothing is kept for a session: the server's prefix cache drops what is oldest."""

    async def update_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Load weights (Hugging Face parameter names) as policy `version`, while completions run."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="upswing-weights-", dir=self._parent))
        folder = self._folder / str(version)
        folder.mkdir(parents=True, exist_ok=True)
        held = {name: tensor.detach().to("cpu").contiguous() for name, tensor in weights.items()}
        if EMBEDDING in held:  # where they are tied, vLLM has its own copy and would keep the old one
            held[HEAD] = held.get(HEAD, held[EMBEDDING]).clone()
        await asyncio.to_thread(save_file, held, folder / "model.safetensors", {"format": "pt"})
        old, self._newest, self.version = self._newest, folder, version
        await self._load()
        if old is not None and old != folder:
            shutil.rmtree(old, ignore_errors=True)

    async def close(self) -> None:
        """The server goes on; what was written for it goes."""
        if self._client is not None:
            await self._client.aclose()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    # -- what is sent ---------------------------------------------------------------------------------------------

    def _request(self, prompt: Sequence[int], sampling: Sampling) -> dict[str, Any]:
        total = len(prompt) + sampling.max_tokens
        if total > self.max_context:
            raise ValueError(
                f"prompt of {len(prompt)} tokens plus max_tokens {sampling.max_tokens} is {total}, above "
                f"{self.request_limit(total)}"
            )
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
        return {"token_ids": [int(token) for token in prompt], "sampling_params": params}

    def _completion(self, answer: Mapping[str, Any], prompt: Sequence[int]) -> Completion | None:
        """None when tokens are of weights that this engine didn't give."""
        try:
            choice = answer["choices"][0]
            tokens = tuple(int(token) for token in choice["token_ids"])
            logprobs = tuple(float(one["logprob"]) for one in choice["logprobs"]["content"])
        except (KeyError, IndexError, TypeError, ValueError) as problem:
            raise UpswingError(f"the vLLM server's answer lacks tokens or log-probs ({problem!r})") from None
        if len(tokens) != len(logprobs):
            raise UpswingError(f"the vLLM server gave {len(tokens)} tokens and {len(logprobs)} log-probs")
        versions = self._versions(choice.get("weight_versions"), len(tokens))
        if versions is None:
            return None
        self.stats.prefill_tokens += len(prompt)
        self.stats.decode_tokens += len(tokens)
        reason = _REASONS.get(str(choice.get("finish_reason")), FinishReason.CANCELLED)
        return Completion(tokens=tokens, engine_logprobs=logprobs, policy_version=versions, finish_reason=reason)

    def _versions(self, spans: Sequence[Mapping[str, Any]] | None, count: int) -> tuple[int, ...] | None:
        if self._newest is None:  # nothing was given yet: the server's own weights are version 0
            return (0,) * count
        found = [-1] * count
        for span in spans or ():
            label = str(span["version"])
            if not label.isdigit() or int(label) > self.version:
                return None
            found[span["start"] : span["end"]] = [int(label)] * (span["end"] - span["start"])
        return None if -1 in found else tuple(found)

    async def _load(self) -> None:
        """Freeze, load, forget the cache, label, go on: no token can be of a mixture."""
        await self._post("/pause", params={"mode": "keep"})
        try:
            call = {"method": "reload_weights", "kwargs": {"weights_path": str(self._newest)}}
            await self._post("/collective_rpc", json=call)
            dropped = await self._post("/reset_prefix_cache", params={"reset_running_requests": "true"})
            if dropped.get("success") is False:
                raise UpswingError("the vLLM server could not drop the cache of the old weights")
            await self._post("/update_weight_version", json={"new_version": str(self.version)})
        finally:
            await self._post("/resume")

    async def _give_back(self) -> None:
        """A server that was restarted has its first weights again: give it the newest ones."""
        if self._lock is None:
            self._lock = asyncio.Lock()
        async with self._lock:
            info = await self._post("/weight_info", method="GET")
            if str(info.get("weight_version")) != str(self.version) and self._newest is not None:
                await self._load()

    async def _post(self, path: str, *, method: str = "POST", **content: Any) -> dict[str, Any]:
        if self._client is None:
            self._client = httpx2.AsyncClient(
                base_url=self.url, timeout=None, limits=httpx2.Limits(max_connections=None)
            )
        problem = ""
        for attempt in range(_TRIES):
            if attempt:
                await asyncio.sleep(_BACKOFF_S * 2**attempt)
            try:
                answer = await self._client.request(method, path, **content)
            except httpx2.TransportError as error:
                problem = f"{type(error).__name__}: {error}"
                continue
            if answer.status_code < 400:
                found = answer.json() if answer.content else {}
                return found if isinstance(found, dict) else {}
            problem = f"status {answer.status_code}: {answer.text[:300]}"
            if answer.status_code < 500:
                raise ValueError(f"the vLLM server refused {path}: {problem}")
        raise UpswingError(f"the vLLM server at {self.url} failed at {path} {_TRIES} times; the last: {problem}")


def _are_processed(client: httpx2.Client) -> bool:
    """Whether log-probs are taken after the temperature: the same token's then differ at two temperatures."""

    def best(temperature: float) -> float:
        """The likeliest first token's."""
        params = {"max_tokens": 1, "temperature": temperature, "logprobs": 1, "seed": 0, "detokenize": False}
        body = {"token_ids": [1, 2, 3], "sampling_params": params}
        answer = client.post("/inference/v1/generate", json=body)
        if answer.status_code >= 400:
            raise ConfigError(
                f"engine.url: the server doesn't take token ids (status {answer.status_code} at "
                f"/inference/v1/generate); vLLM 0.30 or newer is needed, started with --enable-scale-out: {START}"
            )
        one = answer.json()["choices"][0]["logprobs"]["content"][0]
        return max(float(each["logprob"]) for each in (one, *one["top_logprobs"]))

    return best(0.5) != best(2.0)
