"""Judges that compare: an answer with the reference, and the trajectories of a group with each other."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from upswing.trajectory.types import Score, Task
from upswing.verify.base import Episode
from upswing.verify.judge import NONCE, Asker, Unjudged, fence, neutral, suspicion
from upswing.verify.text import accepted, unscored

Float64G = npt.NDArray[np.float64]
_PRIOR = 1.0
"""Drawn games that every player has against one of strength 0: who wins or loses all has a finite strength then."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Comparer(Asker):
    """A judge that says which of two answers is better, asked in both orders."""

    inconsistent: Literal["half", "unscored"] = "half"
    """When it prefers another one in the other order: `half` (they count as equally good) or `unscored`."""

    async def compare(self, task: Task, first: str, second: str) -> tuple[float, float]:
        """(how `first` does: 1 better, 0.5 as good, 0 worse, as a mean of both orders; how far the orders are apart).
        Raises Unjudged when an order couldn't be judged."""
        if first == second:
            return 0.5, 0.0
        there, back = await asyncio.gather(self._prefers(task, first, second), self._prefers(task, second, first))
        apart = abs(there + back - 1)
        if apart == 1 and self.inconsistent == "unscored":
            raise Unjudged("the judge prefers another answer in the other order")
        return (there + 1 - back) / 2, apart

    async def _prefers(self, task: Task, a: str, b: str) -> float:
        weighted = len(self.parsed) > 1
        points = [f"- {one.text}" + (f" (weight {one.weight:g})" if weighted else "") for one in self.parsed]
        system = "You compare two answers, A and B, that AI agents wrote for a task. Say which is better by:"
        shown = (self.question(task), fence("answer_a", a), fence("answer_b", b), f"The nonce is {NONCE}.")
        schema = {"winner": {"enum": ["A", "B", "tie"]}}
        verdict = await self.ask("\n".join([system, *points]), "\n".join(shown), schema)
        return {"A": 1.0, "B": 0.0, "tie": 0.5}[verdict["winner"]]


@dataclass(frozen=True, kw_only=True, eq=False)
class VersusReference(Comparer):
    """Compares an answer with the task's first accepted one -> 1 better, 0.5 as good, 0 worse; the mean of both orders.

    No answer is 0. Components: `disagreement` (of the two orders, 0 to 1) and `injection_suspected`.
    """

    async def __call__(self, episode: Episode) -> Score:
        said, golds = self.said(episode), accepted(episode.gold)
        if said is None:
            return Score(value=0.0, reason="no answer")
        if not golds:
            return unscored("the task has no accepted answer to compare with")
        components: dict[str, float | None] = {"injection_suspected": suspicion(said), "disagreement": None}
        try:
            value, apart = await self.compare(episode.task, said, neutral(golds[0], self.max_chars))
        except Unjudged as error:
            return Score(value=None, components=components, reason=str(error))
        return Score(value=value, components={**components, "disagreement": apart})


@dataclass(frozen=True, kw_only=True, eq=False)
class Pairwise(Comparer):
    """Ranks the trajectories of a group by comparing them -> the chance, by Bradley-Terry, to beat another one of it.

    Rounds of a round-robin tournament, so that all comparisons can be asked at once. No answer is 0, loses nothing to
    others and isn't asked about; who has fewer than half of its comparisons judged isn't scored. Components:
    `comparisons` (how many were judged), `disagreement` (of the orders, their mean) and `injection_suspected`.
    """

    comparisons_per_trajectory: Annotated[int, Field(ge=2)] = 4  # one round connects nobody
    """At most; each is two requests. From the group's size less 1 on, all are compared with all."""

    async def __call__(self, episode: Episode) -> Score:
        """What it says of a trajectory without its group."""
        return unscored("it ranks the trajectories of a group, and this one has none")

    async def score_group(self, episodes: Sequence[Episode]) -> list[Score]:
        """One Score each, in order. The mean over those that have an answer is 0.5."""
        said = [self.said(episode) for episode in episodes]
        answered = [i for i, text in enumerate(said) if text is not None]
        pairs = [(answered[a], answered[b]) for a, b in rounds(len(answered), self.comparisons_per_trajectory)]
        games = (self.compare(episodes[a].task, said[a] or "", said[b] or "") for a, b in pairs)
        results = await asyncio.gather(*games, return_exceptions=True)
        judged = {p: r for p, r in zip(pairs, results, strict=True) if not isinstance(r, BaseException)}
        problem = next((f": {r}" for r in results if isinstance(r, BaseException)), "")
        of = [[pair for pair in pairs if i in pair] for i in range(len(said))]
        done = [[judged[pair] for pair in mine if pair in judged] for mine in of]
        ranked = [i for i in answered if done[i] and 2 * len(done[i]) >= len(of[i])]
        if len(answered) == 1 < len(said):
            ranked = answered
        strengths = bradley_terry({pair: share for pair, (share, _) in judged.items()}, len(said))

        def score(i: int) -> Score:
            text, apart = said[i], [apart for _, apart in done[i]]
            if text is None:
                return Score(value=0.0, reason="no answer")
            others = [j for j in ranked if j != i]
            parts = {
                "comparisons": float(len(apart)),
                "disagreement": sum(apart) / len(apart) if apart else None,
                "injection_suspected": suspicion(text),
            }
            if i in ranked and (others or len(answered) == 1):
                return Score(value=_chance(strengths, i, others), components=parts)
            few = f"{len(apart)} of {len(of[i])} comparisons could be judged{problem}"
            return Score(value=None, components=parts, reason=few if of[i] else "nothing to rank against")

        return [score(i) for i in range(len(said))]


def _chance(strengths_G: Float64G, i: int, others: Sequence[int]) -> float:
    """Mean chance of `i` to beat one of `others`; without any, 0.5."""
    chances = 1 / (1 + np.exp(strengths_G[list(others)] - strengths_G[i]))
    return float(chances.mean()) if others else 0.5


def rounds(size: int, count: int) -> Iterator[tuple[int, int]]:
    """The pairs of up to `count` rounds of a round-robin tournament (the circle method): nobody plays twice in a round,
    nobody meets the same one twice, and two rounds connect all."""
    seats: list[int | None] = [*range(size), *([None] if size % 2 else [])]
    for _ in range(len(seats) - 1 if count >= size - 1 else count):
        for a, b in zip(seats[: len(seats) // 2], reversed(seats), strict=False):
            if a is not None and b is not None:
                yield a, b
        seats = [seats[0], seats[-1], *seats[1:-1]]


def bradley_terry(games: Mapping[tuple[int, int], float], size: int) -> Float64G:
    """Strengths [size], with P(i beats j) = sigmoid(strength i - strength j): the maximum of the likelihood of `games`
    ((i, j) -> share that i won) and of `_PRIOR` drawn games each against strength 0. By Newton's method: it is concave.
    """
    wins = np.zeros((size, size))
    for (i, j), share in games.items():
        wins[i, j] += share
        wins[j, i] += 1 - share
    played, theta = wins + wins.T, np.zeros(size)
    for _ in range(200 if size else 0):
        chance, drawn = 1 / (1 + np.exp(theta[None, :] - theta[:, None])), 1 / (1 + np.exp(-theta))
        slope = wins.sum(1) - (played * chance).sum(1) + _PRIOR * (0.5 - drawn)
        curve = played * chance * (1 - chance)
        step = np.linalg.solve(np.diag(curve.sum(1) + _PRIOR * drawn * (1 - drawn)) - curve, slope)
        theta = theta + step / max(1.0, float(np.abs(step).max()))
        if np.abs(step).max() < 1e-12:
            break
    return theta
