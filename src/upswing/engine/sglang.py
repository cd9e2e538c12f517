"""SGLang over HTTP: a server that you start, token ids in and out (`/generate`), new weights while it serves.

    python -m sglang.launch_server --model-path MODEL

Log-probs are those after the temperature, unless SGLANG_RETURN_ORIGINAL_LOGPROB is set: that is measured, and such a
server is refused for training. They aren't renormalised after top-p, top-k and min-p, so a sampling that cuts is
refused. New weights go through a folder that both sides see. Running completions are put back meanwhile
(`/pause_generation`, mode retract) and go on with the new weights, their cache computed anew; servers without that mode
end them, or finish them before the new weights come. Newer servers say which weights sampled which tokens; of older
ones a completion that new weights came in between is thrown away and sampled again.

Read against SGLang's `http_server.py`, `io_struct.py`, `sampler.py` and `schedule_batch.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from pathlib import Path
from typing import Any, ClassVar

import httpx2

from upswing.engine.base import Capabilities, FinishReason, Sampling
from upswing.engine.http import Answer, Caller, HttpEngine, ServerRefused
from upswing.errors import ConfigError, UpswingError

_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


class SglangEngine(HttpEngine):
    name = "SGLang"
    start = "python -m sglang.launch_server --model-path MODEL"
    best = Capabilities(seeds=False)
    remedies: ClassVar = {
        "exact_logprobs": "start it without SGLANG_RETURN_ORIGINAL_LOGPROB in its environment",
        "weight_updates": "give the address of the server itself, not that of a router in front of it",
        "versions": "a newer SGLang is needed, one that has weight_version in its answers",
    }
    reserved = 2  # it cuts completions short there

    def __init__(self, server: Caller, **options: Any) -> None:
        super().__init__(server, **options)
        self._aborts: set[asyncio.Task[None]] = set()

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
            weight_updates=client.get("/update_weights_from_disk").status_code != 404,  # 405: it is there, for POST
            versions="weight_version" in hot,
            seeds=len(drawn) == 2 and [one[1] for one in drawn[0]] == [one[1] for one in drawn[1]],
        )

    async def _sample(self, prompt: list[int], sampling: Sampling) -> Answer:
        if (sampling.top_p, sampling.top_k, sampling.min_p) != (1.0, 0, 0.0):
            raise ServerRefused(
                f"top_p {sampling.top_p:g}, top_k {sampling.top_k}, min_p {sampling.min_p:g}: SGLang's log-probs "
                "aren't those of a distribution that was cut; use 1, 0 and 0"
            )
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
            meta = (await self.server.call("/generate", timeout_s=None, json=body))["meta_info"]
        except asyncio.CancelledError:
            self._abort(rid)
            raise
        drawn = meta["output_token_logprobs"]
        if (count := int(meta.get("completion_tokens", len(drawn)))) != len(drawn):
            raise UpswingError(f"the SGLang server sampled {count} tokens and gave {len(drawn)}")
        return Answer(
            tokens=tuple(int(one[1]) for one in drawn),
            engine_logprobs=tuple(float(one[0]) for one in drawn),
            finish_reason=_REASONS.get(str((meta.get("finish_reason") or {}).get("type")), FinishReason.CANCELLED),
            label=None if meta.get("weight_version") is None else str(meta["weight_version"]),
            spans=tuple((str(s["version"]), int(s["start"]), int(s["end"])) for s in meta.get("weight_versions") or ()),
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
        try:
            await self.server.call("/pause_generation", json={"mode": "retract"})
            paused = True
        except ServerRefused:  # an older server: it takes weights once nothing runs, and makes what comes wait
            paused = False
        try:
            update = {"model_path": str(folder), "weight_version": label, "flush_cache": True}
            answer = await self.server.call("/update_weights_from_disk", json=update)
            if answer.get("success") is not True:
                raise UpswingError(f"the SGLang server could not load new weights: {answer.get('message', answer)}")
        finally:
            if paused:
                await self.server.call("/continue_generation", json={})

    async def _label(self) -> str:
        return str((await self.server.call("/get_model_info", method="GET")).get("weight_version"))
