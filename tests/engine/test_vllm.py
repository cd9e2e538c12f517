"""The engine over HTTP against a server that speaks vLLM's protocol with a real model behind it, and its faults.

`bench/vllm_engine.py` measures the same against vLLM itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import uvicorn
from safetensors.torch import load_file
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from upswing.engine import vllm as vllm_engine
from upswing.engine.base import FinishReason, Sampling
from upswing.engine.vllm import VllmEngine
from upswing.errors import ConfigError, UpswingError
from upswing.models.load import load_model
from upswing.monitor.metrics import MetricsLog
from upswing.monitor.progress import Progress
from upswing.recipe import recipe_from
from upswing.stages.runner import run_recipe
from upswing.trajectory.store import TrajectoryStore


class Server:
    """One forward a token, slow and plain. `faults` names what it does wrong next."""

    def __init__(self) -> None:
        self.model = load_model("tiny").model.eval()
        self.first = {name: p.detach().clone() for name, p in self.model.state_dict().items()}
        self.version, self.paused, self.processed, self.dev = "default", False, True, True
        self.faults: list[str] = []
        self.calls: list[str] = []

    def restart(self) -> None:
        self.model.load_state_dict(self.first)
        self.version = "default"

    async def generate(self, request: Request) -> JSONResponse:
        fault = self.faults.pop(0) if self.faults else ""
        if fault == "500":
            return JSONResponse({"error": "worker died"}, status_code=500)
        if fault == "hang":
            await asyncio.sleep(30)
        body = await request.json()
        params, ids = body["sampling_params"], list(body["token_ids"])
        tokens: list[int] = []
        content, spans = [], []
        generator = torch.Generator().manual_seed(params.get("seed", 0))
        while len(tokens) < params["max_tokens"]:
            while self.paused:
                await asyncio.sleep(0.001)
            with torch.no_grad():
                logits = self.model(torch.tensor([ids + tokens])).logits[0, -1].double()
            scale = params["temperature"] or 1.0
            logprobs = torch.log_softmax(logits / scale, -1)
            sampled = torch.multinomial(logprobs.exp(), 1, generator=generator)
            token = int(sampled if params["temperature"] else logits.argmax())
            told = logprobs if self.processed else torch.log_softmax(logits, -1)
            top = {"token_id": int(logits.argmax()), "logprob": float(told.max())}
            content.append({"token_id": token, "logprob": float(told[token]), "top_logprobs": [top]})
            tokens.append(token)
            if not spans or spans[-1]["version"] != self.version:
                spans.append({"version": self.version, "start": len(tokens) - 1, "end": len(tokens)})
            spans[-1]["end"] = len(tokens)
            if token in params.get("stop_token_ids", ()):
                break
            await asyncio.sleep(0)
        stopped = bool(tokens) and tokens[-1] in params.get("stop_token_ids", ())
        choice: dict[str, Any] = {"token_ids": tokens, "logprobs": {"content": content}, "weight_versions": spans}
        choice["finish_reason"] = "stop" if stopped else "length"
        if fault == "no logprobs":
            choice["logprobs"] = None
        if fault == "one token short":
            choice["token_ids"] = tokens[:-1]
        return JSONResponse({"choices": [choice]})

    async def rpc(self, request: Request) -> JSONResponse:
        body = await request.json()
        assert body["method"] == "reload_weights" and self.paused, "weights change only while nothing runs"
        self.model.load_state_dict(load_file(Path(body["kwargs"]["weights_path"]) / "model.safetensors"), strict=False)
        return JSONResponse({"results": [None]})

    def app(self) -> Starlette:
        async def note(request: Request) -> JSONResponse:
            self.calls.append(request.url.path)
            if request.url.path in ("/pause", "/resume"):
                self.paused = request.url.path == "/pause"
            if request.url.path == "/update_weight_version":
                self.version = (await request.json())["new_version"]
            if request.url.path == "/weight_info" and not self.dev:
                return JSONResponse({}, status_code=404)
            return JSONResponse({"weight_version": self.version, "success": True, "data": [{"max_model_len": 64}]})

        plain = ("/pause", "/resume", "/reset_prefix_cache", "/update_weight_version")
        return Starlette(
            routes=[
                Route("/inference/v1/generate", self.generate, methods=["POST"]),
                Route("/collective_rpc", self.rpc, methods=["POST"]),
                *(Route(path, note, methods=["POST"]) for path in plain),
                *(Route(path, note) for path in ("/v1/models", "/weight_info")),
            ]
        )


@contextlib.contextmanager
def serving(server: Server) -> Iterator[str]:
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


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[Server, str]]:
    server = Server()
    with serving(server) as url:
        yield server, url


@pytest.fixture
def server(address: tuple[Server, str], monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setattr(vllm_engine, "_BACKOFF_S", 0.001)
    found, _ = address
    found.restart()
    found.faults, found.calls, found.processed, found.dev, found.paused = [], [], True, True, False
    return found


@pytest.fixture
def engine(address: tuple[Server, str], server: Server, tmp_path: Path) -> VllmEngine:
    return VllmEngine.connect(address[1], weights_dir=tmp_path)


def logprobs_of(model: Any, prompt: list[int], tokens: tuple[int, ...], temperature: float) -> list[float]:
    """By one forward over the whole sequence in float64."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0].double() / temperature
    rows = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    return [float(row[token]) for row, token in zip(rows, tokens, strict=True)]


PROMPT = [5, 6, 7, 8]


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
async def test_tokens_and_logprobs_are_those_of_the_sampling_distribution(
    engine: VllmEngine, server: Server, temperature: float
) -> None:
    found = await engine.generate(PROMPT, Sampling(max_tokens=12, temperature=temperature, seed=3))
    assert len(found.tokens) == 12 and found.finish_reason is FinishReason.LENGTH
    expected = logprobs_of(server.model, PROMPT, found.tokens, temperature)
    assert found.engine_logprobs == pytest.approx(expected, abs=1e-4)
    assert found.policy_version == (0,) * 12
    await engine.close()


async def test_a_stop_token_is_part_of_the_completion(engine: VllmEngine) -> None:
    whole = await engine.generate(PROMPT, Sampling(max_tokens=12, seed=3))
    cut = await engine.generate(PROMPT, Sampling(max_tokens=12, seed=3, stop_tokens=(whole.tokens[4],)))
    first = whole.tokens.index(whole.tokens[4])
    assert cut.tokens == whole.tokens[: first + 1] and cut.finish_reason is FinishReason.STOP
    await engine.close()


async def test_new_weights_reach_completions_that_run(engine: VllmEngine, server: Server) -> None:
    weights = {name: p * 1.05 if p.is_floating_point() else p for name, p in server.first.items()}
    await engine.update_weights(server.first, 7)
    running = asyncio.ensure_future(engine.generate(PROMPT, Sampling(max_tokens=50, seed=1)))
    while server.version != "7" or server.paused:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.03)
    await engine.update_weights(weights, 8)
    found = await running
    assert set(found.policy_version) <= {7, 8} and sorted(found.policy_version) == list(found.policy_version)
    after = await engine.generate(PROMPT, Sampling(max_tokens=8, seed=1))
    assert after.policy_version == (8,) * 8
    assert after.engine_logprobs == pytest.approx(logprobs_of(server.model, PROMPT, after.tokens, 1.0), abs=1e-4)
    steps = ["/pause", "/reset_prefix_cache", "/update_weight_version", "/resume"]
    assert [call for call in server.calls if call in steps] == steps * 2
    assert len(list(engine._folder.iterdir())) == 1, "old weights stay on disk"
    folder = engine._folder
    await engine.close()
    assert not folder.exists()


async def test_tied_weights_are_given_under_both_names(engine: VllmEngine, server: Server) -> None:
    """vLLM 0.32 keeps its own copy of a tied output layer, and only reloads it by name."""
    tied = {name: p for name, p in server.first.items() if name != "lm_head.weight"}
    await engine.update_weights(tied, 2)
    written = load_file(engine._folder / "2" / "model.safetensors")
    assert torch.equal(written["lm_head.weight"], tied["model.embed_tokens.weight"])
    both = {**tied, "lm_head.weight": tied["model.embed_tokens.weight"]}  # one tensor under two names
    await engine.update_weights(both, 3)
    await engine.close()


async def test_a_server_that_was_restarted_is_noticed_and_gets_the_weights_again(
    engine: VllmEngine, server: Server
) -> None:
    await engine.update_weights(server.first, 3)
    server.restart()
    found = await asyncio.gather(*(engine.generate(PROMPT, Sampling(max_tokens=4, seed=i)) for i in range(5)))
    assert all(one.policy_version == (3,) * 4 for one in found)
    assert server.calls.count("/resume") == 2, "the weights were given again once, not once a request"
    await engine.close()


@pytest.mark.parametrize("faults", [["500"], ["500", "500", "500"]])
async def test_errors_of_the_server_are_tried_again(engine: VllmEngine, server: Server, faults: list[str]) -> None:
    server.faults = faults
    assert len((await engine.generate(PROMPT, Sampling(max_tokens=3))).tokens) == 3
    await engine.close()


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        (["500"] * 9, "failed at /inference/v1/generate 4 times"),
        (["no logprobs"], "lacks tokens or log-probs"),
        (["one token short"], "2 tokens and 3 log-probs"),
    ],
)
async def test_what_the_server_breaks_is_an_error_and_never_a_completion(
    engine: VllmEngine, server: Server, faults: list[str], message: str
) -> None:
    server.faults = faults
    with pytest.raises(UpswingError, match=message):
        await engine.generate(PROMPT, Sampling(max_tokens=3))
    await engine.close()


async def test_a_hanging_server_can_be_left(engine: VllmEngine, server: Server) -> None:
    server.faults = ["hang"]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(engine.generate(PROMPT, Sampling(max_tokens=3)), 0.1)
    assert len((await engine.generate(PROMPT, Sampling(max_tokens=3))).tokens) == 3
    await engine.close()


async def test_what_does_not_fit_is_refused_before_it_is_sent(engine: VllmEngine) -> None:
    with pytest.raises(ValueError, match="above the server's max_model_len of 64"):
        await engine.generate(PROMPT, Sampling(max_tokens=100))
    await engine.close()


def test_a_server_with_other_logprobs_may_not_be_trained_with(
    address: tuple[Server, str], server: Server, tmp_path: Path
) -> None:
    server.processed = False
    engine = VllmEngine.connect(address[1], weights_dir=tmp_path)
    with pytest.raises(ConfigError, match="--logprobs-mode processed_logprobs"):
        engine.require_training()
    assert not list(tmp_path.iterdir()), "a folder for weights that never come"


def test_a_server_that_takes_no_weights_may_not_be_trained_with(address: tuple[Server, str], server: Server) -> None:
    server.dev = False
    with pytest.raises(ConfigError, match="VLLM_SERVER_DEV_MODE=1"):
        VllmEngine.connect(address[1]).require_training()


def test_no_server_is_said_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"no vLLM server answers at .*vllm serve"):
        VllmEngine.connect("http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"kind": "vllm"}, "engine.url: got nothing, but kind vllm needs it"),
        ({"url": "http://127.0.0.1:1"}, "engine.url: .* without effect: with kind torch it is for kind vllm"),
        (
            {"kind": "vllm", "url": "http://127.0.0.1:1", "quantize": "int8"},
            "engine.quantize: got 'int8' without effect",
        ),
    ],
)
def test_keys_of_the_other_kind_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe_with(keys)


def recipe_with(engine: dict[str, Any]) -> Any:
    return recipe_from(
        {
            "name": "served",
            "model": "tiny",
            "env": "tests.stages.test_algorithms:TwoTurns",
            "verifiers": ["tests.stages.test_algorithms:even"],
            "engine": engine,
            "limits": {"turn_tokens": 8, "context_tokens": 64},
            "stages": [
                {"stage": "rl", "steps": 2, "tasks_per_step": 2, "group_size": 4, "lr": 1e-3, "eval_every": 0},
            ],
        }
    )


def test_a_recipe_trains_on_a_server(address: tuple[Server, str], server: Server, tmp_path: Path) -> None:
    one = recipe_with({"kind": "vllm", "url": address[1]})
    run_recipe(one, tmp_path / "run", log=Progress(quiet=True))
    rows = MetricsLog(tmp_path / "run").read("rl")
    assert len(rows) == 2 and all(row["mismatch_abs"] < 1e-3 for row in rows)
    stored = [s.trajectory for s in TrajectoryStore(tmp_path / "run/trajectories").read("rl")]
    versions = {int(b.policy_version[b.sampled].min()) for t in stored for b in t.branches if b.sampled.any()}
    assert len(versions) == 2, "both steps sampled with the same weights"
