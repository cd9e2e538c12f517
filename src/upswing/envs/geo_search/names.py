"""Text helpers: folding accents, the search tokenizer, numbers, stable hashing. Pure functions."""

from __future__ import annotations

import hashlib
import re
import unicodedata

from upswing.envs.geo_search.tables import WORDINGS

_LETTERS = (
    {"ø": "o", "Ø": "O", "ł": "l", "Ł": "L", "đ": "d", "Đ": "D", "ı": "i", "ß": "ss", "æ": "ae", "Æ": "Ae", "œ": "oe"}
    | {"ə": "a", "Ə": "A", "ð": "d", "þ": "th", "ħ": "h", "ŋ": "n"}
    | {"’": "'", "‘": "'", "ʼ": "'", "ʻ": "'", "ʿ": "'", "ʾ": "'", "`": "'", "–": "-", "‑": "-"}
)
_APOSTROPHES = str.maketrans("’‘ʼ", "'''")
_SPECIAL = {ord(letter): plain for letter, plain in _LETTERS.items()}
_TOKEN = re.compile(r"\d{1,3}(?:,\d{3})+|[a-z0-9]+")
_STOP = frozenset(WORDINGS["stop_words"])
_WITH_THE = frozenset(WORDINGS["with_the"])


def ascii_text(text: str) -> str:
    """`text` without accents: 'São Tomé' -> 'Sao Tome'. Characters with no ASCII form are dropped."""
    decomposed = unicodedata.normalize("NFKD", text.translate(_SPECIAL))
    return decomposed.encode("ascii", "ignore").decode("ascii")


def fold(text: str) -> str:
    """The form in which names are compared: no accents, lower case, single spaces, no leading 'the'."""
    folded = " ".join(ascii_text(text).lower().split())
    return folded.removeprefix("the ")


def display(name: str) -> str:
    """How a name is written in passages and questions: Latin-1 accents stay, rarer letters become ASCII."""
    name = " ".join(name.translate(_APOSTROPHES).split())
    try:
        name.encode("latin-1")
        return name
    except UnicodeEncodeError:
        return ascii_text(name)


def tokenize(text: str) -> list[str]:
    """Search tokens: accents folded, lower case, split on non-alphanumerics, stop words and plural endings removed.

    A number with thousands separators stays one token ('1,019,022' -> '1019022').
    """
    text = ascii_text(text).lower().replace("'s", "").replace("'", "")
    return [_stem(token.replace(",", "")) for token in _TOKEN.findall(text) if token not in _STOP]


def _stem(token: str) -> str:
    if len(token) > 4 and token.endswith("ies"):
        return token[:-3] + "y"
    if len(token) > 3 and token.endswith("s") and not token.endswith("ss"):
        return token[:-1]
    return token


def number(value: int) -> str:
    """1019022 -> '1,019,022'."""
    return f"{value:,}"


def with_the(country: str) -> str:
    """'United States' -> 'the United States', where English wants it."""
    return f"the {country}" if country in _WITH_THE else country


def join_names(names: list[str] | tuple[str, ...]) -> str:
    """['A', 'B', 'C'] -> 'A, B and C'."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def forms(*texts: str) -> tuple[str, ...]:
    """Accepted surface forms: the texts as given and without accents, no repeats, order kept."""
    return tuple(dict.fromkeys(form for text in texts for form in (text, ascii_text(text))))


def stable_hash(*parts: object) -> int:
    """The same 64-bit number in every process for the same parts (unlike `hash`)."""
    return int.from_bytes(hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()[:8], "big")
