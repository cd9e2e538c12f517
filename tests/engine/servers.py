"""Stand-ins for inference engines: a real model behind each protocol, and the faults that they have."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import queue
import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from pathlib import Path
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
    """One forward a token, slow and plain. `faults` names what it does wrong next. `stuck`: it never pauses. `mute`: it
    doesn't say which weights it has sampled with."""

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
        self.stuck = self.mute = False
        self.aborted: set[str] = set()

    def restart(self) -> None:
        self.model.load_state_dict(self.first)
        self.version = "default"
        self.paused: bool | str = False
        self.asleep = False

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
        cut: Callable[[], bool] = bool,
    ) -> list[Drawn]:
        """`update`: an adapter's, by the name of the weight. `cut`: it ends now."""
        generator = torch.Generator()
        generator.manual_seed(seed) if seed is not None else generator.seed()
        drawn: list[Drawn] = []
        self.running += 1
        while len(drawn) < count and not (drawn and drawn[-1].token in stop):
            while (self.paused or self.asleep) and not cut():
                await asyncio.sleep(0.001)
            if cut():
                break
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
    """`dev`: its weights may be changed. `max_rank`: of adapters, `max_loras`: of which completions run at once. `gpu`:
    it can sleep. `dtype`: of its weights, as it says."""

    def reset(self) -> None:
        super().reset()
        self.dev, self.max_rank, self.max_loras, self.gpu = True, 8, 2, True
        self.dtype = "torch.float32"

    def restart(self) -> None:
        super().restart()
        self.adapters: dict[str, dict[str, torch.Tensor]] = {}
        self.in_use: Counter[str] = Counter()

    @contextlib.asynccontextmanager
    async def slot(self, adapter: str) -> AsyncIterator[dict[str, torch.Tensor] | None]:
        """What an adapter adds, once it has a slot."""
        while adapter and not self.in_use[adapter] and len(+self.in_use) >= self.max_loras:
            await asyncio.sleep(0.001)
        self.in_use.update([adapter] if adapter else [])
        try:
            yield self.adapters.get(adapter)
        finally:
            self.in_use.subtract([adapter] if adapter else [])

    async def generate(self, request: Request) -> JSONResponse:
        fault = self.faults.pop(0) if self.faults else ""
        if (broken := await self.broken(fault)) is not None:
            return broken
        body = await request.json()
        if "model" in body and body["model"] not in self.adapters:
            return JSONResponse({"error": {"message": "The model does not exist."}}, status_code=404)
        params = body["sampling_params"]
        stop = params.get("stop_token_ids", ())
        async with self.slot(body.get("model", "")) as update:
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
        choice["weight_versions"] = None if self.mute else spans_of(drawn)
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
        if self.faults[:1] == ["no load"]:
            return JSONResponse({"error": "No such file or directory"}, status_code=500)
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
        if loads and self.faults[:1] == ["no adapter"]:
            return JSONResponse({"error": {"message": "No adapter found."}}, status_code=404)
        if loads:
            self.adapters[body["lora_name"]] = update_of(body["lora_path"])
        else:
            del self.adapters[body["lora_name"]]
        return PlainTextResponse("Success: the adapter was (un)loaded.")

    def app(self) -> Starlette:
        async def note(request: Request) -> JSONResponse:
            path, query = request.url.path, request.query_params
            self.calls.append(path)
            if path == "/pause" and self.stuck:  # whoever waited is gone by then: it would pause a later test
                await asyncio.sleep(30)
            elif path in ("/pause", "/resume"):
                self.paused = path == "/pause"
            if path in ("/sleep", "/wake_up"):
                assert path == "/wake_up" or query["mode"] == "keep"
                self.asleep = path == "/sleep"
            if path == "/update_weight_version":
                self.version = (await request.json())["new_version"]
            if path in ("/weight_info", "/server_info") and not self.dev:
                return JSONResponse({}, status_code=404)
            lora = {"max_lora_rank": self.max_rank, "max_loras": self.max_loras} if self.max_rank else None
            config = {"lora_config": lora, "model_config": {"enable_sleep_mode": self.gpu, "dtype": self.dtype}}
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
                *(Route(path, note) for path in ("/v1/models", "/weight_info", "/server_info", "/health")),
            ]
        )


class SglangServer(ModelServer):
    """`old`: it tells the last token's weights only. `router`: it stands in front of the real one.

    With requests inside, paused or not, it doesn't flush its cache, and new weights kill it, as before 0.5.23.
    """

    def reset(self) -> None:
        super().reset()
        self.old = self.router = self.seeded = False
        self.asked: set[str] = set()

    def restart(self) -> None:
        super().restart()
        self.inside = 0

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
        while self.paused == "abort":  # they don't get in
            await asyncio.sleep(0.001)
        self.inside += 1
        asked = body["input_ids"], params["max_new_tokens"], params["temperature"], stop, seed
        drawn = await self.sample(*asked, cut=lambda: self.paused == "abort")
        self.inside -= 1
        ended = self.paused == "abort"
        meta: dict[str, Any] = {
            "output_token_logprobs": [[one.logprob, one.token, None] for one in drawn],
            "output_top_logprobs": [[[one.top[1], one.top[0], None]] for one in drawn],
            "completion_tokens": len(drawn),
            "weight_version": self.version,
            "weight_versions": spans_of(drawn),
            "finish_reason": {"type": "abort" if ended else "stop" if drawn[-1].token in stop else "length"},
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
        assert body["flush_cache"] and self.paused and not self.inside, "its scheduler dies"
        if self.faults[:1] == ["no load"]:
            return JSONResponse({"success": False, "message": "out of memory"}, status_code=400)
        self.load(body["model_path"])
        self.version = body["weight_version"]
        return JSONResponse({"success": True, "message": ""})

    def app(self) -> Starlette:
        async def note(request: Request) -> JSONResponse:
            path = request.url.path
            self.calls.append(path)
            if path == "/pause_generation" and self.stuck:
                await asyncio.sleep(30)
            elif path == "/pause_generation":
                self.paused = (await request.json())["mode"]
                while self.paused == "abort" and self.inside:
                    await asyncio.sleep(0.001)
            if path == "/continue_generation":
                self.paused = False
            if path == "/flush_cache" and self.inside:
                return JSONResponse({"error": "requests are pending"}, status_code=400)
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
                Route("/pause_generation", is_there, methods=["GET"]),
                *(
                    Route(f"/{path}", note, methods=["POST"])
                    for path in ("pause_generation", "continue_generation", "flush_cache")
                ),
                Route("/abort_request", note, methods=["POST"]),
                *(Route(path, note) for path in ("/v1/models", "/get_model_info")),
            ]
        )


class HasApp(Protocol):
    def app(self) -> Starlette: ...


@contextlib.contextmanager
def serving(server: HasApp, port: int = 0) -> Iterator[str]:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", port))
        running = uvicorn.Server(uvicorn.Config(server.app(), log_level="critical"))
        thread = threading.Thread(target=running.run, kwargs={"sockets": [sock]}, daemon=True)
        thread.start()
        while not running.started:
            time.sleep(0.005)
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        running.should_exit = running.force_exit = True
        thread.join()


@contextlib.contextmanager
def dying(server: ModelServer, when: Callable[[], bool], away_s: float) -> Iterator[str]:
    """Once `when` says so the server is gone, with all that it was at; later it begins anew at the same port."""
    address: queue.Queue[str] = queue.Queue()
    over = threading.Event()

    def serve() -> None:
        with serving(server) as url:
            address.put(url)
            while not when() and not over.is_set():
                time.sleep(0.002)
        server.restart()
        over.wait(away_s)
        if not over.is_set():
            with serving(server, int(url.rpartition(":")[2])):
                over.wait()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield address.get()
    finally:
        over.set()
        thread.join()


def logprobs_of(model: Any, prompt: list[int], tokens: tuple[int, ...], temperature: float = 1.0) -> list[float]:
    """By one forward over the whole sequence in float64."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0].double() / temperature
    rows = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    return [float(row[token]) for row, token in zip(rows, tokens, strict=True)]


def served_recipe(engine: dict[str, Any], **stage: Any) -> dict[str, Any]:
    """A recipe of one stage, an rl stage unless told otherwise."""
    rl = {"stage": "rl", "steps": 2, "tasks_per_step": 2, "group_size": 8, "lr": 1e-3, "eval_every": 0}
    return {
        "name": "served",
        "model": "tiny",
        "env": "tests.stages.test_algorithms:TwoTurns",
        "verifiers": ["tests.stages.test_algorithms:even"],
        "engine": engine,
        "limits": {"turn_tokens": 8, "context_tokens": 60},
        "stages": [stage or rl],
    }
