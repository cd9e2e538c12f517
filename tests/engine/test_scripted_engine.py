"""The scripted engine keeps the engine's contract."""

import asyncio

import pytest

from upswing.engine.base import Engine, FinishReason, Sampling
from upswing.engine.scripted import ScriptedEngine
from upswing.models.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()


async def test_each_session_plays_the_script_from_its_start() -> None:
    engine = ScriptedEngine(["one", "two"], tokenizer=TOKENIZER, end_token=2, version=3)
    assert isinstance(engine, Engine)
    first, other, second = [await engine.generate([5], Sampling(), session=session) for session in ("a", "b", "a")]
    assert TOKENIZER.decode(first.tokens) == TOKENIZER.decode(other.tokens) == "one<|im_end|>"
    assert TOKENIZER.decode(second.tokens) == "two<|im_end|>"
    assert first.engine_logprobs == (-0.5,) * len(first.tokens)
    assert first.policy_version == (3,) * len(first.tokens)
    assert [call.session for call in engine.calls] == ["a", "b", "a"]
    with pytest.raises(IndexError, match="2 lines"):
        await engine.generate([5], Sampling(), session="a")


async def test_lines_are_cut_as_completions_are() -> None:
    engine = ScriptedEngine([[5, 6, 2, 7], [5, 6, 7], "<search>x</search> and more"], tokenizer=TOKENIZER)
    stopped = await engine.generate([5], Sampling(stop_tokens=(2,)))
    assert (stopped.tokens, stopped.finish_reason) == ((5, 6, 2), FinishReason.STOP)
    cut = await engine.generate([5], Sampling(max_tokens=2))
    assert (cut.tokens, cut.finish_reason) == ((5, 6), FinishReason.LENGTH)
    text = await engine.generate([5], Sampling(stop_strings=("</search>",)))
    assert TOKENIZER.decode(text.tokens) == "<search>x</search>"


async def test_callables_exceptions_and_close() -> None:
    engine = ScriptedEngine(lambda prompt, sampling, session: [len(prompt)] if prompt else OSError("broken"))
    assert (await engine.generate([1, 1, 1], Sampling())).tokens == (3,)
    with pytest.raises(OSError, match="broken"):
        await engine.generate([], Sampling())
    await engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        await engine.generate([1], Sampling())


async def test_delay_can_be_cancelled() -> None:
    engine = ScriptedEngine([[1]], delay_s=60)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(engine.generate([1], Sampling()), timeout=0.01)
