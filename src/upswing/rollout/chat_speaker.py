"""An agent's turns from a server that only knows text: the conversation is told in OpenAI's messages.

What it says is encoded here to count it and to show it: those may not be the ids that the server sampled. The
trajectory's source is `text`; there are no log-probs and no version, and a batch of RL refuses it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from upswing.engine.base import Sampling, reason_of
from upswing.engine.openai import OpenAIEngine, Reply
from upswing.envs.base import AssistantMessage, Environment
from upswing.envs.parsers import HermesParser
from upswing.errors import UpswingError
from upswing.rollout.limits import Limits
from upswing.trajectory.conversation import Conversation
from upswing.trajectory.types import Message


@dataclass(kw_only=True)
class ChatSpeaker:
    """Takes one trajectory's turns. Calls become text in the environment's own format, results become answers to the
    server's calls; where the prompt explains the calls, they are text on both sides."""

    engine: OpenAIEngine
    sampling: Sampling
    limits: Limits
    make_env: Callable[[], Environment]
    """For the format of calls."""
    source: str = "text"
    _told: list[dict[str, Any]] = field(default_factory=list)
    """The conversation as the server knows it."""
    _known: tuple[Message, ...] = ()
    """The messages that are in it."""
    _calls: list[str] = field(default_factory=list)
    """Ids of the newest turn's calls."""

    async def speak(self, conversation: Conversation, turn: int) -> AssistantMessage | None:
        """Take one turn; None: there is no room left in the context, counted with the recipe's tokenizer."""
        room = min(self.limits.turn_tokens, self.limits.context_tokens - conversation.num_tokens)
        if room <= 0:
            return None
        self._tell(conversation.messages)
        sampling = replace(self.sampling, max_tokens=room)
        try:
            asked = self.engine.reply(self._told, conversation.tools, sampling)
            reply = await asyncio.wait_for(asked, self.limits.turn_timeout_s)
        except TimeoutError as problem:
            waited = f"sampling a turn took longer than {self.limits.turn_timeout_s:g} s"
            raise UpswingError(waited + reason_of(self.engine)) from problem
        text = self._text(reply)
        conversation.add_expert(text)
        self._told.append(dict(reply.message))
        self._known, self._calls = conversation.messages, [call.id for call in reply.calls]
        return AssistantMessage(content=text, finished=reply.finished)

    def release(self) -> None:
        return None

    def _text(self, reply: Reply) -> str:
        if not reply.calls:
            return reply.text
        parser = getattr(self.make_env(), "parser", None) or HermesParser()
        return "\n".join(part for part in (reply.text, parser.render(reply.calls)) if part)

    def _tell(self, messages: Sequence[Message]) -> None:
        """What is new to the server. An environment that rewrites history is told from the start, as text."""
        known = len(self._known)
        if tuple(messages[:known]) != self._known:
            self._told, self._calls, known = [], [], 0
        for message in messages[known:]:
            if message.role == "tool" and self._calls:
                self._told.append({"role": "tool", "tool_call_id": self._calls.pop(0), "content": message.content})
            else:
                self._answer_rest()
                role = "user" if message.role == "tool" else message.role
                self._told.append({"role": role, "content": message.content})
        self._answer_rest()

    def _answer_rest(self) -> None:
        """A server refuses a conversation with calls that nobody answered."""
        for id in self._calls:
            self._told.append({"role": "tool", "tool_call_id": id, "content": "It was not run."})
        self._calls.clear()
