"""What engines that aren't Upswing's own have in common, each against a stand-in with a real model behind it: a vLLM
server, vLLM in this process, an SGLang server; and their faults.

`bench/vllm_engine.py` measures the same against vLLM itself.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.engine.servers import LocalServer, ModelServer, SglangServer, VllmServer, logprobs_of, served_recipe, serving

from upswing.engine import http
from upswing.engine.base import FinishReason, Sampling
from upswing.engine.http import HttpEngine
from upswing.engine.sglang import SglangEngine
from upswing.engine.vllm import VllmEngine
from upswing.errors import ConfigError, UpswingError
from upswing.monitor.metrics import MetricsLog
from upswing.monitor.progress import Progress
from upswing.recipe import recipe_from
from upswing.stages.runner import run_recipe
from upswing.trajectory.store import TrajectoryStore

PROMPT = [5, 6, 7, 8]
KINDS, SERVERS = ("vllm", "here", "sglang"), ("vllm", "sglang")
LIMITS = {"vllm": "64", "here": "64", "sglang": "64 less 2"}


@dataclass(frozen=True)
class Served:
    kind: str
    server: Any
    connect: Callable[[Path], HttpEngine]
    keys: dict[str, str]
    """Of a recipe's engine."""


@pytest.fixture(scope="module")
def stand_ins() -> Iterator[dict[str, tuple[ModelServer, str]]]:
    vllm, sglang = VllmServer(), SglangServer()
    with serving(vllm) as vllm_url, serving(sglang) as sglang_url:
        yield {"vllm": (vllm, vllm_url), "sglang": (sglang, sglang_url), "here": (LocalServer(), "")}


@pytest.fixture(params=KINDS)
def served(
    request: pytest.FixtureRequest, stand_ins: dict[str, tuple[ModelServer, str]], monkeypatch: pytest.MonkeyPatch
) -> Served:
    monkeypatch.setattr(http, "BACKOFF_S", 0.001)
    kind = request.param
    server, url = stand_ins[kind]
    server.reset()
    if isinstance(server, LocalServer):
        for name, module in server.modules().items():
            monkeypatch.setitem(sys.modules, name, module)
        given = {"model": "tiny", "max_model_len": 64, "logprobs_mode": "processed_logprobs"}
        return Served(kind, server, lambda folder: VllmEngine.here(given, {}, weights_dir=folder), {"kind": "vllm"})
    make = {"vllm": VllmEngine, "sglang": SglangEngine}[kind]
    return Served(kind, server, lambda folder: make.connect(url, weights_dir=folder), {"kind": kind, "url": url})


@pytest.fixture
async def engine(served: Served, tmp_path: Path) -> AsyncIterator[HttpEngine]:
    found = served.connect(tmp_path)
    yield found
    await found.close()
    assert not list(tmp_path.iterdir()), "weights stay behind"


def only(*kinds: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("served", kinds, indirect=True)


@pytest.mark.parametrize("temperature", [0.7, 1.5])
async def test_tokens_and_logprobs_are_those_of_the_sampling_distribution(
    engine: HttpEngine, served: Served, temperature: float
) -> None:
    engine.require_training()
    found = await engine.generate(PROMPT, Sampling(max_tokens=12, temperature=temperature, seed=3))
    assert len(found.tokens) == 12 and found.finish_reason is FinishReason.LENGTH
    expected = logprobs_of(served.server.model, PROMPT, found.tokens, temperature)
    assert found.engine_logprobs == pytest.approx(expected, abs=1e-4)
    assert found.policy_version == (0,) * 12
    stop = tuple(range(0, 400, 2))
    cut = await engine.generate(PROMPT, Sampling(max_tokens=50, stop_tokens=stop, seed=1))
    assert cut.finish_reason is FinishReason.STOP and cut.tokens[-1] in stop, "the stop token is part of it"
    assert not {*cut.tokens[:-1]} & {*stop}


async def test_new_weights_reach_completions_that_run(engine: HttpEngine, served: Served, tmp_path: Path) -> None:
    server = served.server
    weights = {name: p * 1.05 if p.is_floating_point() else p for name, p in server.first.items()}
    await engine.update_weights(server.first, 7)
    begun = server.running
    running = asyncio.ensure_future(engine.generate(PROMPT, Sampling(max_tokens=50, seed=1)))
    while server.running == begun:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.03)
    await engine.update_weights(weights, 8)
    found = await running
    assert set(found.policy_version) == {7, 8} and sorted(found.policy_version) == list(found.policy_version)
    after = await engine.generate(PROMPT, Sampling(max_tokens=8, seed=1))
    assert after.policy_version == (8,) * 8 and engine.version == 8
    assert after.engine_logprobs == pytest.approx(logprobs_of(server.model, PROMPT, after.tokens), abs=1e-4)
    assert not server.paused and [path.name for path in tmp_path.glob("*/*")] == ["8"], "old weights stay on disk"


async def test_tied_weights_are_given_under_both_names(engine: HttpEngine, served: Served, tmp_path: Path) -> None:
    """vLLM 0.32 keeps its own copy of a tied output layer, and only reloads it by name."""
    tied = {name: p for name, p in served.server.first.items() if name != "lm_head.weight"}
    await engine.update_weights(tied, 2)
    (written,) = tmp_path.glob("*/2/model.safetensors")
    assert torch.equal(load_file(written)["lm_head.weight"], tied["model.embed_tokens.weight"])
    both = {**tied, "lm_head.weight": tied["model.embed_tokens.weight"]}  # one tensor under two names
    sizes = [engine.stats.weight_bytes]
    assert sizes[0] == sum(tensor.nbytes for tensor in load_file(written).values()), "as it was written"
    await engine.update_weights(both, 3)
    assert engine.stats.weight_bytes == 2 * sizes[0]


@only(*SERVERS)
async def test_a_server_that_was_restarted_is_noticed_and_gets_the_weights_again(
    engine: HttpEngine, served: Served
) -> None:
    await engine.update_weights(served.server.first, 3)
    served.server.restart()
    found = await asyncio.gather(*(engine.generate(PROMPT, Sampling(max_tokens=4, seed=i)) for i in range(5)))
    assert all(one.policy_version == (3,) * 4 for one in found)
    assert served.server.loads == 2, "the weights were given again once, not once a request"


@only(*SERVERS)
@pytest.mark.parametrize("faults", [["500"], ["500", "500", "500"], ["abort", "500", "abort"]])
async def test_errors_of_the_server_are_tried_again(engine: HttpEngine, served: Served, faults: list[str]) -> None:
    served.server.faults = faults
    assert len((await engine.generate(PROMPT, Sampling(max_tokens=3))).tokens) == 3


BROKEN = [
    ("vllm", ["500"] * 9, "failed at /inference/v1/generate 4 times"),
    ("vllm", ["no logprobs"], "lacks tokens or log-probs"),
    ("vllm", ["one token short"], "2 tokens and 3 log-probs"),
    ("vllm", ["too many"], "6 tokens where 3 were asked for"),
    ("vllm", ["a log-prob above 0"], "the log-prob 0.5"),
    ("vllm", ["abort"] * 4, "breaks completions off"),
    ("here", ["dead"], "vLLM failed at /inference/v1/generate .*EngineCore encountered an issue"),
    ("here", ["refuse"], "vLLM refused /inference/v1/generate: the prompt is empty"),
    ("here", ["no logprobs"], "3 tokens and 0 log-probs"),
    ("here", ["one token short"], "3 tokens and 2 log-probs"),
    ("here", ["abort"] * 4, "breaks completions off"),
    ("sglang", ["500"] * 9, "failed at /generate 4 times"),
    ("sglang", ["no logprobs"], "lacks tokens or log-probs"),
    ("sglang", ["NaN"], "lacks tokens or log-probs"),
    ("sglang", ["one token short"], "sampled 3 tokens and gave 2"),
    ("sglang", ["abort"] * 4, "breaks completions off"),
]


@pytest.mark.parametrize(("served", "faults", "message"), BROKEN, indirect=["served"])
async def test_what_is_broken_is_an_error_and_never_a_completion(
    engine: HttpEngine, served: Served, faults: list[str], message: str
) -> None:
    served.server.faults = list(faults)
    with pytest.raises(UpswingError, match=message):
        await engine.generate(PROMPT, Sampling(max_tokens=3))


async def test_a_hanging_completion_can_be_left(engine: HttpEngine, served: Served) -> None:
    """vLLM's server sees by itself that nobody waits; the others are told."""
    served.server.faults = ["hang"]
    hanging = asyncio.ensure_future(engine.generate(PROMPT, Sampling(max_tokens=3)))
    while served.server.faults:
        await asyncio.sleep(0.005)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(hanging, 0.05)
    async with asyncio.timeout(5):
        while served.kind != "vllm" and not served.server.aborted:
            await asyncio.sleep(0.005)
    assert len((await engine.generate(PROMPT, Sampling(max_tokens=3))).tokens) == 3


async def test_what_does_not_fit_is_refused_before_it_is_sent(engine: HttpEngine, served: Served) -> None:
    with pytest.raises(ValueError, match=f"above the server's max_model_len of {LIMITS[served.kind]}"):
        await engine.generate(PROMPT, Sampling(max_tokens=100))


@pytest.mark.parametrize(("make", "start"), [(VllmEngine, "vllm serve"), (SglangEngine, "sglang.launch_server")])
def test_no_server_is_said_with_what_to_do(make: type[HttpEngine], start: str) -> None:
    with pytest.raises(ConfigError, match=rf"no {make.name} server answers at .*{start}"):
        make.connect("http://127.0.0.1:9")


def test_a_recipe_trains(served: Served, tmp_path: Path) -> None:
    one = recipe_from(served_recipe(dict(served.keys)))
    run_recipe(one, tmp_path / "run", log=Progress(quiet=True))
    rows = MetricsLog(tmp_path / "run").read("rl")
    assert len(rows) == 2 and all(row["mismatch_abs"] < 1e-3 for row in rows)
    first = served.server.first
    whole = sum(p.nbytes for p in {**first, "lm_head.weight": first["model.embed_tokens.weight"]}.values())
    assert [row["sync_gb"] for row in rows] == pytest.approx([whole / 1e9] * 2)
    stored = [s.trajectory for s in TrajectoryStore(tmp_path / "run/trajectories").read("rl")]
    versions = {int(b.policy_version[b.sampled].min()) for t in stored for b in t.branches if b.sampled.any()}
    assert len(versions) == 2, "both steps sampled with the same weights"
    assert served.kind != "here" or not served.server.on
