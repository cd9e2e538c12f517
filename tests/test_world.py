"""From a recipe to environment, rubric and tasks, with everything checked that can be checked without a model."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from upswing.errors import ConfigError
from upswing.recipe import SftStage, load_recipe
from upswing.world import World, build_world, demonstration_env, preflight

NO_SFT = "stages=[{stage: rl, steps: 2}]"


def rows(path: Path, count: int, start: int = 0, **extra: Any) -> str:
    lines = [{"prompt": f"q{i}", "answer": f"a{i}", **extra} for i in range(start, start + count)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path.name


def world(recipe: Path, *overrides: str) -> World:
    return preflight(load_recipe(recipe, overrides))


def refusal(recipe: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        world(recipe, *overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def prompts(made: World, split: str, seed: int, count: int) -> list[str]:
    return [task.messages[0].content for task in islice(made.tasks(split, seed), count)]


def test_an_environment_of_the_users_own_plays_and_scores(echo: Path):
    made = world(echo)
    assert prompts(made, "train", 3, 5) == ["Say lima-3-0.", "Say lima-3-1.", "Say lima-3-2."]
    assert made.make_env() is not made.make_env()
    assert world(echo, "env.args.word=oslo").make_env().word == "oslo"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            "for index in range",
            "self.rows['col']; index = 0\n        for index in range",
            "raised AttributeError: 'Echo'",
        ),
        ("def tasks(self, split, seed=0):\n        for", "def tasks(self, split):\n        for", "raised TypeError"),
        ("yield Task(", "yield dict(", "yields dict; tasks() yields upswing.Task objects"),
        (
            'Message(role="user", content=text)',
            '{"role": "user", "content": text}',
            "aren't all upswing.Message objects",
        ),
        (
            "self.word, self.has_expert",
            "open('gone.csv'); self.word, self.has_expert",
            "__init__ raised FileNotFoundError",
        ),
    ],
)
def test_what_is_wrong_with_a_users_own_environment_is_one_line_and_says_where(
    echo: Path, old: str, new: str, words: str
) -> None:
    source = echo.parent / "echo_env.py"
    text = source.read_text()
    assert old in text
    source.write_text(text.replace(old, new, 1))
    message = refusal(echo, NO_SFT)
    assert words in message and "environment 'echo_env.py:Echo'" in message


def test_unshuffled_rows_come_in_order_pass_after_pass(echo: Path):
    train = rows(echo.parent / "train.jsonl", 4)
    dev = rows(echo.parent / "dev.jsonl", 2, start=10)
    made = world(echo, f"dataset={{train: {train}, dev: {dev}, shuffle: false}}")
    assert prompts(made, "train", 5, 6) == ["q0", "q1", "q2", "q3", "q0", "q1"]
    assert prompts(made, "dev", 5, 9) == ["q10", "q11"]


def test_shuffled_rows_are_a_permutation_each_pass_and_follow_the_seed(echo: Path):
    rows(echo.parent / "train.jsonl", 20)
    made = build_world(load_recipe(echo, ["dataset=train.jsonl"]))
    first, again, other = prompts(made, "train", 1, 40), prompts(made, "train", 1, 40), prompts(made, "train", 2, 40)
    assert first == again != other
    assert sorted(first[:20]) == sorted(first[20:]) == sorted(f"q{i}" for i in range(20))
    assert first[:20] != first[20:]


def test_other_columns_stay_with_their_row(echo: Path):
    text = [{"prompt": f"q{i}", "answer": f"a{i}", "level": i} for i in range(4)]
    (echo.parent / "t.jsonl").write_text("\n".join(map(json.dumps, text)))
    made = build_world(load_recipe(echo, ["dataset=t.jsonl"]))
    for task in islice(made.tasks("train", 0), 8):
        assert task.messages[0].content == f"q{task.data['level']}" and task.gold == (f"a{task.data['level']}",)


def test_a_row_without_an_answer_is_named_by_file_and_line(echo: Path):
    (echo.parent / "t.jsonl").write_text('{"prompt": "a", "answer": "b"}\n{"prompt": "c", "anser": "d"}\n')
    message = refusal(echo, "dataset=t.jsonl", NO_SFT, "stages.0.eval_every=0")
    assert "t.jsonl:2" in message and "answer" in message
    optional = "dataset={train: t.jsonl, answer_required: false}"
    message = refusal(echo, optional, NO_SFT, "stages.0.eval_every=0")
    assert "t.jsonl:2: task 't-1' has no gold (an accepted answer), which verifier 'exact_match' needs" in message
    assert world(echo, optional, NO_SFT, "stages.0.eval_every=0", "verifiers=[format, {name: f1, weight: 0}]")
    distill = "stages=[{stage: distill, steps: 1, teacher: tiny, eval_every: 0}]"  # its teacher judges
    assert world(echo, optional, distill)


CHECKS = """
def needs(answer, gold):
    return answer in gold

def copes(answer, gold=()):
    return answer in gold if gold else len(answer) > 2
"""


@pytest.mark.parametrize(
    ("verifiers", "missing"),
    [
        ("[strict_match]", ("gold", "strict_match")),
        ("[format, {name: numeric, gate: true}]", ("gold", "numeric")),
        ("[format, {name: f1, weight: 0, weight_from: 1, weight_steps: 5}]", ("gold", "f1")),
        ("[check.py:needs]", ("gold", "needs")),
        ("[tool_calls]", ("data.calls", "tool_calls")),
        ("[state]", ("data.final_state", "state")),
        ("[check.py:copes]", None),
        ("[format, {name: strict_match, weight: 0}, {name: state, weight: 0}]", None),
    ],
)
def test_a_task_without_what_the_reward_needs_is_named_before_a_model_is_needed(
    echo: Path, verifiers: str, missing: tuple[str, str] | None
):
    (echo.parent / "check.py").write_text(CHECKS)
    source = echo.parent / "echo_env.py"
    # Only the third task of three has none.
    text = source.read_text().replace('gold=(f"{self.word}-{seed}-{index}",)', "gold=('x',) * (index < 2)")
    source.write_text(text)
    changes = (NO_SFT, "stages.0.eval_every=0", f"verifiers={verifiers}")
    if missing is None:
        assert world(echo, *changes)
        return
    number = 2 if missing[0] == "gold" else 0
    field = "gold (an accepted answer)" if number else missing[0]
    message = refusal(echo, *changes)
    assert f"stages.0: train task {number + 1} of 'echo_env.py:Echo': task 'train-{number}'" in message
    assert f"has no {field}, which verifier '{missing[1]}' needs" in message


def test_tasks_for_demonstrations_are_looked_at_as_thoroughly(echo: Path):
    """Only the third one of the other tasks has no gold."""
    source = echo.parent / "echo_env.py"
    gold = "gold=('x',) * (self.word == 'lima' or index < 2)"
    source.write_text(source.read_text().replace('gold=(f"{self.word}-{seed}-{index}",)', gold))
    message = refusal(echo, "sft.task_args={word: kilo}")
    assert "stages.0.task_args: train task 3 of 'echo_env.py:Echo': task 'train-2' has no gold" in message
    assert world(echo)


def test_a_gold_that_is_no_text_is_for_the_users_own_verifier_to_read(echo: Path):
    (echo.parent / "check.py").write_text("def exactly(answer, gold):\n    return int(answer) == gold[0]\n")
    source = echo.parent / "echo_env.py"
    source.write_text(source.read_text().replace('gold=(f"{self.word}-{seed}-{index}",)', "gold=(index,)"))
    assert world(echo, NO_SFT, "stages.0.eval_every=0", "verifiers=[check.py:exactly]")


@pytest.mark.parametrize(("tasks", "fine"), [(2, True), (3, False)])
def test_no_more_tasks_are_looked_at_than_a_stage_takes(echo: Path, tasks: int, fine: bool):
    source = echo.parent / "echo_env.py"
    text = source.read_text()
    at = text.index("for index in range")
    loop = text[at : text.index("\n\n", at)] if "\n\n" in text[at:] else text[at:].rstrip("\n")
    source.write_text(text.replace(loop, f"{loop}\n        raise LookupError('there are two')"))
    changes = f"stages=[{{stage: eval, split: dev, tasks: {tasks}}}]"
    if fine:
        assert world(echo, changes)
    else:
        assert "raised LookupError: there are two" in refusal(echo, changes)


def test_a_slow_stream_is_not_waited_for(echo: Path):
    source = echo.parent / "echo_env.py"
    text = source.read_text().replace("for index in range", "import time\n        for index in range")
    source.write_text(text.replace('"dev": 2', '"dev": 50').replace("yield Task(", "time.sleep(1.1); yield Task("))
    started = time.monotonic()
    assert world(echo, "stages=[{stage: eval, split: dev, tasks: 50}]")
    assert time.monotonic() - started < 3


@pytest.mark.parametrize("identity", ["{split}-{index}", "{split}-{index % 1}"])
def test_an_id_may_come_again_with_the_same_task_only(echo: Path, identity: str):
    """The stream is 0 1 0 1; with the second kind of ids, all four are called train-0."""
    source = echo.parent / "echo_env.py"
    text = source.read_text().replace(
        "for index in range(", "for index in (0, 1, 0, 1) if split == 'train' else range("
    )
    source.write_text(text.replace("{split}-{index}", identity))
    if "%" not in identity:
        assert len(prompts(world(echo), "train", 0, 9)) == 4
        return
    message = refusal(echo)
    assert "train tasks 1 and 2 are two problems with one id, 'train-0'" in message
    assert "environment 'echo_env.py:Echo'" in message


@pytest.mark.parametrize("env", ["lookup", "calculator", "grid", "memory", "sql", "web_shop", "wordle"])
def test_the_streams_of_built_in_environments_keep_to_that(echo: Path, env: str):
    assert world(echo, f"env={env}", "verifiers=[format]", NO_SFT)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return {}['lima']", "expert(task, rng) raised KeyError: 'lima' (echo_env.py:"),
        ("yield 'look'", "expert(task, rng) gave generator; it gives a function"),
        ("pass", "expert(task, rng) gave NoneType"),
    ],
)
def test_an_expert_that_raises_or_gives_no_policy_is_one_line_and_says_where(echo: Path, body: str, words: str):
    source = echo.parent / "echo_env.py"
    head, mark, tail = source.read_text().partition("    def expert(self, task, rng):\n")
    source.write_text(f"{head}{mark}        {body}\n\n{tail[tail.index('class Taskless') :]}")
    message = refusal(echo)
    assert message.startswith("stages.0: environment 'echo_env.py:Echo': ") and words in message


def test_clashing_columns_are_refused(echo: Path):
    rows(echo.parent / "t.jsonl", 2, completions="x")
    assert "'completions'" in refusal(echo, "dataset=t.jsonl")


def test_a_question_in_two_splits_is_refused(echo: Path):
    rows(echo.parent / "a.jsonl", 4)
    rows(echo.parent / "b.jsonl", 4, start=3)
    assert "same problem" in refusal(echo, "dataset={train: a.jsonl, dev: b.jsonl}")


def test_splits_that_a_stage_needs_must_have_tasks(echo: Path):
    rows(echo.parent / "t.jsonl", 4)
    assert "no dev rows; set dataset.dev" in refusal(echo, "dataset=t.jsonl", NO_SFT)
    assert world(echo, "dataset=t.jsonl", NO_SFT, "stages.0.eval_every=0")
    evaluation = "stages=[{stage: rl, steps: 2}, {stage: eval, split: test}]"
    assert "stages.1: environment 'echo_env.py:Echo' has no test tasks" in refusal(echo, evaluation)


def test_an_environment_without_tasks_asks_for_a_dataset(echo: Path):
    assert "dataset.train" in refusal(echo, "env=echo_env.py:Taskless")


def test_sft_needs_an_expert(echo: Path):
    message = refusal(echo, "env.args.has_expert=false")
    assert "stages.0: sft needs demonstrations" in message and "expert(task, rng)" in message
    assert world(echo, "env.args.has_expert=false", NO_SFT)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("env=geo_serch", "did you mean 'geo_search'?"),
        ("env.args.wrod=x", "did you mean 'word'?"),
        ("env=echo_env.py:Ecko", "did you mean 'Echo'?"),
        ("env=json:dumps", "must be a subclass"),
        ("verifiers=[exact_mach]", "did you mean 'exact_match'?"),
        ("verifiers=[check.py:strict]", "anser"),
    ],
)
def test_wrong_names_are_refused_before_a_model_is_needed(echo: Path, override: str, words: str):
    (echo.parent / "check.py").write_text("def strict(anser, gold):\n    return 1.0\n")
    assert words in refusal(echo, override)


def test_no_torch_is_needed_to_check_a_recipe(echo: Path):
    code = (
        "import sys; from upswing.recipe import load_recipe; from upswing.world import preflight;"
        "preflight(load_recipe(sys.argv[1])); print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, echo], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_demonstrations_may_be_played_with_other_arguments(echo: Path):
    recipe = load_recipe(echo, ["sft.env_args={word: kilo}"])
    stage = recipe.stages[0]
    assert isinstance(stage, SftStage)
    preflight(recipe)
    assert demonstration_env(recipe, stage)().word == "kilo"  # type: ignore[attr-defined]
    assert build_world(recipe).make_env().word == "lima"  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="did you mean 'word'"):
        preflight(load_recipe(echo, ["sft.env_args={wrd: kilo}"]))
