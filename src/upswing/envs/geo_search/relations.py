"""Relations between a place and a fact: how a query asks for one and how it is read back out of a result line.

Reading is by inverting the passages' wordings, so the scripted expert knows only what a search returned.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from upswing.envs.geo_search.corpus import BULLET
from upswing.envs.geo_search.names import fold
from upswing.envs.geo_search.tables import WORDINGS


@dataclass(frozen=True, kw_only=True)
class Relation:
    """One kind of hop; the fields are explained in `wordings.yaml`."""

    topics: Sequence[str]
    queries: Sequence[str]
    vague: Sequence[str]
    inverse: bool
    """The subject is the fact and the answer is the title ('Brussels' -> 'Belgium')."""
    also: Sequence[str] = ()
    group: str = "o"


RELATIONS: Mapping[str, Relation] = {
    name: Relation(**{"topics": [name], **row}, inverse=name.endswith("_of"))
    for name, row in WORDINGS["relations"].items()
}


def read(relation: str, line: str, subject: str, qualifier: str | None) -> str | None:
    """What `line` says about `relation` of `subject`, or of the relations that state the same."""
    facts = (_read(name, line, subject, qualifier) for name in (relation, *RELATIONS[relation].also))
    return next((fact for fact in facts if fact is not None), None)


def _read(relation: str, line: str, subject: str, qualifier: str | None) -> str | None:
    """What `line` ('- Title: text') says about `relation` of `subject`; None when it says nothing of it.

    A title that adds a qualifier ('Valencia, Spain') is taken only for the qualifier asked for.
    """
    spec = RELATIONS[relation]
    title, colon, text = line.removeprefix(BULLET).partition(": ")
    match = next((m for pattern in _patterns(relation) if (m := pattern.match(text))), None) if colon else None
    if match is None:
        return None
    fact = match.group(spec.group).removeprefix("the ")
    if spec.inverse:
        return title if fold(fact) == fold(subject) else None
    wanted = {fold(subject)} if qualifier is None else {fold(subject), fold(f"{subject}, {qualifier}")}
    return fact if fold(title) in wanted else None


@functools.cache
def _patterns(relation: str) -> tuple[re.Pattern[str], ...]:
    topics = RELATIONS[relation].topics
    return tuple(_invert(wording) for topic in topics for wording in WORDINGS["passages"][topic])


def _invert(wording: str) -> re.Pattern[str]:
    """'The capital is {o}.' -> a pattern with the groups of its fields; trailing sentences are ignored."""
    parts = re.split(r"\{(\w)\}", wording)
    pattern = "".join(re.escape(part) if i % 2 == 0 else f"(?P<{part}>.+?)" for i, part in enumerate(parts))
    return re.compile(pattern + r"(?: Also spoken: .+)?$")
