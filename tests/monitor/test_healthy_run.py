"""What a run that learned well showed on its way (`recipes/tiny.yaml`, seed 0: 32.0 -> 59.5 % in the test split)."""

from __future__ import annotations

from typing import Any

import pytest
from tests.monitor.series import FACTS, Row, run
from tests.monitor.test_detectors import judged, serious

NAMES = ("success", "score_format", "invalid_call_frac", "tool_calls", "delta_good", "delta_good_first")
NAMES += ("displaced_frac", "logprob_good", "entropy")
UNITS = (64, 64, 1e3, 64, 1e4, 1e4, 100, 1e3, 1e3)
"""What the table's numbers are divided by. Deltas and displaced are of one to three of the good attempts. Attempts with
an invalid call weren't logged then: at most those out of format, which stand for them."""
TABLE = """
    27 51 120 125 -458 212 100 -92 272
    10 30 169 168 -1704 47 100 -80 232
    23 39 224 129 67 15 0 -59 284
    17 43 243 107 149 9 0 -95 345
    32 56 90 113 -174 -545 50 -81 283
    24 47 192 120 -792 -3 100 -80 289
    21 40 281 82 92 4 0 -100 371
    18 42 224 104 75 20 0 -132 419
    21 49 209 88 83 3 0 -65 355
    13 43 298 99 24 1 0 -86 326
    24 40 250 120 33 2 0 -45 320
    38 45 231 104 92 4 0 -80 375
    28 45 225 107 57 16 0 -43 299
    28 43 314 94 11 4 0 -67 322
    13 41 403 80 19 2 0 -89 356
    31 40 385 83 240 44 0 -42 284
    26 40 333 101 23 5 0 -59 271
    38 50 226 103 -14 -38 100 -31 254
    27 45 328 92 37 7 0 -49 254
    23 47 245 105 56 11 0 -74 253
    33 48 207 111 8 8 0 -31 255
    32 50 237 100 3 -3 0 -52 232
    30 48 283 86 136 47 0 -75 253
    34 47 190 119 23 3 0 -33 176
    33 50 228 105 128 414 0 -45 177
    24 52 222 91 -3 -28 100 -40 220
    27 46 252 110 212 19 0 -35 282
    37 50 291 83 63 1 0 -36 252
    34 55 188 92 34 9 0 -48 249
    39 54 220 85 8 2 0 -20 204
    32 50 333 72 106 3 0 -34 260
    23 46 302 90 19 -8 33 -30 245
    23 43 370 86 24 6 0 -56 300
    27 44 288 104 2 0 0 -26 259
    40 45 288 104 22 1 0 -64 258
    38 41 243 106 14 6 0 -23 288
    15 41 457 76 139 18 0 -95 287
    33 47 347 79 40 11 0 -33 257
    36 53 194 87 46 1 0 -68 258
    40 51 185 88 5 2 0 -21 201
"""
TINY: dict[str, Any] = {
    **FACTS, "steps": 40, "lr": 2e-3, "minibatches": 1, "updates_per_batch": 1, "max_turns": 4, "turn_tokens": 16,
    "tools": 1, "weights": {"strict_match": 1.0, "format": 0.0},
}  # fmt: skip
LLD, MARKUP = "likelihood_displacement", "control_token_collapse"


def rows() -> list[Row]:
    found = []
    for step, line in enumerate(TABLE.strip().split("\n"), 1):
        row = {name: int(text) / unit for name, text, unit in zip(NAMES, line.split(), UNITS, strict=True)}
        success = row.pop("success")
        std = (success * (1 - success)) ** 0.5
        row["invalid_attempt_frac"] = 1 - row["score_format"]
        row |= {"step": step, "reward": success, "score_strict_match": success, "reward_std": std}
        found.append({**row, "num_trajectories": 64.0})
    return found


def first(found: list[Row], mode: str, facts: dict[str, Any] = TINY) -> int | None:
    ends = range(1, len(found) + 1)
    return next((end for end in ends if mode in serious(judged(found[:end], facts))), None)


def test_no_step_of_it_raises_an_alarm() -> None:
    healthy = rows()
    assert len(healthy) == 40
    bare = [{name: value for name, value in row.items() if name != "score_format"} for row in healthy]
    for end in range(1, 41):
        assert not serious(judged(healthy[:end], TINY)), end
        assert not serious(judged(bare[:end], TINY)), f"{end}, without `format` in its rubric"


def test_the_same_calls_are_a_fault_where_more_attempts_are_hit_or_none_were_counted() -> None:
    """A third of the attempts are hit at steps 2 to 4 and at 17; what rises is how often each of them tries again."""
    healthy = rows()
    hit = [{**row, "invalid_attempt_frac": 0.2 + 1.2 * row["invalid_call_frac"]} for row in healthy]
    unknown = [{name: value for name, value in row.items() if name != "invalid_attempt_frac"} for row in healthy]
    assert first(hit, MARKUP) == first(unknown, MARKUP) == 17
    fails = [{**row, "score_strict_match": 0.05, "reward": 0.05} if row["step"] > 14 else row for row in healthy]
    assert first(fails, MARKUP) in (17, 18), "success tells as well"


@pytest.mark.parametrize("seed", range(4))
def test_attempts_that_are_hit_delay_nothing_where_markup_breaks(seed: int) -> None:
    found = run("saturates", seed, steps=45, batch=(32, 64, 128, 512)[seed], fault=MARKUP)[0]
    counted = [{**row, "invalid_attempt_frac": row["invalid_call_frac"]} for row in found]
    alone = first(found, MARKUP, FACTS)
    assert alone is not None and first(counted, MARKUP, FACTS) == alone


@pytest.mark.parametrize(
    ("deltas", "found"),
    [
        ((-0.046, -0.17), None),  # the healthy run's, of one attempt each and without a warm-up
        ((-0.3, -0.2), 2),
        ((-0.05, -0.04, -0.06), 3),
        ((-0.05, -0.04, 0.01), None),
    ],
)
def test_two_steps_tell_only_of_a_loss_that_no_policy_survives(deltas: tuple[float, ...], found: int | None) -> None:
    base = {"displaced_frac": 1.0, "reward": 0.3, "reward_std": 0.4, "num_trajectories": 64}
    assert first([{"step": step, "delta_good": d, **base} for step, d in enumerate(deltas, 1)], LLD) == found
