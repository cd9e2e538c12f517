"""The messages of one trajectory and the exact token branches that the model saw.

Sampled ids are held as they were sampled. What the environment answers is rendered with the chat template, and only the
text after the newest assistant message is encoded and appended, so the held ids stay an exact prefix of every later
prompt. When the template writes the history differently (it strips old thinking, say), that isn't possible and a new
branch is opened; earlier turns are context there and are trained only in the branch that sampled them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from upswing.errors import ConfigError, InvalidTrajectory
from upswing.trajectory.render import PROBE, ChatRenderer
from upswing.trajectory.types import Branch, DriftEvent, Message
from upswing.trajectory.validate import DTYPES

if TYPE_CHECKING:
    from upswing.engine.base import Completion


class _Tokens:
    """A branch that still grows: five lists of one length T, in the order of DTYPES."""

    def __init__(self) -> None:
        self._columns: dict[str, list[Any]] = {name: [] for name in DTYPES}

    @property
    def tokens(self) -> list[int]:
        return self._columns["tokens"]

    def extend(
        self,
        tokens: Sequence[int],
        turn: int,
        *,
        sampled: bool = False,
        engine_logprobs: Sequence[float] = (),
        policy_version: Sequence[int] = (),
    ) -> None:
        """Append tokens of one turn. Without log-probs and versions they are NaN and -1."""
        count = len(tokens)
        logprobs, versions = engine_logprobs or [math.nan] * count, policy_version or [-1] * count
        new: tuple[Sequence[Any], ...] = (tokens, [sampled] * count, logprobs, versions, [turn] * count)
        for column, values in zip(self._columns.values(), new, strict=True):
            column.extend(values)

    def freeze(self) -> Branch:
        return Branch(**{name: np.array(column, dtype=DTYPES[name]) for name, column in self._columns.items()})


class Conversation:
    """One trajectory while it is played: messages, branches and drift events.

    Call in turn: `prompt_ids` -> engine -> `add_completion` -> environment -> `add_messages` -> `prompt_ids` ...
    `add_expert` takes the engine's place for a demonstration. `end_tokens` are the ids that end a turn wherever the
    program asks (see `ChatRenderer.end_tokens`); the template's own must be among them, else ConfigError. So is a
    message that the template would drop or refuse.
    """

    def __init__(
        self,
        renderer: ChatRenderer,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        end_tokens: tuple[int, ...],
    ) -> None:
        end_of_turn = renderer.end_of_turn_id()
        if end_of_turn not in end_tokens:
            raise ConfigError(
                f"the chat template ends turns with token {end_of_turn} ({renderer.decode([end_of_turn])!r}), which "
                f"isn't among the end tokens {tuple(end_tokens)}; add it, or no turn would ever end"
            )
        self._renderer = renderer
        self._tools = tuple(tools)
        self._end_tokens = frozenset(end_tokens)
        self._messages = list(messages)
        self._guarded = [renderer.guard_message(message) for message in messages]
        self._closed: list[Branch] = []
        self._current = _Tokens()
        self._checkpoints: list[tuple[int, int]] = []
        """Prompts that the model saw: (characters of rendered text, the number of held ids that they are)."""
        self._drift: list[DriftEvent] = []
        self._num_turns = 0
        self._awaits_messages = False
        self._newest_ids: tuple[int, ...] = ()
        self._prompt_text = ""
        self._require_roles(messages)
        full = self._render()
        self._current.extend(renderer.encode(full), 0)
        self._mark_prompt(full)

    # -- what is read -------------------------------------------------------------------------------------------------

    @property
    def messages(self) -> tuple[Message, ...]:
        """All messages so far, contents as raw text."""
        return tuple(self._messages)

    @property
    def drift(self) -> tuple[DriftEvent, ...]:
        """Where a prompt wasn't, or was only by repair, an exact extension of what the model had seen."""
        return tuple(self._drift)

    @property
    def tools(self) -> tuple[Mapping[str, Any], ...]:
        """The schemas that the chat template shows."""
        return self._tools

    @property
    def num_turns(self) -> int:
        """Assistant turns added to this conversation (those in the starting messages aren't counted)."""
        return self._num_turns

    @property
    def num_tokens(self) -> int:
        """Tokens held in the current branch."""
        return len(self._current.tokens)

    def ended(self, tokens: Sequence[int]) -> bool:
        """True when the tokens end with an end-of-turn token: the turn is finished, not cut, whatever its length."""
        return bool(tokens) and tokens[-1] in self._end_tokens

    def prompt_ids(self) -> list[int]:
        """The exact ids to send to the engine for the next turn; never cut. RuntimeError before `add_messages`."""
        if self._awaits_messages:
            raise RuntimeError("the newest turn has no answer yet: call add_messages() before prompt_ids()")
        return list(self._current.tokens)

    def branches(self) -> tuple[Branch, ...]:
        """Every branch so far, the current one last."""
        return (*self._closed, self._current.freeze())

    # -- what is added ------------------------------------------------------------------------------------------------

    def add_completion(self, completion: Completion) -> str:
        """Append what the engine sampled; -> its text for the environment, less a final end-of-turn token.

        Raises InvalidTrajectory when ids, log-probs and versions differ in number.
        """
        counts = (len(completion.tokens), len(completion.engine_logprobs), len(completion.policy_version))
        if len(set(counts)) != 1:
            raise InvalidTrajectory(
                f"turn {self._num_turns}: the engine returned {counts[0]} tokens, {counts[1]} engine_logprobs and "
                f"{counts[2]} policy_version entries; they must be equal in number"
            )
        self._require_prompt("add_completion")
        content = completion.tokens[:-1] if self.ended(completion.tokens) else completion.tokens
        text, guarded = self._renderer.text_of_sampled(content)
        end = self._renderer.special_text(completion.tokens[-1]) if len(content) < len(completion.tokens) else ""
        whole = self._renderer.text_of_sampled(completion.tokens)[1] if end is None else guarded + end
        if self._renderer.encode(whole) != list(completion.tokens):
            self._note("retokenised", forked=False, detail="the sampled ids aren't how the tokenizer splits their text")
        self._add_turn(text, guarded, completion.tokens, completion.engine_logprobs, completion.policy_version)
        return text

    def add_context(self, tokens: Sequence[int]) -> None:
        """Append a turn that another conversation sampled, as its exact ids: context here, never trained here."""
        self._require_prompt("add_context")
        text, guarded = self._renderer.text_of_sampled(tokens[:-1] if self.ended(tokens) else tokens)
        self._add_turn(text, guarded, tokens, sampled=False)

    def add_expert(self, text: str) -> None:
        """Append a demonstration turn and its end-of-turn token, marked sampled: log-probs NaN, version -1."""
        self._require_prompt("add_expert")
        guarded = self._renderer.guard(text)
        self._add_turn(text, guarded, (*self._renderer.encode(guarded), self._renderer.end_of_turn_id()))

    def add_messages(self, messages: Sequence[Message]) -> None:
        """Append the environment's answer to the newest turn: extends the held ids exactly, or opens a new branch.

        Tokens that the template adds to close the turn are never sampled ones. RuntimeError when no turn is open.
        """
        if not self._awaits_messages:
            raise RuntimeError("add_messages() answers a turn: call add_completion() or add_expert() first")
        self._require_roles(messages)
        guarded = [self._renderer.guard_message(message) for message in messages]
        newest = self._guarded[-1]
        tail = self._tail(guarded)
        self._messages.extend(messages)
        self._guarded.extend(guarded)
        full = self._render()
        middle = _between(full, self._prompt_text, tail) if tail is not None else None
        if tail is None or middle is None or "".join(middle.split()) != "".join(newest.content.split()):
            self._fork("template", full, "the template writes earlier messages differently now")
        else:
            if middle != newest.content:
                self._note("template", forked=False, detail="the template changes white space in the turn")
            self._extend(full, tail)
        self._awaits_messages = False

    def rewrite(self, messages: Sequence[Message]) -> None:
        """Replace the whole conversation (summarised or dropped history): opens a new branch, kind `rewritten`."""
        self._require_roles(messages)
        self._messages = list(messages)
        self._guarded = [self._renderer.guard_message(message) for message in messages]
        self._fork("rewritten", self._render(), "the environment replaced the messages")
        self._awaits_messages = False

    # -- how ----------------------------------------------------------------------------------------------------------

    def _render(self) -> str:
        return self._renderer.render_guarded(self._guarded, self._tools)

    def _require_roles(self, messages: Sequence[Message]) -> None:
        self._renderer.require({message.role for message in messages}, bool(self._tools))

    def _note(self, kind: str, *, forked: bool, detail: str) -> None:
        self._drift.append(DriftEvent(kind=kind, turn=self._num_turns, forked=forked, detail=detail))

    def _require_prompt(self, caller: str) -> None:
        if self._awaits_messages:
            raise RuntimeError(f"the newest turn has no answer yet: call add_messages() before {caller}()")

    def _add_turn(
        self,
        text: str,
        guarded: str,
        tokens: Sequence[int],
        engine_logprobs: Sequence[float] = (),
        policy_version: Sequence[int] = (),
        sampled: bool = True,
    ) -> None:
        self._messages.append(Message(role="assistant", content=text))
        self._guarded.append(Message(role="assistant", content=guarded))
        self._current.extend(
            tokens, self._num_turns, sampled=sampled, engine_logprobs=engine_logprobs, policy_version=policy_version
        )
        self._newest_ids = tuple(tokens)
        self._num_turns += sampled
        self._awaits_messages = True

    def _tail(self, added: Sequence[Message]) -> str | None:
        """What the template writes after the newest assistant's content; None when it doesn't write the content once.

        Found with a stand-in for the content: the template's own end of the turn isn't then mistaken for content.
        """
        stand_in = [*self._guarded[:-1], Message(role="assistant", content=PROBE), *added]
        head, *rest = self._renderer.render_guarded(stand_in, self._tools).split(PROBE)
        return rest[0] if head and len(rest) == 1 else None

    def _extend(self, full: str, tail: str) -> None:
        """Append the unsampled glue and the new messages: what `tail` has after the end-of-turn token held already."""
        suffix = tail
        if self.ended(self._newest_ids):
            held = self._renderer.decode(self._newest_ids[-1:])
            suffix, as_template = self._after_end(tail, held)
            if not as_template:
                self._note(
                    "template", forked=False, detail=f"the turn ended with {held!r}, not as the template ends it"
                )
        self._current.extend(self._renderer.encode(suffix), self._num_turns)
        self._mark_prompt(full)

    def _after_end(self, tail: str, held: str) -> tuple[str, bool]:
        """(rest of `tail` after the turn's end, whether the held end token is exactly how the template ends it)."""
        before, found, after = tail.partition(held)
        if found and not before.strip():
            return after, not before
        # Another of the model's end tokens was sampled: it stands for the template's.
        ending = self._renderer.end_of_turn_text
        return (tail[len(ending) :] if tail.startswith(ending) else tail), False

    def _fork(self, kind: str, full: str, detail: str) -> None:
        """Close the current branch and open one for `full`, reusing the held ids of the longest prompt it begins with.

        Reuse keeps the ids that the model saw (and the engine's cache of them) wherever the history is unchanged.
        """
        self._note(kind, forked=True, detail=detail)
        previous, seen = self._current, self._prompt_text
        self._closed.append(previous.freeze())
        shared = [point for point in self._checkpoints if full.startswith(seen[: point[0]])]
        num_chars, num_tokens = shared[-1] if shared else (0, 0)
        self._current = _Tokens()
        self._current.extend(previous.tokens[:num_tokens], self._num_turns)
        self._current.extend(self._renderer.encode(full[num_chars:]), self._num_turns)
        self._checkpoints = shared
        self._mark_prompt(full)

    def _mark_prompt(self, full: str) -> None:
        self._prompt_text = full
        self._checkpoints.append((len(full), self.num_tokens))


def _between(full: str, start: str, end: str) -> str | None:
    """The part of `full` between its beginning `start` and its end `end`; None unless it has both, not overlapping."""
    if len(start) + len(end) > len(full) or not full.startswith(start) or not full.endswith(end):
        return None
    return full[len(start) : len(full) - len(end)]
