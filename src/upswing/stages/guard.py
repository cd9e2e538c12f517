"""A stage's health while it trains: what the watch finds is told and kept, and safeguards are chosen.

Everything follows from the stored metrics and the checkpoint, so that a resumed run goes on as it would have.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from upswing.monitor.detectors import Readings
from upswing.monitor.findings import Finding, Judgement
from upswing.monitor.history import SUCCESS, History, unheard
from upswing.monitor.ladder import LEFT_OUT, RESETS, UNPAID, Situation
from upswing.monitor.safeguards import Action, Past, decide, usable
from upswing.monitor.standing import best_checkpoint, is_worse, normal_of, side_part
from upswing.monitor.watch import Watch
from upswing.recipe import RlStage
from upswing.recipe.distill import DistillStage
from upswing.recipe.rl import GROUPED
from upswing.stages.context import RunContext
from upswing.trajectory.types import Trajectory
from upswing.verify.rubric import Rubric
from upswing.view.run_folder import FINDINGS, read_json_lines

STORED_STEPS = 50
"""Newest steps whose trajectories tell which tasks are solved or hopeless."""


class Guard:
    """The watch over one stage and, where its recipe wants them, the safeguards."""

    def __init__(self, context: RunContext, stage: RlStage | DistillStage, folder: Path) -> None:
        """`folder`: of the stage's checkpoints."""
        self.context, self.stage, self.folder = context, stage, folder
        self.now = stage
        """The stage with the changes in force."""
        self.names = usable(stage.safeguards, dict(stage)) if isinstance(stage, RlStage) else ()
        self.past = Past()
        # A safeguard of the stage before may have taken parts out; rollouts and evaluations have the recipe's own.
        self.rubric = context.rubric = cast(Rubric, context.rollouts.rubric)
        self._unheard = unheard(stage.stage, grouped=isinstance(stage, RlStage) and stage.advantage in GROUPED)
        self._watch, self.judgements = self._new_watch(), tuple[Judgement, ...]()
        self._outcomes = lru_cache(maxsize=STORED_STEPS)(self._read_outcomes)

    def _new_watch(self) -> Watch:
        env = self.context.make_env()
        told = {"max_turns": getattr(env, "max_turns", None), "tools": len(getattr(env, "_tools", ())) or None}
        more = {"turn_tokens": self.context.recipe.limits.turn_tokens, "weights": self.rubric.weights}
        # As the recipe has them, also when safeguards have changed some: that is what a remedy changes.
        known = {key: value for key, value in told.items() if value is not None}
        self._facts = {**self.stage.model_dump(), **more, **known}
        return Watch(self.stage.name, self._facts, self._trajectories)

    def _trajectories(self, step: int) -> list[Trajectory]:
        return [stored.trajectory for stored in self.context.store.read(self.stage.name, step)]

    def resume(self, saved: Mapping[str, Any] | None) -> None:
        """Be as after the stored rows; `saved` is what a checkpoint kept of the safeguards. What a kill left unsaid of
        them is said now."""
        if saved is not None:
            self.past = Past.from_json(saved)
            self._apply()
        found = self._replay()
        rows = read_json_lines(self.context.out / FINDINGS)
        said = {(row.get("stage"), row.get("step"), row.get("mode"), row.get("kind")) for row in rows}
        for row in found:
            if (self.stage.name, row["step"], row["mode"], row.get("kind")) not in said:
                self._say(row)

    def _replay(self) -> list[dict[str, Any]]:
        """A new watch over the rows that hold -> the rows of findings that come of it."""
        self._watch = self._new_watch()
        return list(chain.from_iterable(self._observe(row) for row in self._rows()))

    def observe(self, row: Mapping[str, Any]) -> None:
        """Look at the metrics of a step or evaluation; whatever began, grew worse or ended is said."""
        for one in self._observe(row):
            self._say(one)

    def _observe(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        seen = self._watch.observe({key: value for key, value in row.items() if key not in self._unheard})
        self.judgements = seen.judgements
        return [_over(one.finding, one.step) if one.kind == "ended" else one.finding.row() for one in seen.news]

    def _say(self, row: Mapping[str, Any]) -> None:
        if row.get("kind") == "over":
            self.context.note(f"{self.stage.name}: {row['title']}: over at step {row['step']}")
            self.context.metrics.finding(**row)
        else:
            self.context.found(Finding.from_row(row))

    @property
    def paid(self) -> Mapping[str, float]:
        """The scores that are success by all that was seen, and their weights; none: the reward is."""
        return self._watch.history.paid

    # -- safeguards ---------------------------------------------------------------------------------------------------

    def decide(self, step: int) -> Action | None:
        """What is to be done now that `step` steps are finished; it is said, kept and in force in `now`."""
        if not self.names:
            return None
        self.past.see(self.judgements, step)
        changed = self.past.changes()
        if not (self.past.found_since or changed):
            return None
        history = self._history()
        readings, best = Readings(history), self.best(history)
        base = {LEFT_OUT: [], UNPAID: [], **dict(self.stage)}
        weights = {name: weight for name, _, weight in self.rubric.items}
        situation = Situation(
            base=base,
            now={**base, **changed, **dict(self.now)},  # what a change has made ineffective is not in `self.now`
            normal=normal_of(history),
            decided=self._decided,
            blamed=lambda mode: side_part(history, weights, changed.get(UNPAID, ()), mode),
            dropped=readings.dropped,
            paid=readings.paid,
        )
        action = decide(
            self.judgements,
            situation,
            self.past,
            step=step,
            names=self.names,
            fits=self._fits,
            best=best if best is not None and is_worse(history, best) else None,
        )
        if action is not None:
            self._keep(action)
        for mode in self.past.waiting(step):
            self.context.note(f"{self.stage.name} step {step}: safeguards hold {mode} back: the last action rests")
        return action

    def _keep(self, action: Action) -> None:
        self.past.actions.append(action)
        self._apply()
        if action.rollback is not None:
            self._replay()
        verb = "taken back" if action.takes_back else "safeguard"
        text = f"{verb} {action.safeguard}: {action.text} ({action.why})"
        text += f"; held back meanwhile: {', '.join(action.held)}" if action.held else ""
        self.context.note(f"{self.stage.name} step {action.step}: {text}")
        self.context.metrics.finding(**action.row(self.stage.name))

    def signals(self) -> dict[str, float]:
        """For the metrics of a step: how many actions there were before it, and the changed keys as they are."""
        if not self.names:
            return {}
        now = {key: getattr(self.now, key, None) for key in self.past.changes()}
        numbers = {f"set_{key}": value for key, value in now.items() if isinstance(value, int | float)}
        return {"safeguard_actions": len(self.past.actions), **numbers}

    def best(self, history: History | None = None) -> int | None:
        """The step of the best checkpoint there is; `history`: that of the stored rows, if they have been read."""
        saved = [int(path.name.removeprefix("step-")) for path in self.folder.glob("step-??????")]
        history = self._history() if history is None else history
        return best_checkpoint(history, [step for step in saved if not self.past.is_undone(step)])

    def _history(self) -> History:
        return History(self.stage.name, self._rows(), facts=self._facts)

    def _rows(self) -> list[dict[str, Any]]:
        """The stored rows of weights that the present ones come from."""
        return [row for row in self.context.metrics.read(self.stage.name) if self.past.holds(row)]

    def _apply(self) -> None:
        """Put what the safeguards have changed in force."""
        changes = self.past.changes()
        self.now = self._with(changes)
        self.context.rubric = self.rubric.without(changes.get(UNPAID, ()))

    def _with(self, changes: Mapping[str, Any]) -> RlStage | DistillStage:
        """Raises ValidationError for changes that the stage refuses."""
        keys = {key: value for key, value in changes.items() if key not in (LEFT_OUT, RESETS, UNPAID)}
        return self.stage.changed(keys) if keys and isinstance(self.stage, RlStage) else self.stage

    def _fits(self, changes: Mapping[str, Any]) -> bool:
        try:
            self._with(changes)
        except ValidationError:
            return False
        return True

    def _read_outcomes(self, step: int) -> dict[str, set[float]]:
        """Task -> its successes in a step; asked for at every step of a long advantage collapse."""
        found: dict[str, set[float]] = {}
        for t in self._trajectories(step):
            value = None if t.score is None else t.score.components.get(SUCCESS, t.score.value)
            if value is not None:
                found.setdefault(t.task.id, set()).add(value)
        return found

    def _decided(self) -> list[str]:
        """Further tasks that were played in two steps of late with one and the same outcome; with those that are left
        out already at most half of those known."""
        played: dict[str, list[set[float]]] = {}
        for _, step, _ in self.context.store.shards(self.stage.name)[-STORED_STEPS:]:
            for task, values in self._outcomes(step).items():
                played.setdefault(task, []).append(values)
        found = [task for task, sets in played.items() if len(sets) > 1 and len(sets[-1] | sets[-2]) == 1]
        left = set(self.past.changes().get(LEFT_OUT, ()))
        room = len(played.keys() | left) // 2 - len(left)
        return [task for task in found if task not in left][: max(0, room)]


def _over(finding: Finding, step: int) -> dict[str, Any]:
    """The row of `findings.jsonl` that says a finding has ended."""
    kept = {"mode": finding.mode, "title": finding.title, "since": finding.since, "stage": finding.stage}
    return {"kind": "over", "severity": "info", **kept, "step": step}
