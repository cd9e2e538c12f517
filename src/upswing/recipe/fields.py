"""Building blocks of the recipe's models: strict scalars, the frozen base class, and how a validator names its key."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

Bool = Annotated[bool, Field(strict=True)]
Int = Annotated[int, Field(strict=True)]
Float = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Text = Annotated[str, Field(strict=True, min_length=1)]
Count = Annotated[int, Field(strict=True, ge=1)]
CountOrZero = Annotated[int, Field(strict=True, ge=0)]
Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(strict=True, ge=0, le=1)]
BelowOne = Annotated[float, Field(strict=True, ge=0, lt=1)]
UpToOne = Annotated[float, Field(strict=True, gt=0, le=1)]
Several = Annotated[int, Field(strict=True, ge=2)]
Split = Literal["train", "dev", "test"]
Schedule = Literal["constant", "linear", "cosine"]
Dtype = Literal["auto", "float32", "bfloat16"]


def opt(default: Any, description: str, **bounds: Any) -> Any:
    """A field that may be left out; of a table or section `default` is what makes one."""
    return Field(**{"default_factory" if callable(default) else "default": default}, description=description, **bounds)


class Section(BaseModel):
    """A part of a recipe: frozen, and unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)
    main_key: ClassVar[str] = ""
    """What a plain string in the section's place stands for."""

    @model_validator(mode="before")
    @classmethod
    def _written_out(cls, data: Any) -> Any:
        data = {cls.main_key: data} if cls.main_key and isinstance(data, str) else data
        if not isinstance(data, dict):
            return data
        return {**data, **{key: value for key, value in cls.derived(data).items() if data.get(key) is None}}

    @classmethod
    def derived(cls, data: dict[str, Any]) -> dict[str, Any]:
        """What keys are, where they are null or left out, by the others."""
        return {}

    def refuse_given(self, keys: Iterable[str], why: str) -> None:
        """Raises for the first of `keys` that isn't null: it has no effect."""
        for key in keys:
            if (got := getattr(self, key)) is not None:
                raise refuse(key, f"got {said(got)} without effect, {why}")


def refuse(key: str, message: str) -> PydanticCustomError:
    """The error to raise when `key` is wrong because of other keys; the message then names it with its full path."""
    return PydanticCustomError("recipe", "{message}", {"key": key, "message": message})


def said(value: Any) -> str:
    """A value as YAML has it, texts in quotes."""
    return f"'{value}'" if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else f"{value}"


def _switch_or_gb(value: Any) -> Any:
    if isinstance(value, bool) or (isinstance(value, int | float) and 0 < value < math.inf):
        return value
    raise refuse("", f"got {value!r}; allowed: true, false, or a number of GB above 0")


GradientCheckpointing = Annotated[
    Bool | Positive,
    BeforeValidator(_switch_or_gb),
    Field(
        description="Recompute activations in the backward pass: less memory, a third more time. A number: only where "
        "a pack's would take more GB than that and smaller packs would cost more (activations only: bf16 copies of "
        "weights, gradients and a chunk of logits come on top)."
    ),
]
