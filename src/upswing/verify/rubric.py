"""A rubric: named verifiers with weights and gates."""

from __future__ import annotations

import asyncio
import copy
import functools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from upswing.errors import ConfigError, did_you_mean
from upswing.trajectory.types import Score, Task
from upswing.verify.base import Episode
from upswing.verify.deadline import DeadlineExceeded, call_with_deadline
from upswing.verify.functions import Verifier, to_score, verifier_from

Ramp = tuple[float, int]
"""(weight at step 0, steps until it is the verifier's own weight)."""
GATED = ".gated"
"""After a verifier's name: its score as the gates leave it, which is what the reward is made of."""


class Rubric:
    """The reward: the weighted sum of the verifiers' scores, each part that raises it times the gates' scores.

    A part that lowers the reward stays whole: a failed gate never pays.
    Weight 0: measured and reported, never part of the reward. The reward is always the sum of `weights` times the
    score's components of those names.
    """

    def __init__(
        self,
        items: Iterable[tuple[str, Any, float]],
        *,
        gates: Iterable[str] = (),
        ramps: Mapping[str, Ramp] | None = None,
    ) -> None:
        """`items`: (name, verifier or function, weight). Gates must score in [0, 1]: at 0 no reward is above 0; their
        own weight is 0. Raises ConfigError for what can't be a reward."""
        self.items: tuple[tuple[str, Verifier, float], ...] = tuple(
            (name, verifier_from(verifier, name=name), float(weight)) for name, verifier, weight in items
        )
        self.gates, self.ramps = frozenset(gates), dict(ramps or {})
        names = [name for name, _, _ in self.items]
        for name in (*self.gates, *self.ramps):
            if name not in names:
                raise ConfigError(f"no verifier is called '{name}'{did_you_mean(name, names)}")
        for name, _, weight in self.items:
            start, steps = self.ramps.get(name, (weight, 1))
            if names.count(name) > 1:
                raise ConfigError(f"two verifiers are called '{name}'; give each a name of its own")
            if not math.isfinite(weight) or not math.isfinite(start):
                raise ConfigError(f"verifier '{name}': weight must be a finite number, got {weight}")
            if name in self.gates and (weight or start):
                raise ConfigError(f"verifier '{name}' is a gate: it multiplies the reward and has no weight")
            if steps < 1:
                raise ConfigError(f"verifier '{name}': its weight must change over at least 1 step, got {steps}")
        if not any(weight for _, _, weight in self.items):
            raise ConfigError("no verifier has a weight other than 0, so the reward would always be 0")
        if not self.at(0).weights:
            raise ConfigError("no verifier has a weight other than 0 at step 0; let one start above 0")

    def at(self, step: int) -> Rubric:
        """The rubric with the weights that it has at a step (0-based); without, it has those it ends with."""
        if not self.ramps:
            return self
        found = copy.copy(self)
        found.items = tuple((name, verifier, self._weight(name, weight, step)) for name, verifier, weight in self.items)
        found.ramps = {}
        return found

    def without(self, names: Collection[str]) -> Rubric:
        """With these verifiers measured and reported as before, but no part of the reward."""
        if not names:
            return self
        found = copy.copy(self)
        found.items = tuple((name, verifier, 0.0 if name in names else one) for name, verifier, one in self.items)
        found.ramps = {name: ramp for name, ramp in self.ramps.items() if name not in names}
        return found

    def _weight(self, name: str, end: float, step: int) -> float:
        start, steps = self.ramps.get(name, (end, 1))
        return start + (end - start) * min(step / steps, 1.0)

    @property
    def weights(self) -> dict[str, float]:
        """What the reward is made of: component -> weight, for estimators that normalise each by itself (GDPO)."""
        return {name + (GATED if self.gates else ""): weight for name, _, weight in self.items if weight}

    @property
    def grouped(self) -> tuple[str, ...]:
        """Names of the verifiers that judge a finished group as a whole: those with a `score_group(episodes)`."""
        return tuple(name for name, verifier, _ in self.items if hasattr(verifier.function, "score_group"))

    def check_group(self, size: int, where: str) -> None:
        """Raises ConfigError when the reward needs a group, and one has only `size` trajectories."""
        for name, _, weight in self.items:
            if size < 2 and name in self.grouped and (weight or name in self.gates):
                why = f"verifier '{name}' compares the trajectories of a task and is part of the reward"
                raise ConfigError(f"{where}: got {size}, but {why}; allowed: 2 and more, or weight 0 for it")

    def lacking(self, task: Task) -> str | None:
        """What a verifier that is part of the reward needs of a task and doesn't find there; None: nothing."""
        for name, verifier, weight in self.items:
            counts = weight or name in self.gates or name in self.ramps
            if counts and (field := verifier.lacks(task)) is not None:
                what = "gold (an accepted answer)" if field == "gold" else field
                own = "" if verifier.inline else ", or give its parameter `gold` a default if it can do without"
                return (
                    f"task '{task.id}' has no {what}, which verifier '{name}' needs; "
                    f"give it one, or take that verifier out of the reward (weight: 0){own}"
                )
        return None

    async def score(self, episode: Episode) -> Score:
        """All verifiers; those that wait side by side. The value is None when a gate or one with weight couldn't
        score."""
        waiting = [verifier(episode) for _, verifier, _ in self.items if not verifier.at_once]
        found = iter(await asyncio.gather(*waiting) if waiting else ())
        scores = {name: await one(episode) if one.at_once else next(found) for name, one, _ in self.items}
        return self._total({}, [], scores)

    async def score_group(self, episodes: Sequence[Episode], scores: Sequence[Score], timeout_s: float) -> list[Score]:
        """What `score` said of each episode of a finished group, `scores`, with what the verifiers of `grouped` say of
        them together; each has `timeout_s` seconds."""
        ranking = [(name, verifier) for name, verifier, _ in self.items if name in self.grouped]
        found = await asyncio.gather(*(_together(verifier, episodes, timeout_s) for _, verifier in ranking))
        totals = []
        for row, alone in enumerate(scores):
            kept = [text for text in alone.reason.split("; ") if text and text.partition(":")[0] not in self.grouped]
            together = {name: column[row] for (name, _), column in zip(ranking, found, strict=True)}
            totals.append(self._total(alone.components, kept, together))
        return totals

    def _total(self, known: Mapping[str, float | None], reasons: list[str], scores: Mapping[str, Score]) -> Score:
        """The rubric's Score of the verifiers' own, over components that are `known` already."""
        components, gate, judged = dict(known), 1.0, True
        for name, score in scores.items():
            components[name] = score.value
            components.update({f"{name}.{key}": value for key, value in score.components.items()})
            if score.reason:
                reasons.append(f"{name}: {score.reason}")
        for name, _, weight in self.items:
            value = components.get(name)
            if value is None:
                judged = judged and not weight and name not in self.gates
            elif name in self.gates:
                gate *= value
                if not 0 <= value <= 1:
                    judged = False
                    reasons.append(f"{name}: a gate must score between 0 and 1, got {value:g}")
        reasons = list(dict.fromkeys(reasons))
        if not judged:
            return Score(value=None, components=components, reason="; ".join(reasons))
        if self.gates:
            for name, _, weight in self.items:
                if weight:
                    value = components[name] or 0.0
                    components[name + GATED] = gate * value if weight * value > 0 else value
        total = sum(weight * (components[name] or 0.0) for name, weight in self.weights.items())
        reasons += [] if math.isfinite(total) else [f"the weighted sum is {total}"]
        value = total if math.isfinite(total) else None
        return Score(value=value, components=components, reason="; ".join(reasons))


async def _together(verifier: Verifier, episodes: Sequence[Episode], timeout_s: float) -> list[Score]:
    """What a verifier says of a whole group; no values, with the reason, when it breaks or takes too long."""
    try:
        call = functools.partial(verifier.function.score_group, episodes)  # type: ignore[attr-defined]
        scores = [to_score(one) for one in await call_with_deadline(call, {}, timeout_s)]
        if len(scores) == len(episodes):
            return scores
        reason = f"it gave {len(scores)} scores for {len(episodes)} episodes"
    except DeadlineExceeded:
        reason = f"judging the group took longer than {timeout_s:g} s"
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"[:500]
    return [Score(value=None, reason=reason)] * len(episodes)


def rubric_from(specs: Sequence[Any]) -> Rubric:
    """The rubric of a recipe's verifiers (`name`, `args`, `weight`, and where they have them `gate`, `weight_from` and
    `weight_steps`), called by their names; import paths by what follows the colon."""
    made = [(verifier_from(spec.name, spec.args), spec) for spec in specs]
    gates = [verifier.name for verifier, spec in made if getattr(spec, "gate", False)]
    return Rubric(
        [(verifier.name, verifier, 0.0 if verifier.name in gates else spec.weight) for verifier, spec in made],
        gates=gates,
        ramps={
            verifier.name: (float(start), int(getattr(spec, "weight_steps", None) or 0))
            for verifier, spec in made
            if (start := getattr(spec, "weight_from", None)) is not None
        },
    )


def variance_shares(
    components_B: Sequence[Mapping[str, float | None]], weights: Mapping[str, float]
) -> dict[str, float]:
    """How much of the reward's variance each component makes: cov(weight x score, reward) / var(reward), which sum to
    1. Over the rows where all are scored; NaN when the reward doesn't vary."""
    rows = [row for one in components_B if None not in (row := [one.get(name) for name in weights])]
    parts = np.array(rows, dtype=np.float64).reshape(len(rows), len(weights)) * list(weights.values())
    rewards = parts.sum(1)
    # The mean of the rewards alone is enough: deviations of the other factor sum to the same.
    apart = rewards - rewards.sum() / max(1, len(rewards))
    variance = float(apart @ apart)
    spread = variance > 1e-18 * float(max(rewards**2, default=1.0))
    return {name: float(apart @ parts[:, i]) / variance if spread else math.nan for i, name in enumerate(weights)}
