"""Do demonstrations copy names token by token, or spell them anew?"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from upswing.trajectory.types import Branch

_NAME = re.compile(r"\b[A-Z][A-Za-z]{3,}\b")
LEAST = 20
"""Copied names below which nothing is said."""
SHARE = 0.25
REMEDY = (
    "A small model then learns to spell in place of copying, and misspells names that it hasn't seen. Where the "
    "protocol allows it, put a space before them, as in a sentence."
)

Word = tuple[str, tuple[str, ...], bool]
"""(a name, the tokens that hold it, whether the agent wrote it)."""


def respelt(branches: Sequence[Branch], decode: Callable[[list[int]], str]) -> str:
    """How many, when at least `SHARE` of the names that turns repeat have tokens there that they had nowhere before.

    ' Norway' is one token in a sentence; behind a tag, a quote or a line's end it is spelt: 'Nor', 'way'. A small model
    copies tokens easily and spells badly, worst of all names that training never showed. Empty when all is well.
    """
    copied, other, example = 0, 0, ""
    pieces: dict[int, str] = {}
    for branch in branches:
        read: dict[str, set[tuple[str, ...]]] = {}
        for name, tokens, written in _words(branch, pieces, decode):
            if written and name in read:
                copied += 1
                if tokens not in read[name]:
                    other += 1
                    example = example or f"'{'|'.join(min(read[name]))}' is read, '{'|'.join(tokens)}' written"
            read.setdefault(name, set()).add(tokens)
    if copied < LEAST or other < SHARE * copied:
        return ""
    return (
        f"{other / copied:.0%} of the names that demonstrations repeat have other tokens where they are written "
        f"({example})"
    )


def _words(branch: Branch, pieces: dict[int, str], decode: Callable[[list[int]], str]) -> Iterator[Word]:
    """The names of a branch in order. A name that both sides share a token of counts as the agent's."""
    text, at = "", list[int]()
    for position, token in enumerate(branch.tokens.tolist()):
        if token not in pieces:
            pieces[token] = decode([token])
        text += pieces[token]
        at += [position] * len(pieces[token])
    for found in _NAME.finditer(text):
        first, last = at[found.start()], at[found.end() - 1]
        held = tuple(pieces[token] for token in branch.tokens[first : last + 1].tolist())
        yield found[0], held, bool(branch.sampled[first : last + 1].any())
