"""What is SGLang's alone; `test_served.py` has what it shares with vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engine.servers import SglangServer, served_recipe, serving

from upswing.engine import http
from upswing.engine.base import Sampling
from upswing.engine.sglang import SglangEngine
from upswing.errors import ConfigError
from upswing.monitor.progress import Progress
from upswing.recipe import recipe_from
from upswing.stages.runner import eval_checkpoint

PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[SglangServer, str]]:
    server = SglangServer()
    with serving(server) as url:
        yield server, url


@pytest.fixture
def server(address: tuple[SglangServer, str], monkeypatch: pytest.MonkeyPatch) -> SglangServer:
    monkeypatch.setattr(http, "BACKOFF_S", 0.001)
    address[0].reset()
    return address[0]


@pytest.fixture
def engine(address: tuple[SglangServer, str], server: SglangServer, tmp_path: Path) -> SglangEngine:
    return SglangEngine.connect(address[1], weights_dir=tmp_path)


async def test_a_distribution_that_is_cut_is_refused(engine: SglangEngine) -> None:
    with pytest.raises(ValueError, match="aren't those of a distribution that was cut"):
        await engine.generate(PROMPT, Sampling(max_tokens=4, top_p=0.9))


@pytest.mark.parametrize("stop", [(), ("never",)])
async def test_of_a_server_that_tells_no_spans_completions_go_on_after_an_update(
    engine: SglangEngine, server: SglangServer, stop: tuple[str, ...]
) -> None:
    """What may end in a stop string is sampled anew: the server looks for one in what it samples in one go."""
    server.old = True
    await engine.update_weights(server.first, 7)
    begun = server.running
    running = asyncio.ensure_future(engine.generate(PROMPT, Sampling(max_tokens=50, stop_strings=stop)))
    while server.running == begun:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.03)
    await engine.update_weights(server.first, 8)
    found = await running
    assert len(found.tokens) == 50 and {*found.policy_version} == ({8} if stop else {7, 8})
    server.restart()
    many = await asyncio.gather(*(engine.generate(PROMPT, Sampling(max_tokens=4)) for _ in range(5)))
    assert all(one.policy_version == (8,) * 4 for one in many) and server.loads == 3
    await engine.close()


async def test_a_completion_that_nobody_waits_for_is_stopped_by_name(
    engine: SglangEngine, server: SglangServer
) -> None:
    server.asked.clear()
    server.faults = ["hang"]
    hanging = asyncio.ensure_future(engine.generate(PROMPT, Sampling(max_tokens=3)))
    while not server.asked:
        await asyncio.sleep(0.005)
    hanging.cancel()
    async with asyncio.timeout(5):
        while server.aborted != server.asked:
            await asyncio.sleep(0.005)
    await engine.close()


@pytest.mark.parametrize(
    ("trait", "message"),
    [
        ({"processed": False}, "without SGLANG_RETURN_ORIGINAL_LOGPROB"),
        ({"router": True}, "takes no new weights.*not that of a router"),
        ({"mute": True}, "doesn't say which weights sampled a token.*SGLang 0.5.1 or newer"),
    ],
)
def test_a_server_that_lacks_something_may_only_evaluate(
    address: tuple[SglangServer, str], server: SglangServer, trait: dict[str, bool], message: str
) -> None:
    vars(server).update(trait)
    engine = SglangEngine.connect(address[1])
    with pytest.raises(ConfigError, match=message):
        engine.require_training()
    vars(server).update(seeded=True)
    assert SglangEngine.connect(address[1]).capabilities.seeds and not engine.capabilities.seeds


def test_what_is_measured_is_what_was_named(address: tuple[SglangServer, str], server: SglangServer) -> None:
    """A server has some weights already: they may not be those of the model that is to be evaluated."""
    stage = {"stage": "eval", "of": ["base"], "tasks": 2, "split": "train"}
    one = recipe_from(served_recipe({"kind": "sglang", "url": address[1]}, **stage))
    eval_checkpoint(one, "tiny", split="train", tasks=2, greedy=True, samples=1, log=Progress(quiet=True))
    assert server.version.endswith("-1") and "/continue_generation" in server.calls
