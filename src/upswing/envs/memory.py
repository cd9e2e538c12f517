"""Memory: facts told in one session are asked for in a later one, which sees nothing of it but a notebook."""

from __future__ import annotations

import random
from typing import Annotated

from pydantic import Field

from upswing.envs.base import AssistantMessage, Observation
from upswing.envs.generated import GeneratedEnv, book
from upswing.envs.tools import tool
from upswing.trajectory.types import Message, StopReason, Task

_BOOK = book("memory")
MAX_FOUND = 3


class Memory(GeneratedEnv):
    """Each session is a new conversation: the last one asks for what an earlier one told. `remember(note)` writes to a
    notebook that all sessions share, `recall(query)` finds its notes by their words. A session ends when the agent says
    something without a call.

    Options: `sessions`, the ones that tell something; `facts`, how many things each tells; `expert_noise`, the chance
    that the expert first recalls with words that no note has.
    """

    name = "memory"
    system = "Nothing said here is kept for the next session, only what you remember with the tool."
    sessions: Annotated[int, Field(ge=1, le=10)] = 2
    facts: Annotated[int, Field(ge=1, le=5)] = 2

    def enough_turns(self) -> int:
        """Twice what a note for each fact takes."""
        return 2 * (self.sessions * (self.facts + 1) + 2)

    def draw(self, rng: random.Random) -> Task:
        pairs = [(name, thing) for name in _BOOK["names"] for thing in _BOOK["things"]]
        told = [(*pair, _value(pair[1], rng)) for pair in rng.sample(pairs, self.sessions * self.facts)]
        texts = [f"{name}'s {thing} is {value}." for name, thing, value in told]
        sessions = [" ".join(texts[i :: self.sessions]) for i in range(self.sessions)]
        name, thing, value = rng.choice(told)
        question = f"What is {name}'s {thing}?"
        later = [*sessions[1:], question]
        return self.make_task(" ".join([*texts, question]), sessions[0], gold=(value,), sessions=later)

    def start(self, task: Task) -> None:
        self._notes, self._left = list[str](), list(task.data["sessions"])

    async def step(self, message: AssistantMessage) -> Observation:
        seen = await super().step(message)
        if seen.stop_reason is not StopReason.ANSWERED or not self._left:
            return seen
        if self._turns >= self.max_turns:
            return Observation(done=True, stop_reason=StopReason.MAX_TURNS)
        told = Task(id="", messages=(Message(role="user", content=self._left.pop(0)),))
        self.answer = ""
        return Observation(messages=self._opening(told), rewrite=True)

    @tool()
    async def remember(self, note: str) -> str:
        """Write a note into the notebook."""
        self._notes.append(note.strip())
        return "Noted."

    @tool()
    async def recall(self, query: str) -> str:
        """Find notes that share words with the query."""
        wanted = _words(query)
        scored = [(len(wanted & _words(note)), i, note) for i, note in enumerate(self._notes)]
        best = sorted((-shared, i, note) for shared, i, note in scored if shared)[:MAX_FOUND]
        return "\n".join(note for *_, note in best) or "No note has these words."

    def speak(self, task: Task, messages: tuple[Message, ...], heard: list[str], careless: bool) -> str:
        """Writes down all that it is told, a note for each fact, and recalls by the question's words."""
        told = next(m.content for m in reversed(messages) if m.role == "user")
        if not told.endswith("?"):
            facts = [f"{fact.strip().rstrip('.')}." for fact in told.split(". ") if fact.strip()]
            return self.call("remember", note=facts[len(heard)]) if len(heard) < len(facts) else self.say("Noted.")
        if not heard or heard[-1].startswith("No note"):
            return self.call("recall", query="secret" if careless and not heard else told)
        about = told.removeprefix("What is ").rstrip("?")
        return self.say(next(n for n in heard[-1].splitlines() if about in n).split(" is ")[1].rstrip("."))


def _value(thing: str, rng: random.Random) -> str:
    kind = _BOOK["things"][thing]
    return str(rng.randint(1000, 9999)) if kind == "number" else str(rng.choice(_BOOK[kind]))


def _words(text: str) -> set[str]:
    plain = "".join(c if c.isalnum() else " " for c in text.lower().replace("'s", ""))
    return set(plain.split()) - {"what", "is", "the"}
