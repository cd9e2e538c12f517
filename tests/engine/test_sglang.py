"""The SGLang engine against a server that speaks its protocol with a real model behind it, and its faults."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from tests.engine.servers import ModelServer, logprobs_of, served_recipe, serving, spans_of

from upswing.engine import http
from upswing.engine.base import FinishReason, Sampling
from upswing.engine.sglang import SglangEngine
from upswing.errors import ConfigError, UpswingError
from upswing.monitor.metrics import MetricsLog
from upswing.monitor.progress import Progress
from upswing.recipe import recipe_from
from upswing.stages.runner import eval_checkpoint, run_recipe

PROMPT = [5, 6, 7, 8]


class Server(ModelServer):
    """`old`: it tells the last token's weights only, and can't pause. `router`: it stands in front of the real one."""

    def reset(self) -> None:
        super().reset()
        self.old = self.router = self.mute = self.seeded = False
        self.running: set[str] = set()
        self.aborted: set[str] = set()

    async def generate(self, request: Request) -> JSONResponse:
        fault = self.faults.pop(0) if self.faults else ""
        body = await request.json()
        params = body["sampling_params"]
        assert "ignore_eos" not in params, "it would make SGLang deaf to stop_token_ids"
        self.running.add(body.get("rid", ""))
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
            return JSONResponse({"weight_version": self.version, "data": [{"max_model_len": 64}]})

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


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[Server, str]]:
    server = Server()
    with serving(server) as url:
        yield server, url


@pytest.fixture
def server(address: tuple[Server, str], monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setattr(http, "BACKOFF_S", 0.001)
    address[0].reset()
    return address[0]


@pytest.fixture
def engine(address: tuple[Server, str], server: Server, tmp_path: Path) -> SglangEngine:
    return SglangEngine.connect(address[1], weights_dir=tmp_path)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
async def test_tokens_and_logprobs_are_those_of_the_sampling_distribution(
    engine: SglangEngine, server: Server, temperature: float
) -> None:
    found = await engine.generate(PROMPT, Sampling(max_tokens=12, temperature=temperature))
    assert len(found.tokens) == 12 and found.finish_reason is FinishReason.LENGTH
    assert found.engine_logprobs == pytest.approx(
        logprobs_of(server.model, PROMPT, found.tokens, temperature), abs=1e-4
    )
    cut = await engine.generate(PROMPT, Sampling(max_tokens=50, stop_tokens=tuple(range(0, 400, 2))))
    assert cut.finish_reason is FinishReason.STOP and cut.tokens[-1] % 2 == 0, "the stop token is part of it"
    await engine.close()


async def test_a_distribution_that_is_cut_is_refused(engine: SglangEngine) -> None:
    with pytest.raises(ValueError, match="aren't those of a distribution that was cut"):
        await engine.generate(PROMPT, Sampling(max_tokens=4, top_p=0.9))


@pytest.mark.parametrize("old", [False, True])
async def test_new_weights_reach_completions_that_run(engine: SglangEngine, server: Server, old: bool) -> None:
    """A server that tells spans keeps the completion; of one that doesn't, it is sampled again."""
    server.old = old
    weights = {name: p * 1.05 if p.is_floating_point() else p for name, p in server.first.items()}
    await engine.update_weights(server.first, 7)
    server.running.clear()
    running = asyncio.ensure_future(engine.generate(PROMPT, Sampling(max_tokens=50)))
    while not server.running:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.03)
    await engine.update_weights(weights, 8)
    found = await running
    assert set(found.policy_version) == ({8} if old else {7, 8}) and len(found.tokens) == 50
    assert sorted(found.policy_version) == list(found.policy_version)
    after = await engine.generate(PROMPT, Sampling(max_tokens=8))
    assert after.policy_version == (8,) * 8
    assert after.engine_logprobs == pytest.approx(logprobs_of(server.model, PROMPT, after.tokens, 1.0), abs=1e-4)
    assert not server.paused and len(list(engine._folder.iterdir())) == 1, "old weights stay on disk"
    await engine.close()


@pytest.mark.parametrize("old", [False, True])
async def test_a_server_that_was_restarted_gets_the_weights_again(
    engine: SglangEngine, server: Server, old: bool
) -> None:
    server.old = old
    await engine.update_weights(server.first, 3)
    server.restart()
    found = await asyncio.gather(*(engine.generate(PROMPT, Sampling(max_tokens=4)) for _ in range(5)))
    assert all(one.policy_version == (3,) * 4 for one in found)
    assert server.calls.count("/pause_generation") == 2, "the weights were given again once, not once a request"
    await engine.close()


async def test_weights_that_could_not_be_loaded_end_the_update(engine: SglangEngine, server: Server) -> None:
    server.faults = ["no load"]
    with pytest.raises(UpswingError, match=r"refused /update_weights_from_disk.*out of memory"):
        await engine.update_weights(server.first, 3)
    assert not server.paused, "the server is left frozen"
    await engine.close()


@pytest.mark.parametrize("faults", [["500"], ["500", "500", "500"], ["abort", "500", "abort"]])
async def test_errors_of_the_server_are_tried_again(engine: SglangEngine, server: Server, faults: list[str]) -> None:
    server.faults = faults
    assert len((await engine.generate(PROMPT, Sampling(max_tokens=3))).tokens) == 3
    await engine.close()


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        (["500"] * 9, "failed at /generate 4 times"),
        (["no logprobs"], "lacks tokens or log-probs"),
        (["NaN"], "lacks tokens or log-probs"),
        (["one token short"], "sampled 3 tokens and gave 2"),
        (["abort"] * 4, "breaks completions off"),
    ],
)
async def test_what_the_server_breaks_is_an_error_and_never_a_completion(
    engine: SglangEngine, server: Server, faults: list[str], message: str
) -> None:
    server.faults = faults
    with pytest.raises(UpswingError, match=message):
        await engine.generate(PROMPT, Sampling(max_tokens=3))
    await engine.close()


async def test_a_hanging_completion_is_left_and_stopped_by_name(engine: SglangEngine, server: Server) -> None:
    server.running.clear()
    server.faults = ["hang"]
    hanging = asyncio.ensure_future(engine.generate(PROMPT, Sampling(max_tokens=3)))
    while not server.running:
        await asyncio.sleep(0.005)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(hanging, 0.05)
    async with asyncio.timeout(5):
        while server.aborted != server.running:
            await asyncio.sleep(0.005)
    await engine.close()


@pytest.mark.parametrize(
    ("trait", "message"),
    [
        ({"processed": False}, "without SGLANG_RETURN_ORIGINAL_LOGPROB"),
        ({"router": True}, "takes no new weights.*not that of a router"),
        ({"mute": True}, "doesn't say which weights sampled a token.*a newer SGLang"),
    ],
)
def test_a_server_that_lacks_something_may_only_evaluate(
    address: tuple[Server, str], server: Server, trait: dict[str, bool], message: str
) -> None:
    vars(server).update(trait)
    engine = SglangEngine.connect(address[1])
    with pytest.raises(ConfigError, match=message):
        engine.require_training()
    vars(server).update(seeded=True)
    assert SglangEngine.connect(address[1]).capabilities.seeds and not engine.capabilities.seeds


def test_no_server_is_said_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"no SGLang server answers at .*sglang.launch_server"):
        SglangEngine.connect("http://127.0.0.1:9")


def test_a_recipe_trains_on_a_server(address: tuple[Server, str], server: Server, tmp_path: Path) -> None:
    server.faults = ["", "", "", "", "500"]  # after the four of finding out what it can do
    one = recipe_from(served_recipe({"kind": "sglang", "url": address[1]}))
    run_recipe(one, tmp_path / "run", log=Progress(quiet=True))
    rows = MetricsLog(tmp_path / "run").read("rl")
    assert len(rows) == 2 and all(row["mismatch_abs"] < 1e-3 for row in rows)


def test_what_is_measured_is_what_was_named(address: tuple[Server, str], server: Server) -> None:
    """A server has some weights already: they may not be those of the model that is to be evaluated."""
    stage = {"stage": "eval", "of": ["base"], "tasks": 2, "split": "train"}
    one = recipe_from(served_recipe({"kind": "sglang", "url": address[1]}, **stage))
    eval_checkpoint(one, "tiny", split="train", tasks=2, greedy=True, samples=1, log=Progress(quiet=True))
    assert server.version == "1" and "/continue_generation" in server.calls
