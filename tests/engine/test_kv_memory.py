"""The budget for cached keys and values: never exceeded, and nobody's tokens depend on it."""

import asyncio
import functools
import random
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen2Config, Qwen2ForCausalLM

from upswing.engine.base import Completion, Sampling
from upswing.engine.kv_cache import KVCache
from upswing.engine.torch import TorchEngine
from upswing.errors import ConfigError
from upswing.models.tiny import tiny_model

from .conftest import MakeEngine, reference
from .test_torch_engine import hf_logprobs

TOKEN_GB = 2 * 2 * 2 * 16 * 4 / 1e9
"""Of the tiny model in float32: keys and values, 2 layers, 2 key heads of size 16, 4 bytes."""


@pytest.fixture
def make_engine(make_engine: MakeEngine) -> MakeEngine:
    """With the tiny model as it is: sharpened, as elsewhere, the batch's shape alone moves log-probs by 3e-5."""
    return functools.partial(make_engine, tiny_model())


def gb(tokens: int) -> float:
    return (tokens + 0.5) * TOKEN_GB


def watch(engine: TorchEngine) -> list[int]:
    """Collects the cache's bytes at every forward pass."""
    seen: list[int] = []
    engine.model.register_forward_pre_hook(
        lambda *_: seen.append(sum(layer.untyped_storage().nbytes() for layer in engine._cache.layers))
    )
    return seen


def workload(seed: int) -> list[tuple[list[int], Sampling]]:
    """Seven requests of up to 155 tokens, a third of them with a common start."""
    rng = random.Random(seed)
    start = [rng.randrange(20, 900) for _ in range(15)]
    return [
        (
            [*(start if i % 3 == 0 else ()), *(rng.randrange(20, 900) for _ in range(rng.randint(2, 30)))],
            Sampling(max_tokens=rng.randint(20, 110), seed=i, top_k=rng.choice([0, 20])),
        )
        for i in range(7)
    ]


def same(tight: Completion, free: Completion) -> None:
    assert (tight.tokens, tight.finish_reason, tight.policy_version) == (
        free.tokens,
        free.finish_reason,
        free.policy_version,
    )
    for ours, theirs in ((tight.engine_logprobs, free.engine_logprobs), (tight.entropy, free.entropy)):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("tokens", "chunk"), [(160, 16), (330, 7), (250, 1024)])
async def test_a_tight_budget_changes_no_completion(make_engine: MakeEngine, tokens: int, chunk: int) -> None:
    """Token for token, with every log-prob to 1e-5, whatever was put back and computed again."""
    work = workload(tokens)
    free = make_engine()
    tight = make_engine(kv_memory_gb=gb(tokens), prefill_chunk=chunk)
    bytes_seen = watch(tight)
    for a, b in zip(*[await asyncio.gather(*(e.generate(*w) for w in work)) for e in (tight, free)], strict=True):
        same(a, b)
    assert max(bytes_seen) <= gb(tokens) * 1e9
    assert free.stats.preemptions == 0
    assert tight.stats.preemptions > 0
    assert tight.stats.evictions == 0, "no sessions, none to evict"


async def test_the_oldest_is_never_put_back(make_engine: MakeEngine) -> None:
    """Equal requests end in the order they came in, so each moves on however tight it is."""
    engine = make_engine(kv_memory_gb=gb(130))
    ended: list[int] = []

    async def one(i: int) -> None:
        await engine.generate([20 + i] * 20, Sampling(max_tokens=60, seed=i))
        ended.append(i)

    await asyncio.gather(*(one(i) for i in range(5)))
    assert ended == list(range(5))
    assert 0 < engine.stats.preemptions < 20


async def test_idle_sessions_go_before_running_requests(make_engine: MakeEngine) -> None:
    prompts = [[20 + i] * 30 for i in range(6)]
    engine, free = make_engine(kv_memory_gb=gb(6 * 40)), make_engine()
    for one in (engine, free):
        for i, prompt in enumerate(prompts):  # six idle sessions of 39 tokens each fill the budget
            await one.generate(prompt, Sampling(max_tokens=10, seed=i), session=f"s{i}")
    assert (engine.stats.evictions, engine.stats.preemptions) == (0, 0)
    long, sampling = [700] * 20, Sampling(max_tokens=80)
    same(await engine.generate(long, sampling), await free.generate(long, sampling))
    # 100 tokens leave room for two slots of up to 120: five sessions had to go, the one that came last is still there.
    assert (engine.stats.evictions, engine.stats.preemptions) == (5, 0)
    for number, cached in ((5, 39), (0, 0)):
        before = engine.stats.cached_tokens
        again = [*prompts[number], *[7] * 10]
        await engine.generate(again, Sampling(max_tokens=1), session=f"s{number}")
        assert (engine.stats.cached_tokens - before >= 30) == (cached > 0)


async def test_turns_of_many_sessions_under_a_budget(make_engine: MakeEngine) -> None:
    """Histories that grow past what may be cached at once; idle sessions and running turns lose theirs."""

    async def play(engine: TorchEngine, i: int) -> list[Completion]:
        rng = random.Random(i)
        history = [rng.randrange(20, 900) for _ in range(20)]
        turns = []
        for turn in range(3):
            sampling = Sampling(max_tokens=rng.choice([12, 60]), seed=turn)
            done = await engine.generate(history, sampling, session=f"s{i}")
            history += [*done.tokens, *(rng.randrange(20, 900) for _ in range(9))]
            turns.append(done)
        return turns

    free, tight = make_engine(), make_engine(kv_memory_gb=gb(300), max_slots=8)
    bytes_seen = watch(tight)
    both = [await asyncio.gather(*(play(engine, i) for i in range(10))) for engine in (tight, free)]
    for ours, theirs in zip(*both, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            same(a, b)
    assert max(bytes_seen) <= gb(300) * 1e9 and tight.stats.evictions > 0 and tight.stats.preemptions > 0


@pytest.mark.parametrize("event", ["nothing", "cancel", "release", "weights"])
async def test_a_session_that_is_put_back_while_something_happens(make_engine: MakeEngine, event: str) -> None:
    """It is cancelled, released or gets other weights: every log-prob of it and of the others is exact."""
    models = [tiny_model(), tiny_model()]
    with torch.no_grad():
        models[1].model.layers[1].self_attn.v_proj.weight.mul_(-9)
    engine = make_engine(kv_memory_gb=gb(160))
    todo = [(i, ([30 + i] * 20, Sampling(max_tokens=60, seed=i))) for i in range(3)]  # room for two in the end
    jobs = [asyncio.create_task(engine.generate(*work, session=f"s{i}")) for i, work in todo]
    put_back = None
    while put_back is None:
        await asyncio.sleep(0)
        async with engine._lock:  # no step runs
            put_back = next((request for request in engine._waiting if request.tokens), None)
            number = int(put_back.session[1:]) if put_back else -1
            if put_back and event == "cancel":
                jobs[number].cancel()
                await asyncio.sleep(0)
            if put_back and event == "release":
                engine.release(f"s{number}")
    before = len(put_back.tokens)
    if event == "weights":
        await engine.update_weights(dict(models[1].named_parameters()), 1)
        assert len(put_back.tokens) == before, "still waiting when they came"
    await asyncio.wait(jobs)
    done = {i: (prompt, jobs[i].result(), sampling) for i, (prompt, sampling) in todo if not jobs[i].cancelled()}
    assert set(range(3)) - set(done) == ({number} if event == "cancel" else set())
    assert put_back not in engine._waiting and (len(put_back.tokens) == before) == (event == "cancel")
    kept = {slot.session for slot in engine._slots.slots}
    assert (f"s{number}" in kept) == (event in ("nothing", "weights"))
    for prompt, turn, sampling in done.values():
        by_model = [hf_logprobs(reference(model), prompt, turn, sampling) for model in models]
        versions, got = torch.tensor(turn.policy_version), torch.tensor(turn.engine_logprobs).double()
        torch.testing.assert_close(got, torch.where(versions == 0, *by_model), atol=1e-5, rtol=0)
        assert (by_model[0] - by_model[1]).abs().mean() > 1e-3
    if event == "weights":
        assert done[number][1].policy_version == (0,) * before + (1,) * (60 - before)
    elif event == "nothing":  # its next turn
        prompt, turn, sampling = done[number]
        longer, free = [*prompt, *turn.tokens, 7, 8], make_engine()
        same(await engine.generate(longer, sampling, session=f"s{number}"), await free.generate(longer, sampling))


@pytest.mark.parametrize("total", [18_000, 131_072])
@pytest.mark.parametrize("given_gb", [0.5, 1.0321])
def test_the_memory_that_is_asked_for_is_enough_and_no_more(total: int, given_gb: float) -> None:
    """Qwen2.5-7B's cache: 57344 bytes a token, which six digits of the sum can't tell."""
    sizes = {
        "vocab_size": 8, "hidden_size": 3584, "intermediate_size": 8, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 131_072,
    }  # fmt: skip
    with torch.device("meta"):
        model = Qwen2ForCausalLM(Qwen2Config(**sizes)).to(torch.bfloat16)
    message = TorchEngine(model, kv_memory_gb=given_gb).request_limit(total)
    assert f"kv_memory_gb {given_gb} holds; raise it to " in message
    needed = float(message.split()[-1])
    assert TorchEngine(model, kv_memory_gb=needed).max_request == total
    assert TorchEngine(model, kv_memory_gb=needed - 1e-9).max_request == total - 1


async def test_what_can_never_fit_is_refused_with_the_numbers(make_engine: MakeEngine) -> None:
    engine = make_engine(kv_memory_gb=gb(100))
    words = "prompt of 90 tokens plus max_tokens 11 is 101, above the 100 that kv_memory_gb 5.1456e-05 holds; raise it"
    with pytest.raises(ValueError, match=words) as refused:
        await engine.generate([5] * 90, Sampling(max_tokens=11))
    assert len((await engine.generate([5] * 90, Sampling(max_tokens=10))).tokens) == 10
    enough = make_engine(kv_memory_gb=float(str(refused.value).split()[-1]))
    assert len((await enough.generate([5] * 90, Sampling(max_tokens=11))).tokens) == 11
    for tokens in (-1, 0, 1):
        with pytest.raises(ConfigError, match="kv_memory_gb"):
            make_engine(kv_memory_gb=gb(tokens))


def cache_of(tokens: int | None, *, layers: int = 3, expected: tuple[int, int] = (0, 0)) -> KVCache:
    """Two key heads of size 4 in float32: 64 bytes a token and layer."""
    config = SimpleNamespace(num_attention_heads=4, num_key_value_heads=2, head_dim=4, num_hidden_layers=layers)
    model: Any = SimpleNamespace(config=config, dtype=torch.float32, device=torch.device("cpu"))
    memory_gb = None if tokens is None else (tokens + 0.5) * 64 * layers / 1e9
    return KVCache(model, max_slots=9, max_positions=300, memory_gb=memory_gb, expected=expected)


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most bytes that tensors made under it had at one time."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: list[weakref.ref[torch.Tensor]] = []
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.new_zeros.default:
            self.made.append(weakref.ref(out))
            self.peak = max(self.peak, sum(made.nbytes for ref in self.made if (made := ref()) is not None))
        return out


@settings(max_examples=40, deadline=None)
@given(data=st.data(), tokens=st.sampled_from([None, 40, 300, 1200]))
def test_slots_keep_their_content_within_the_budget(data: st.DataObject, tokens: int | None) -> None:
    """Any sequence of new, dropped and longer slots against a plain list of what each slot holds."""
    cache = cache_of(tokens)
    assert cache.budget == (tokens or cache.budget)
    held: list[torch.Tensor] = []
    live = LiveBytes()
    for _ in range(12):
        kept = [i for i in range(len(held)) if data.draw(st.integers(0, 4)) > 0]
        held = [held[i] for i in kept]
        longest = max((content.shape[2] for content in held), default=1)
        positions = data.draw(st.integers(longest, max(longest, 299)))
        while held and len(held) * positions > cache.budget:
            held.pop()
            kept.pop()
        if not kept or ((len(kept) + 1) * positions <= cache.budget and len(kept) < 9 and data.draw(st.booleans())):
            kept.append(max(cache.num_slots, *kept) if kept else cache.num_slots)
            held.append(torch.empty(2, 2, 0, 4))
        if len(kept) * positions > cache.budget:
            positions = cache.budget
        with live:
            cache.reserve(kept, positions)
        _, slots, _, room, _ = cache.layers[0].shape
        assert slots >= len(held) and room >= positions and slots * room <= cache.budget
        for i, content in enumerate(held):
            new = torch.rand(2, 2, data.draw(st.integers(content.shape[2], positions)) - content.shape[2], 4)
            held[i] = torch.cat([content, new], 2)
            for layer in cache.layers:
                assert torch.equal(layer[:, i, :, : content.shape[2]], content)
                layer[:, i, :, : held[i].shape[2]] = held[i]
    if tokens:
        assert 0 < live.peak <= tokens * 64 * (3 + 1), "one layer more than the budget while it is replaced"


async def test_frequencies_over_seeds_match_the_models_distribution(make_engine: MakeEngine) -> None:
    """Chi-square over seeds 0, 1, 2, ...: a request's own generator must not make neighbouring seeds alike."""
    prompt, count = [50, 60, 70], 1500
    engine = make_engine(max_slots=32)
    sampling = [Sampling(max_tokens=1, temperature=2.5, top_k=12, seed=seed) for seed in range(count)]
    done = await asyncio.gather(*(engine.generate(prompt, s) for s in sampling))
    with torch.no_grad():
        logits, tokens = reference(tiny_model())(torch.tensor([prompt])).logits[0, -1].double().topk(12)
    expected = (logits / 2.5).softmax(0) * count
    seen = torch.tensor([[c.tokens[0] for c in done].count(int(token)) for token in tokens]).double()
    assert seen.sum() == count
    assert float(((seen - expected) ** 2 / expected).sum()) < 11 + 5 * (2 * 11) ** 0.5


async def test_a_finished_slot_is_refilled_while_others_run(make_engine: MakeEngine) -> None:
    """Two slots: nine short ones go through one of them while the long one holds the other; no step is wasted."""
    engine = make_engine(max_slots=2)
    steps: list[int] = []
    engine.model.register_forward_pre_hook(lambda *_: steps.append(1))
    ended: list[str] = []

    async def one(name: str, num_tokens: int) -> None:
        await engine.generate([20 + len(name)] * 4, Sampling(max_tokens=num_tokens))
        ended.append(name)

    await asyncio.gather(one("long", 100), *(one("short" + "x" * i, 10) for i in range(9)))
    assert ended[-1] == "long"
    # Sampling 100 tokens takes 100 forward passes; everything else happens in the same ones.
    assert len(steps) == 100


def test_a_cache_begins_as_large_as_the_one_before_it_was_needed() -> None:
    """So that a step's cache isn't grown, and copied, all over again; and one long sequence isn't paid for forever."""
    cache = cache_of(None)
    cache.reserve(range(5), 200)
    after = cache_of(None, expected=cache.most)
    after.reserve([0], 1)
    assert after.layers[0].shape[1] >= 5 and after.layers[0].shape[3] >= 200
    assert after.most == (1, 1)  # what it was needed for itself, which the next one begins with
    assert cache_of(None, expected=cache.most).most == (5, 200)  # dropped before it was used


async def test_memory_given_back_before_learning_costs_only_time(make_engine: MakeEngine) -> None:
    engine = make_engine()
    expected = await engine.generate([5] * 40, Sampling(max_tokens=8, seed=1), session="a")
    await engine.forget_cache()
    assert engine._cache.num_slots == 0
    again = await engine.generate([5] * 40, Sampling(max_tokens=8, seed=1), session="a")
    assert again.tokens == expected.tokens
    running = asyncio.ensure_future(engine.generate([5] * 40, Sampling(max_tokens=60, seed=2)))
    while engine.stats.decode_tokens < 20:
        await asyncio.sleep(0)
    await engine.forget_cache()
    assert (await running).tokens == (await engine.generate([5] * 40, Sampling(max_tokens=60, seed=2))).tokens
