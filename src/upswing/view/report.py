"""`report.html`: one self-contained page about a run, made from the run folder alone.

It loads nothing and works from `file://`. Every section stands alone: what a run (killed early, say) didn't leave is
left out or named as missing. All text goes through `html.escape`, and a content security policy with the hash of the
page's only script keeps anything else from running.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from upswing.view import curves, examples, headline, health, run_folder
from upswing.view.html import Html, h, join, table
from upswing.view.page import page
from upswing.view.run_folder import read_json, read_json_lines, replace_file, write_json
from upswing.view.text import number

MAX_EVENTS = 200


def write_results(run_dir: Path, results: Sequence[Mapping[str, Any]]) -> Path:
    """Write `results.json` atomically: entries as made by `upswing.evals.summary.result_entry`, in order."""
    return write_json(Path(run_dir) / run_folder.RESULTS, results)


def write_report(run_dir: Path) -> Path:
    """Write `report.html` into the run folder and return its path. Missing or broken inputs leave gaps, not errors."""
    path = Path(run_dir) / run_folder.REPORT
    replace_file(path, _page(path.parent))
    return path


def _sections(run_dir: Path, metrics: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, Html]]:
    """(name in the navigation, heading, content) of every section that has one, in reading order."""
    results, shown = (_dicts(read_json(run_dir / name)) for name in (run_folder.RESULTS, run_folder.EXAMPLES))
    recovery = [example for example in shown if example.get("kind") == "recovery"]
    others = [example for example in shown if example.get("kind") != "recovery"]
    findings = partial(read_json_lines, run_dir / run_folder.FINDINGS)
    sections: list[tuple[str, str, Callable[[], Html]]] = [
        ("Results", "Results", lambda: headline.render(results)),
        ("Graduation", "Did SFT graduate?", lambda: _graduation(metrics)),
        ("Curves", "Curves", lambda: curves.render(metrics)),
        ("Recovery", "Recovery: the first search fails, the agent searches differently", lambda: _examples(recovery)),
        ("Examples", "Before and after, on the same task", lambda: _examples(others)),
        ("Findings", "Findings and warnings", lambda: health.render(findings(), _loud_events(run_dir))),
        ("Run", "About this run", lambda: _run(run_dir)),
    ]
    return [(name, heading, body) for name, heading, render in sections if (body := _guarded(render))]


def _guarded(render: Callable[[], Html]) -> Html:
    """A section, or why there is none: files that others wrote must not cost the rest of the page."""
    try:
        return render()
    except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError, OSError) as problem:
        text = f"This part of the run's files can't be shown ({type(problem).__name__}: {problem})."
        return h("p", text, class_="card muted")


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _page(run_dir: Path) -> str:
    metrics = read_json_lines(run_dir / run_folder.METRICS)
    sections = _sections(run_dir, metrics)
    title, written = run_dir.resolve().name, datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return page(
        f"{title} – Upswing report",
        h("h1", title),
        h("p", _subtitle(metrics), class_="muted"),
        *(h("section", h("h2", heading), body, id=name.lower()) for name, heading, body in sections),
        h("footer", f"Written {written} by Upswing from the files of this run folder."),
        links=[(name, name.lower()) for name, _, _ in sections],
    )


def _subtitle(rows: Sequence[Mapping[str, Any]]) -> str:
    times = [row["time"] for row in rows if isinstance(row.get("time"), int | float)]
    stages = list(dict.fromkeys(str(row.get("stage")) for row in rows))
    parts = [f"Stages: {' → '.join(stages)}"] if stages else ["No metrics yet"]
    if len(times) > 1:
        seconds = max(times) - min(times)
        span = f"{seconds / 60:.1f} minutes" if seconds >= 60 else f"{seconds:.0f} seconds"
        parts.append(f"{span} from the first to the last metric")
    return " · ".join(parts)


def _graduation(rows: Sequence[Mapping[str, Any]]) -> Html:
    """The last verdict of every stage that gave one: a metrics row with `graduated`, `words` and the values judged."""
    verdicts = {str(row.get("stage")): row for row in rows if "graduated" in row and "words" in row}
    return join(_verdict(stage, row) for stage, row in verdicts.items())


def _verdict(stage: str, row: Mapping[str, Any]) -> Html:
    known = {"stage", "step", "time", "graduated", "words"}
    judged = {key.replace("_", " "): value for key, value in row.items() if key not in known}
    values = [[key, number(value) if isinstance(value, float | None) else value] for key, value in judged.items()]
    good = bool(row["graduated"])
    verdict = h("span", "graduated" if good else "not graduated", class_="chip " + ("good" if good else "bad"))
    return h(
        "div",
        h("h3", f"Stage {stage}, step {row.get('step', '?')} ", verdict),
        h("p", row["words"]),
        table(["measured", "value"], values, class_="data") if values else None,
        class_="card verdict " + ("good" if good else "bad"),
    )


def _examples(found: Sequence[Mapping[str, Any]]) -> Html:
    if not found:
        return Html("")
    unlikely = h("span", h("span", "unlikely", class_="t low"), class_="sampled")
    entries = (
        [h("span", "sampled by the agent", class_="sampled"), " (trained)"],
        [unlikely, " log-prob below −1.6"],
        [h("span", "prompt and tool text", class_="given"), " (never trained)"],
        ["Hover a token, or focus a text and use ← →, for its id, log-prob, turn and version."],
    )
    legend = h("div", *(h("span", *entry, class_="entry") for entry in entries), class_="legend tokens-key")
    return join([legend, *map(examples.render_example, found)])


def _loud_events(run_dir: Path) -> list[Html]:
    """The warnings and errors in `events.log`, the last `MAX_EVENTS` of them."""
    found, path = list[Html](), run_dir / run_folder.EVENTS
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        stamp, level, text = (*line.split(" ", 2), "", "")[:3]
        if level in ("warning", "error"):
            found.append(h("li", h("span", level, class_="chip warn"), f" {text} ({stamp})"))
    return found[-MAX_EVENTS:]


def _run(run_dir: Path) -> Html:
    parts, environment = list[Html](), read_json(run_dir / run_folder.ENVIRONMENT)
    if isinstance(environment, dict):
        values = table(["", ""], _flat(environment), class_="text")
        parts.append(h("div", h("h3", "Environment"), values, class_="card"))
    recipe = run_dir / run_folder.RECIPE
    if recipe.exists():
        text = recipe.read_text(encoding="utf-8", errors="replace")
        summary = h("summary", "recipe.yaml, as it was run")
        parts.append(h("details", summary, h("pre", text, tabindex="0"), class_="card"))
    stored = [path for path in (run_dir / "trajectories").rglob("*") if path.is_file()]
    if stored:
        size = sum(path.stat().st_size for path in stored) / 1e6
        parts.append(h("p", f"All trajectories: trajectories/, {len(stored)} file(s), {size:.1f} MB.", class_="muted"))
    return join(parts)


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[list[Any]]:
    """Nested mappings as dotted keys."""
    for key, item in value.items():
        if isinstance(item, dict):
            yield from _flat(item, f"{prefix}{key}.")
        else:
            yield [f"{prefix}{key}", ", ".join(map(str, item)) if isinstance(item, list) else item]
