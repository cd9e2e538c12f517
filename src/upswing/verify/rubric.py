"""A rubric: named verifiers with weights, and the check that it can't be fooled by the obvious."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from upswing.errors import ConfigError
from upswing.trajectory.types import Message, Outcome, Score, StopReason, Task
from upswing.verify.base import Episode
from upswing.verify.functions import Verifier, verifier_from


class VerifierSpec(Protocol):
    """What a recipe says of one verifier."""

    @property
    def name(self) -> str: ...
    @property
    def weight(self) -> float: ...
    @property
    def args(self) -> Any: ...


class Rubric:
    """The reward: the weighted sum of its verifiers. Weight 0: measured and reported, never part of the reward."""

    def __init__(self, items: Iterable[tuple[str, Any, float]]) -> None:
        """`items`: (name, verifier or function, weight). Raises ConfigError for what can't be a reward."""
        self.items: tuple[tuple[str, Verifier, float], ...] = tuple(
            (name, verifier_from(verifier, name=name), float(weight)) for name, verifier, weight in items
        )
        names = [name for name, _, _ in self.items]
        for name, _, weight in self.items:
            if names.count(name) > 1:
                raise ConfigError(f"two verifiers are called '{name}'; give each a name of its own")
            if not math.isfinite(weight):
                raise ConfigError(f"verifier '{name}': weight must be a finite number, got {weight}")
        if not any(weight for _, _, weight in self.items):
            raise ConfigError("no verifier has a weight other than 0, so the reward would always be 0")

    async def score(self, episode: Episode) -> Score:
        """All verifiers, run side by side. The value is None when one that carries weight could not score."""
        scores = await asyncio.gather(*(verifier(episode) for _, verifier, _ in self.items))
        components: dict[str, float | None] = {}
        reasons, total, judged = [], 0.0, True
        for (name, _, weight), score in zip(self.items, scores, strict=True):
            components[name] = score.value
            components.update({f"{name}.{key}": value for key, value in score.components.items()})
            if score.reason:
                reasons.append(f"{name}: {score.reason}")
            if weight and score.value is None:
                judged = False
            elif weight and score.value is not None:
                total += weight * score.value
        if judged and not math.isfinite(total):
            judged, reasons = False, [*reasons, f"the weighted sum is {total}"]
        return Score(value=total if judged else None, components=components, reason="; ".join(reasons))


def rubric_from(specs: Sequence[VerifierSpec]) -> Rubric:
    """The rubric of a recipe's verifiers, called by their names; import paths by what follows the colon."""
    made = [(verifier_from(spec.name, spec.args), float(spec.weight)) for spec in specs]
    return Rubric([(verifier.name, verifier, weight) for verifier, weight in made])


@dataclass(frozen=True)
class SelfCheckRow:
    """How one made-up answer to one task was judged."""

    task_id: str
    case: str
    answer: str | None
    value: float | None
    accepted: bool
    """It scored as much as the accepted answer does."""

    @property
    def ok(self) -> bool:
        """Gold was accepted, anything else was not."""
        return self.accepted == (self.case == "gold")


@dataclass(frozen=True)
class SelfCheckReport:
    """What `self_check` found."""

    rows: tuple[SelfCheckRow, ...]

    @property
    def ok(self) -> bool:
        return not self.failures

    @property
    def failures(self) -> tuple[SelfCheckRow, ...]:
        return tuple(row for row in self.rows if not row.ok)

    def by_case(self) -> dict[str, tuple[int, int]]:
        """(accepted, tried) by case."""
        tried = Counter(row.case for row in self.rows)
        accepted = Counter(row.case for row in self.rows if row.accepted)
        return {case: (accepted[case], count) for case, count in tried.items()}


async def self_check(verifier: Rubric | Verifier, tasks: Sequence[Task]) -> SelfCheckReport:
    """Judge made-up answers: the gold one must be accepted; none, empty, cut, echoed and adversarial ones must not."""
    others = tuple(dict.fromkeys(gold for task in tasks for gold in task.gold))
    rows: list[SelfCheckRow] = []
    for task in tasks:
        nothing = await verifier.score(_episode(task, None, Outcome.TRUNCATED))
        floor = nothing.value if nothing.value is not None else 0.0
        golds = [await verifier.score(_episode(task, gold)) for gold in task.gold]
        full = min((score.value for score in golds if score.value is not None), default=None)
        for gold, score in zip(task.gold, golds, strict=True):
            better = score.value is not None and score.value > floor
            rows.append(SelfCheckRow(task.id, "gold", gold, score.value, better))
        if not golds:
            rows.append(SelfCheckRow(task.id, "gold", None, None, False))
        for case, answer in _wrong_answers(task, others):
            outcome = Outcome.TRUNCATED if case == "truncated" else Outcome.COMPLETED
            value = (await verifier.score(_episode(task, answer, outcome))).value
            accepted = value is not None and (full is None or value >= full)
            rows.append(SelfCheckRow(task.id, case, answer, value, accepted))
    return SelfCheckReport(tuple(rows))


def _wrong_answers(task: Task, others: Sequence[str]) -> list[tuple[str, str | None]]:
    """(case, answer), those that happen to be accepted answers left out."""
    question = task.messages[-1].content if task.messages else ""
    cases: list[tuple[str, str | None]] = [("none", None), ("truncated", None), ("empty", ""), ("echo", question)]
    for gold in task.gold[:1]:
        cases += [
            ("cut", gold[:-1]),
            ("dot", f".{gold}"),
            ("extra", f"{gold} or something else"),
            ("repeated", f"{gold} {gold}"),
            ("all_golds", ", ".join(dict.fromkeys((*task.gold, *others))) + ","),
            ("tags", f"<answer>{gold}</answer>"),
            ("thinking", f"<think>{gold}</think>"),
        ]
    accepted = {gold.strip() for gold in task.gold}
    return [(case, answer) for case, answer in cases if answer is None or answer.strip() not in accepted]


def _episode(task: Task, answer: str | None, outcome: Outcome = Outcome.COMPLETED) -> Episode:
    reply = () if answer is None else (Message(role="assistant", content=answer),)
    return Episode(
        task=task,
        messages=(*task.messages, *reply),
        answer=answer,
        gold=task.gold,
        data=task.data,
        tool_records=(),
        state={},
        outcome=outcome,
        stop_reason=StopReason.ANSWERED if outcome is Outcome.COMPLETED else StopReason.MAX_TURNS,
        num_turns=1,
    )
