"""The embedded engine: continuous batching over a Hugging Face model, with a slotted KV cache and prefix reuse.

One step is one packed forward: a token for every running completion, plus up to `prefill_chunk` prompt tokens of
those that begin. Requests wait in order; a finished one's slot is refilled at the next step. A request starts from
the longest cached prefix there is: its own session's earlier turns, or any other sequence's (a group's prompt is
computed once and copied). Requests that share a prefix still being computed wait for it. Those whose tokens are all the
same (a group's, until they part) are one row of the forward, and each draws from its logits.

When the cache's memory is full, idle sessions lose theirs first; then the request that began last goes back to the
front of the waiting ones, with all that it has sampled, and is computed again later.

Steps run in one worker thread; everything they touch is touched by nobody else while one runs.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeVar, cast

import numpy as np
import torch
from transformers import PreTrainedModel

from upswing.engine.base import Capabilities, Completion, EngineStats, Sampling
from upswing.engine.int8 import check_int8, quantize_linears
from upswing.engine.kv_cache import CachedAttention, KVCache, Segment
from upswing.engine.linear import speed_up_linears
from upswing.engine.request import Request
from upswing.engine.sampler import check_sampling, sample
from upswing.engine.slots import MIN_SHARED, Slot, SlotTable, common_prefix
from upswing.engine.stopping import StopChecker
from upswing.engine.weights import compute_dtype, load_weights
from upswing.errors import ConfigError
from upswing.models.attention import check_all_attended, context_limit, use_upswing_attention
from upswing.trajectory.types import Int32T

_STEPS_PER_HOP = 8
"""Steps that the worker thread does before the event loop hears from it, unless a completion ends earlier."""

_QUIET_PASSES = 4
"""Turns of the event loop without a new request, after which the next steps begin."""

_R = TypeVar("_R")


class TorchEngine:
    """Samples from a Llama- or Qwen-family `AutoModelForCausalLM` on CPU or one GPU.

    The model is used as it is and changed by `update_weights`; `from_model` makes a copy first. `tokenizer` is needed
    for stop strings only. `max_slots` completions run at once, the rest wait. `max_context` (prompt plus completion)
    defaults to the model's; cache memory grows with what is used, not with what is allowed, up to `kv_memory_gb`
    (1e9 bytes each; None: no limit).
    """

    capabilities = Capabilities()

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        tokenizer: Any = None,
        max_slots: int = 64,
        max_context: int | None = None,
        prefill_chunk: int = 1024,
        kv_memory_gb: float | None = None,
    ) -> None:
        limit = context_limit(model)
        if max_context is not None and not 2 <= max_context <= limit:
            raise ConfigError(f"max_context is {max_context}; allowed: 2 to {limit}, what the model was made for")
        if max_slots < 1 or prefill_chunk < 1:
            raise ConfigError(f"max_slots ({max_slots}) and prefill_chunk ({prefill_chunk}) must be at least 1")
        use_upswing_attention(model)
        model.train(False).requires_grad_(False)
        self.model, self.tokenizer = model, tokenizer
        self.max_context = max_context or limit
        self.prefill_chunk = prefill_chunk
        self.version = 0
        self.stats = EngineStats()
        self.max_slots = max_slots
        self.kv_memory_gb = kv_memory_gb
        self._slots = SlotTable(max_slots)
        self._cache = self._empty_cache()
        if self._cache.budget < 2:
            raise ConfigError(f"kv_memory_gb is {kv_memory_gb:g}; 2 tokens of {self._cache.token_bytes} bytes must fit")
        self._waiting: deque[Request] = deque()
        self._active: list[Request] = []
        self._numbers = itertools.count()
        self._inbox: deque[Callable[[], None]] = deque()
        self._requests: set[Request] = set()
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="upswing-engine")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    @classmethod
    def from_model(
        cls,
        model: PreTrainedModel,
        *,
        tokenizer: Any = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        quantize: Literal["int8"] | None = None,
        **options: Any,
    ) -> TorchEngine:
        """An engine with its own copy of `model`.

        `device` None: a GPU when there is one. `dtype` None: bfloat16 where the device computes in it, else float32.
        `quantize`: the products in int8 (`engine.int8`). Raises ConfigError where they can't be.
        """
        chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if quantize is not None:
            check_int8(chosen)
        held: Any = copy.deepcopy(model)
        held.to(device=chosen, dtype=dtype or compute_dtype(chosen))
        if quantize is not None:
            quantize_linears(held)
        speed_up_linears(held)
        return cls(held, tokenizer=tokenizer, **options)

    @property
    def kv_tokens(self) -> int:
        """Tokens that the cache may hold, all slots together."""
        return self._cache.budget

    @property
    def max_request(self) -> int:
        """Tokens, prompt and completion together, that one request may have."""
        return min(self.max_context, self._cache.budget)

    def request_limit(self, total: int) -> str:
        """What a request of `total` tokens, more than `max_request`, is above; for messages."""
        if total > self.max_context:
            return f"the engine's context of {self.max_context}"
        enough = total * self._cache.token_bytes / 1e9
        return f"the {self._cache.budget} that kv_memory_gb {self.kv_memory_gb:.12g} holds; raise it to {enough:.12g}"

    async def generate(self, prompt: Sequence[int], sampling: Sampling, *, session: str | None = None) -> Completion:
        """Sample one completion of `prompt`; see `Engine.generate`.

        Raises ValueError for an empty prompt, one that doesn't fit, or a setting out of range.
        """
        self._check_open()
        loop = self._bind_loop()
        request = self._new_request(prompt, sampling, session)
        self._requests.add(request)
        self._inbox.append(lambda: self._enqueue(request))
        if self._task is None:
            self._task = loop.create_task(self._run())
        try:
            return await request.future
        except asyncio.CancelledError:
            self._inbox.append(lambda: self._drop(request))
            raise
        finally:
            self._requests.discard(request)

    def release(self, session: str) -> None:
        """Free what is kept for a session. Unknown sessions are ignored."""
        self._inbox.append(lambda: self._release(session))

    async def update_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Load weights between two steps. Running completions go on with the new ones, their cache recomputed.

        Raises ValueError for unknown or missing names, before anything is changed, and for wrong shapes.
        """
        self._check_open()

        def load() -> None:
            self._forget_cache()
            self.stats.weight_bytes += load_weights(self.model, weights)
            self.version = version

        await self._exclusively(load)

    async def forget_cache(self) -> None:
        """Give the cache's memory back until something is sampled again; what runs is computed anew."""
        await self._exclusively(self._forget_cache)

    async def close(self) -> None:
        """Stop; requests still running end as cancelled, with the tokens that they have."""
        if self._closed:
            return
        self._closed = True
        await self._exclusively(self._reset)
        for request in list(self._requests):
            request.resolve()
        if self._task is not None:
            await asyncio.wait([self._task])
        self._worker.shutdown(wait=False)

    # --- event loop side ---------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the engine is closed")

    def _bind_loop(self) -> asyncio.AbstractEventLoop:
        """The running loop. One that replaces an earlier one finds no requests of that one left."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            if self._loop is not None and self._loop.is_running():
                raise RuntimeError("the engine is in use by the event loop of another thread; give each its own engine")
            self._worker.submit(self._reset).result()
            self._loop, self._lock, self._task = loop, asyncio.Lock(), None
            self._requests.clear()
        return loop

    async def _exclusively(self, action: Callable[[], _R]) -> _R:
        """Run in the worker thread while no step runs."""
        loop = self._bind_loop()
        async with self._lock:
            return await loop.run_in_executor(self._worker, action)

    def _new_request(self, prompt: Sequence[int], sampling: Sampling, session: str | None) -> Request:
        check_sampling(sampling)
        num_prompt = len(prompt)
        if num_prompt == 0:
            raise ValueError("the prompt has no tokens; at least 1 is needed")
        total = num_prompt + sampling.max_tokens
        if total > self.max_request:
            raise ValueError(
                f"prompt of {num_prompt} tokens plus max_tokens {sampling.max_tokens} is {total}, "
                f"above {self.request_limit(total)}"
            )
        vocab = int(self.model.config.vocab_size)
        if min(prompt) < 0 or max(prompt) >= vocab:
            raise ValueError(f"the prompt has token ids outside the model's vocabulary of {vocab}")
        sequence = np.empty(total, np.int32)
        sequence[:num_prompt] = prompt
        return Request(
            sequence=sequence,
            num_prompt=num_prompt,
            length=num_prompt,
            sampling=sampling,
            session=session,
            stop=StopChecker(sampling, self.tokenizer),
            rng=random.Random(sampling.seed),
        )

    async def _run(self) -> None:
        """Step while there are requests; ends when there are none, and is started again by the next one."""
        try:
            while self._requests and not self._closed:
                await self._listen()
                for request in await self._exclusively(self._work):
                    request.resolve()
                    self._requests.discard(request)
        except asyncio.CancelledError:
            for request in self._requests:
                request.future.cancel()
            self._loop = None  # the worker may still be in a step: the next call waits for it and resets
            raise
        except BaseException as error:
            await self._exclusively(self._reset)
            for request in self._requests:  # those that came in meanwhile too: nobody may wait forever
                if not request.future.done():
                    request.future.set_exception(error)
            self._requests.clear()
        finally:
            self._task = None

    async def _listen(self) -> None:
        """Let those who have just been answered ask again: otherwise their Python and the next steps, which would run
        half empty, fight for the interpreter. What takes longer, a tool that waits, isn't waited for."""
        quiet = 0
        while quiet < _QUIET_PASSES:
            heard = len(self._inbox)
            await asyncio.sleep(0)
            quiet = 0 if len(self._inbox) > heard else quiet + 1

    # --- worker thread side ------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _work(self) -> list[Request]:
        """A few steps; returns the requests that ended."""
        for _ in range(_STEPS_PER_HOP):
            while self._inbox:
                self._inbox.popleft()()
            self._admit()
            if not self._active:
                return []
            finished = self._step()
            if finished:
                return finished
        return []

    def _enqueue(self, request: Request) -> None:
        if not request.future.done():
            self._waiting.append(request)

    def _drop(self, request: Request) -> None:
        """Forget a cancelled request and free its slot."""
        if request in self._waiting:
            self._waiting.remove(request)
        if request in self._active:
            self._leave(request, keep=False)

    def _release(self, session: str) -> None:
        self._slots.release(session)
        for request in (*self._active, *self._waiting):
            if request.session == session:
                request.session = None

    def _leave(self, request: Request, *, keep: bool) -> None:
        """Take a request out of the running ones; `keep` its slot for the session's next turn."""
        self._active.remove(request)
        self._slots.done(request.slot, keep_for=request.session if keep else None)

    def _empty_cache(self, expected: tuple[int, int] = (0, 0)) -> KVCache:
        slots, context, memory_gb = self.max_slots, self.max_context, self.kv_memory_gb
        return KVCache(self.model, max_slots=slots, max_positions=context, memory_gb=memory_gb, expected=expected)

    def _forget_cache(self) -> None:
        """Drop every key and value; running requests start over from their tokens so far, before the waiting ones.

        The memory goes too: NaNs of bad weights left in it would get through the mask (NaN - inf is NaN).
        """
        self._waiting.extendleft(reversed(self._active))
        self._active = []
        for request in self._waiting:
            request.slot = Slot(-1)
        self._slots.clear()
        self._cache = self._empty_cache(self._cache.most)

    def _reset(self) -> None:
        """Forget all requests and the cache, after a failure or at the end."""
        self._inbox.clear()
        self._forget_cache()
        self._waiting.clear()

    def _admit(self) -> None:
        """Give slots to waiting requests, first come first, except those whose prefix is just being computed."""
        held_back, running = list[Request](), self._active if self._waiting else []
        positions = max((r.positions for r in running), default=0)
        prefilling = [r for r in running if r.num_pending > 1]
        while self._waiting and len(self._active) < self.max_slots:
            positions = max(positions, self._waiting[0].positions)
            if (len(self._active) + 1) * positions > self._cache.budget:
                break
            request = self._waiting.popleft()
            if self._prefix_is_coming(request, prefilling):
                held_back.append(request)
            else:
                self._place(request, positions)
                prefilling += [request] if request.num_pending > 1 else []
        self._waiting.extendleft(reversed(held_back))

    def _prefix_is_coming(self, request: Request, prefilling: Sequence[Request]) -> bool:
        """Whether one of those `prefilling` has more of it than the cache does, but hasn't computed it yet.

        Nobody waits for one with the very same tokens that stands where it would begin: they are computed together.
        """
        if not prefilling:
            return False
        sequence = request.sequence[: request.length]
        cached = self._slots.longest_match(sequence)
        begin, more = cached if cached >= MIN_SHARED else 0, cached + MIN_SHARED
        if more >= len(sequence):
            return False
        begins, last = sequence[:more], sequence.item(more - 1)  # which tells most apart
        able = (r for r in prefilling if r.length >= more and r.sequence.item(more - 1) == last)
        sharing = [r for r in able if common_prefix(r.sequence, begins) == more]
        return bool(sharing) and not any(r.slot.length == begin and _same_tokens(r, request) for r in sharing)

    def _place(self, request: Request, positions: int) -> None:
        """Give it a slot; all slots need `positions`."""
        sequence = request.sequence[: request.length]
        positions = max([positions, *[slot.length for slot in self._slots.slots]])
        self._slots.max_slots = min(self.max_slots, self._cache.budget // positions)
        request.slot, source, shared = self._slots.place(sequence, request.session)
        if request.slot.index >= self._cache.num_slots:
            self._cache.reserve(self._slots.renumber(), positions)
        if source is not None:
            self._cache.copy_prefix(source.index, request.slot.index, request.slot.length, shared)
            request.slot.length = shared
        request.slot.sequence = request.sequence  # which has room for more
        self.stats.cached_tokens += shared
        alike = next((r.alike for r in self._active if _same_tokens(r, request)), None)
        request.alike = next(self._numbers) if alike is None else alike
        self._active.append(request)

    def _make_room(self) -> None:
        """Let idle slots go, then the requests that began last, until the others' next tokens fit the budget."""
        while len(self._slots.slots) * (positions := max(r.length for r in self._active)) > self._cache.budget:
            if not self._slots.drop():
                youngest = self._active[-1]
                self._leave(youngest, keep=False)
                youngest.slot = Slot(-1)
                self._waiting.appendleft(youngest)
                self.stats.preemptions += 1
        self._cache.reserve(self._slots.renumber(), positions)
        self.stats.evictions = self._slots.evictions

    def _step(self) -> list[Request]:
        """One packed forward and one sampled token for each request whose sequence is complete."""
        self._make_room()
        batch = self._plan()
        segments, ids, ends = _pack(batch)
        logits = self._forward(segments, ids, ends)
        ready, rows = list[Request](), list[int]()
        for (twins, count), segment in zip(batch, segments, strict=True):
            stop = segment.start + count
            for request in twins:
                request.slot.length = stop
            if count == 1 and segment.start >= twins[0].num_prompt:
                self.stats.decode_tokens += len(twins)
            else:
                self.stats.prefill_tokens += count
                self.stats.cached_tokens += count * (len(twins) - 1)
            if stop == twins[0].length:
                rows += [rows[-1] + 1 if rows else 0] * len(twins)
                ready += twins
        return self._sample(ready, logits, rows) if ready else []

    def _plan(self) -> list[tuple[list[Request], int]]:
        """Who runs, those with the same tokens as one, and with how many: long ones first, then single tokens ascending
        by slot."""
        alike: dict[tuple[int, int], list[Request]] = {}
        for request in self._active:
            alike.setdefault((request.alike, request.slot.length), []).append(request)
        singles: list[tuple[list[Request], int]] = []
        long: list[tuple[list[Request], int]] = []
        budget = self.prefill_chunk
        for twins in alike.values():
            count = twins[0].num_pending
            if count > 1:
                count = min(count, budget)
                budget -= count
            if count:
                (long if count > 1 else singles).append((twins, count))
        singles.sort(key=lambda pair: pair[0][0].slot.index)
        return long + singles

    def _forward(self, segments: Sequence[Segment], ids: Int32T, ends: Sequence[int]) -> torch.Tensor:
        """Logits [len(ends), V] at the packed indices `ends`; of the last token when there are none."""
        attention = CachedAttention(self._cache, segments)
        device = attention.positions_N.device
        output = self.model(
            input_ids=torch.from_numpy(ids.astype(np.int64))[None].to(device),
            position_ids=attention.positions_N[None],
            attention=attention,
            use_cache=False,
            logits_to_keep=torch.tensor(ends or [len(ids) - 1], device=device),
        )
        check_all_attended(self.model, attention)
        return cast(torch.Tensor, output.logits[0])

    def _sample(self, ready: Sequence[Request], logits_UV: torch.Tensor, rows: Sequence[int]) -> list[Request]:
        """Add a token to each ready request, from its row of the logits; returns those that ended."""
        sampled = sample(logits_UV, [r.sampling for r in ready], [r.rng.random() for r in ready], rows)
        drawn = zip(ready, sampled.tokens, sampled.logprobs, sampled.entropies, strict=True)
        finished = [r for r, token, logprob, entropy in drawn if r.add(token, logprob, entropy, self.version)]
        parted: dict[tuple[int, int], int] = {}
        for request in ready:
            request.alike = parted.setdefault((request.alike, request.tokens[-1]), next(self._numbers))
        for request in finished:
            self._leave(request, keep=True)
        return finished


def _same_tokens(a: Request, b: Request) -> bool:
    same = a.length == b.length and a.sequence[a.length - 1] == b.sequence[b.length - 1]  # which tells most apart
    return bool(same) and np.array_equal(a.sequence[: a.length], b.sequence[: b.length])


def _pack(batch: Iterable[tuple[Sequence[Request], int]]) -> tuple[list[Segment], Int32T, list[int]]:
    """Segments, their tokens in a row, and the packed index of each last token whose logits are needed."""
    segments: list[Segment] = []
    pieces: list[Int32T] = []
    ends: list[int] = []
    offset = 0
    for (request, *others), count in batch:
        start = request.slot.length
        segments.append(Segment(request.slot.index, start, count, offset, [other.slot.index for other in others]))
        pieces.append(request.sequence[start : start + count])
        offset += count
        if start + count == request.length:
            ends.append(offset - 1)
    return segments, np.concatenate(pieces), ends
