"""Wordle: find a five-letter word in six guesses; each answer narrows the rest."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Annotated, Any

from pydantic import Field

from upswing.envs.base import Expert
from upswing.envs.generated import GeneratedEnv
from upswing.envs.tools import tool
from upswing.trajectory.types import Message, Task

LETTERS = 5


class Wordle(GeneratedEnv):
    """`guess(word)` is answered by a letter for each of the word's: G right place, Y elsewhere, `-` not (or no more) in
    the word. The final state's `solved` says whether it was found.

    Options: `guesses`; `expert_noise`, the chance of each guess that the expert doesn't heed what it knows.
    """

    name = "wordle"
    only_acts = True
    protocol = "tags"
    guesses: Annotated[int, Field(ge=1, le=20)] = 6
    _made, _solved = 0, False

    def enough_turns(self) -> int:
        return self.guesses + 3

    def draw(self, rng: random.Random) -> Task:
        word = rng.choice(words())
        marked = "G: right place, Y: elsewhere, -: not in it."
        text = f"Find the secret five-letter word in {self.guesses} guesses. {marked}"
        return self.make_task(word, text, word=word, start_state={"solved": False}, final_state={"solved": True})

    def start(self, task: Task) -> None:
        self._secret, self._made, self._solved = task.data["word"], 0, False

    def final(self) -> Mapping[str, Any]:
        return {"solved": self._solved, "guesses": self._made}

    def is_done(self) -> bool:
        return self._solved or self._made >= self.guesses

    @tool()
    async def guess(self, word: str) -> str:
        """Guess a five-letter word."""
        word = word.strip().lower()
        if len(word) != LETTERS or not (word.isascii() and word.isalpha()):
            raise ValueError(f"{word[:20]!r} is not a word of {LETTERS} letters")
        if word not in words():
            raise ValueError(f"'{word}' is not in the list of words")
        self._made += 1
        self._solved = word == self._secret
        return f"{word}: {marks(word, self._secret)}"

    def expert(self, task: Task, rng: random.Random) -> Expert:
        """Guesses a word that fits all that was said."""

        def act(messages: tuple[Message, ...]) -> str:
            said = [m.content.split(": ") for m in messages if m.role == "tool" and not m.content.startswith("Error")]
            fits = [w for w in words() if all(marks(guess, w) == found for guess, found in said)]
            careless = rng.random() < self.expert_noise
            return self.call("guess", word=rng.choice(words() if careless else fits))

        return act


def marks(guess: str, secret: str) -> str:
    """A letter that occurs once in the secret is marked once: right places first, then from the left."""
    left = Counter(s for g, s in zip(guess, secret, strict=True) if g != s)
    found = []
    for g, s in zip(guess, secret, strict=True):
        if g == s:
            found.append("G")
        elif left[g]:
            left[g] -= 1
            found.append("Y")
        else:
            found.append("-")
    return "".join(found)


@cache
def words() -> tuple[str, ...]:
    return tuple(files("upswing.envs").joinpath("words.txt").read_text(encoding="ascii").split())
