"""JSON as it is specified: no NaN, no infinities, no number too large for a float, no key twice in one object."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from decimal import Decimal
from typing import Any


def decoder(parse_float: Callable[[str], Any] = float) -> json.JSONDecoder:
    """Its methods raise ValueError, which says what is wrong."""

    def finite(text: str) -> Any:
        if not math.isfinite(float(text)):
            raise ValueError(f"{text} is too large a number")
        return parse_float(text)

    return json.JSONDecoder(parse_constant=_refuse, parse_float=finite, object_pairs_hook=_once)


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"key {Counter(key for key, _ in pairs).most_common(1)[0][0]!r} occurs twice in one object")
    return found


def _exact(text: str) -> int | Decimal:
    value = Decimal(text)
    return int(value) if value == value.to_integral_value() else value


FLOATS, DECIMALS = decoder(), decoder(_exact)
