"""vLLM over HTTP: a server that you start, token ids in and out, new weights while it serves.

Start it so that its log-probs are those of the sampling distribution and its weights may be changed (0.30 or newer):

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enable-scale-out --logprobs-mode processed_logprobs

New weights go through a folder that both sides see (memory, where there is `/dev/shm`). Running completions are frozen
meanwhile, their cache is dropped, and they go on with the new weights; the server says which weights sampled which
tokens, and what it says is checked.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import httpx2

from upswing.engine.base import Capabilities, FinishReason, Sampling
from upswing.engine.http import Answer, HttpEngine
from upswing.errors import ConfigError, UpswingError

_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


class VllmEngine(HttpEngine):
    name = "vLLM"
    start = "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enable-scale-out --logprobs-mode processed_logprobs"
    remedies: ClassVar = {
        "exact_logprobs": "start it with --logprobs-mode processed_logprobs",
        "weight_updates": "start it with VLLM_SERVER_DEV_MODE=1 in its environment (and let nobody else reach it)",
    }

    @classmethod
    def _probe(cls, client: httpx2.Client) -> Capabilities:
        def best(temperature: float) -> float:
            """The likeliest first token's log-prob."""
            params = {"max_tokens": 1, "temperature": temperature, "logprobs": 1, "seed": 0, "detokenize": False}
            answer = client.post("/inference/v1/generate", json={"token_ids": [1, 2, 3], "sampling_params": params})
            if answer.status_code >= 400:
                raise ConfigError(
                    f"engine.url: the server doesn't take token ids (status {answer.status_code} at "
                    f"/inference/v1/generate); vLLM 0.30 or newer is needed, started with --enable-scale-out: "
                    f"{cls.start}"
                )
            one = answer.json()["choices"][0]["logprobs"]["content"][0]
            return max(float(each["logprob"]) for each in (one, *one["top_logprobs"]))

        return Capabilities(
            exact_logprobs=best(0.5) != best(2.0),  # else they are taken before the temperature
            weight_updates=client.get("/weight_info").status_code == 200,
        )

    async def _sample(self, prompt: list[int], sampling: Sampling) -> Answer:
        params: dict[str, Any] = {
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "seed": sampling.seed % 2**63,
            "stop_token_ids": list(sampling.stop_tokens),
            "ignore_eos": True,  # what ends a turn is said above, and only that
            "logprobs": 0,
            "detokenize": bool(sampling.stop_strings),
        }
        if sampling.stop_strings:
            params["stop"] = list(sampling.stop_strings)
        body = {"token_ids": prompt, "sampling_params": params}
        answer = await self.server.call("/inference/v1/generate", timeout_s=None, json=body)
        choice = answer["choices"][0]
        spans = choice.get("weight_versions") or ()
        return Answer(
            tokens=tuple(int(token) for token in choice["token_ids"]),
            engine_logprobs=tuple(float(one["logprob"]) for one in choice["logprobs"]["content"]),
            finish_reason=_REASONS.get(str(choice.get("finish_reason")), FinishReason.CANCELLED),
            spans=tuple((str(span["version"]), int(span["start"]), int(span["end"])) for span in spans),
        )

    async def _load(self, folder: Path, label: str) -> None:
        await self.server.call("/pause", params={"mode": "keep"})
        try:
            call = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
            await self.server.call("/collective_rpc", json=call)
            dropped = await self.server.call("/reset_prefix_cache", params={"reset_running_requests": "true"})
            if dropped.get("success") is False:
                raise UpswingError("the vLLM server could not drop the cache of the old weights")
            await self.server.call("/update_weight_version", json={"new_version": label})
        finally:
            await self.server.call("/resume")

    async def _label(self) -> str:
        return str((await self.server.call("/weight_info", method="GET")).get("weight_version"))
