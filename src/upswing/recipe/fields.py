"""Building blocks of the recipe's models: strict scalars, the frozen base class, and how a validator names its key."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
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
Split = Literal["train", "dev", "test"]
Schedule = Literal["constant", "linear", "cosine"]
Dtype = Literal["auto", "float32", "bfloat16"]


class Section(BaseModel):
    """A part of a recipe: frozen, and unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


def refuse(key: str, message: str) -> PydanticCustomError:
    """The error to raise when `key` is wrong because of other keys; the message then names it with its full path."""
    return PydanticCustomError("recipe", "{message}", {"key": key, "message": message})


def expand_shorthand(value: Any, key: str) -> Any:
    """`exact_match` -> `{name: exact_match}`: a plain string stands for a section with only its main key."""
    return {key: value} if isinstance(value, str) else value


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
