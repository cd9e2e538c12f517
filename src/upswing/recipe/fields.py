"""The types of a recipe's values: strict scalars with their bounds."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from upswing.recipe.section import refuse

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
Schedule = Literal["constant", "linear", "cosine"]
Dtype = Literal["auto", "float32", "bfloat16"]


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
