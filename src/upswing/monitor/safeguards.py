"""Safeguards: what is done about a finding while a stage trains. Pure decisions; the stage's loop carries them out.

Each answers some failure modes by one bounded change of the stage's keys, and is taken back once the mode has been ok
for long enough. Data never decides: only judgements, the keys, and what was done before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from upswing.monitor.findings import SEVERITIES, Finding, Judgement, Severity

COOLDOWN = 5
"""Steps between two actions but for a severer finding, two uses of one safeguard, and two answers to one mode."""
RELEASE = 20
"""Steps that a mode must have been ok before its newest change is taken back; twice as many after each time."""
PATIENCE = 10
"""Steps that a critical finding may outlive the last thing that could be done about it, before the run is stopped."""
ROLLBACKS = 3
FIRST = 10
"""Steps whose medians are what was normal."""
SMOOTH = 5
"""Steps over which the training reward is averaged."""

UNGROUPED = ("reinforce", "reinforce_pp", "remax", "gae")
"""Advantages for which a group without a spread of rewards is no waste."""

LEFT_OUT, RESETS = "left_out", "reference_resets"
"""Not keys of the stage, but changed like them: ids of tasks that are no longer played; a count."""

Keys = Mapping[str, Any]
Fits = Callable[[dict[str, Any]], bool]


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What a change is computed from."""

    base: Keys
    """The stage's keys as its recipe has them."""
    now: Keys
    """Those in force."""
    normal: Keys = field(default_factory=dict)
    """Medians of the stage's first steps, as `normal_of` has them."""
    decided: Callable[[], Sequence[str]] = tuple
    """Ids of repeated tasks that the agent always solves or never does; slow."""


@dataclass(frozen=True)
class Safeguard:
    """One kind of action."""

    about: str
    change: Callable[[Situation, str], dict[str, Any] | None]
    """The next value of each key for a mode; None: at its bound, or nothing to change."""
    needs: Callable[[Keys], str | None] = lambda keys: None
    """Why a stage with these keys can't use it; None: it can."""


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
    """It takes an earlier change of this safeguard back."""
    over: int | None = None
    """The step at which its change was taken back."""

    @property
    def text(self) -> str:
        """`lr 2e-05 -> 1e-05, back to the weights of step 20`."""
        parts = [f"{key} {_said(before)} -> {_said(after)}" for key, (before, after) in self.changes.items()]
        parts += [f"back to the weights of step {self.rollback}"] if self.rollback is not None else []
        return ", ".join(parts) or self.safeguard

    def row(self, stage: str) -> dict[str, Any]:
        """For `findings.jsonl`."""
        until = "" if self.takes_back or not _reversible(self) else f"taken back once {self.mode} was ok for long"
        plain = {name: value for name, value in asdict(self).items() if name not in ("changes", "severity", "over")}
        changes = {key: [len(v) if isinstance(v, list) else v for v in pair] for key, pair in self.changes.items()}
        kind = {"kind": "action", "title": self.text, "severity": "info", "stage": stage}
        return {**kind, **plain, "changes": changes, "until": until}


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
        return cls(
            actions=[Action(**one) for one in data["actions"]],
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

    def add(self, action: Action) -> None:
        if action.takes_back:
            [a for a in self.in_force(action.mode) if _reversible(a)][-1].over = action.step
        self.actions.append(action)

    def in_force(self, mode: str | None = None) -> list[Action]:
        """Changes that hold, oldest first."""
        return [a for a in self.actions if a.changes and not a.takes_back and a.over is None and mode in (None, a.mode)]

    def changes(self, *, without: Action | None = None) -> dict[str, Any]:
        """Key -> the value in force, of changed keys only."""
        return {key: to for a in self.in_force() if a is not without for key, (_, to) in a.changes.items()}

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
    was done about and that began first; else one taken back. While the last action rests, for severer findings only.

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
    return next((back for mode in past.ok_since if (back := _taken_back(mode, situation, past, step, fits))), None)


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
    # Which weights were better is judged by the reward: not where that is what lies.
    may = critical and "rollback" in names and mode != "reward_hacking" and len(rolled) < ROLLBACKS
    if may and (not rolled or step - rolled[-1] >= COOLDOWN):
        back = best
    chosen = _next(mode, situation, past, step, names, fits)
    if chosen is not None:
        name, change = chosen
        changes = {key: [situation.now.get(key), value] for key, value in change.items()}
        return Action(step=step, mode=mode, safeguard=name, why=why, changes=changes, rollback=back)
    if back is not None:
        return Action(step=step, mode=mode, safeguard="rollback", why=why, rollback=back)
    waited = step - max(past.found_since.get(mode, step), last or 0)
    if critical and "stop" in names and waited >= PATIENCE:
        tried = "; ".join(f"step {a.step}: {a.text}" for a in past.answers(mode)) or "nothing that could be tried"
        more = f". To try: {finding.remedies[0].text}" if finding.remedies else ""
        return Action(step=step, mode=mode, safeguard="stop", why=f"{why}. Tried: {tried}{more}")
    return None


def _next(
    mode: str, situation: Situation, past: Past, step: int, names: Sequence[str], fits: Fits
) -> tuple[str, dict[str, Any]] | None:
    """The safeguard tried least for this mode, in the order of its ladder, and its change."""
    resting = _resting(past, step)
    ladder = [name for name in LADDERS.get(mode, ()) if name in names and name not in resting]
    for name in sorted(ladder, key=[a.safeguard for a in past.answers(mode)].count):
        change = SAFEGUARDS[name].change(situation, mode)
        if change and fits({**past.changes(), **change}):
            return name, change
    return None


def _taken_back(mode: str, situation: Situation, past: Past, step: int, fits: Fits) -> Action | None:
    """The newest change for a mode that has been ok for long enough, taken back: after those that later changed the
    same keys, so that a key goes back the way it came."""
    held = [a for a in past.in_force(mode) if _reversible(a)]
    times = sum(a.takes_back for a in past.actions if a.mode == mode)
    since = max([past.ok_since[mode], *(a.step for a in past.actions if a.mode == mode)])
    if not held or step - since < RELEASE * 2**times:
        return None
    action, left = held[-1], past.changes(without=held[-1])
    later = past.in_force()[past.in_force().index(action) + 1 :]
    if any(a.changes.keys() & action.changes.keys() for a in later) or action.safeguard in _resting(past, step):
        return None
    values = {key: left.get(key, situation.base.get(key)) for key in action.changes}
    if not fits(left):
        return None
    changes = {key: [situation.now.get(key), value] for key, value in values.items()}
    why = f"{mode} has been ok since step {past.ok_since[mode]}"
    return Action(step=step, mode=mode, safeguard=action.safeguard, why=why, changes=changes, takes_back=True)


def _resting(past: Past, step: int) -> set[str]:
    return {a.safeguard for a in past.actions if step - a.step < COOLDOWN}


def _acts(one: Judgement) -> bool:
    return one.finding is not None and one.finding.severity != "info"


def _reversible(action: Action) -> bool:
    return bool(action.changes) and RESETS not in action.changes


def _said(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"{len(value)} tasks"
    return "none" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


# -- what is known of the stage ----------------------------------------------------------------------------------------


def normal_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Medians of entropy and length over the first steps."""
    found = {name: _numbers(rows, name)[:FIRST] for name in ("entropy", "sampled_tokens")}
    return {name: median(values) for name, values in found.items() if values}


def best_checkpoint(rows: Sequence[Mapping[str, Any]], saved: Sequence[int]) -> int | None:
    """The step of the best saved one: by the last evaluation up to it, without any by its smoothed training reward,
    which also tells those after one evaluation apart; of equals the newest. None without any to judge by. Without an
    evaluation, of which there is one batch only, step 0 is the best where there is no other."""
    saved = [step for step in saved if step or _eval(rows) is not None or len(saved) == 1]
    known = [(score, _reward(rows, step) or 0.0, step) for step in saved if (score := _score(rows, step)) is not None]
    return max(known)[-1] if known else None


def is_worse(rows: Sequence[Mapping[str, Any]], best: int) -> bool:
    """Whether the newest evaluation, or the training reward, is below that of a checkpoint."""
    pairs = [(_eval(rows, best), _eval(rows)), (_reward(rows, best), _reward(rows))]
    return any(then is not None and now is not None and now < then for then, now in pairs)


def _score(rows: Sequence[Mapping[str, Any]], step: int) -> float | None:
    return _eval(rows, step) if _eval(rows) is not None else _reward(rows, step)


def _eval(rows: Sequence[Mapping[str, Any]], step: float = math.inf) -> float | None:
    found = _numbers([row for row in rows if row["step"] <= step], "eval_reward")
    return found[-1] if found else None


def _reward(rows: Sequence[Mapping[str, Any]], step: float = math.inf) -> float | None:
    """A step's reward is of the weights before it, so the first one is that of the start weights, step 0."""
    found = _numbers([row for row in rows if row["step"] <= step], "reward")[-SMOOTH:]
    found = found if step else _numbers(rows, "reward")[:1]
    return sum(found) / len(found) if found else None


def _numbers(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    values = (row.get(name) for row in rows)
    return [float(v) for v in values if isinstance(v, int | float) and math.isfinite(v)]


# -- the set -----------------------------------------------------------------------------------------------------------


def is_single(keys: Keys) -> bool:
    """One optimizer step a batch: every ratio is 1."""
    updates: int = (keys["minibatches"] or 1) * keys["updates_per_batch"]
    return updates == 1


def _ratios(keys: Keys) -> str | None:
    why = "a batch has one update, whose ratio is 1; set minibatches or updates_per_batch too"
    return why if is_single(keys) else None


def _entropy(s: Situation, mode: str) -> dict[str, Any] | None:
    coef, target, normal = s.now["entropy_coef"], s.now["entropy_target"], s.normal.get("entropy")
    if mode == "entropy_explosion":
        return {"entropy_coef": 0.0, "entropy_target": None} if coef else None
    if target is not None or not normal:
        return None
    return {"entropy_coef": max(coef, 0.005), "entropy_target": round(normal / 2, 4)}


def _clip_higher(s: Situation, mode: str) -> dict[str, Any] | None:
    clip = s.now["clip_high"]
    return None if clip is None or clip >= 0.4 else {"clip_high": min(0.4, round(1.4 * clip, 4))}


def _has_clip(keys: Keys) -> str | None:
    has = keys["loss"] in ("ppo_clip", "clip_cov")
    return _ratios(keys) if has else f"it raises clip_high, and loss '{keys['loss']}' has none on that scale"


def _kl_cov(s: Situation, mode: str) -> dict[str, Any] | None:
    return {"algorithm": "custom", "loss": "kl_cov"} if s.now["loss"] == "ppo_clip" and not is_single(s.now) else None


def _clips(keys: Keys) -> str | None:
    return _ratios(keys) if keys["loss"] == "ppo_clip" else f"it takes ppo_clip's place, and loss is '{keys['loss']}'"


def _dynamic_sampling(s: Situation, mode: str) -> dict[str, Any] | None:
    batches = s.now["dynamic_sampling"] or 1
    return {"dynamic_sampling": min(4, 2 * batches)} if batches < 4 else None


def _grouped(keys: Keys) -> str | None:
    if keys["reward_model"] is not None:
        return "it judges by the verifiers, and reward_model is the reward"
    if keys["group_size"] == 1:
        return "a group of 1 never has a spread"
    ungrouped = keys["advantage"] in UNGROUPED
    return f"advantage '{keys['advantage']}' learns from groups without a spread too" if ungrouped else None


def _curriculum(s: Situation, mode: str) -> dict[str, Any] | None:
    before = set(s.now.get(LEFT_OUT) or ())
    found = before | set(s.decided())
    return {LEFT_OUT: sorted(found)} if found != before else None


def _llds(s: Situation, mode: str) -> dict[str, Any] | None:
    coef = s.now["llds_coef"]
    return {"llds_coef": min(1.0, max(0.2, 2 * coef))} if coef < 1 else None


def _own_old(keys: Keys) -> str | None:
    return "old_logprobs is 'engine'" if keys["old_logprobs"] == "engine" else None


def _kl(s: Situation, mode: str) -> dict[str, Any] | None:
    coef = s.now["kl_coef"]
    return {"kl_coef": min(0.1, max(0.01, 3 * coef))} if coef < 0.1 else None


def _fixed_kl(keys: Keys) -> str | None:
    return "kl_target adapts kl_coef already" if keys["kl_target"] is not None else None


def _ref_reset(s: Situation, mode: str) -> dict[str, Any] | None:
    count = s.now.get(RESETS) or 0
    return {RESETS: count + 1} if s.now["kl_coef"] and count < 3 else None


def _lr(s: Situation, mode: str) -> dict[str, Any] | None:
    lr = s.now["lr"] / 2
    return {"lr": lr} if lr >= 0.99 * s.base["lr"] / 8 else None


def _reuse(s: Situation, mode: str) -> dict[str, Any] | None:
    """Half as many updates a batch; never one alone where something would lose its effect by that."""
    passes, parts, tasks = s.now["updates_per_batch"], s.now["minibatches"] or 1, s.now["tasks_per_step"]
    if passes > 1:
        change = {"updates_per_batch": passes // 2}
    elif parts > 1:
        change = {"minibatches": max(n for n in range(1, parts // 2 + 1) if tasks % n == 0)}
    else:
        return None
    needs_ratios = s.now["llds_coef"] or s.now["loss"] == "kl_cov"
    return None if needs_ratios and is_single({**s.now, **change}) else change


def _overlong(s: Situation, mode: str) -> dict[str, Any] | None:
    length = s.normal.get("sampled_tokens")
    if s.now["overlong_length"] is not None or not length:
        return None
    return {"overlong_length": math.ceil(3 * length), "overlong_cache": math.ceil(1.5 * length)}


def _shapeable(keys: Keys) -> str | None:
    if keys["overlong_length"] is not None:
        return "overlong_length is set already"
    reads_reward = keys["advantage"] not in ("gdpo", "pass_at_k")
    return None if reads_reward else f"a length penalty doesn't reach advantage '{keys['advantage']}'"


def _correction(s: Situation, mode: str) -> dict[str, Any] | None:
    return {"correction": "tis"} if s.now["correction"] is None else None


def _uncorrected(keys: Keys) -> str | None:
    return _own_old(keys) or (None if keys["correction"] is None else f"correction is '{keys['correction']}' already")


SAFEGUARDS: dict[str, Safeguard] = {
    "entropy": Safeguard("an entropy bonus that adapts to half the first entropy, or none any more", _entropy),
    "clip_higher": Safeguard("clip_high up, to 0.4 at most", _clip_higher, _has_clip),
    "kl_cov": Safeguard("loss kl_cov in ppo_clip's place", _kl_cov, _clips),
    "dynamic_sampling": Safeguard("up to 4 batches a step for groups with a spread", _dynamic_sampling, _grouped),
    "curriculum": Safeguard("repeated tasks always or never solved are left out", _curriculum, _grouped),
    "llds": Safeguard("llds_coef 0.2, then doubled to 1 at most", _llds, lambda keys: _ratios(keys) or _own_old(keys)),
    "kl": Safeguard("kl_coef 0.01, then tripled to 0.1 at most", _kl, _fixed_kl),
    "ref_reset": Safeguard(
        "the policy becomes the reference", _ref_reset, lambda keys: None if keys["kl_coef"] else "kl_coef is 0"
    ),
    "lr": Safeguard("learning rate halved, to an eighth at most", _lr),
    "reuse": Safeguard("half as many updates a batch", _reuse, _ratios),
    "overlong": Safeguard("a penalty from 1.5 times the first length on", _overlong, _shapeable),
    "correction": Safeguard("truncated importance sampling", _correction, _uncorrected),
    "rollback": Safeguard(
        "back to the best checkpoint",
        lambda s, mode: None,
        lambda keys: None if keys["save_every"] else "save_every is 0",
    ),
    "stop": Safeguard("the run ends with the reason when nothing helps", lambda s, mode: None),
}

LADDERS: dict[str, tuple[str, ...]] = {
    "entropy_collapse": ("entropy", "clip_higher", "kl_cov", "lr"),
    "entropy_explosion": ("entropy", "llds", "lr", "reuse", "kl"),
    "advantage_collapse": ("curriculum", "dynamic_sampling"),
    "echo_trap": ("dynamic_sampling", "clip_higher", "reuse", "lr"),
    "template_collapse": ("dynamic_sampling", "lr"),
    "kl_explosion": ("lr", "reuse", "kl", "ref_reset"),
    "length_explosion": ("overlong", "lr"),
    "length_collapse": ("lr", "kl"),
    "likelihood_displacement": ("llds", "reuse", "lr"),
    "train_inference_mismatch": ("correction", "lr"),
    "tool_call_collapse": ("kl", "lr"),
    "repeated_calls": ("kl", "lr"),
    "control_token_collapse": ("kl", "lr"),
    "stale_updates": ("reuse", "correction", "lr"),
    "reward_hacking": ("kl", "lr"),
    "overfitting": ("kl", "lr"),
    "gradient_instability": ("lr", "reuse"),
}
"""What is tried for each mode, the best first. Others have nothing that a change of keys could help."""


def usable(wanted: str | Sequence[str], keys: Keys) -> tuple[str, ...]:
    """The names that `off`, `auto` or a list means for a stage with these keys."""
    if wanted == "off":
        return ()
    return tuple(n for n, one in SAFEGUARDS.items() if (wanted == "auto" or n in wanted) and one.needs(keys) is None)
