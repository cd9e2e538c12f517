"""How fast the embedded engine samples, against `transformers` generate on the same work.

    python bench/rollout.py [--quick]

`fixed_vs_hf`: 64 prompts of 64 tokens, 64 new tokens each (`--quick`: 32), no early stop, no shared prefixes. Same
model, threads, number format and sampling (temperature 1) for both; generate returns no log-probs, the engine does.
Rounds alternate A B A B after one to warm up; medians are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time

import torch
import transformers

from common import Figure, cannot_run, describe_machine, finish
from upswing.engine.base import Sampling
from upswing.engine.torch import TorchEngine
from upswing.engine.weights import compute_dtype
from upswing.errors import UpswingError
from upswing.models.load import LoadedModel, load_model

NUM_PROMPTS = 64
PROMPT_TOKENS = 64
TARGET = 2.5


def make_prompts(vocab: int) -> list[list[int]]:
    """Random ids: no two prompts share a prefix, so that the engine's prefix reuse can't help."""
    rng = random.Random(0)
    return [[rng.randrange(100, vocab) for _ in range(PROMPT_TOKENS)] for _ in range(NUM_PROMPTS)]


def time_hf(model: transformers.PreTrainedModel, prompts: list[list[int]], new_tokens: int) -> float:
    """Seconds of one batched generate."""
    ids = torch.tensor(prompts)
    began = time.perf_counter()
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        pad_token_id=0,
    )
    assert out.shape == (NUM_PROMPTS, PROMPT_TOKENS + new_tokens)
    return time.perf_counter() - began


def time_engine(model: transformers.PreTrainedModel, prompts: list[list[int]], new_tokens: int) -> float:
    """Seconds of the same work with an empty cache; making the engine isn't counted."""
    engine = TorchEngine(model, max_slots=NUM_PROMPTS)

    async def work() -> float:
        began = time.perf_counter()
        samplings = [Sampling(max_tokens=new_tokens, seed=i) for i in range(NUM_PROMPTS)]
        done = await asyncio.gather(*(engine.generate(p, s) for p, s in zip(prompts, samplings, strict=True)))
        seconds = time.perf_counter() - began
        assert all(len(completion.tokens) == new_tokens for completion in done)
        await engine.close()
        return seconds

    return asyncio.run(work())


def compare(
    loaded: LoadedModel, dtype: torch.dtype, *, new_tokens: int, rounds: int
) -> tuple[list[float], list[float]]:
    """Seconds per round of generate and of the engine, alternating, the first round of each thrown away."""
    ours = loaded.model.to(dtype)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(loaded.path, dtype=dtype).eval()
    prompts = make_prompts(loaded.model.config.vocab_size)
    hf, engine = [], []
    for _ in range(rounds + 1):
        hf.append(time_hf(theirs, prompts, new_tokens))
        engine.append(time_engine(ours, prompts, new_tokens))
        print(f"generate {hf[-1]:.1f} s, engine {engine[-1]:.1f} s", flush=True)
    return hf[1:], engine[1:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    try:
        loaded = load_model("smollm2-135m")
    except UpswingError as error:
        return cannot_run(str(error))
    dtype = compute_dtype(torch.device("cpu"))
    print(f"{describe_machine()}\n{loaded.name}, {dtype}")
    new_tokens = 32 if quick else 64
    hf, engine = compare(loaded, dtype, new_tokens=new_tokens, rounds=2 if quick else 3)
    for name, seconds in (("generate", statistics.median(hf)), ("engine", statistics.median(engine))):
        print(f"{name:8} {seconds:6.1f} s {NUM_PROMPTS * new_tokens / seconds:6.0f} tokens/s")
    ratios = [a / b for a, b in zip(hf, engine, strict=True)]
    value = statistics.median(hf) / statistics.median(engine)
    figure = Figure(round(value, 3), TARGET, spread=[round(min(ratios), 3), round(max(ratios), 3)])
    return finish("rollout", quick, {"fixed_vs_hf": figure})


if __name__ == "__main__":
    sys.exit(main())
