"""The engine over HTTP against a server that speaks vLLM's protocol with a real model behind it, and its faults.

`bench/vllm_engine.py` measures the same against vLLM itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from tests.engine.servers import ModelServer, logprobs_of, served_recipe, serving, spans_of

from upswing.engine import http
from upswing.engine.base import FinishReason, Sampling
from upswing.engine.vllm import VllmEngine
from upswing.errors import ConfigError, UpswingError
from upswing.monitor.metrics import MetricsLog
from upswing.monitor.progress import Progress
from upswing.recipe import recipe_from
from upswing.stages.runner import run_recipe
from upswing.trajectory.store import TrajectoryStore


class Server(ModelServer):
    dev = True

    async def generate(self, request: Request) -> JSONResponse:
        fault = self.faults.pop(0) if self.faults else ""
        if (broken := await self.broken(fault)) is not None:
            return broken
        body = await request.json()
        params = body["sampling_params"]
        stop = params.get("stop_token_ids", ())
        drawn = await self.sample(
            body["token_ids"], params["max_tokens"], params["temperature"], stop, params.get("seed", 0)
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
        assert body["method"] == "reload_weights" and self.paused, "weights change only while nothing runs"
        self.load(body["kwargs"]["weights_path"])
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


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[Server, str]]:
    server = Server()
    with serving(server) as url:
        yield server, url


@pytest.fixture
def server(address: tuple[Server, str], monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setattr(http, "BACKOFF_S", 0.001)
    found, _ = address
    found.reset()
    found.dev = True
    return found


@pytest.fixture
def engine(address: tuple[Server, str], server: Server, tmp_path: Path) -> VllmEngine:
    return VllmEngine.connect(address[1], weights_dir=tmp_path)


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


@pytest.mark.parametrize("faults", [["500"], ["500", "500", "500"], ["abort", "500", "abort"]])
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
        (["too many"], "6 tokens where 3 were asked for"),
        (["a log-prob above 0"], "the log-prob 0.5"),
        (["abort"] * 4, "breaks completions off"),
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
    hanging = asyncio.ensure_future(engine.generate(PROMPT, Sampling(max_tokens=3)))
    while server.faults:
        await asyncio.sleep(0.005)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(hanging, 0.05)
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
        recipe_from(served_recipe(keys))


def test_a_recipe_trains_on_a_server(address: tuple[Server, str], server: Server, tmp_path: Path) -> None:
    one = recipe_from(served_recipe({"kind": "vllm", "url": address[1]}))
    run_recipe(one, tmp_path / "run", log=Progress(quiet=True))
    rows = MetricsLog(tmp_path / "run").read("rl")
    assert len(rows) == 2 and all(row["mismatch_abs"] < 1e-3 for row in rows)
    stored = [s.trajectory for s in TrajectoryStore(tmp_path / "run/trajectories").read("rl")]
    versions = {int(b.policy_version[b.sampled].min()) for t in stored for b in t.branches if b.sampled.any()}
    assert len(versions) == 2, "both steps sampled with the same weights"
