"""What an update did to the policy, and how much its first turns say about their task: small forwards beside a step.

Both are cut to what they may cost. In forwards of one token: a trained token takes three and, at the least, so does a
sampled one. Nothing random is drawn, so that training is the same bit for bit with them and without.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np

from upswing.evals.summary import COUNTED
from upswing.learn.learner import Learner
from upswing.learn.metrics import UpdateMetrics
from upswing.learn.rows import TrainRow
from upswing.stages.text_signals import first_turn, mean
from upswing.trajectory.types import Group, Int32T

FORWARDS = 3
DISPLACEMENT_SHARE, FIRST_TURN_SHARE = 0.02, 0.01
"""Of a step's forwards, on average over steps (first turns: of a step that learns from all of its rows); but at least a
row of either sign, and two pairs, are looked at."""
EVERY, PAIRS = 5, 6
"""Steps from one look at first turns to the next, and how many of them at most."""


class Probe:
    """Made before an update, asked after it."""

    def __init__(self, learner: Learner, rows: Sequence[TrainRow], *, temperature: float, passes: int = 1) -> None:
        """`rows` with their advantages; `passes` of the update over them."""
        self._learner, self._temperature = learner, temperature
        signs = [_sign(row) for row in rows]
        sampled = sum(len(row.loss_positions) for row in rows)
        trained = forward_tokens([row for row, sign in zip(rows, signs, strict=True) if sign])
        # As if every row were trained: the number of pairs, which bounds what they can say, is then about the same
        # at every step of a run.
        self._budget = int(EVERY * FIRST_TURN_SHARE * FORWARDS * (sampled + passes * forward_tokens(rows)))
        self._chosen = _choose(rows, signs, int(DISPLACEMENT_SHARE * FORWARDS * (sampled + passes * trained)))
        self._rows, self._signs = [rows[i] for i in self._chosen], [signs[i] for i in self._chosen]

    def after(self, groups: Sequence[Group], step: int, update: UpdateMetrics | None) -> dict[str, float]:
        """The change where the update changed anything, the first turns every `EVERY` steps, and what both took."""
        started = time.perf_counter()
        found = self._displacement() if update is not None and update.num_steps else {}
        if step % EVERY == 0:
            found |= first_turn_information(self._learner, groups, self._temperature, self._budget)
        return found | {"probe_s": time.perf_counter() - started}

    def _displacement(self) -> dict[str, float]:
        """Change of the log-prob of what was sampled, a token; its fall on good rows is likelihood displacement.

        Since before the update, not by the engine's numbers: those of an engine of other arithmetic (int8, say) are
        higher on what it sampled itself, so that everything would look displaced.
        """
        now = self._learner.logprobs(self._rows, self._temperature)
        before = [self._learner.old_logprobs[i] for i in self._chosen]
        at = [row.loss_positions for row in self._rows]
        change = [(a - b)[i].astype(np.float64) for a, b, i in zip(now, before, at, strict=True)]
        first = [np.zeros(len(i)) if row.turn is None else row.turn[i] for row, i in zip(self._rows, at, strict=True)]
        good = [i for i, sign in enumerate(self._signs) if sign > 0]
        bad = [i for i, sign in enumerate(self._signs) if sign < 0]
        return {
            "delta_good": _pooled([change[i] for i in good]),
            "delta_good_first": _pooled([change[i][first[i] == 0] for i in good]),
            "delta_bad": _pooled([change[i] for i in bad]),
            "displaced_frac": mean([change[i].sum() <= 0.0 for i in good]),
            "num_probed_good": len(good),
        }


def first_turn_information(
    learner: Learner, groups: Sequence[Group], temperature: float, budget: int
) -> dict[str, float]:
    """The mutual-information proxy of RAGEN-2 for up to `PAIRS` tasks' prompts x and first turns z, from token ids.

    mi_first_turn: mean of log p(z_i | x_i) - log mean_j p(z_i | x_j), p of the whole turn; nats, at most log of
    mi_pairs. mi_retrieval: how often a turn is likeliest after its own prompt. Both NaN with fewer than two prompts.
    `budget`: forward tokens. A turn is cut where, after the longest prompt, it would pass the batch's longest branch.
    """
    found: dict[bytes, tuple[Int32T, Int32T]] = {}
    for group in groups:
        turns = (first_turn(t) for t in group.trajectories if t.outcome in COUNTED)
        pair = next((one for one in turns if one is not None), None)
        if pair is not None and len(found) < PAIRS:
            found.setdefault(pair[0].tobytes(), pair)
    pairs = list(found.values())
    while len(pairs) > 2 and sum(len(x) + len(pairs) * len(z) for x, z in pairs) > budget:
        pairs.pop()
    if len(pairs) < 2:
        return {"mi_first_turn": math.nan, "mi_retrieval": math.nan, "mi_pairs": len(pairs)}
    longest = max(len(branch) for group in groups for t in group.trajectories for branch in t.branches)
    room = longest - max(len(x) for x, _ in pairs)
    rows = [_continued(x, z[:room], group=number) for number, (x, _) in enumerate(pairs) for _, z in pairs]
    logprob = [np.nansum(values, dtype=np.float64) for values in learner.logprobs(rows, temperature)]
    turn_prompt = np.array(logprob).reshape(len(pairs), len(pairs)).T
    own, best = np.diagonal(turn_prompt), turn_prompt.max(axis=1)
    marginal = best + np.log(np.exp(turn_prompt - best[:, None]).mean(axis=1))
    retrieved = turn_prompt.argmax(axis=1) == np.arange(len(pairs))
    found_mi = {"mi_first_turn": float((own - marginal).mean()), "mi_retrieval": float(retrieved.mean())}
    return {**found_mi, "mi_pairs": len(pairs)}


def forward_tokens(rows: Sequence[TrainRow]) -> int:
    """Tokens of a forward over `rows`, about: a group's prompt counts once."""
    first = [int(at[0]) if len(at := row.loss_positions) else 0 for row in rows]
    prompts = {row.group: prompt for row, prompt in zip(rows, first, strict=True)}
    return sum(len(row.tokens) - prompt for row, prompt in zip(rows, first, strict=True)) + sum(prompts.values())


def _choose(rows: Sequence[TrainRow], signs: Sequence[float], budget: int) -> list[int]:
    """Indices of as many rows of either sign, evenly spread over the batch, as the budget of tokens allows."""
    sides = [[i for i, sign in enumerate(signs) if sign * side > 0] for side in (1, -1)]
    count = max(4, len(rows) // 16)
    while True:
        sized = [(side, min(count, len(side))) for side in sides]
        chosen = [side[(2 * i + 1) * len(side) // (2 * n)] for side, n in sized for i in range(n)]
        if count == 1 or forward_tokens([rows[i] for i in chosen]) <= budget:
            return chosen
        count -= 1


def _sign(row: TrainRow) -> float:
    """Of the mean advantage at the row's loss tokens; 0 without any."""
    at = row.loss_positions
    return float(np.sign(np.broadcast_to(row.advantage, row.tokens.shape)[at].mean())) if len(at) else 0.0


def _continued(prompt: Int32T, turn: Int32T, group: int) -> TrainRow:
    tokens = np.concatenate([prompt, turn])
    return TrainRow(tokens=tokens, loss_mask=np.arange(len(tokens)) >= len(prompt), group=group)


def _pooled(parts: Sequence[np.ndarray]) -> float:
    return mean(np.concatenate([*parts, np.zeros(0)]))
