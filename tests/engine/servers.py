"""Stand-ins for inference engines: a real model behind each protocol, and the faults that they have."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import socket
import threading
import time
from collections.abc import AsyncIterator, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple, Protocol

import torch
import uvicorn
from safetensors.torch import load_file
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from upswing.models.load import load_model

CONTEXT = 64


class Drawn(NamedTuple):
    token: int
    logprob: float
    top: tuple[int, float]
    """The likeliest token and its log-prob."""
    version: str


class ModelServer:
    """One forward a token, slow and plain. `faults` names what it does wrong next."""

    def __init__(self) -> None:
        self.model = load_model("tiny").model.eval()
        self.first = {name: p.detach().clone() for name, p in self.model.state_dict().items()}
        self.reset()

    def reset(self) -> None:
        self.restart()
        self.processed = True
        self.faults: list[str] = []
        self.calls: list[str] = []
        self.loads = self.running = 0
        self.aborted: set[str] = set()

    def restart(self) -> None:
        self.model.load_state_dict(self.first)
        self.version = "default"
        self.paused = self.asleep = False

    def load(self, folder: str) -> None:
        self.loads += 1
        self.model.load_state_dict(load_file(Path(folder) / "model.safetensors"), strict=False)

    async def broken(self, fault: str) -> JSONResponse | None:
        """What a server that is down answers; None: it isn't."""
        if fault == "hang":
            await asyncio.sleep(30)
        return JSONResponse({"error": "worker died"}, status_code=500) if fault == "500" else None

    async def sample(
        self,
        ids: list[int],
        count: int,
        temperature: float,
        stop: Collection[int],
        seed: int | None,
        update: dict[str, torch.Tensor] | None = None,
    ) -> list[Drawn]:
        """`update`: an adapter's, by the name of the weight."""
        generator = torch.Generator()
        generator.manual_seed(seed) if seed is not None else generator.seed()
        drawn: list[Drawn] = []
        self.running += 1
        while len(drawn) < count and not (drawn and drawn[-1].token in stop):
            while self.paused or self.asleep:
                await asyncio.sleep(0.001)
            with torch.no_grad():
                weights = dict(self.model.named_parameters())
                changed = {name: weights[name] + delta for name, delta in (update or {}).items()}
                ids_BT = torch.tensor([ids + [one.token for one in drawn]])
                logits = torch.func.functional_call(self.model, changed, (ids_BT,)).logits[0, -1].double()
            logprobs = torch.log_softmax(logits / (temperature or 1.0), -1)
            sampled = torch.multinomial(logprobs.exp(), 1, generator=generator)
            token = int(sampled if temperature else logits.argmax())
            told = logprobs if self.processed else torch.log_softmax(logits, -1)
            top = int(logits.argmax()), float(told.max())
            drawn.append(Drawn(token, float(told[token]), top, self.version))
            await asyncio.sleep(0)
        return drawn


def spans_of(drawn: list[Drawn]) -> list[dict[str, Any]]:
    spans: list[dict[str, Any]] = []
    for index, one in enumerate(drawn):
        if not spans or spans[-1]["version"] != one.version:
            spans.append({"version": one.version, "start": index})
        spans[-1]["end"] = index + 1
    return spans


def update_of(folder: str) -> dict[str, torch.Tensor]:
    """An adapter in peft's layout -> what it adds to each weight."""
    config = json.loads((Path(folder) / "adapter_config.json").read_text())
    scaling = config["lora_alpha"] / (math.sqrt(config["r"]) if config["use_rslora"] else config["r"])
    saved = load_file(Path(folder) / "adapter_model.safetensors")
    names = [name for name in saved if name.endswith(".lora_A.weight")]
    plain = {name: name.removeprefix("base_model.model.").replace(".lora_A", "") for name in names}
    return {plain[name]: scaling * saved[name.replace("_A.", "_B.")] @ saved[name] for name in names}


class VllmServer(ModelServer):
    """`dev`: its weights may be changed. `max_rank`: of adapters. `gpu`: it can sleep."""

    def reset(self) -> None:
        super().reset()
        self.dev, self.max_rank, self.gpu = True, 8, True

    def restart(self) -> None:
        super().restart()
        self.adapters: dict[str, dict[str, torch.Tensor]] = {}

    async def generate(self, request: Request) -> JSONResponse:
        fault = self.faults.pop(0) if self.faults else ""
        if (broken := await self.broken(fault)) is not None:
            return broken
        body = await request.json()
        if "model" in body and body["model"] not in self.adapters:
            return JSONResponse({"error": {"message": "The model does not exist."}}, status_code=404)
        params, update = body["sampling_params"], self.adapters.get(body.get("model", ""))
        stop = params.get("stop_token_ids", ())
        drawn = await self.sample(
            body["token_ids"], params["max_tokens"], params["temperature"], stop, params.get("seed", 0), update
        )
        content = [
            {
                "token_id": one.token,
                "logprob": one.logprob,
                "top_logprobs": [{"token_id": one.top[0], "logprob": one.top[1]}],
            }
            for one in drawn
        ]
        tokens = [one.token for one in drawn]
        choice: dict[str, Any] = {"token_ids": tokens, "logprobs": {"content": content}}
        choice["weight_versions"] = spans_of(drawn)
        choice["finish_reason"] = "abort" if fault == "abort" else "stop" if tokens[-1] in stop else "length"
        if fault == "no logprobs":
            choice["logprobs"] = None
        if fault == "one token short":
            choice["token_ids"] = tokens[:-1]
        if fault == "too many":
            choice["token_ids"], choice["logprobs"]["content"] = tokens * 2, content * 2
        if fault == "a log-prob above 0":
            content[1]["logprob"] = 0.5
        return JSONResponse({"choices": [choice]})

    async def rpc(self, request: Request) -> JSONResponse:
        body = await request.json()
        self.reload(body["method"], body["kwargs"])
        return JSONResponse({"results": [None]})

    def reload(self, method: str, kwargs: dict[str, str]) -> None:
        assert method == "reload_weights" and self.paused, "weights change only while nothing runs"
        self.load(kwargs["weights_path"])

    async def lora(self, request: Request) -> Response:
        if not self.max_rank:
            return JSONResponse({}, status_code=404)
        if request.method == "GET":
            return JSONResponse({}, status_code=405)
        body, name = await request.json(), request.url.path
        self.calls.append(name)
        loads = name == "/v1/load_lora_adapter"
        if loads == (body["lora_name"] in self.adapters):
            return JSONResponse({"error": {"message": "already, or not, loaded"}}, status_code=400 if loads else 404)
        if loads:
            self.adapters[body["lora_name"]] = update_of(body["lora_path"])
        else:
            del self.adapters[body["lora_name"]]
        return PlainTextResponse("Success: the adapter was (un)loaded.")

    def app(self) -> Starlette:
        async def note(request: Request) -> JSONResponse:
            path, query = request.url.path, request.query_params
            self.calls.append(path)
            if path in ("/pause", "/resume"):
                self.paused = path == "/pause"
            if path in ("/sleep", "/wake_up"):
                assert path == "/wake_up" or query["mode"] == "keep"
                self.asleep = path == "/sleep"
            if path == "/update_weight_version":
                self.version = (await request.json())["new_version"]
            if path in ("/weight_info", "/server_info") and not self.dev:
                return JSONResponse({}, status_code=404)
            lora = {"max_lora_rank": self.max_rank} if self.max_rank else None
            config = {"lora_config": lora, "model_config": {"enable_sleep_mode": self.gpu}}
            models = [{"max_model_len": CONTEXT}]
            return JSONResponse(
                {"weight_version": self.version, "success": True, "data": models, "vllm_config": config}
            )

        plain = ("pause", "resume", "reset_prefix_cache", "update_weight_version", "sleep", "wake_up")
        return Starlette(
            routes=[
                Route("/inference/v1/generate", self.generate, methods=["POST"]),
                Route("/collective_rpc", self.rpc, methods=["POST"]),
                *(Route(f"/v1/{one}_lora_adapter", self.lora, methods=["POST", "GET"]) for one in ("load", "unload")),
                *(Route(f"/{path}", note, methods=["POST"]) for path in plain),
                *(Route(path, note) for path in ("/v1/models", "/weight_info", "/server_info")),
            ]
        )


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
        self.args, self.model_config = args, SimpleNamespace(max_model_len=args.max_model_len)
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
        update = None if lora_request is None else self.adapters[str(lora_request.lora_int_id)]
        try:
            await self.broken(fault)
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


class SglangServer(ModelServer):
    """`old`: it tells the last token's weights only, and can't pause. `router`: it stands in front of the real one."""

    def reset(self) -> None:
        super().reset()
        self.old = self.router = self.mute = self.seeded = False
        self.asked: set[str] = set()

    async def generate(self, request: Request) -> JSONResponse:
        fault = self.faults.pop(0) if self.faults else ""
        body = await request.json()
        params = body["sampling_params"]
        assert "ignore_eos" not in params, "it would make SGLang deaf to stop_token_ids"
        self.asked.add(body.get("rid", ""))
        if (broken := await self.broken(fault)) is not None:
            return broken
        stop = params.get("stop_token_ids", ())
        seed = params.get("sampling_seed") if self.seeded else None
        drawn = await self.sample(body["input_ids"], params["max_new_tokens"], params["temperature"], stop, seed)
        meta: dict[str, Any] = {
            "output_token_logprobs": [[one.logprob, one.token, None] for one in drawn],
            "output_top_logprobs": [[[one.top[1], one.top[0], None]] for one in drawn],
            "completion_tokens": len(drawn),
            "weight_version": drawn[-1].version,
            "weight_versions": spans_of(drawn),
            "finish_reason": {"type": "stop" if drawn[-1].token in stop else "length"},
        }
        if self.old:
            del meta["weight_versions"]
        if self.mute:
            del meta["weight_version"], meta["weight_versions"]
        if fault == "no logprobs":
            del meta["output_token_logprobs"]
        if fault == "one token short":
            meta["output_token_logprobs"].pop()
        if fault == "abort":
            meta["finish_reason"] = {"type": "abort", "message": "shutting down"}
        if fault == "NaN":
            meta["output_token_logprobs"][0][0] = None
        return JSONResponse({"text": "", "meta_info": meta})

    async def update(self, request: Request) -> JSONResponse:
        body = await request.json()
        assert body["flush_cache"] and (self.paused or self.old)
        if self.faults[:1] == ["no load"]:
            return JSONResponse({"success": False, "message": "out of memory"}, status_code=400)
        self.load(body["model_path"])
        self.version = body["weight_version"]
        return JSONResponse({"success": True, "message": ""})

    def app(self) -> Starlette:
        async def note(request: Request) -> JSONResponse:
            path = request.url.path
            self.calls.append(path)
            if path.endswith("_generation"):
                if self.old:
                    return JSONResponse({}, status_code=404)
                self.paused = path == "/pause_generation"
            if path == "/abort_request":
                self.aborted.add((await request.json())["rid"])
            return JSONResponse({"weight_version": self.version, "data": [{"max_model_len": CONTEXT}]})

        async def is_there(request: Request) -> JSONResponse:
            return JSONResponse({}, status_code=404 if self.router else 405)

        return Starlette(
            routes=[
                Route("/generate", self.generate, methods=["POST"]),
                Route("/update_weights_from_disk", self.update, methods=["POST"]),
                Route("/update_weights_from_disk", is_there, methods=["GET"]),
                *(Route(f"/{path}_generation", note, methods=["POST"]) for path in ("pause", "continue")),
                Route("/abort_request", note, methods=["POST"]),
                *(Route(path, note) for path in ("/v1/models", "/get_model_info")),
            ]
        )


class HasApp(Protocol):
    def app(self) -> Starlette: ...


@contextlib.contextmanager
def serving(server: HasApp) -> Iterator[str]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        running = uvicorn.Server(uvicorn.Config(server.app(), log_level="error"))
        thread = threading.Thread(target=running.run, kwargs={"sockets": [sock]}, daemon=True)
        thread.start()
        while not running.started:
            time.sleep(0.005)
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        running.should_exit = True
        thread.join()


def logprobs_of(model: Any, prompt: list[int], tokens: tuple[int, ...], temperature: float = 1.0) -> list[float]:
    """By one forward over the whole sequence in float64."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0].double() / temperature
    rows = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    return [float(row[token]) for row, token in zip(rows, tokens, strict=True)]


def served_recipe(engine: dict[str, Any], **stage: Any) -> dict[str, Any]:
    """A recipe of one stage, an rl stage unless told otherwise."""
    rl = {"stage": "rl", "steps": 2, "tasks_per_step": 2, "group_size": 4, "lr": 1e-3, "eval_every": 0}
    return {
        "name": "served",
        "model": "tiny",
        "env": "tests.stages.test_algorithms:TwoTurns",
        "verifiers": ["tests.stages.test_algorithms:even"],
        "engine": engine,
        "limits": {"turn_tokens": 8, "context_tokens": 60},
        "stages": [stage or rl],
    }
