"""The `lora` section of a stage."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from upswing.recipe.fields import BelowOne, Bool, Count, Positive, Text
from upswing.recipe.section import Section, opt, refuse

ALL_LINEAR = "all-linear"
_OrOne = BeforeValidator(lambda value: [value] if isinstance(value, str) else value)


class LoraSection(Section):
    """Train a small low-rank update (adapter) of the weights. The stage still leaves a whole model: it's merged in."""

    r: Count = opt(16, "Rank of the update.")
    alpha: Positive = opt(32.0, "The update is scaled by alpha / r.")
    dropout: BelowOne = opt(0.0, "Dropout before the update; only 0 in stages that compare log-probs of policies.")
    target: Annotated[tuple[Text, ...], _OrOne] = opt(
        (ALL_LINEAR,),
        "all-linear, or names of linear layers such as [q_proj, v_proj]; never embeddings or heads.",
        min_length=1,
    )
    rslora: Bool = opt(False, "Scale by alpha / sqrt(r) instead, which suits large ranks.")
    quantize: Literal["none", "4bit"] = opt("none", "Keep the frozen weights in 4 bits (QLoRA); needs bitsandbytes.")

    @model_validator(mode="after")
    def _effective(self) -> Self:
        if len(self.target) > 1 and ALL_LINEAR in self.target:
            raise refuse("target", f"got {list(self.target)}; allowed: {ALL_LINEAR} alone, or names of layers")
        needed = {"peft": "lora"} if self.quantize == "none" else {"peft": "qlora", "bitsandbytes": "qlora"}
        for package, extra in needed.items():
            if find_spec(package) is None:
                raise refuse("", f"needs {package}; install with: pip install 'upswing[{extra}]'")
        return self


Lora = Annotated[LoraSection | None, Field(description="Train an adapter of these dimensions; null: all weights.")]


def refuse_dropout(lora: LoraSection | None) -> None:
    """For stages whose loss compares log-probs: raises the error for a `lora` with dropout."""
    if lora is not None and lora.dropout > 0:
        why = "log-probs of two policies are compared token by token, and dropout alone would make them differ"
        raise refuse("lora.dropout", f"got {lora.dropout:g}; allowed: 0 ({why})")
