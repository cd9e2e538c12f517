"""Chat rendering: messages to text with a jinja chat template, and text to token ids.

Only what the template writes may become a control token. Text that comes from a message, a tool's schema or a tool's
name is *guarded*: wherever it spells a special token such as `<|im_end|>`, an invisible break (`BREAK`) is put after
the first character, and `encode` tokenises the pieces between breaks on their own, so that the spelled token ends up
as ordinary text tokens and a retrieved page can't close a turn or open a system message.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence, Set, Sized
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import jinja2

from upswing.errors import ConfigError, did_you_mean
from upswing.trajectory.types import ROLES, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BREAK = "\ufdd0"
"""A Unicode noncharacter: it never occurs in text meant for interchange. `encode` cuts here and drops it."""
PROBE = "\ufdd1"
"""Stands for an assistant's content when only what the template writes around it is wanted."""
TEMPLATE_DATE = datetime.datetime(2024, 7, 26)
"""What a template that prints today's date prints: a prompt must not change overnight, nor between two runs."""

_X = Message(role="user", content="x")
_WORD, _TOOL_NAME = "quagga", "okapi"
"""What templates are probed with: none says them by itself, and trimming or escaping leaves them whole."""
_PROBES = {
    "system": (Message(role="system", content=_WORD), _X),
    "user": (Message(role="user", content=_WORD),),
    "assistant": (_X, Message(role="assistant", content=_WORD), _X),
    "tool": (_X, Message(role="assistant", content="x"), Message(role="tool", content=_WORD, name=_TOOL_NAME)),
}
_PARAMETERS = {"type": "object", "properties": {"q": {"type": "string", "description": "x"}}, "required": ["q"]}
_TOOL = {"type": "function", "function": {"name": _TOOL_NAME, "description": "x", "parameters": _PARAMETERS}}
_KEPT, _LONGEST = 256, 20_000
"""How many pieces of text are remembered, and how many ids; the characters or ids of one."""
_K = TypeVar("_K")
_V = TypeVar("_V", bound=Sized)


class ChatRenderer:
    """Renders messages with a tokenizer's chat template and encodes the result.

    `template` is jinja text that replaces the tokenizer's own. Raises ConfigError when there is none at all, or when it
    can't render a plain user message.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str | None = None) -> None:
        if template is None and not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                "the tokenizer has no chat template; set chat_template to one (a jinja file, such as a ChatML one), or "
                "use an instruction-tuned model"
            )
        self.tokenizer = tokenizer
        self._template = template
        special = {str(text) for text in tokenizer.all_special_tokens}
        special |= {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        self._special_texts = sorted((text for text in special if text), key=len, reverse=True)
        self._special_ids = {self._id_of(text): text for text in self._special_texts}
        alternatives = "|".join(re.escape(text) for text in self._special_texts) or r"(?!)"
        self._special_pattern = re.compile(alternatives)
        # Lookahead, so that a special token that begins inside another one is broken up too.
        self._guard_pattern = re.compile(f"(?=(?:{alternatives}))(.)", re.DOTALL)
        self._ids: dict[str, tuple[int, ...]] = {}
        self._decoded: dict[tuple[int, ...], str] = {}
        self._texts: dict[tuple[tuple[Message, ...], str, bool], str] = {}
        self._problems: dict[tuple[str, bool], str | None] = {}
        self.render_text([_X])

    # -- text ---------------------------------------------------------------------------------------------------------

    def render_text(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), generation: bool = True
    ) -> str:
        """The conversation as text; with `generation`, the header of the assistant's next message at the end.

        Special tokens spelled in contents are guarded (see the module's docstring), so `encode` of this is safe.
        Raises ConfigError on an unknown role or when the template refuses the messages.
        """
        return self.render_guarded([self.guard_message(message) for message in messages], tools, generation)

    def render_guarded(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), generation: bool = True
    ) -> str:
        """`render_text` for messages that are guarded already (by `guard_message` or `text_of_sampled`).

        Kept for a while: a group's samples begin alike, and often go on so.
        """
        key = tuple(messages), repr(tools) if tools else "", generation
        if (held := self._texts.get(key)) is None:
            held = self._render(messages, tools, generation)
            _keep(self._texts, key, held)
        return held

    def _render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], generation: bool) -> str:
        try:
            rendered = self.tokenizer.apply_chat_template(
                [_as_dict(message) for message in messages],
                tools=[self._guard_value(tool) for tool in tools] or None,
                chat_template=self._pinned_template(tools),
                add_generation_prompt=generation,
                tokenize=False,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            if isinstance(error, ConfigError):
                raise
            roles = ", ".join(message.role for message in messages)
            raise ConfigError(f"the chat template can't render the roles ({roles}): {error}") from error
        return str(rendered)

    def _pinned_template(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """The template's text, its clock stopped at TEMPLATE_DATE.

        The library hands templates plain data only, so the clock is replaced by a macro of the same name.
        """
        text = self._template
        if text is None:
            text = str(self.tokenizer.get_chat_template(None, [dict(tool) for tool in tools] or None))
        if "strftime_now" not in text:
            return text
        formats = {match[1] for match in re.findall(r"""strftime_now\(\s*(["'])(.*?)\1""", text)}
        dates = json.dumps({each: TEMPLATE_DATE.strftime(each) for each in sorted(formats)})
        default = TEMPLATE_DATE.strftime("%d %b %Y")
        macro = "{% macro strftime_now(format) %}{{ " + dates + ".get(format, '" + default + "') }}{% endmacro %}"
        return macro + text

    def guard(self, text: str) -> str:
        """`text` with every special token that it spells broken up. Guarding twice changes nothing.

        What can't be tokenised or would be mistaken for the renderer's own marks goes: lone surrogates become `?`.
        """
        text = text.replace(PROBE, BREAK).encode("utf-8", "replace").decode("utf-8")
        if not self._special_pattern.search(text):  # the usual case, and the other pattern looks at every character
            return text
        return self._guard_pattern.sub(lambda match: match.group(1) + BREAK, text)

    def guard_message(self, message: Message) -> Message:
        """A copy of the message whose content and name can't produce control tokens."""
        name = None if message.name is None else self.guard(message.name)
        return Message(role=message.role, content=self.guard(message.content), name=name)

    def _guard_value(self, value: Any) -> Any:
        """A JSON value with every string guarded, keys included; null, false and empty values stay as they are."""
        if isinstance(value, str):
            return self.guard(value)
        if isinstance(value, Mapping):
            return {self._guard_value(key): self._guard_value(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._guard_value(item) for item in value]
        return value

    # -- what the template has a place for ----------------------------------------------------------------------------

    def require(self, roles: Set[str], tools: bool = False) -> None:
        """Raises ConfigError unless the template writes what messages of these roles say; `tools`: where it has tools.

        Many drop the roles that they don't know, so that an agent would never see its tools' results.
        """
        for role in sorted(_PROBES.keys() & roles):  # an unknown role is refused when it is rendered
            if (role, tools) not in self._problems:
                self._problems[role, tools] = self._problem_with(role, tools)
            if problem := self._problems[role, tools]:
                raise ConfigError(f"{self._source} {problem}; set chat_template to one that has the role")

    def require_tools(self) -> None:
        """Raises ConfigError unless the template shows the tools that it is given."""
        if _TOOL_NAME not in self.render_text(_PROBES["user"], [_TOOL]):
            raise ConfigError(
                f"{self._source} doesn't show tools; set env.args.tools_in_system: true, so that the system message "
                "describes them, or set chat_template to one that does"
            )

    def _problem_with(self, role: str, tools: bool) -> str | None:
        try:
            text = self.render_text(_PROBES[role], [_TOOL] if tools else [])
        except ConfigError as error:
            return f"refuses '{role}' messages ({error.__cause__})"
        return None if _WORD in text else f"leaves out what '{role}' messages say"

    @property
    def _source(self) -> str:
        name = "" if self._template is not None else self.tokenizer.name_or_path
        return f"the chat template of '{name}'" if name else "the chat template"

    # -- ids ----------------------------------------------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        """Token ids of rendered text: special tokens become their ids, guarded ones ordinary text. No BOS is added."""
        return [token for piece in text.split(BREAK) if piece for token in self._encode(piece)]

    def _encode(self, piece: str) -> tuple[int, ...]:
        """Kept for a while: a group's samples begin with one prompt, and often say the same."""
        ids = self._ids.get(piece)
        if ids is None:
            ids = tuple(self.tokenizer.encode(piece, add_special_tokens=False))
            _keep(self._ids, piece, ids)
        return ids

    def _id_of(self, special_text: str) -> int:
        found = self.tokenizer.convert_tokens_to_ids(special_text)
        assert isinstance(found, int), f"{special_text!r} is one token, so it has one id"
        return found

    def decode(self, ids: Sequence[int]) -> str:
        """The exact text of token ids, special tokens included. Kept for a while, as by `_encode`."""
        key = tuple(ids)
        if (text := self._decoded.get(key)) is None:
            text = str(self.tokenizer.decode([*ids], skip_special_tokens=False, clean_up_tokenization_spaces=False))
            _keep(self._decoded, key, text)
        return text

    def special_text(self, token: int) -> str | None:
        """What a special token spells; None for any other."""
        return self._special_ids.get(token)

    def text_of_sampled(self, ids: Sequence[int]) -> tuple[str, str]:
        """(plain, guarded) text of sampled ids.

        In the guarded text a special token that was sampled as one stays whole; one that was merely spelled with
        ordinary tokens is broken up, as in any other content.
        """
        plain: list[str] = []
        guarded: list[str] = []
        run: list[int] = []
        for token in [*ids, None]:
            if token is not None and token not in self._special_ids:
                run.append(token)
                continue
            if run:
                text = self.decode(run)
                plain.append(text)
                guarded.append(self.guard(text))
                run = []
            if token is not None:
                plain.append(self._special_ids[token])
                guarded.append(self._special_ids[token])
        return "".join(plain), "".join(guarded)

    # -- ends of turns ------------------------------------------------------------------------------------------------

    @cached_property
    def end_of_turn_text(self) -> str:
        """What the template writes between an assistant's content and whatever follows, up to its first special token.

        Empty when the template writes no special token there.
        """
        probe = [Message(role="user", content="x"), Message(role="assistant", content=PROBE)]
        tail = self.render_guarded(probe, generation=False).rpartition(PROBE)[2]
        match = self._special_pattern.search(tail)
        return tail[: match.end()] if match else ""

    def end_of_turn_id(self) -> int:
        """The token that ends an assistant's turn: the template's, else the tokenizer's EOS.

        Raises ConfigError when there is neither.
        """
        match = self._special_pattern.search(self.end_of_turn_text)
        if match:
            return self._id_of(match.group())
        if self.tokenizer.eos_token_id is not None:
            return int(self.tokenizer.eos_token_id)
        raise ConfigError(
            "neither the chat template nor the tokenizer has an end-of-turn token, so no turn could end; "
            "set the tokenizer's eos_token or chat_template to one that ends assistant messages with a special token"
        )

    def end_tokens(self, generation_eos: int | Sequence[int] | None = None) -> tuple[int, ...]:
        """Every token that ends a turn: one set for stopping, masks and metrics.

        The template's end-of-turn token first, then the tokenizer's EOS and the model's own list
        (`generation_config.eos_token_id`: an int, a list or None).
        """
        listed = [generation_eos] if isinstance(generation_eos, int) else list(generation_eos or ())
        eos = self.tokenizer.eos_token_id
        found = [self.end_of_turn_id(), *([] if eos is None else [int(eos)]), *listed]
        return tuple(dict.fromkeys(found))


def plain(text: str) -> str:
    """Rendered text for people: without the invisible breaks of guarded contents."""
    return text.replace(BREAK, "")


def _keep(held: dict[_K, _V], key: _K, value: _V) -> None:
    """Remember it, unless it is very long, and forget the oldest of too many."""
    if len(value) <= _LONGEST:
        held[key] = value
    if len(held) > _KEPT:
        held.pop(next(iter(held)), None)


def _as_dict(message: Message) -> dict[str, str]:
    """A message as templates expect it. Raises ConfigError on an unknown role (templates print roles unescaped)."""
    if message.role not in ROLES:
        hint = did_you_mean(message.role, ROLES)
        raise ConfigError(f"unknown message role '{message.role}'; allowed: {', '.join(ROLES)}{hint}")
    fields = {"role": message.role, "content": message.content}
    return fields if message.name is None else {**fields, "name": message.name}
