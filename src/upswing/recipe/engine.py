"""The `engine` section: the embedded engine, or a server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from upswing.recipe.fields import Count, Dtype, Positive, Section, Text, refuse
from upswing.recipe.stages import EvalStage

_OWN = {
    "torch": ("max_context", "dtype", "prefill_chunk", "quantize", "kv_memory_gb"),
    "vllm": ("url", "api_key_env", "weights_dir"),
    "sglang": ("url", "api_key_env", "weights_dir"),
    "openai": ("url", "api_key_env", "model"),
}
"""The keys of each kind, besides those that all have."""
NEEDED = {"vllm": ("url",), "sglang": ("url",), "openai": ("url", "model")}
_SUCH_AS = {"url": "such as http://127.0.0.1:8000", "model": "the name that the server has for its model"}


class EngineSection(Section):
    """The engine that samples."""

    kind: Literal["torch", "vllm", "sglang", "openai"] = Field(
        default="torch",
        description="The embedded engine (torch), a vLLM or SGLang server that you started, or any server with "
        "OpenAI's chat completions (openai), which can only evaluate.",
    )
    url: Text | None = Field(
        default=None,
        description="Of the server: http://127.0.0.1:8000; kind openai: with /v1, https://api.openai.com/v1.",
    )
    api_key_env: Text | None = Field(
        default=None, description="Environment variable that holds the server's key; null: it asks for none."
    )
    model: Text | None = Field(
        default=None, description="What the server calls its model (openai); the recipe's own model counts the tokens."
    )
    weights_dir: Text | None = Field(
        default=None,
        description="Folder that the server (vllm, sglang) sees too, for new weights; null: memory (/dev/shm), on one "
        "machine.",
    )
    max_slots: Count = Field(
        default=32, description="Trajectories decoded together; each holds a cache, of max_context at most."
    )
    max_context: Annotated[int, Field(strict=True, ge=16)] = Field(
        default=2048, description="Tokens a trajectory may have."
    )
    dtype: Dtype = Field(
        default="auto", description="Precision; auto: bfloat16 where the processor has it, else float32."
    )
    prefill_chunk: Count = Field(default=512, description="Prompt tokens run through the model at once.")
    quantize: Literal["int8"] | None = Field(
        default=None,
        description="int8: sample with weights and activations in 8 bits (CPU only); RL then needs a correction.",
    )
    kv_memory_gb: Positive | None = Field(
        default=None,
        description="Memory for cached keys and values, in GB (1e9 bytes); null: no limit. Size it as trajectories at "
        "once times the longest one: no more play at once than it holds limits.context_tokens for. When full, the "
        "cache of idle trajectories goes first, then the youngest turn waits, which counts towards "
        "limits.turn_timeout_s, and is computed again.",
    )

    @model_validator(mode="after")
    def _belongs(self) -> Self:
        """Keys of the other kinds are refused."""
        for key in NEEDED.get(self.kind, ()):
            if getattr(self, key) is None:
                raise refuse(key, f"got nothing, but kind {self.kind} needs it, {_SUCH_AS[key]}")
        for key in sorted({key for keys in _OWN.values() for key in keys} - {*_OWN[self.kind]}):
            if getattr(self, key) != type(self).model_fields[key].default:
                if key in _OWN["torch"]:
                    where = "is for the server to be started with"
                else:
                    where = "is for kind " + " or ".join(kind for kind, keys in _OWN.items() if key in keys)
                raise refuse(key, f"got {getattr(self, key)!r} without effect: with kind {self.kind} it {where}")
        return self


def check_engine(engine: EngineSection, stages: Sequence[Any], *, agent: bool) -> None:
    """Raises for what a server of text can't do, whichever it is."""
    if engine.kind != "openai":
        return
    for index, stage in enumerate(stages):
        if not isinstance(stage, EvalStage):
            raise refuse(
                f"stages.{index}.stage",
                f"got '{stage.stage}', but engine.kind openai can only evaluate (eval): such a server neither takes "
                "nor gives token ids, its log-probs aren't those of the sampling distribution, and it takes no new "
                "weights; use kind vllm, sglang or torch",
            )
    if agent:
        raise refuse(
            "agent",
            "got a program, but engine.kind openai has no tokens to keep for it; use kind vllm, sglang or torch",
        )
