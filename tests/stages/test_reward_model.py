"""The reward_model stage: what is refused, and whole runs from a file and from samples."""

from __future__ import annotations

import json
import random
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from upswing.errors import ConfigError, UpswingError
from upswing.learn.reward_model import load_reward_model, score_trajectories
from upswing.models.load import load_model
from upswing.monitor.metrics import MetricsLog
from upswing.monitor.progress import Progress
from upswing.recipe import Recipe, recipe_from
from upswing.stages.runner import run_recipe
from upswing.trajectory.store import TrajectoryStore
from upswing.trajectory.types import Branch, Outcome, StopReason, Task, Trajectory
from upswing.view.run_folder import FINDINGS, read_json, read_json_lines
from upswing.world import preflight

BASE = {
    "name": "small",
    "model": "tiny",
    "env": {"name": "lookup", "args": {"expert_noise": 0.2}},
    "verifiers": ["strict_match", {"name": "format", "weight": 0.5}],
    "engine": {"max_slots": 32, "max_context": 256},
    "limits": {"turn_tokens": 16, "context_tokens": 256},
}
COLOURS = ("one two three four five", "six seven eight nine ten")


def recipe(**keys: Any) -> Recipe:
    return recipe_from({**BASE, "stages": [{"stage": "reward_model", **keys}]})


def pairs_file(folder: Path, count: int, *, longer: bool = False) -> str:
    """A low number is preferred to a high one, whatever the question; or three numbers to one."""
    draw, lines = random.Random(0), []
    for _ in range(count):
        sides = [draw.choice(words.split()) for words in COLOURS]
        if longer:
            sides = [f"{sides[0]} {sides[1]} {sides[0]}", draw.choice(sides)]
        question = f"Which number, {draw.randrange(10_000)}?"
        lines.append(json.dumps({"prompt": question, "chosen": sides[0], "rejected": sides[1]}))
    path = folder / "pairs.jsonl"
    path.write_text("\n".join(lines))
    return str(path)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"samples": 4, "pairs_per_task": 3}, "pairs_per_task: got 3; allowed: 1 to 2"),
        ({"validation_pairs": 0, "eval_every": 5}, "eval_every: got 5 without effect, as validation_pairs is 0"),
        ({"centring": -1.0}, "centring: got -1.0; allowed: 0.0 and more"),
        ({"loss": "dpo"}, "unknown key"),
        ({"from": "nowhere"}, "got 'nowhere', no earlier stage with weights"),
    ],
)
def test_options_without_effect_are_refused(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        recipe(**keys)
    assert words in str(caught.value) and "stages.0." in str(caught.value)


def test_a_file_replaces_sampling_and_is_read_before_any_model_loads(tmp_path: Path) -> None:
    path = pairs_file(tmp_path, 2)
    made = recipe(file=path, validation_pairs=0)
    assert recipe_from(made.to_dict()) == made
    preflight(made)
    with pytest.raises(ConfigError, match="samples: got 4 without effect, as the pairs come from file"):
        recipe(file=path, samples=4)
    with open(path, "a") as file:
        file.write('\n{"prompt": "x", "chosen": "y"}')
    with pytest.raises(ConfigError, match=r"pairs\.jsonl:3: the row has no 'rejected'"):
        preflight(made)


def test_nothing_starts_from_a_reward_model_nor_is_it_evaluated(tmp_path: Path) -> None:
    """It has no language-model head: loading one would make up its weights."""
    stages = [{"stage": "reward_model", "file": pairs_file(tmp_path, 2)}, {"stage": "sft", "from": "reward_model"}]
    with pytest.raises(ConfigError, match="no earlier stage with weights"):
        recipe_from({**BASE, "stages": stages})
    stages[1]["from"] = "previous"
    made = recipe_from({**BASE, "stages": stages})
    assert made.source_of(1) == "base"


def trajectory(tokens: list[int]) -> Trajectory:
    size = len(tokens)
    branch = Branch(
        tokens=np.array(tokens, np.int32),
        sampled=np.zeros(size, bool),
        engine_logprobs=np.full(size, np.nan, np.float32),
        policy_version=np.full(size, -1, np.int32),
        turn=np.zeros(size, np.int16),
    )
    return Trajectory(
        id="t", task=Task(id="t", messages=()), branches=(branch,), messages=(),
        outcome=Outcome.COMPLETED, stop_reason=StopReason.ANSWERED,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["all weights", "lora"])
def test_a_run_learns_the_preference_of_a_file(tmp_path: Path, kind: str) -> None:
    if kind == "lora" and find_spec("peft") is None:
        pytest.skip("needs peft")
    keys = {"lora": {"r": 8}, "lr": 1e-2} if kind == "lora" else {"lr": 3e-3}
    made = recipe(file=pairs_file(tmp_path, 96), validation_pairs=24, epochs=2, **keys)
    run_recipe(made, tmp_path / "run", log=Progress(quiet=True))
    facts = read_json(tmp_path / "run" / "state.json")["stages"]["reward_model"]
    before, after = facts["held_out"]["before"], facts["held_out"]["after"]
    assert (facts["pairs"], facts["steps"]) == (72, 10)
    assert before["validation_accuracy"] == 0.5 and after["validation_accuracy"] > 0.9
    assert after["validation_loss"] < 0.5 and 0 <= after["validation_ece"] <= 0.5
    rows = MetricsLog(tmp_path / "run").read("reward_model")
    assert [row["step"] for row in rows if "validation_ece" in row] == [0, 10]
    assert [row["step"] for row in rows if "num_steps" in row] == list(range(1, 11))
    assert not read_json_lines(tmp_path / "run" / FINDINGS)
    folder = tmp_path / "run" / "checkpoints" / "reward_model" / "final"
    model, tokenizer = load_reward_model(folder), load_model("tiny").tokenizer
    start = "<|im_start|>user\nWhich number, 5?<|im_end|>\n<|im_start|>assistant\n"
    ends = [f"{start}{number}<|im_end|>" for number in ("two", "nine")]
    low, high = score_trajectories(model, [trajectory(tokenizer(text).input_ids) for text in ends])
    assert low is not None and high is not None and low > high + 1
    with pytest.raises(ConfigError):
        load_reward_model("tiny")


def test_a_reward_model_that_likes_length_is_a_finding(tmp_path: Path) -> None:
    made = recipe(file=pairs_file(tmp_path, 48, longer=True), validation_pairs=16, lr=5e-3, epochs=2, eval_every=0)
    run_recipe(made, tmp_path / "run", log=Progress(quiet=True))
    found = [row["title"] for row in read_json_lines(tmp_path / "run" / FINDINGS)]
    assert found == ["the reward model likes length"]


def test_one_that_does_not_generalise_is_a_finding_and_holding_out_everything_an_error(tmp_path: Path) -> None:
    path = Path(pairs_file(tmp_path, 56))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows[-8:]:  # held out, as they come last: here the other number is preferred
        row["chosen"], row["rejected"] = row["rejected"], row["chosen"]
    path.write_text("\n".join(map(json.dumps, rows)))
    run_recipe(
        recipe(file=str(path), validation_pairs=8, lr=3e-3, epochs=2), tmp_path / "run", log=Progress(quiet=True)
    )
    found = [row["title"] for row in read_json_lines(tmp_path / "run" / FINDINGS)]
    assert found == ["the reward model is hardly better than chance"]
    with pytest.raises(UpswingError, match="none left to train on"):
        run_recipe(recipe(file=str(path), validation_pairs=99), tmp_path / "other", log=Progress(quiet=True))


def test_pairs_are_the_models_own_samples_as_the_verifiers_judge_them(tmp_path: Path) -> None:
    verifier = tmp_path / "taste.py"
    verifier.write_text("def letters(messages):\n    return float(messages[-1].content.count('e'))\n")
    keys = {"tasks": 8, "samples": 6, "pairs_per_task": 2, "validation_pairs": 4, "batch_size": 4}
    stages = [{"stage": "reward_model", "name": "taste", **keys}]
    made = recipe_from({**BASE, "verifiers": [f"{verifier}:letters"], "stages": stages})
    run_recipe(made, tmp_path / "run", log=Progress(quiet=True))
    stored = [one.trajectory for one in TrajectoryStore(tmp_path / "run" / "trajectories").read("taste")]
    facts = read_json(tmp_path / "run" / "state.json")["stages"]["taste"]
    assert len(stored) == 48 and 8 <= facts["pairs"] <= 12
    model = load_reward_model(tmp_path / "run" / "checkpoints" / "taste" / "final")
    assert all(score is not None for score in score_trajectories(model, stored))
