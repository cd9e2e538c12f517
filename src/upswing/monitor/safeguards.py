"""Safeguards: what is done about a finding while a stage trains. Pure decisions; the stage's loop carries them out.

Each answers some failure modes by one bounded change of the stage's keys; what only brakes is let go, notch by notch,
once the mode has been ok for long enough. Data never decides: only judgements, the keys, and what was done before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from upswing.monitor.findings import SEVERITIES, Finding, Judgement, Severity
from upswing.monitor.ladder import BRAKES, LADDERS, LEFT_OUT, RESETS, SAFEGUARDS, UNPAID, Keys, Situation

__all__ = ["LEFT_OUT", "RESETS", "SAFEGUARDS", "UNPAID", "Action", "Past", "decide", "usable"]

COOLDOWN = 5
"""Steps between two actions but for a severer finding, two uses of one safeguard, and two answers to one mode."""
RELEASE = 10
"""Steps that modes must have been ok before a brake is let go by a notch; twice as many after each relapse."""
PATIENCE = 10
"""Steps that a critical finding may outlive the last thing that could be done about it, before the run is stopped,
where success has dropped; where it only gains nothing, three times as many."""
ROLLBACKS = 3

Fits = Callable[[dict[str, Any]], bool]


@dataclass(kw_only=True)
class Action:
    """What was done, or is to be done, at the end of a step."""

    step: int
    mode: str
    """The finding that it answers."""
    safeguard: str
    why: str
    changes: dict[str, list[Any]] = field(default_factory=dict)
    """Key -> [from, to]."""
    rollback: int | None = None
    """The weights, optimizer included, of the checkpoint after this step come back first."""
    severity: Severity = "warning"
    """Of that finding."""
    held: list[str] = field(default_factory=list)
    """Modes that were found too, then or while it rests, and wait."""
    takes_back: bool = False
    """It lets a brake go by a notch."""

    @property
    def text(self) -> str:
        """`lr 2e-05 -> 1e-05, back to the weights of step 20`."""
        parts = [f"{key} {_said(key, old)} -> {_said(key, new)}" for key, (old, new) in self.changes.items()]
        parts += [f"back to the weights of step {self.rollback}"] if self.rollback is not None else []
        return ", ".join(parts) or self.safeguard

    def row(self, stage: str) -> dict[str, Any]:
        """For `findings.jsonl`."""
        brakes = ", ".join(key for key in self.changes if key in BRAKES)
        until = f"taken back step by step ({brakes}) once {self.mode} was ok for long" if brakes else ""
        plain = {name: value for name, value in asdict(self).items() if name not in ("changes", "severity")}
        changes = dict(self.changes)
        if LEFT_OUT in changes:
            changes[LEFT_OUT] = [None if ids is None else len(ids) for ids in changes[LEFT_OUT]]
        kind = {"kind": "action", "title": self.text, "severity": "info", "stage": stage}
        return {**kind, **plain, "changes": changes, "until": "" if self.takes_back else until}


@dataclass(kw_only=True)
class Past:
    """What was done so far in a stage, and how long each mode has been ok or not. JSON by `to_json`."""

    actions: list[Action] = field(default_factory=list)
    ok_since: dict[str, int] = field(default_factory=dict)
    found_since: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Past:
        """Fields that this version doesn't know are left out, so that older runs resume."""
        known = Action.__dataclass_fields__.keys()
        return cls(
            actions=[Action(**{key: one[key] for key in known & one.keys()}) for one in data["actions"]],
            ok_since=dict(data["ok_since"]),
            found_since=dict(data["found_since"]),
        )

    def see(self, judgements: Iterable[Judgement], step: int) -> None:
        """Note which modes are ok and which aren't."""
        for one in judgements:
            since = self.found_since if _acts(one) else self.ok_since if one.status == "ok" else {}
            for other in (self.found_since, self.ok_since):
                if other is not since:
                    other.pop(one.mode, None)
            since.setdefault(one.mode, step)

    def answers(self, mode: str | None = None) -> list[Action]:
        """What was done about findings, oldest first."""
        return [a for a in self.actions if not a.takes_back and mode in (None, a.mode)]

    def resting(self, step: int) -> Action | None:
        """The newest of them, while it is to show what it does."""
        done = self.answers()
        return done[-1] if done and step - done[-1].step < COOLDOWN else None

    def waiting(self, step: int) -> list[str]:
        """Modes that newly have to wait for that; from now on they count as told."""
        if (last := self.resting(step)) is None:
            return []
        new = [mode for mode in self.found_since if mode not in (last.mode, *last.held)]
        last.held += new
        return new

    def changes(self) -> dict[str, Any]:
        """Key -> the value in force, of keys that were ever changed."""
        return {key: to for a in self.actions for key, (_, to) in a.changes.items()}

    def is_undone(self, step: float) -> bool:
        """Whether the weights after a step were rolled back; of an update, which lies between two: `step - 0.5`."""
        return any(a.rollback is not None and a.rollback < step < a.step for a in self.actions)

    def holds(self, row: Mapping[str, Any]) -> bool:
        """Whether a row of metrics, of an update or an evaluation, is of weights that the present ones come from."""
        return not self.is_undone(row["step"] - 0.5 * ("train_s" in row))


# -- decisions ---------------------------------------------------------------------------------------------------------


def decide(
    judgements: Sequence[Judgement],
    situation: Situation,
    past: Past,
    *,
    step: int,
    names: Sequence[str],
    fits: Fits = lambda changes: True,
    best: int | None = None,
) -> Action | None:
    """At most one action: for the severest finding that something can be done about, of equals for the one that least
    was done about and that began first; else a brake let go. While the last action rests, for severer findings only.

    `names`: safeguards that may be used. `fits`: whether the stage accepts all these changes of its keys together.
    `best`: the checkpoint that a rollback would go to; None: none is better than the present. `past` has seen the
    judgements.
    """
    found = [one.finding for one in judgements if one.finding is not None and _acts(one)]
    last = past.resting(step)
    for finding in sorted(found, key=lambda f: (-SEVERITIES.index(f.severity), len(past.answers(f.mode)), f.since)):
        if last is not None and SEVERITIES.index(finding.severity) <= SEVERITIES.index(last.severity):
            break
        action = _answer(finding, situation, past, step, names, fits, best)
        if action is not None:
            action.severity, action.held = finding.severity, [f.mode for f in found if f is not finding]
            return action
    return next((one for key in BRAKES if (one := _let_go(key, situation, past, step, fits))), None)


def _answer(
    finding: Finding, situation: Situation, past: Past, step: int, names: Sequence[str], fits: Fits, best: int | None
) -> Action | None:
    mode = finding.mode
    last = max((a.step for a in past.answers(mode)), default=None)
    if last is not None and step - last < COOLDOWN:
        return None
    why = f"{finding.title}: {'; '.join(finding.evidence)}"
    critical = finding.severity == "critical"
    rolled = [a.step for a in past.answers() if a.rollback is not None]
    back = None
    # Where nothing about the policy is wrong (no ladder), older weights help only if success has fallen.
    policy = bool(LADDERS.get(mode)) or situation.dropped
    may = critical and policy and "rollback" in names and len(rolled) < ROLLBACKS
    if may and (not rolled or step - rolled[-1] >= COOLDOWN):
        back = best
    chosen = _next(finding, situation, past, step, names, fits)
    if chosen is not None:
        name, change = chosen
        changes = {key: [situation.now.get(key), value] for key, value in change.items()}
        return Action(step=step, mode=mode, safeguard=name, why=why, changes=changes, rollback=back)
    if back is not None:
        return Action(step=step, mode=mode, safeguard="rollback", why=why, rollback=back)
    waited = step - max(past.found_since.get(mode, step), last or 0)
    patience = PATIENCE if situation.dropped else 3 * PATIENCE
    # What breaks half of the attempts, say, needn't keep the rest from learning.
    if critical and "stop" in names and waited >= patience and (situation.dropped or not situation.paid(finding.since)):
        tried = "; ".join(f"step {a.step}: {a.text}" for a in past.answers(mode)) or "nothing that could be tried"
        more = f". To try: {finding.remedies[0].text}" if finding.remedies else ""
        return Action(step=step, mode=mode, safeguard="stop", why=f"{why}. Tried: {tried}{more}")
    return None


def _next(
    finding: Finding, situation: Situation, past: Past, step: int, names: Sequence[str], fits: Fits
) -> tuple[str, dict[str, Any]] | None:
    """The safeguard tried least for this mode, in the order of its ladder, and its change. About a critical finding,
    which has few steps left, with a quarter of the learning rate at once."""
    resting = _resting(past, step)
    ladder = [name for name in LADDERS.get(finding.mode, ()) if name in names and name not in resting]
    slower: dict[str, Any] = {}
    if finding.severity == "critical" and "lr" in ladder and SAFEGUARDS["lr"].change(situation, finding.mode):
        slower = {"lr": max(situation.base["lr"] / 8, situation.now["lr"] / 4)}
        ladder = [name for name in ladder if name != "lr"] + ["lr"]
    for name in sorted(ladder, key=[a.safeguard for a in past.answers(finding.mode)].count):
        change = SAFEGUARDS[name].change(situation, finding.mode)
        for changes in ({**change, **slower}, change) if change else ():
            if fits({**past.changes(), **changes}):
                return name, changes
    return None


def _let_go(key: str, situation: Situation, past: Past, step: int, fits: Fits) -> Action | None:
    """A brake by a notch, the way it came (the learning rate doubles), once all modes that it was for have been ok for
    long enough."""
    usual, value, now = situation.base.get(key), situation.now.get(key), past.changes()
    if now.get(key, usual) == usual or (past.actions and step - past.actions[-1].step < COOLDOWN):
        return None
    own = [a for a in past.actions if key in a.changes]
    put_on = [a for a in own if not a.takes_back]
    if any(a.mode not in past.ok_since for a in put_on):
        return None
    since = max([own[-1].step, *(past.ok_since[a.mode] for a in put_on)])
    relapses = sum(a.takes_back and not b.takes_back for a, b in pairwise(own))
    after = next((a.changes[key][0] for a in reversed(put_on) if a.changes[key][1] == now[key]), usual)
    after = min(usual, 2 * now[key]) if key == "lr" and usual is not None else after
    if step - since < RELEASE * 2**relapses or not fits({**now, key: after}):
        return None
    last = put_on[-1].mode
    why = f"{last} has been ok since step {past.ok_since[last]}"
    change = {key: [value, after]}
    return Action(step=step, mode=last, safeguard=BRAKES[key], why=why, changes=change, takes_back=True)


def _resting(past: Past, step: int) -> set[str]:
    return {a.safeguard for a in past.actions if step - a.step < COOLDOWN}


def _acts(one: Judgement) -> bool:
    return one.finding is not None and one.finding.severity != "info"


def _said(key: str, value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"{len(value)} tasks" if key == LEFT_OUT else ", ".join(value) or "none"
    return "none" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def usable(wanted: str | Sequence[str], keys: Keys) -> tuple[str, ...]:
    """The names that `off`, `auto` or a list means for a stage with these keys."""
    if wanted == "off":
        return ()
    return tuple(n for n, one in SAFEGUARDS.items() if (wanted == "auto" or n in wanted) and one.needs(keys) is None)
