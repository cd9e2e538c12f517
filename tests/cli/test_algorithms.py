"""`upswing algorithms`: every name, every key that it gives an effect to, no model code; and the tables in the docs."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from rich.console import Console
from typer.testing import CliRunner, Result

from upswing.cli.algorithms import all_rows, choice_rows, key_rows, said, show
from upswing.cli.main import app
from upswing.recipe import RlStage
from upswing.recipe.presets import EFFECTS, PRESETS, TABLE_KEYS

DOCS = Path(__file__).parent.parent.parent / "docs" / "algorithms.md"


def upswing(*args: str) -> Result:
    return CliRunner().invoke(app, ["algorithms", *args])


def keys(name: str) -> dict[str, tuple[Any, str]]:
    """Key -> (default, when it has an effect)."""
    return {row["key"]: (row["default"], row["has an effect"]) for row in key_rows(name)}


def test_a_line_an_algorithm_whatever_the_width():
    lines = upswing().stdout.splitlines()
    for name, preset in PRESETS.items():
        (line,) = [line for line in lines if line.split()[:1] == [name]]
        for part in (
            *map(preset.choices.__getitem__, TABLE_KEYS),
            preset.source,
            preset.note,
        ):
            assert part in line
    assert any(line.startswith("custom ") for line in lines)
    assert "dynamic_sampling: 4" in next(line for line in lines if line.startswith("dapo "))


def test_a_terminal_gets_a_table(monkeypatch: pytest.MonkeyPatch):
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=240, color_system=None)
    monkeypatch.setattr("rich.console.Console", lambda: console)
    show(all_rows(), "title", "note")
    assert "┃" in shown.getvalue() and "│ grpo " in shown.getvalue()


def test_json_holds_the_same_rows():
    assert [row["name"] for row in json.loads(upswing("--json").stdout)["rows"]] == [*PRESETS, "custom"]
    assert json.loads(upswing("gspo", "--json").stdout)["rows"] == key_rows("gspo")


def test_keys_of_one_are_its_own_with_their_defaults():
    several = "with several updates a batch"
    assert keys("grpo")["clip_high"] == (0.28, several) and keys("gspo")["clip_high"] == (4e-4, "always")
    assert keys("ppo")["critic.kind"] == ("separate", "always") and keys("ppo")["kl_in"][1] == "with kl_coef above 0"
    assert keys("dr_grpo")["norm_length"] == (256, "always") and keys("dr_grpo")["normalize_std"][0] is False
    assert {"llds_coef", "llds_gate", "llds_answer_weight"} <= set(keys("llds"))
    assert not {"clip_low", "minibatches", "pass_k", "critic"} & set(keys("rloo"))
    assert keys("clip_cov")["cov_fraction"] == (2e-4, "always")


@pytest.mark.parametrize("name", PRESETS)
def test_keys_said_to_have_an_effect_are_taken_and_the_others_refused(name: str):
    """The page and the recipe's own check agree: setting a listed key to its default is never refused."""
    found = keys(name)
    owned = {key for table in EFFECTS.values() for own in table.values() for key in own}
    base = {"algorithm": name, "steps": 1}
    for key, (default, when) in found.items():
        if default is None or "." in key:
            continue
        more = {"minibatches": 2} if when == "with several updates a batch" else {}
        more |= {"kl_coef": 0.1} if when == "with kl_coef above 0" else {}
        assert getattr(RlStage.model_validate({**base, **more, key: default}), key) == default
    for key in owned - {key.partition(".")[0] for key in found} - {"correction_low", "correction_high"}:
        value = next(own[key] for table in EFFECTS.values() for own in table.values() if key in own)
        with pytest.raises(ValidationError) as caught:
            RlStage.model_validate({**base, key: value})
        assert caught.value.errors()[0]["ctx"]["key"] == key


def test_custom_lists_every_choice():
    text = upswing("custom").stdout
    assert all(value in text for choice in ("advantage", "loss") for value in EFFECTS[choice])
    assert "seq-mean-token-sum-norm" in text and "lam: 1" in text


def test_an_unknown_name_is_refused_with_the_nearest():
    result = upswing("dr_gpo")
    assert result.exit_code == 2 and result.stderr.count("\n") == 1 and "did you mean 'dr_grpo'?" in result.stderr


def test_no_model_code_is_imported():
    code = (
        "import sys; from upswing.cli.algorithms import algorithms_command as list_them; list_them(None); "
        "list_them('ppo'); assert not {'torch', 'transformers', 'upswing.algo'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# -- docs/algorithms.md ------------------------------------------------------------


def markdown(rows: list[dict[str, Any]], code: tuple[str, ...]) -> str:
    """The table as it stands in the docs; columns in `code` are set as code."""
    header = list(rows[0])
    lines = [
        [f"`{said(row[c])}`" if c in code and said(row[c]) not in ("-", "any") else said(row[c]) for c in header]
        for row in rows
    ]
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, ["---"] * len(header), *lines])


@pytest.mark.parametrize("rows", [all_rows(), choice_rows()], ids=["algorithms", "choices"])
def test_the_tables_in_the_docs_are_those_of_the_code(rows: list[dict[str, Any]]):
    wanted = markdown(rows, ("name", "advantage", "loss", "aggregation", "also sets", "value", "its keys"))
    assert wanted in DOCS.read_text(encoding="utf-8"), f"docs/algorithms.md should hold:\n{wanted}"


def test_the_docs_name_every_correction_with_its_bounds():
    text = DOCS.read_text(encoding="utf-8")
    for name, own in EFFECTS["correction"].items():
        bounds = f"{own.get('correction_low', 0):g} to {own['correction_high']:g}"
        assert any(f"`{name}`" in line and bounds in line for line in text.splitlines()), (name, bounds)
