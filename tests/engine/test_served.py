"""What engines that aren't Upswing's own have in common, each against a stand-in with a real model behind it: a vLLM
server, vLLM in this process, an SGLang server; and their faults.

`bench/vllm.py` measures the same against vLLM itself.
"""

from __future__ import annotations

import asyncio
import copy
import os
import resource
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.engine.local_vllm import LocalServer
from tests.engine.servers import ModelServer, SglangServer, VllmServer, dying, logprobs_of, served_recipe, serving

from upswing.engine import http
from upswing.engine.base import FinishReason, Sampling
from upswing.engine.http import HttpEngine
from upswing.engine.sglang import SglangEngine
from upswing.engine.vllm import VllmEngine
from upswing.errors import ConfigError, UpswingError
from upswing.models.load import load_model
from upswing.monitor.metrics import MetricsLog
from upswing.monitor.progress import Progress
from upswing.recipe import recipe_from
from upswing.stages.runner import run_recipe
from upswing.stages.servers import server_of
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
    """Each token has the log-prob that the weights of its version give it: at the borders, too."""
    server, models = served.server, {7: served.server.model}
    for version, factor in ((8, 1.5), (9, 0.5), (10, 2.0), (11, 0.7), (12, 1.3), (13, 0.6)):
        models[version] = copy.deepcopy(server.model)
        with torch.no_grad():
            for parameter in models[version].parameters():
                parameter.mul_(factor)
    weights = {version: copy.deepcopy(model.state_dict()) for version, model in models.items()}
    models[7] = copy.deepcopy(server.model)
    await engine.update_weights(weights[7], 7)
    begun = server.running
    running = asyncio.ensure_future(engine.generate(PROMPT, Sampling(max_tokens=50, seed=1)))
    while server.running == begun:
        await asyncio.sleep(0.001)
    for version in range(8, 14):  # more than there are tries
        await asyncio.sleep(0.01)
        await engine.update_weights(weights[version], version)
    found = await running
    told = found.policy_version
    assert len(told) == 50 and len({*told}) > 2 and sorted(told) == list(told)
    by_version = {version: logprobs_of(models[version], PROMPT, found.tokens) for version in {*told}}
    assert found.engine_logprobs == pytest.approx([by_version[v][at] for at, v in enumerate(told)], abs=1e-4)
    borders = [(at, told[at - 1], told[at]) for at in range(1, 50) if told[at - 1] != told[at]]
    assert all(abs(by_version[old][at] - by_version[new][at]) > 1e-3 for at, old, new in borders), "nothing is shown"
    after = await engine.generate(PROMPT, Sampling(max_tokens=8, seed=1))
    assert after.policy_version == (13,) * 8 and engine.version == 13
    assert after.engine_logprobs == pytest.approx(logprobs_of(server.model, PROMPT, after.tokens), abs=1e-4)
    assert not server.paused and [path.name for path in tmp_path.glob("*/*")] == ["13"], "old weights stay on disk"


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


class _Read(dict[str, torch.Tensor]):
    """Says which threads its values are made in."""

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        super().__init__(weights)
        self.threads: set[int] = set()

    def items(self) -> Any:
        self.threads.add(threading.get_ident())
        return super().items()


@only("vllm", "here")
async def test_weights_go_in_the_servers_format_and_are_written_beside_the_event_loop(
    served: Served, tmp_path: Path
) -> None:
    served.server.dtype = "torch.bfloat16"
    engine, weights = served.connect(tmp_path), _Read(served.server.first)
    await engine.update_weights(weights, 2)
    (written,) = tmp_path.glob("*/2/model.safetensors")
    for name, tensor in load_file(written).items():
        assert tensor.dtype == (torch.bfloat16 if tensor.dim() > 1 else torch.float32), name
    assert weights.threads and threading.get_ident() not in weights.threads
    await engine.close()


async def test_no_room_for_weights_is_said_and_leaves_nothing(
    engine: HttpEngine, served: Served, tmp_path: Path
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # as a disk that is full: a write fails in its middle
    try:
        with pytest.raises(UpswingError, match=r"engine.weights_dir: new weights can't be written to .*room for two"):
            await engine.update_weights(served.server.first, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.glob("*/*"))


@only(*SERVERS)
async def test_a_server_that_does_not_see_the_folder(engine: HttpEngine, served: Served) -> None:
    """It is up and says that it can't: that isn't waited out."""
    served.server.faults = ["no load"]
    with pytest.raises(
        UpswingError, match=r"engine.weights_dir: the \w+ server could not load .*on a disk that it shares"
    ):
        await engine.update_weights(served.server.first, 3)
    assert not served.server.paused, "the server is left frozen"


@only(*SERVERS)
@pytest.mark.parametrize("number", [2, 3])
async def test_another_runs_weights_are_not_taken_for_this_ones(
    engine: HttpEngine, served: Served, number: int, tmp_path: Path
) -> None:
    """Every run counts from 1."""
    await engine.update_weights(served.server.first, 3)
    other = served.connect(tmp_path)
    await other.update_weights({name: 2 * p for name, p in served.server.first.items()}, number)
    found = await engine.generate(PROMPT, Sampling(max_tokens=4, seed=1))
    own = load_model("tiny").model
    assert found.engine_logprobs == pytest.approx(logprobs_of(own, PROMPT, found.tokens), abs=1e-4)
    assert served.server.loads == 3, "they were given again"
    await other.close()


@pytest.mark.parametrize("label", ["upswing-00000000-3", "3", "default", "{own}-2", "{own}-4", "{own}-"])
async def test_labels_that_can_not_be_are_refused_with_the_cause(
    engine: HttpEngine, served: Served, label: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await engine.update_weights(served.server.first, 3)
    own, sample = served.server.version.rpartition("-")[0], served.server.sample

    async def changed(*args: Any, **options: Any) -> Any:
        served.server.version = label.format(own=own)
        return await sample(*args, **options)

    monkeypatch.setattr(served.server, "sample", changed)
    with pytest.raises(UpswingError, match=rf"labelled {label.format(own=own)}\): another client"):
        await engine.generate(PROMPT, Sampling(max_tokens=2))


async def test_a_server_that_hangs_while_weights_change_is_noticed(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = served.connect(tmp_path)
    await engine.update_weights(served.server.first, 1)
    monkeypatch.setattr(engine.server, "outage_s", 0.4, raising=False)
    monkeypatch.setattr(http, "WARN_S", 0.05)
    if served.kind == "here":
        call = engine.server.call
        monkeypatch.setattr(engine.server, "call", lambda *args, **more: call(*args, **{**more, "timeout_s": 0.4}))
    served.server.stuck, began = True, time.monotonic()
    with pytest.raises(UpswingError, match=r"failed for 0.4 s; the last: it hangs|vLLM failed at /pause .Timeout"):
        await engine.update_weights(served.server.first, 2)
    assert time.monotonic() - began < 10
    said = [text for text in caplog.messages if text.startswith("waiting for the")]
    assert len(said) == (served.kind != "here"), "once"
    await engine.close()


@only(*SERVERS)
async def test_a_recipe_says_how_long_a_server_may_be_away(served: Served, tmp_path: Path) -> None:
    """Also where a call has no other limit: the weights that are given back while a completion is sampled."""
    keys = {**served.keys, "weights_dir": str(tmp_path), "outage_s": 60.0}
    engine = server_of(recipe_from(served_recipe(keys)), Progress(quiet=True))
    assert engine.server.outage_s == 60.0
    await engine.update_weights(served.server.first, 1)
    engine.server.outage_s = 0.2
    served.server.restart()
    served.server.stuck, began = True, time.monotonic()
    served.server.faults = ["500"]
    with pytest.raises(UpswingError, match=r"failed for 0.2 s; the last: /pause.*raise engine.outage_s"):
        await engine.generate(PROMPT, Sampling(max_tokens=3))
    assert time.monotonic() - began < 10
    await engine.close()


@only("vllm")
async def test_what_a_killed_run_left_is_deleted_by_the_next_one(served: Served, tmp_path: Path) -> None:
    killed, engine = served.connect(tmp_path), served.connect(tmp_path)
    await killed.update_weights(served.server.first, 1)
    [left] = tmp_path.iterdir()
    assert killed._hold is not None
    os.close(killed._hold)  # as its process's end does
    killed._hold = None
    os.utime(left, (0, 0))
    await engine.update_weights(served.server.first, 2)
    assert not left.exists() and list(tmp_path.iterdir())
    await killed.close()
    await engine.close()


@pytest.mark.parametrize(("make", "server"), [(VllmEngine, VllmServer), (SglangEngine, SglangServer)])
async def test_an_outage_is_waited_out(
    make: type[HttpEngine], server: type[ModelServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of completions that run and of new weights that are to come; it is said once."""
    monkeypatch.setattr(http, "BACKOFF_S", 0.01)
    monkeypatch.setattr(http, "WARN_S", 0.3)
    served, gone, said = server(), threading.Event(), list[str]()
    with dying(served, gone.is_set, away_s=2.0) as url:
        engine = make.connect(url, weights_dir=tmp_path, warn=said.append)
        await engine.update_weights(served.first, 3)
        begun = served.running
        many = [engine.generate(PROMPT, Sampling(max_tokens=50, seed=seed)) for seed in range(3)]
        running = asyncio.gather(*many)
        while served.running == begun:
            await asyncio.sleep(0.001)
        gone.set()
        await asyncio.sleep(0.2)
        await engine.update_weights(served.first, 4)
        found = await running
        await engine.close()
    assert {version for one in found for version in one.policy_version} <= {3, 4} and engine.version == 4
    assert len(said) == 1 and said[0].startswith(f"waiting for the {make.name} server at {url}, up to 900 s (/")


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
@pytest.mark.parametrize("faults", [["500"], ["500"] * 6, ["abort", "500", "abort"]])
async def test_errors_of_the_server_are_tried_again(engine: HttpEngine, served: Served, faults: list[str]) -> None:
    served.server.faults = faults
    assert len((await engine.generate(PROMPT, Sampling(max_tokens=3))).tokens) == 3


BROKEN = [
    ("vllm", ["500"] * 999, "failed for 0.2 s; the last: /inference/v1/generate: status 500"),
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
    ("sglang", ["500"] * 999, "failed for 0.2 s; the last: /generate: status 500"),
    ("sglang", ["no logprobs"], "lacks tokens or log-probs"),
    ("sglang", ["NaN"], "lacks tokens or log-probs"),
    ("sglang", ["one token short"], "sampled 3 tokens and gave 2"),
    ("sglang", ["abort"] * 4, "breaks completions off"),
]


@pytest.mark.parametrize(("served", "faults", "message"), BROKEN, indirect=["served"])
async def test_what_is_broken_is_an_error_and_never_a_completion(
    engine: HttpEngine, served: Served, faults: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.server, "outage_s", 0.2, raising=False)
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
