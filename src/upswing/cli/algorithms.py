"""`upswing algorithms [NAME]`: what the names in `algorithm:` stand for, and where each comes from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, get_args

import typer

from upswing.cli.common import user_command
from upswing.errors import ConfigError, did_you_mean
from upswing.recipe import RlStage
from upswing.recipe.explain import describe
from upswing.recipe.presets import EFFECTS, PRESETS, TABLE_KEYS
from upswing.recipe.rl import RATIO_FREE, Aggregation

CUSTOM = "custom"
SEVERAL = "with several updates a batch"
Row = dict[str, Any]


@user_command
def algorithms_command(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="An algorithm, to see its keys and their defaults.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the algorithms of the `rl` stage with their sources, or every key of one with its default."""
    if name is None:
        rows, title = all_rows(), "Algorithms of the rl stage"
        note = "`upswing algorithms NAME` shows every key of one, `upswing algorithms custom` what can be combined."
    elif name == CUSTOM:
        rows, title = choice_rows(), "custom: name an advantage, a loss and an aggregation"
        note = "The keys are those that a choice gives an effect to, with their defaults."
    elif name in PRESETS:
        rows, title = key_rows(name), f"{name}: {PRESETS[name].note} ({PRESETS[name].source})"
        note = "Keys that every algorithm has (lr, kl_coef, correction, ...) are in docs/recipe.md."
    else:
        allowed = (*PRESETS, CUSTOM)
        raise ConfigError(f"no algorithm '{name}'{did_you_mean(name, allowed)} (allowed: {', '.join(allowed)})")
    if as_json:
        typer.echo(json.dumps({"title": title, "rows": rows}, indent=1, ensure_ascii=False))
    else:
        show(rows, title, note)


def all_rows() -> list[Row]:
    """One row an algorithm, and one for `custom`."""
    rows: list[Row] = []
    for name, preset in PRESETS.items():
        more = {key: value for key, value in preset.choices.items() if key not in TABLE_KEYS}
        named = {key: preset.choices[key] for key in TABLE_KEYS}
        rows.append({"name": name, **named, "also sets": more, "source": preset.source, "note": preset.note})
    yours = dict.fromkeys(TABLE_KEYS, "any")
    return [*rows, {"name": CUSTOM, **yours, "also sets": {}, "source": "", "note": "the three are yours to name"}]


def key_rows(name: str) -> list[Row]:
    """Every key that an algorithm sets or gives an effect to: its default, and when it has the effect."""
    preset = PRESETS[name]
    settings = {} if preset.choices["loss"] == "policy_gradient" else {"minibatches": 2}
    resolved = RlStage.model_validate({"steps": 1, "algorithm": name, **settings}).model_dump(by_alias=True)
    of_ratio = set(EFFECTS["loss"][preset.choices["loss"]]) - RATIO_FREE
    rows: list[Row] = []
    for key, field in RlStage.model_fields.items():
        value = preset.choices.get(key) if resolved.get(key) is None else resolved[key]
        own = field.default is None and value is not None and key != "minibatches"
        if own or key in preset.choices or (key == "llds_answer_weight" and resolved["llds_coef"]):
            when = "with kl_coef above 0" if key == "kl_in" else ""
            if key in of_ratio and "minibatches" not in preset.choices:
                when = SEVERAL
            rows += _flat(key, preset.choices.get(key, value), when)
    return rows


def _flat(key: str, value: Any, when: str, *above: str) -> list[Row]:
    """A row, or one for each key of a section."""
    path = (*above, key)
    if isinstance(value, Mapping):
        return [row for inner, own in value.items() for row in _flat(inner, own, when, *path)]
    meaning = describe(("stages", 0, "rl", *path))
    return [{"key": ".".join(path), "default": value, "has an effect": when or "always", "meaning": meaning}]


def choice_rows() -> list[Row]:
    """What `custom` may combine, and the keys that each choice gives an effect to."""
    rows = [
        {"key": choice, "value": value, "its keys": keys}
        for choice in ("advantage", "loss")
        for value, keys in EFFECTS[choice].items()
    ]
    norm = {"seq-mean-token-sum-norm": {"norm_length": 256}}
    return [*rows, *({"key": "aggregation", "value": v, "its keys": norm.get(v, {})} for v in get_args(Aggregation))]


def show(rows: Sequence[Row], title: str, note: str) -> None:
    """A table on a terminal; elsewhere aligned text, a line a row, whatever the width."""
    from rich.console import Console  # a second that --help can do without
    from rich.table import Table
    from rich.text import Text

    console = Console()
    header = list(rows[0])
    cells = [[said(row[column]) for column in header] for row in rows]
    if console.is_terminal:
        table = Table(title=title, title_justify="left", caption=note, caption_justify="left")
        for column in header:
            table.add_column(column, no_wrap=column in ("name", "key"))
        for line in cells:
            table.add_row(*map(Text, line))
        console.print(table)
        return
    widths = [max(len(line[i]) for line in [header, *cells]) for i in range(len(header))]
    aligned = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in [header, *cells]]
    typer.echo("\n".join([title, "", *aligned, "", note]))


def said(value: Any) -> str:
    """A value as a recipe has it."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {'{}' if inner == {} else said(inner)}" for key, inner in value.items()) or "-"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)
