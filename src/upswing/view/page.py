"""The frame that Upswing's self-contained pages share: nothing is loaded, and no script runs but the page's own."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib import resources

from upswing.view.html import Html, h


def page(title: str, *content: Html, links: Sequence[tuple[str, str]] = ()) -> str:
    """A whole document; `links`: (text, id of a section) for its navigation."""
    folder = resources.files("upswing.view")
    style, script = (folder.joinpath(f"report.{kind}").read_text("utf-8") for kind in ("css", "js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'"
    head = h(
        "head",
        h("meta", charset="utf-8"),
        h("meta", http_equiv="Content-Security-Policy", content=policy),
        h("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        h("title", title),
        h("style", Html(style)),
    )
    nav = h("nav", *(h("a", text, href=f"#{name}") for text, name in links), aria_label="Sections")
    bar = h("div", h("b", "Upswing"), nav if links else None, h("button", "Light / dark", id="theme"))
    body = h(
        "body",
        h("a", "Skip to content", href="#main", class_="skip"),
        h("div", bar, class_="bar"),
        h("main", *content, id="main"),
        h("div", id="tip", hidden=True, role="tooltip"),
        h("div", id="spoken", aria_live="polite", class_="skip"),
        h("script", Html(script)),
    )
    return f"<!doctype html>\n{h('html', head, body, lang='en')}\n"
