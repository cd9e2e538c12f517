"""The report's findings: each once, at its worst, with its end, its remedies as overrides, and what was done."""

from __future__ import annotations

from typing import Any

from upswing.view.health import overrides, render

from .test_report import Parsed

FOUND: dict[str, Any] = {
    "mode": "kl_explosion",
    "title": "The policy runs away",
    "severity": "warning",
    "stage": "rl",
    "step": 7,
    "since": 5,
    "evidence": ["KL 0.3 a token", "was 0.01"],
    "causes": ["a high learning rate", "no KL term"],
    "remedies": [{"text": "Learn more slowly.", "change": {"lr": 1e-5, "limits.turn_tokens": 64, "kl_in": None}}],
    "trajectories": ["t<1>"],
}
WORSE = {**FOUND, "severity": "critical", "step": 9, "since": 8, "evidence": ["KL 3 a token"]}
OVER = {"kind": "over", "severity": "info", "mode": "kl_explosion", "title": "x", "stage": "rl", "since": 8, "step": 20}
ACTION = {"kind": "action", "title": "lr 2e-05 -> 1e-05", "severity": "info", "stage": "rl", "step": 7, "mode":
          "kl_explosion", "safeguard": "lr", "why": "KL 0.3", "until": "taken back once it was ok"}  # fmt: skip


def text(*rows: dict[str, Any]) -> str:
    parsed = Parsed(render(rows))
    assert parsed.problems == [] and parsed.open == []
    return parsed.text


def test_a_finding_is_shown_once_as_it_was_at_its_worst():
    page = text(FOUND, ACTION, WORSE, OVER, {**FOUND, "step": 30})
    assert page.count("The policy runs away") == 2, "a second time after the first was over"
    assert "critical The policy runs away stage rl, step 7, since step 5, over at step 20KL 3 a token" in page
    assert "rl.lr=1e-05 limits.turn_tokens=64 rl.kl_in=null" in page
    assert "Likely causes: a high learning rate; no KL term" in page and "See trajectories t<1>." in page
    assert "lr, for kl_explosion: KL 0.3. It is taken back once it was ok." in page


def test_rows_of_any_kind_are_shown():
    assert "None recorded." in text()
    assert "old style" in text({"title": "old style", "evidence": "text", "remedy": "do it", "step": 0})
    assert "finding" in text({}, {"kind": "over"}, {"mode": "a"}, {"kind": "action"})


def test_overrides_are_what_the_command_line_takes():
    assert (
        overrides({"loss": "kl_cov", "env.args.x": [1, 2], "a": True}, "rl")
        == "rl.loss=kl_cov env.args.x=[1, 2] rl.a=true"
    )
