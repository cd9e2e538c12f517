"""The arms of `bench/rollout.py` that run in this Python: `peers.py ARM FOLDER DTYPE`."""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers

from arms import Arm, Conversation, serve
from upswing.engine.base import Sampling
from upswing.engine.torch import TorchEngine
from upswing.learn import Learner, TrainRow
from upswing.models.load import load_model

BATCH = 64
"""Completions that run at once: the engine's slots, the rows of a `generate`."""


class EngineArm(Arm):
    """Upswing's embedded engine: every conversation is a session, played as fast as it goes."""

    engine: Any = None

    def __init__(self, folder: str, dtype: str, *, greedy: bool = False, **options: Any) -> None:
        """`options` are those of `TorchEngine.from_model`."""
        self.folder, self.dtype, self.temperature = folder, getattr(torch, dtype), 0.0 if greedy else 1.0
        self.options = {"dtype": self.dtype, "device": "cpu", "max_slots": BATCH, **options}

    def setup(self, conversations: Sequence[Conversation]) -> None:
        if self.engine is not None:
            asyncio.run(self.engine.close())
            self.engine = None
        model = load_model(self.folder).model
        self.num_weights = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
        self.engine = TorchEngine.from_model(model, **self.options)

    def play(self, conversations: Sequence[Conversation]) -> list[list[int]]:
        return [tokens for tokens, _ in asyncio.run(self._play(conversations))]

    async def _play(self, conversations: Sequence[Conversation]) -> list[tuple[list[int], list[float]]]:
        """Tokens and log-probs of each, NaN where nothing was sampled."""

        async def one(number: int, turns: Conversation) -> tuple[list[int], list[float]]:
            tokens: list[int] = []
            found: list[float] = []
            for turn, (given, new) in enumerate(turns):
                sampling = Sampling(max_tokens=new, temperature=self.temperature, seed=number * 1000 + turn)
                tokens += given
                done = await self.engine.generate(tokens, sampling, session=str(number))
                tokens += done.tokens
                found += [np.nan] * len(given) + list(done.engine_logprobs)
            self.engine.release(str(number))
            return tokens, found

        return await asyncio.gather(*(one(i, turns) for i, turns in enumerate(conversations)))

    def logprob_gap(self, conversations: Sequence[Conversation]) -> float:
        """Mean |engine's log-prob - learner's| of what is sampled, both computing in this dtype."""
        self.setup(conversations)
        played = asyncio.run(self._play(conversations))
        found = [np.array(values, np.float32) for _, values in played]
        rows = [
            TrainRow(tokens=np.array(tokens, np.int32), loss_mask=~np.isnan(values))
            for (tokens, _), values in zip(played, found, strict=True)
        ]
        learner = Learner(load_model(self.folder).model, lr=1e-6, compute_dtype=self.dtype)
        gaps = [np.abs(a - b) for a, b in zip(found, learner.logprobs(rows), strict=True)]
        return float(np.nanmean(np.concatenate(gaps), dtype=np.float64))

    @torch.inference_mode()
    def floor(self, conversations: Sequence[Conversation]) -> float:
        """Seconds that the matrix products alone take of conversations of one turn and of one length.

        The first token comes out of the prompts' forward, so there is one decode step less than there are new tokens.
        """
        model, head = self.engine.model, self.engine.model.get_output_embeddings()
        linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
        held = sum(linear.in_features * linear.out_features for linear in linears)
        if held != self.num_weights:
            raise RuntimeError(f"the engine's linear layers hold {held} weights, the model's {self.num_weights}")
        rows, new = len(conversations), conversations[0][0][1]
        num_prompt = sum(len(turns[0][0]) for turns in conversations)
        chunk: int = min(self.engine.prefill_chunk, num_prompt)
        prompts = self._products([m for m in linears if m is not head], chunk, 1) * num_prompt / chunk
        return prompts + self._products([head], rows) + self._products(linears, rows) * (new - 1)

    def _products(self, linears: Sequence[Any], rows: int, repeats: int = 3) -> float:
        """Seconds for `rows` rows through all of them: in the engine's own form or `nn.Linear`'s, the faster counts."""
        inputs = {m.in_features: torch.randn(rows, m.in_features, dtype=self.dtype) for m in linears}

        def seconds(form: Callable[[Any, torch.Tensor], torch.Tensor]) -> float:
            began = time.perf_counter()
            for linear in linears:
                form(linear, inputs[linear.in_features])
            return time.perf_counter() - began

        def plain(linear: Any, rows_BH: torch.Tensor) -> torch.Tensor:
            return F.linear(rows_BH, linear.weight, linear.bias)

        forms = (torch.nn.Linear.__call__, plain)
        return min(statistics.median([seconds(form) for _ in range(repeats)]) for form in forms)


class HFArm(Arm):
    """`generate` in batches of 64, padded left and to the longest; every turn reads the whole conversation again."""

    def __init__(self, folder: str, dtype: str, *, greedy: bool = False) -> None:
        factory: Any = transformers.AutoModelForCausalLM
        self.model = factory.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        config: Any = transformers.GenerationConfig
        # No end token: every arm samples as many tokens as asked for.
        self.model.generation_config = config(
            do_sample=not greedy, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0, eos_token_id=None
        )

    def complete(self, texts: Sequence[list[int]], new: Sequence[int]) -> list[list[int]]:
        out: list[list[int]] = []
        for start in range(0, len(texts), BATCH):
            batch, counts = texts[start : start + BATCH], new[start : start + BATCH]
            width = max(map(len, batch))
            ids = torch.tensor([[0] * (width - len(text)) + text for text in batch])
            mask = torch.tensor([[0] * (width - len(text)) + [1] * len(text) for text in batch])
            rows = self.model.generate(ids, attention_mask=mask, max_new_tokens=max(counts))[:, width:].tolist()
            out += [row[:count] for row, count in zip(rows, counts, strict=True)]
        return out


class ContinuousArm(HFArm):
    """transformers' own continuous batching; a conversation's next turn is asked for when the last one ends."""

    manager: Any = None

    def setup(self, conversations: Sequence[Conversation]) -> None:
        if self.manager is not None:
            self.manager.stop(block=True, timeout=10)
        config = transformers.ContinuousBatchingConfig(
            # The default takes most of the machine's memory; this is what the work needs.
            num_blocks=sum(sum(len(given) + new for given, new in turns) // 256 + 2 for turns in conversations[:BATCH]),
            max_batch_tokens=1024,
            max_requests_per_batch=BATCH,
            auto_switch_to_flash=False,
        )
        self.manager = self.model.init_continuous_batching(continuous_batching_config=config)
        self.manager.start()

    def play(self, conversations: Sequence[Conversation]) -> list[list[int]]:
        texts: list[list[int]] = [[] for _ in conversations]
        waiting = [list(turns) for turns in conversations]

        def ask(i: int) -> None:
            given, new = waiting[i].pop(0)
            texts[i] += given
            self.manager.add_request(texts[i], request_id=str(i), max_new_tokens=new, eos_token_id=-1)

        for i in range(len(conversations)):
            ask(i)
        for _ in range(sum(map(len, conversations))):
            while (result := self.manager.get_result(timeout=1)) is None:
                if not self.manager.is_running():
                    raise RuntimeError(f"it stopped: {self.manager.background_thread_status.fatal_error}")
            if result.error is not None:
                raise RuntimeError(result.error)
            texts[int(result.request_id)] += result.generated_tokens
            if waiting[int(result.request_id)]:
                ask(int(result.request_id))
        return texts


ARMS: dict[str, Callable[[str, str], Arm]] = {
    "engine": EngineArm,
    "int8": lambda folder, dtype: EngineArm(folder, dtype, quantize="int8"),
    "hf": HFArm,
    "continuous_batching": ContinuousArm,
}

if __name__ == "__main__":
    serve(ARMS[sys.argv[1]], *sys.argv[2:])
