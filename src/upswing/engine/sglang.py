"""SGLang over HTTP: a server that you start, token ids in and out (`/generate`), new weights while it serves.

    python -m sglang.launch_server --model-path MODEL

Log-probs are those after the temperature, unless SGLANG_RETURN_ORIGINAL_LOGPROB is set: that is measured, and such a
server is refused for training. They aren't renormalised after top-p, top-k and min-p, so a sampling that cuts is
refused.

New weights go through a folder that both sides see. Running completions are ended meanwhile (`/pause_generation`, mode
abort) and then go on from the tokens that they had; new ones wait here. The server must be idle: weights on one that
isn't end its process in versions before 0.5.23 or so, and mode retract leaves requests waiting (sgl-project/sglang
issue 33783). As no answer has tokens from before and after a change, the label of its last token's weights
(`weight_version`) is that of all; newer servers tell spans.

Read against SGLang 0.5.1 and 0.5.23: `http_server.py`, `tokenizer_manager.py`, `scheduler.py`, `sampler.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import httpx2

from upswing.engine import http
from upswing.engine.base import Capabilities, FinishReason, Sampling
from upswing.engine.http import PROBE_S, Answer, Caller, HttpEngine, ServerDown, ServerRefused
from upswing.errors import ConfigError, UpswingError

_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
_IDLE_TRIES = 20


class SglangEngine(HttpEngine):
    name = "SGLang"
    start = "python -m sglang.launch_server --model-path MODEL"
    best = Capabilities(seeds=False)
    remedies: ClassVar = {
        "exact_logprobs": "start it without SGLANG_RETURN_ORIGINAL_LOGPROB in its environment",
        "weight_updates": "give the address of the server itself (0.5.1 or newer), not that of a router in front of it",
        "versions": "SGLang 0.5.1 or newer is needed, which has weight_version in its answers",
    }
    reserved = 2  # it cuts completions short there

    def __init__(self, server: Caller, **options: Any) -> None:
        super().__init__(server, **options)
        self._aborts: set[asyncio.Task[None]] = set()
        self._loads = 0

    @classmethod
    def _probe(cls, client: httpx2.Client) -> Capabilities:
        def ask(**params: Any) -> httpx2.Response:
            more = {"return_logprob": True, "top_logprobs_num": 1}
            return client.post("/generate", json={"input_ids": [1, 2, 3], "sampling_params": params, **more})

        def meta(temperature: float) -> dict[str, Any]:
            answer = ask(max_new_tokens=1, temperature=temperature)
            if answer.status_code >= 400:
                raise ConfigError(
                    f"engine.url: the server doesn't take token ids (status {answer.status_code} at /generate); "
                    f"SGLang's own server is needed: {cls.start}"
                )
            return dict(answer.json()["meta_info"])

        def best(found: dict[str, Any]) -> float:
            """The likeliest first token's log-prob."""
            return max(float(one[0]) for one in (*found["output_token_logprobs"], *found["output_top_logprobs"][0]))

        cold, hot = meta(0.5), meta(2.0)
        twice = [ask(max_new_tokens=16, temperature=2.0, sampling_seed=7) for _ in range(2)]
        drawn = [one.json()["meta_info"]["output_token_logprobs"] for one in twice if one.status_code < 400]
        return Capabilities(
            exact_logprobs=best(cold) != best(hot),  # else they are taken before the temperature
            weight_updates=all(  # 405: it is there, for POST
                client.get(path).status_code != 404 for path in ("/update_weights_from_disk", "/pause_generation")
            ),
            versions="weight_version" in hot,
            seeds=len(drawn) == 2 and [one[1] for one in drawn[0]] == [one[1] for one in drawn[1]],
        )

    async def _sample(self, prompt: list[int], sampling: Sampling) -> Answer:
        if (sampling.top_p, sampling.top_k, sampling.min_p) != (1.0, 0, 0.0):
            raise ServerRefused(
                f"top_p {sampling.top_p:g}, top_k {sampling.top_k}, min_p {sampling.min_p:g}: SGLang's log-probs "
                "aren't those of a distribution that was cut; use 1, 0 and 0"
            )
        found = Answer(tokens=(), engine_logprobs=(), finish_reason=FinishReason.CANCELLED)
        while True:
            async with self._loading():  # what comes while weights are loaded waits
                loads = self._loads
            count = len(found.tokens)
            left = replace(sampling, max_tokens=sampling.max_tokens - count)
            part = await self._part([*prompt, *found.tokens], left)
            found = Answer(
                tokens=(*found.tokens, *part.tokens),
                engine_logprobs=(*found.engine_logprobs, *part.engine_logprobs),
                finish_reason=part.finish_reason,
                spans=(*found.spans, *((label, start + count, end + count) for label, start, end in part.spans)),
            )
            if part.finish_reason is not FinishReason.CANCELLED or loads == self._loads:
                return found
            # Ended by new weights. That hides an end that the last token is; a stop string may lie across the cut.
            if found.tokens and found.tokens[-1] in sampling.stop_tokens:
                return replace(found, finish_reason=FinishReason.STOP)
            if len(found.tokens) == sampling.max_tokens:
                return replace(found, finish_reason=FinishReason.LENGTH)
            if sampling.stop_strings:
                found = replace(found, tokens=(), engine_logprobs=(), spans=())

    async def _part(self, prompt: list[int], sampling: Sampling) -> Answer:
        """Up to the end, or to new weights."""
        # Not `ignore_eos`: it would make SGLang deaf to `stop_token_ids` too.
        params: dict[str, Any] = {
            "max_new_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "stop_token_ids": list(sampling.stop_tokens),
            "no_stop_trim": True,
            "skip_special_tokens": False,
        }
        if sampling.stop_strings:
            params["stop"] = list(sampling.stop_strings)
        if self.capabilities.seeds:
            params["sampling_seed"] = sampling.seed % 2**31
        rid = uuid.uuid4().hex
        body = {"input_ids": prompt, "sampling_params": params, "return_logprob": True, "rid": rid}
        try:
            meta = (await self.server.call("/generate", timeout_s=math.inf, json=body))["meta_info"]
        except asyncio.CancelledError:
            self._abort(rid)
            raise
        reason = _REASONS.get(str((meta.get("finish_reason") or {}).get("type")), FinishReason.CANCELLED)
        ended = reason is FinishReason.CANCELLED
        drawn = (meta.get("output_token_logprobs") or []) if ended else meta["output_token_logprobs"]
        if (count := int(meta.get("completion_tokens", len(drawn)))) != len(drawn):
            if not ended:
                raise UpswingError(f"the SGLang server sampled {count} tokens and gave {len(drawn)}")
            drawn = []
        told = [(str(s["version"]), int(s["start"]), int(s["end"])) for s in meta.get("weight_versions") or ()]
        told = told or [(str(meta.get("weight_version")), 0, len(drawn))]
        return Answer(
            tokens=tuple(int(one[1]) for one in drawn),
            engine_logprobs=tuple(float(one[0]) for one in drawn),
            finish_reason=reason,
            spans=tuple((label, start, min(end, len(drawn))) for label, start, end in told if start < len(drawn)),
        )

    def _abort(self, rid: str) -> None:
        """Stop a completion that nobody waits for: SGLang notices a closed connection only after seconds."""

        async def stop() -> None:
            with contextlib.suppress(UpswingError):
                await self.server.call("/abort_request", json={"rid": rid})

        self._aborts.add(task := asyncio.ensure_future(stop()))
        task.add_done_callback(self._aborts.discard)

    async def close(self) -> None:
        for task in self._aborts:
            task.cancel()
        await asyncio.gather(*self._aborts, return_exceptions=True)
        await super().close()

    async def _load(self, folder: Path, label: str) -> None:
        self._loads += 1
        await self.server.call("/pause_generation", json={"mode": "abort"})
        try:
            await self._idle()
            update = {"model_path": str(folder), "weight_version": label, "flush_cache": True}
            try:
                answer = await self.server.call("/update_weights_from_disk", json=update)
            except ServerRefused as problem:
                raise self._unseen(folder, problem) from None
            if answer.get("success") is not True:
                raise self._unseen(folder, answer.get("message", answer))
        finally:
            await self.server.call("/continue_generation", json={}, timeout_s=PROBE_S)

    async def _idle(self) -> None:
        """Once it can flush its cache, nothing runs or waits there: new weights flush it again."""
        for attempt in range(_IDLE_TRIES):
            try:
                await self.server.call("/flush_cache")
                return
            except ServerRefused as problem:
                busy = problem
                await asyncio.sleep(http.BACKOFF_S * min(attempt, 4))
        raise ServerDown(str(busy))

    async def _label(self) -> str:
        return str((await self.server.call("/get_model_info", method="GET", timeout_s=PROBE_S)).get("weight_version"))
