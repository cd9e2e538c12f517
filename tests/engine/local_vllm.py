"""A stand-in for vLLM in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace

import torch
from tests.engine.servers import VllmServer, spans_of, update_of


@dataclass(kw_only=True)
class _Params:
    """vLLM's SamplingParams, as far as they are used."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    stop_token_ids: list[int]
    ignore_eos: bool
    logprobs: int
    detokenize: bool
    output_kind: int
    stop: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.stop and not self.detokenize:
            raise ValueError("stop strings are only supported when detokenize is True")


@dataclass(kw_only=True)
class _EngineArgs:
    """Its AsyncEngineArgs."""

    model: str
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    dtype: str = "auto"
    logprobs_mode: str = "raw_logprobs"
    enable_sleep_mode: bool = False
    disable_log_stats: bool = False
    kv_cache_memory_bytes: int | None = None
    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16
    gpu_memory_utilization: float = 0.92
    tensor_parallel_size: int = 1


@dataclass(kw_only=True)
class _Adapter:
    """Its LoRARequest."""

    lora_name: str
    lora_int_id: int
    lora_path: str


@dataclass
class _Span:
    version: str
    start: int
    end: int


class _ClientError(Exception):
    """Its VLLMClientError."""


class LocalServer(VllmServer):
    """vLLM's AsyncLLM: what it takes and tells is as in its source, the model behind it is the stand-ins' own."""

    def start(self, args: _EngineArgs) -> LocalServer:
        if args.enable_sleep_mode and not self.gpu:
            raise ValueError("Sleep mode is not supported on current platform.")
        dtype = getattr(torch, self.dtype.removeprefix("torch."))
        self.args, self.model_config = args, SimpleNamespace(max_model_len=args.max_model_len, dtype=dtype)
        self.max_loras = args.max_loras
        self.processed, self.on = args.logprobs_mode == "processed_logprobs", True
        return self

    async def generate(
        self, prompt: dict[str, list[int]], params: _Params, request_id: str, *, lora_request: _Adapter | None = None
    ) -> AsyncIterator[SimpleNamespace]:
        fault = self.faults.pop(0) if self.faults else ""
        if fault == "refuse":
            raise _ClientError("the prompt is empty")
        if fault == "dead":
            raise RuntimeError("EngineCore encountered an issue.")
        stop, seed = params.stop_token_ids, params.seed
        adapter = "" if lora_request is None else str(lora_request.lora_int_id)
        try:
            await self.broken(fault)
            async with self.slot(adapter) as update:
                drawn = await self.sample(
                    prompt["prompt_token_ids"], params.max_tokens, params.temperature, stop, seed, update
                )
        except asyncio.CancelledError:
            self.aborted.add(request_id)
            raise
        told = [{one.token: SimpleNamespace(logprob=one.logprob)} for one in drawn]
        output = SimpleNamespace(
            token_ids=[one.token for one in drawn],
            logprobs=told[:-1] if fault == "one token short" else None if fault == "no logprobs" else told,
            finish_reason="abort" if fault == "abort" else "stop" if drawn[-1].token in stop else "length",
            weight_versions=[_Span(**span) for span in spans_of(drawn)],
        )
        yield SimpleNamespace(outputs=[output])

    async def pause_generation(self, *, mode: str) -> None:
        self.calls.append("/pause")
        await asyncio.sleep(30 * self.stuck)
        self.paused = mode == "keep"

    async def resume_generation(self) -> None:
        self.calls.append("/resume")
        self.paused = False

    async def collective_rpc(self, method: str, *, kwargs: dict[str, str]) -> None:
        self.reload(method, kwargs)

    async def reset_prefix_cache(self, *, reset_running_requests: bool) -> bool:
        self.calls.append("/reset_prefix_cache")
        return reset_running_requests

    async def update_weight_version(self, new_version: str) -> None:
        self.calls.append("/update_weight_version")
        self.version = new_version

    async def get_weight_version(self) -> str:
        return self.version

    async def add_lora(self, request: _Adapter) -> bool:
        assert self.args.enable_lora and str(request.lora_int_id) not in self.adapters, "an id is for one adapter"
        self.adapters[str(request.lora_int_id)] = update_of(request.lora_path)
        return True

    async def remove_lora(self, number: int) -> bool:
        return self.adapters.pop(str(number), None) is not None

    async def sleep(self, level: int, mode: str) -> None:
        assert (level, mode) == (1, "keep") and self.args.enable_sleep_mode
        self.calls.append("/sleep")
        self.asleep = True

    async def wake_up(self) -> bool:
        self.calls.append("/wake_up")
        self.asleep = False
        return True

    def shutdown(self) -> None:
        self.on = False

    def modules(self) -> dict[str, ModuleType]:
        """What `import vllm` finds."""
        names = {
            "vllm": {"SamplingParams": _Params},
            "vllm.engine.arg_utils": {"AsyncEngineArgs": _EngineArgs},
            "vllm.exceptions": {"VLLMClientError": _ClientError},
            "vllm.lora.request": {"LoRARequest": _Adapter},
            "vllm.sampling_params": {"RequestOutputKind": SimpleNamespace(FINAL_ONLY=2)},
            "vllm.v1.engine.async_llm": {"AsyncLLM": SimpleNamespace(from_engine_args=self.start)},
        }
        found = {name: ModuleType(name) for name in names}
        for name, content in names.items():
            vars(found[name]).update(content)
        return found
