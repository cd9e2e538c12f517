"""The recipe: what is accepted, what is refused and in which words."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel, ValidationError

from upswing.errors import ConfigError
from upswing.recipe import EvalStage, Recipe, RlStage, load_recipe, recipe_from
from upswing.recipe.keys import SECTIONS, keys_page
from upswing.recipe.rl import Aggregation
from upswing.recipe.yaml_reader import parse_yaml

ROOT = Path(__file__).parent.parent
SHIPPED = sorted((ROOT / "recipes").glob("*.yaml"))
TEXT = """\
name: small
model: tiny
env: geo_search
verifiers: [exact_match]
stages:
  - stage: sft
  - stage: rl
    steps: 4
    lr: 1e-5
  - {stage: eval, of: [base, sft, rl], split: test}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "small.yaml"
    file.write_text(TEXT)
    return file


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_recipe(path, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_recipes_load_and_survive_a_round_trip(path: Path, tmp_path: Path):
    recipe = load_recipe(path)
    again = tmp_path / "recipe.yaml"
    again.write_text(recipe.dump())
    assert load_recipe(again) == recipe
    assert load_recipe(tmp_path) == recipe  # a run folder stands for its recipe


def test_there_are_the_three_recipes_that_the_readme_names():
    assert {"tiny", "demo", "search"} <= {path.stem for path in SHIPPED}


def test_strings_stand_for_sections_with_one_key(path: Path):
    recipe = load_recipe(path)
    assert recipe.env.name == "geo_search" and recipe.verifiers[0].name == "exact_match"


def test_numbers_without_a_dot_are_numbers_and_dates_are_text():
    assert parse_yaml("a: 1e-5\nb: -2E3\nc: .5\nd: 2024-01-01\ne: 1.5e3", "x") == {
        "a": 1e-5,
        "b": -2000.0,
        "c": 0.5,
        "d": "2024-01-01",
        "e": 1500.0,
    }


def test_the_recipe_is_frozen(path: Path):
    recipe = load_recipe(path)
    with pytest.raises(ValidationError):
        recipe.seed = 3  # type: ignore[misc]


def test_overrides_reach_stages_by_index_and_by_name(path: Path):
    recipe = load_recipe(
        path, ["seed=7", "stages.1.steps=5", "rl.lr=3e-4", "stages.sft.graduation.tasks=3", "rl.lr=2e-4"]
    )
    rl = recipe.stages[1]
    assert isinstance(rl, RlStage)
    assert (recipe.seed, rl.steps, rl.lr) == (7, 5, 2e-4)  # the last of two wins
    assert recipe.stages[0].graduation.tasks == 3  # type: ignore[union-attr]


def test_overrides_can_open_sections_and_replace_lists(path: Path):
    recipe = load_recipe(path, ["env.args.k=1", "verifiers.0.weight=0.5", "limits.turn_tokens=9", "eval.of=[rl]"])
    assert recipe.env.args == {"k": 1} and recipe.env.name == "geo_search"
    assert recipe.verifiers[0].weight == 0.5
    assert recipe.limits.turn_tokens == 9
    last = recipe.stages[-1]
    assert isinstance(last, EvalStage) and last.of == ("rl",)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rl.lrr=1", ["stages.1.lrr: unknown key; did you mean 'lr'?", "allowed: stage, name", "override 'rl.lrr=1'"]),
        ("env.nme=x", ["env.nme: unknown key; did you mean 'name'?"]),
        ("rl.early_warning.stp=true", ["stages.1.early_warning.stp", "did you mean 'stop'?"]),
        ("modl=tiny", ["unknown key 'modl'; did you mean 'model'?"]),
        ("rll.lr=1", ["unknown key 'rll'; did you mean 'rl'?"]),
        ("rl=3", ["'rl' is a stage", "rl.lr=1e-5"]),
        ("rl.lr", ["expected key=value"]),
        ("stages.7.lr=1", ["no 'stages.7'", "0, 1, 2, sft, rl, eval"]),
        ("stages.evl.tasks=1", ["did you mean 'eval'?"]),
        ("seed.x=1", ["env"]),
        ("rl.lr=fast", ["stages.1.lr: got 'fast', expected a number"]),
        ("rl.lr=true", ["got true, expected a number"]),
        ("rl.lr=-1", ["got -1; allowed: more than 0"]),
        ("rl.lr=.inf", ["got inf, expected a finite number"]),
        ("rl.steps=1.5", ["stages.1.steps: got 1.5, expected a whole number"]),
        ("seed=true", ["seed: got true, expected a whole number"]),
        ("sft.graduation.enabled=1", ["got 1, expected true or false"]),
        ("rl.steps=null", ["got null, expected a whole number"]),
        ("rl.algorithm=grp", ["got 'grp'; did you mean 'grpo'?", "rloo, remax, grpo, dr_grpo"]),
        ("engine.dtype=floot32", ["did you mean 'float32'?"]),
        ("eval.split=tset", ["did you mean 'test'?"]),
        ("rl.stage=r", ["allowed: sft, rl, preference, reward_model, distill, eval"]),
        ("stages=3", ["stages: got 3, expected a list"]),
        ("stages.0=3", ["stages.0: got 3, expected keys and values"]),
        ("verifiers=[]", ["expected at least one item"]),
        ("name=a/b", ["name: got 'a/b', expected letters, digits"]),
        ("model=", ["model: got ''"]),
    ],
)
def test_wrong_overrides_get_one_clear_line(path: Path, override: str, words: list[str]):
    if override == "seed.x=1":
        assert "seed" in refusal(path, override)
        return
    message = refusal(path, override)
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["rl.top_p=0.9"], "stages.1.top_p: got 0.9; allowed: 1.0 (RL would then sample from another distribution"),
        (["rl.top_k=50"], "stages.1.top_k: got 50; allowed: 0"),
        (["rl.kl_estimator=k3"], "stages.1.kl_estimator: got 'k3' without effect, as kl_coef is 0"),
        (["rl.kl_coef=0.1", "rl.kl_estimator=k1"], "stages.1.kl_estimator: got 'k1': as a loss its gradient is zero"),
        (["rl.group_size=1"], "stages.1.group_size: got 1"),
        (["rl.minibatches=3"], "stages.1.minibatches: got 3, which doesn't divide the 8 tasks_per_step"),
        (["rl.minibatches=16"], "allowed: 1, 2, 4, 8"),
        (["rl.minibatches=2", "rl.dual_clip=1.0"], "stages.1.dual_clip: got 1; allowed: more than 1 + clip_high = 1.2"),
        (["rl.algorithm=dr_grpo", "rl.normalize_std=true"], "stages.1.normalize_std: got true, but dr_grpo"),
        (["rl.algorithm=dr_grpo", "rl.aggregation=token-mean"], "stages.1.aggregation: got 'token-mean', but dr_grpo"),
        (["rl.norm_length=100"], "stages.1.norm_length: got 100 without effect"),
        (["rl.temperature=0.0"], "stages.1.temperature: got 0.0; allowed: more than 0"),
        (["rl.warmup_steps=4"], "stages.1.warmup_steps: got 4; allowed: fewer than the 4 steps"),
        (["sft.time_limit_s=3", "sft.time_limit_as=x"], "stages.0.time_limit_as: got both"),
        (["sft.time_limit_as=rl"], "stages.0.time_limit_as: got 'rl', no earlier stage"),
        (["sft.batch_size=200"], "stages.0.batch_size: got 200, more than the 160 demonstrations"),
        (["sft.validation_demonstrations=0"], "graduation needs a validation loss"),
        (["eval.samples=4"], "stages.2.samples: got 4, but greedy samples are all alike"),
        (["eval.temperature=0.7"], "stages.2.temperature: got 0.7 without effect, as greedy is true"),
        (["eval.of=[rl, rl]"], "allowed: each name once"),
        (["eval.of=[rl, stf]"], "stages.2.of: got 'stf', no earlier stage with weights; did you mean 'sft'?"),
        (["rl.from=rl"], "stages.1.from: got 'rl', no earlier stage"),
        (["rl.name=sft"], "stages.1.name: got 'sft' twice"),
        (["rl.name=model"], "stages.1.name: got 'model'; allowed"),
        (["rl.name=../up"], "stages.1.name: got '../up'; allowed"),
        (["verifiers.0.weight=0"], "got 0 for every verifier"),
        (["verifiers=[{name: f1}, {name: format, gate: true, weight: 2}]"], "verifiers.1.gate: got true, but a gate"),
        (["verifiers=[{name: f1, weight_from: 0}]"], "verifiers.0.weight_steps: got nothing, but"),
        (["verifiers=[{name: f1, weight_from: 1, weight_steps: 3}]"], "verifiers.0.weight_from: got 1, which"),
        (
            ["verifiers=[{name: f1, weight_from: 0.5, weight_steps: 3}]", "stages=[{stage: sft}]"],
            "verifiers.0.weight_from: got a value without effect, as there is no rl stage",
        ),
        (["verifiers=[{name: f1, weight: 0}, {name: format, gate: true}]"], "verifiers.0.weight: got 0 for every"),
        (["verifiers=[f1, f1]"], "verifiers.1.name: got 'f1' twice"),
        (["limits.context_tokens=4096"], "limits.context_tokens: got 4096; allowed: up to engine.max_context (2048)"),
        (["limits.turn_tokens=2000"], "limits.turn_tokens: got 2000; allowed: up to context_tokens (1024)"),
        (["limits.env_timeout_s=5000"], "limits.env_timeout_s: got 5000; allowed: up to rollout_timeout_s (1800)"),
    ],
)
def test_ineffective_and_contradictory_keys_are_refused(path: Path, overrides: list[str], words: str):
    assert words in refusal(path, *overrides)


def test_what_makes_a_key_effective_makes_it_allowed(path: Path):
    recipe = load_recipe(path, ["rl.kl_coef=0.1", "rl.kl_estimator=k3", "eval.greedy=false", "eval.samples=4"])
    rl, last = recipe.stages[1], recipe.stages[2]
    assert isinstance(rl, RlStage) and isinstance(last, EvalStage)
    assert (rl.kl_estimator, last.samples, last.temperature) == ("k3", 4, 1.0)


def test_an_algorithm_fills_in_what_it_means_and_the_dump_shows_it(path: Path):
    rl = load_recipe(path, ["rl.algorithm=dr_grpo"]).stages[1]
    assert isinstance(rl, RlStage)
    assert (rl.normalize_std, rl.aggregation, rl.norm_length) == (False, "seq-mean-token-sum-norm", 256)
    assert load_recipe(path, ["rl.kl_coef=0.1"]).stages[1].kl_estimator == "k2"  # type: ignore[union-attr]


def test_an_evaluation_with_one_sample_is_fine_whatever_the_group_size(path: Path):
    assert load_recipe(path, ["eval.samples=1", "rl.group_size=4"]).stages[2].samples == 1  # type: ignore[union-attr]


def test_previous_means_the_last_stage_with_weights(path: Path):
    recipe = load_recipe(path)
    assert [recipe.source_of(index) for index in range(4)] == ["base", "sft", "rl", "rl"]
    assert recipe.source_of(2, "sft") == "sft"


def test_yaml_mistakes_name_the_line(path: Path):
    path.write_text(TEXT + "  - {stage: eval\n")
    assert ": line " in refusal(path)
    path.write_text(TEXT + "seed: 1\nseed: 2\n")
    assert "line 12, column 1: key 'seed' is there twice" in refusal(path)
    path.write_text(TEXT.replace("model:", "\tmodel:"))
    assert "line 2" in refusal(path)
    path.write_text("")
    assert "got nothing" in refusal(path)
    path.write_text("- a")
    assert "got list" in refusal(path)
    path.write_bytes(b"name: \xff\xfe")
    assert "not UTF-8" in refusal(path)


def test_a_missing_key_is_named_with_what_it_is(path: Path):
    path.write_text(TEXT.replace("model: tiny\n", ""))
    assert "model: missing, and it has no default: The base model" in refusal(path)
    path.write_text(TEXT.replace("    steps: 4\n", "    stps: 4\n"))
    assert "stages.1.stps: unknown key; did you mean 'steps'?" in refusal(path)  # not the missing steps
    path.write_text(TEXT.replace("stage: sft", "name: sft"))
    assert "missing the key 'stage'" in refusal(path)


def test_a_missing_recipe_names_the_nearest(path: Path):
    assert f"did you mean '{path}'?" in refusal(path.with_name("smal.yaml"))
    assert f"did you mean '{path}'?" in refusal(path.with_name("small"))


def test_files_are_found_beside_the_recipe_and_missing_ones_named(path: Path):
    (path.parent / "rows.jsonl").write_text("{}")
    recipe = load_recipe(path, ["dataset=rows.jsonl"])
    assert recipe.dataset is not None and recipe.dataset.train == str(path.parent / "rows.jsonl")
    assert "did you mean" in refusal(path, "dataset.train=row.jsonl")
    assert "env.name: file 'nowhere.py' not found" in refusal(path, "env=nowhere.py:Env")
    assert "verifiers.0.name: file 'v.py' not found" in refusal(path, "verifiers=[v.py:f]")


def test_python_data_works_like_yaml():
    data = {"name": "x", "model": "tiny", "env": "tool", "verifiers": ["f1"], "stages": [{"stage": "rl", "steps": 2}]}
    assert isinstance(recipe_from(data), Recipe)
    with pytest.raises(ConfigError, match=r"mine: env: missing"):
        recipe_from({key: value for key, value in data.items() if key != "env"}, source="mine")


def every_model() -> list[type[BaseModel]]:
    return [section for _, section in SECTIONS]


@pytest.mark.parametrize("section", every_model(), ids=lambda section: section.__name__)
def test_every_field_has_a_description_of_one_sentence(section: type[BaseModel]):
    for name, field in section.model_fields.items():
        assert field.description and field.description.endswith("."), name


def test_the_key_page_is_complete_and_up_to_date():
    seen: set[type] = set()

    def visit(section: type[BaseModel]) -> None:
        seen.add(section)
        for field in section.model_fields.values():
            for part in _leaves(field.annotation):
                if isinstance(part, type) and issubclass(part, BaseModel):
                    visit(part)

    visit(Recipe)
    assert seen == set(every_model())
    assert (ROOT / "docs" / "recipe.md").read_text() == keys_page(), "python -m upswing.recipe.keys > docs/recipe.md"


def _leaves(annotation: object) -> list[object]:
    inner = get_args(annotation)
    return [leaf for part in inner for leaf in _leaves(part)] if inner else [annotation]


def test_names_are_those_of_the_algorithms():
    from upswing.algo.aggregate import AGGREGATIONS

    assert get_args(Aggregation) == AGGREGATIONS


def test_reading_a_recipe_imports_nothing_heavy():
    code = (
        "import sys; from upswing.recipe import load_recipe; load_recipe(sys.argv[1]);"
        "print([m for m in ('torch', 'transformers', 'numpy', 'bm25s') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, SHIPPED[0]], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
