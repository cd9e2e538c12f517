"""Building HTML that can't be broken out of: whatever isn't marked as `Html` is escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import Any

_SVG_LEAVES = {"line", "circle", "polyline", "polygon"}


class Html(str):
    """Text that is already HTML."""

    __slots__ = ()


def escape(text: Any) -> Html:
    """Any value as HTML text, safe in an element and in a quoted attribute; NUL, which HTML forbids, is replaced."""
    return text if isinstance(text, Html) else Html(html.escape(str(text).replace("\0", "\ufffd"), quote=True))


def h(name: str, *children: Any, **attributes: Any) -> Html:
    """An element: `h("a", "text", href="#x", class_="c", data_id=3)`.

    Children and attribute values are escaped unless they are Html; None children are left out; attributes that are
    None or False are left out and True ones stand bare. A trailing `_` is dropped and `_` becomes `-`.
    """
    parts = [f"<{name}"]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        attribute = key.rstrip("_").replace("_", "-")
        parts.append(f" {attribute}" if value is True else f' {attribute}="{escape(value)}"')
    if name in _SVG_LEAVES and not children:
        return Html("".join([*parts, "/>"]))
    parts.append(">")
    parts.extend(escape(child) for child in children if child is not None)
    if name != "meta":
        parts.append(f"</{name}>")
    return Html("".join(parts))


def join(parts: Iterable[Any], separator: str = "") -> Html:
    """Concatenate, escaping what isn't Html."""
    return Html(separator.join(escape(part) for part in parts))


def table(columns: Iterable[Any], rows: Iterable[Iterable[Any]], caption: str | None = None, class_: str = "") -> Html:
    """A table that scrolls sideways on a narrow screen; the first cell of a row is its header."""
    head = h("tr", *(h("th", column, scope="col") for column in columns))
    body = (h("tr", h("th", first, scope="row"), *(h("td", cell) for cell in rest)) for first, *rest in rows)
    name = h("caption", caption) if caption else None
    inner = h("table", name, h("thead", head), h("tbody", *body), class_=class_ or None)
    return h("div", inner, class_="scroll", tabindex="0", role="group", aria_label=caption or "table")
