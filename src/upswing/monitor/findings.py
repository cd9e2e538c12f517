"""What the monitor says: findings with evidence, ranked causes and remedies, and a verdict on every failure mode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Severity = Literal["info", "warning", "critical"]
SEVERITIES: tuple[Severity, ...] = ("info", "warning", "critical")
"""Mildest first. info: worth knowing; warning: it gets worse if nothing changes; critical: it destroys the policy."""

Status = Literal["ok", "finding", "warming_up", "skipped"]
"""warming_up: too few steps to tell; skipped: an input is missing, so nothing is known (never the same as ok)."""


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """One thing to do about a finding."""

    text: str
    """What to do and why, in a sentence."""
    change: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the stage, or dotted ones of the recipe, with the values to set; empty: not a matter of the recipe."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A diagnosed failure of one stage."""

    mode: str
    """Which failure, such as `entropy_collapse`; also the name of its page in the docs."""
    title: str
    severity: Severity
    stage: str
    step: int
    """When it was found."""
    since: int
    """The step at which it began, as far as the series can tell; at most `step`."""
    evidence: tuple[str, ...]
    """Sentences with numbers."""
    causes: tuple[str, ...]
    """Hypotheses, the likeliest first."""
    remedies: tuple[Remedy, ...]
    """The best first."""
    trajectories: tuple[str, ...] = ()
    """Ids of up to three that show it."""

    def row(self) -> dict[str, Any]:
        """For `findings.jsonl`."""
        return asdict(self)

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Finding:
        """The inverse of `row`; other keys are ignored. Raises KeyError for a row that is no finding."""
        texts: dict[str, Any] = {name: tuple(row[name]) for name in ("evidence", "causes")}
        remedies = tuple(Remedy(text=r["text"], change=r.get("change", {})) for r in row["remedies"])
        plain: dict[str, Any] = {name: row[name] for name in ("mode", "title", "severity", "stage", "step", "since")}
        return cls(**plain, **texts, remedies=remedies, trajectories=tuple(row.get("trajectories", ())))


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What is known of one failure mode now."""

    mode: str
    status: Status
    finding: Finding | None = None
    """With status `finding` only."""
    missing: tuple[str, ...] = ()
    """With status `skipped`: the signals that it would need; with `ok`: those without which a part wasn't judged."""


def worst(judgements: list[Judgement]) -> Severity | None:
    """The severest finding's severity; None without findings."""
    found = [SEVERITIES.index(j.finding.severity) for j in judgements if j.finding is not None]
    return SEVERITIES[max(found)] if found else None
