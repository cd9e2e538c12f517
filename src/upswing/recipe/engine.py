"""The `engine` section: the embedded engine, or a server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from upswing.recipe.fields import Bool, Count, Dtype, Positive, Text
from upswing.recipe.section import Section, null, opt, refuse
from upswing.recipe.stages import EvalStage

_HERE = "vllm without a url"
_SERVER, _VLLM = ("url", "api_key_env", "outage_s", "weights_dir"), ("adapters", "sleep")
_OWN = {
    "torch": ("max_context", "dtype", "kv_memory_gb", "prefill_chunk", "quantize"),
    "vllm": (*_SERVER, *_VLLM),
    _HERE: ("weights_dir", *_VLLM, "max_context", "dtype", "kv_memory_gb", "options"),
    "sglang": _SERVER,
    "openai": ("url", "api_key_env", "outage_s", "model"),
}
"""The keys of each kind, besides those that all have."""
NEEDED = {"sglang": ("url",), "openai": ("url", "model")}
MAX_RANK = 512
"""Of the adapters that vLLM has kernels for."""
_SUCH_AS = {"url": "such as http://127.0.0.1:8000", "model": "the name that the server has for its model"}


class EngineSection(Section):
    """The engine that samples."""

    kind: Literal["torch", "vllm", "sglang", "openai"] = opt(
        "torch",
        "The embedded engine (torch), vLLM (in this process, or a server at url), an SGLang server that "
        "you started, or any server with OpenAI's chat completions (openai), which can only evaluate.",
    )
    url: Text | None = null(
        "Of the server: http://127.0.0.1:8000; kind openai: with /v1, https://api.openai.com/v1; null: "
        "no server (torch, vllm)."
    )
    api_key_env: Text | None = null("Environment variable that holds the server's key; null: it asks for none.")
    outage_s: Positive = opt(
        900.0,
        "How long the server may be away, in seconds; also what new weights may take in all. A turn also has "
        "limits.turn_timeout_s.",
    )
    model: Text | None = null("What the server calls its model (openai); the recipe's own model counts the tokens.")
    weights_dir: Text | None = null(
        "Folder that the server (vllm, sglang) sees too, for new weights; null: memory (/dev/shm), on one machine."
    )
    adapters: Bool = opt(
        False,
        "Give the engine (vllm) only the adapter that a stage with `lora` trains, at each update, in place "
        "of merged weights.",
    )
    sleep: Bool = opt(
        False,
        "The engine (vllm) leaves the GPU's memory to the learner while nothing samples; for one GPU that "
        "both share, without staleness.",
    )
    options: dict[str, Any] = opt(
        dict,
        "Further arguments of vLLM's engine (vllm without url): {tensor_parallel_size: 2, "
        "gpu_memory_utilization: 0.5}.",
    )
    max_slots: Count = opt(32, "Trajectories decoded together; each holds a cache, of max_context at most.")
    max_context: Annotated[int, Field(strict=True, ge=16)] = opt(2048, "Tokens a trajectory may have.")
    dtype: Dtype = opt(
        "auto", "Precision; auto: bfloat16 where the processor has it, else float32; vllm: the model's own."
    )
    prefill_chunk: Count = opt(512, "Prompt tokens run through the model at once.")
    quantize: Literal["int8"] | None = null(
        "int8: sample with weights and activations in 8 bits (CPU only); RL then needs a correction."
    )
    kv_memory_gb: Positive | None = null(
        "Memory for cached keys and values, in GB (1e9 bytes); null: no limit. Size it as trajectories at "
        "once times the longest one: no more play at once than it holds limits.context_tokens for. When full, the "
        "cache of idle trajectories goes first, then the youngest turn waits, which counts towards "
        "limits.turn_timeout_s, and is computed again."
    )

    @model_validator(mode="after")
    def _belongs(self) -> Self:
        """Keys of the other kinds are refused."""
        for key in NEEDED.get(self.kind, ()):
            if getattr(self, key) is None:
                raise refuse(key, f"got nothing, but kind {self.kind} needs it, {_SUCH_AS[key]}")
        kind = _HERE if self.kind == "vllm" and self.url is None else self.kind
        for key in sorted({key for keys in _OWN.values() for key in keys} - {*_OWN[kind]}):
            if getattr(self, key) != type(self).model_fields[key].get_default(call_default_factory=True):
                if self.kind != "torch" and self.url is not None and key in (*_OWN["torch"], "options"):
                    where = "is for the server to be started with"
                else:
                    where = "is for kind " + " or ".join(kind for kind, keys in _OWN.items() if key in keys)
                raise refuse(key, f"got {getattr(self, key)!r} without effect: with kind {kind} it {where}")
        return self


def adapter_ranks(stages: Sequence[Any]) -> dict[str, int]:
    """The key of each rank of an adapter that an engine may be given -> it."""
    lora = {index: stage.lora for index, stage in enumerate(stages) if stage.stage in ("sft", "rl", "distill")}
    return {f"stages.{index}.lora.r": one.r for index, one in lora.items() if one is not None}


def _check_vllm(engine: EngineSection, stages: Sequence[Any]) -> None:
    ranks = adapter_ranks(stages)
    if engine.adapters and not ranks:
        raise refuse("engine.adapters", "got true without effect: no sft, rl or distill stage trains one (lora)")
    for key, rank in ranks.items():
        if engine.adapters and rank > MAX_RANK:
            raise refuse(key, f"got {rank}; allowed with engine.adapters: up to {MAX_RANK}, which is vLLM's limit")
    if engine.sleep and all(isinstance(stage, EvalStage) for stage in stages):
        raise refuse("engine.sleep", "got true without effect: no stage trains")
    for index, stage in enumerate(stages):
        if engine.sleep and getattr(stage, "max_staleness", None):
            why = "but with engine.sleep nothing samples while it learns"
            raise refuse(f"stages.{index}.max_staleness", f"got {stage.max_staleness}, {why}; allowed: 0")


def check_engine(engine: EngineSection, stages: Sequence[Any], *, agent: bool) -> None:
    """Raises for what doesn't go with the stages, and for what a server of text can't do, whichever it is."""
    _check_vllm(engine, stages)
    if engine.kind != "openai":
        return
    for index, stage in enumerate(stages):
        if not isinstance(stage, EvalStage):
            why = (
                "but engine.kind openai can only evaluate (eval): such a server neither takes nor gives token ids, its "
                "log-probs aren't those of the sampling distribution, and it takes no new weights"
            )
            raise refuse(f"stages.{index}.stage", f"got '{stage.stage}', {why}; use kind vllm, sglang or torch")
    if agent:
        why = "but engine.kind openai has no tokens to keep for it"
        raise refuse("agent", f"got a program, {why}; use kind vllm, sglang or torch")
