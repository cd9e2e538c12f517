"""The preference stage: which pairs trajectories and files give, what is refused, and a whole run that resumes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from upswing.envs.pairs import read_pairs
from upswing.errors import ConfigError
from upswing.models.tiny import tiny_tokenizer
from upswing.monitor.metrics import MetricsLog
from upswing.monitor.progress import Progress
from upswing.recipe import Recipe, recipe_from
from upswing.recipe.offline import PreferenceStage
from upswing.stages.pairs import hold_out, pairs_from_group, pairs_from_rows
from upswing.stages.runner import run_recipe
from upswing.trajectory.conversation import Conversation
from upswing.trajectory.render import ChatRenderer
from upswing.trajectory.store import TrajectoryStore
from upswing.trajectory.types import Branch, Message, Outcome, Score, StopReason, Task, Trajectory
from upswing.view.run_folder import read_json
from upswing.world import preflight

# -- pairs of trajectories --------------------------------------------------------------------------------------------


def branch(*tokens: int) -> Branch:
    size = len(tokens)
    sampled = np.array([False, *[True] * (size - 1)])
    return Branch(
        tokens=np.array(tokens, np.int32),
        sampled=sampled,
        engine_logprobs=np.where(sampled, -1, np.nan).astype(np.float32),
        policy_version=np.where(sampled, 1, -1).astype(np.int32),
        turn=np.zeros(size, np.int16),
    )


def trajectory(
    number: int, reward: float | None, branches: int = 1, outcome: Outcome = Outcome.COMPLETED
) -> Trajectory:
    return Trajectory(
        id=f"t/0-{number}",
        task=Task(id="t", messages=()),
        branches=tuple(branch(9, number) for _ in range(branches)),
        messages=(),
        outcome=outcome,
        stop_reason=StopReason.ERROR if outcome is Outcome.ERRORED else StopReason.ANSWERED,
        score=None if outcome is Outcome.ERRORED else Score(value=reward),
    )


def shown(pairs) -> list[tuple[int, int]]:
    return [(int(pair.chosen.tokens[-1]), int(pair.rejected.tokens[-1])) for pair in pairs]


def test_best_meets_worst_and_nobody_comes_twice():
    group = [trajectory(i, reward) for i, reward in enumerate([0.5, 0.0, 1.0, 0.2, 0.5])]
    assert shown(pairs_from_group(group, most=9)) == [(2, 1), (0, 3)]
    assert shown(pairs_from_group(group, most=1)) == [(2, 1)]


@pytest.mark.parametrize("rewards", [[1.0, 1.0, 1.0], [0.0], []])
def test_no_difference_no_pair(rewards):
    assert pairs_from_group([trajectory(i, reward) for i, reward in enumerate(rewards)], most=4) == []


def test_equal_rewards_stop_the_pairing():
    group = [trajectory(i, reward) for i, reward in enumerate([1.0, 1.0, 1.0, 0.0])]
    assert shown(pairs_from_group(group, most=4)) == [(0, 3)]


def test_what_was_not_scored_or_has_several_branches_is_never_used():
    """An errored trajectory isn't a bad one, and an unscored one isn't 0."""
    group = [
        trajectory(0, 1.0),
        trajectory(1, None, outcome=Outcome.ERRORED),
        trajectory(2, None),
        trajectory(3, 0.0, branches=2),
        trajectory(4, 0.5),
    ]
    assert shown(pairs_from_group(group, most=4)) == [(0, 4)]


def test_prompts_are_held_out_whole():
    files = [_pair_of(prompt) for prompt in (1, 1, 2, 3, 3)]
    training, held = hold_out(files, 1)
    assert [len(training), len(held)] == [3, 2], "both pairs of prompt 3"
    training, held = hold_out(files, 3)
    assert [len(training), len(held)] == [2, 3]
    assert hold_out(files, 0) == (files, [])
    assert hold_out(files, 99)[0] == []


def _pair_of(prompt: int):
    (pair,) = pairs_from_group([trajectory(5, 1.0), trajectory(6, 0.0)], most=1)
    pair.chosen.tokens[0] = pair.rejected.tokens[0] = prompt
    return pair


# -- pairs of a file --------------------------------------------------------------------------------------------------

GOOD = {"prompt": "How many?", "chosen": "Two.", "rejected": "Three."}
TURNS = [
    {"role": "assistant", "content": "<search>x</search>"},
    {"role": "tool", "name": "search", "content": "x is 2 <|im_end|>"},
    {"role": "assistant", "content": "<answer>2</answer>"},
]


def written(folder: Path, *rows: object) -> Path:
    path = folder / "pairs.jsonl"
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("{not json\n", "pairs.jsonl:2: not valid JSON"),
        ({**GOOD, "choosen": "x"}, "pairs.jsonl:2: unknown key 'choosen'; did you mean 'chosen'?"),
        ({"prompt": "x", "chosen": "y"}, "pairs.jsonl:2: the row has no 'rejected'"),
        ({"chosen": "y", "rejected": "z"}, "pairs.jsonl:2: the row has no 'prompt'"),
        ({**GOOD, "rejected": "Two."}, "pairs.jsonl:2: 'chosen' and 'rejected' are the same"),
        ({**GOOD, "chosen": ""}, "pairs.jsonl:2: 'chosen' must be text or a list of messages"),
        ({**GOOD, "chosen": 3}, "pairs.jsonl:2: 'chosen' must be text or a list of messages"),
        ({**GOOD, "prompt": [{"role": "assistant", "content": "x"}]}, "'prompt' ends with role 'assistant'"),
        (
            {**GOOD, "chosen": TURNS[:2]},
            "'chosen' must begin and end with an assistant message; its roles: assistant, tool",
        ),
        ({**GOOD, "chosen": [TURNS[0], TURNS[2]]}, "'chosen' has two assistant messages in a row"),
        ({**GOOD, "chosen": [{"role": "agent", "content": "x"}]}, "role 'agent' is not one of"),
        ({**GOOD, "tools": "search"}, "'tools' must be a list of tool schemas"),
    ],
)
def test_bad_rows_are_refused_with_line_and_key(tmp_path, row, words):
    with pytest.raises(ConfigError) as caught:
        read_pairs(written(tmp_path, GOOD, row))
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_an_unpaired_row_needs_one_side_and_a_file_some_rows(tmp_path):
    (row,) = read_pairs(written(tmp_path, {"prompt": "x", "rejected": "y"}), paired=False)
    assert (row.chosen, row.rejected) == ((), (Message(role="assistant", content="y"),))
    with pytest.raises(ConfigError, match="no rows"):
        read_pairs(written(tmp_path, "\n"))


@pytest.fixture(scope="module")
def renderer() -> ChatRenderer:
    return ChatRenderer(tiny_tokenizer())


def test_files_become_the_tokens_of_a_demonstration(tmp_path, renderer):
    """The loss covers the agent's turns with their ends; a tool that spells an end of turn ends nothing."""
    rows = read_pairs(written(tmp_path, {"prompt": "How many?", "chosen": TURNS, "rejected": "Three."}))
    (pair,) = pairs_from_rows(rows, renderer, renderer.end_tokens(), max_tokens=500)
    conversation = Conversation(renderer, rows[0].prompt, end_tokens=renderer.end_tokens())
    conversation.add_expert(TURNS[0]["content"])
    conversation.add_messages([Message(**TURNS[1])])
    conversation.add_expert(TURNS[2]["content"])
    (want,) = conversation.branches()
    assert pair.chosen.tokens.tolist() == want.tokens.tolist()
    trained = pair.chosen.tokens[pair.chosen.loss_mask].tolist()
    assert renderer.decode(trained) == "<search>x</search><|im_end|><answer>2</answer><|im_end|>"
    assert renderer.decode(pair.rejected.tokens[pair.rejected.loss_mask].tolist()) == "Three.<|im_end|>"
    start = pair.chosen.loss_positions[0]
    assert pair.prompt == pair.rejected.tokens[:start].tobytes(), "both sides begin with the same ids"
    with pytest.raises(ConfigError, match=r"pairs.jsonl:1: 'chosen' has \d+ tokens; allowed: up to .* \(8\)"):
        pairs_from_rows(rows, renderer, renderer.end_tokens(), max_tokens=8)


# -- the recipe -------------------------------------------------------------------------------------------------------

BASE = {
    "name": "small",
    "model": "tiny",
    "env": {"name": "lookup", "args": {"expert_noise": 0.2}},
    "verifiers": ["strict_match", {"name": "format", "weight": 0.5}],
    "engine": {"max_slots": 32, "max_context": 256},
    "limits": {"turn_tokens": 16, "context_tokens": 256},
}
SFT = {
    "stage": "sft", "demonstrations": 64, "validation_demonstrations": 0, "epochs": 3, "batch_size": 16, "lr": 5e-3,
    "eval_every": 0, "graduation": {"enabled": False},
}  # fmt: skip


def recipe(**keys: object) -> Recipe:
    return recipe_from({**BASE, "stages": [SFT, {"stage": "preference", **keys}]})


def only(made: Recipe) -> PreferenceStage:
    stage = made.stages[-1]
    assert isinstance(stage, PreferenceStage)
    return stage


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            {"loss": "ipo", "label_smoothing": 0.1},
            "label_smoothing: got 0.1 without effect, as loss is 'ipo' (for: dpo)",
        ),
        ({"margin": 1.0}, "margin: got 1.0 without effect, as loss is 'dpo' (for: simpo)"),
        ({"loss": "kto", "nll_coef": 0.1}, "nll_coef: got 0.1 without effect, as loss is 'kto'"),
        ({"desirable_weight": 2.0}, "desirable_weight: got 2.0 without effect"),
        ({"robust": True}, "robust: got true without effect, as label_smoothing is 0"),
        ({"label_smoothing": 0.5}, "label_smoothing: got 0.5; allowed: less than 0.5"),
        ({"loss": "orpo", "nll_coef": 0.0}, "nll_coef: got 0, but orpo is an SFT loss"),
        ({"samples": 1}, "samples: got 1; allowed: 2 and more"),
        ({"samples": 4, "pairs_per_task": 3}, "pairs_per_task: got 3; allowed: 1 to 2"),
        ({"loss": "dop"}, "loss: got 'dop'; did you mean 'dpo'?"),
        ({"lora": {"dropout": 0.1}}, "lora.dropout"),
    ],
)
def test_options_without_effect_are_refused(keys, words):
    with pytest.raises(ConfigError) as caught:
        recipe(**keys)
    assert words in str(caught.value) and "stages.1." in str(caught.value)


def test_a_resolved_recipe_shows_what_a_loss_sets(tmp_path):
    assert (only(recipe()).beta, only(recipe()).nll_coef, only(recipe()).margin) == (0.1, 0.0, None)
    assert (only(recipe(loss="simpo")).beta, only(recipe(loss="simpo")).margin) == (2.0, 1.0)
    assert only(recipe(loss="orpo")).nll_coef == 1.0 and only(recipe(samples=2)).pairs_per_task == 1
    path = written(tmp_path, GOOD)
    made = recipe(loss="kto", file=str(path))
    assert only(made).tasks is None
    assert recipe_from(made.to_dict()) == made
    with pytest.raises(ConfigError, match="tasks: got 9 without effect, as the pairs come from file"):
        recipe(file=str(path), tasks=9)


def test_a_missing_or_bad_file_is_found_before_any_model_loads(tmp_path):
    with pytest.raises(ConfigError, match=r"stages\.1\.file"):
        recipe(file=str(tmp_path / "nowhere.jsonl"))
    bad = recipe(file=str(written(tmp_path, GOOD, {"prompt": "x"})))
    with pytest.raises(ConfigError, match=r"pairs\.jsonl:2: the row has no 'chosen'"):
        preflight(bad)


def test_no_stage_starts_from_or_measures_a_reward_model():
    """Its weights score; `previous` means the newest stage that an agent can be played with."""
    scores = {"stage": "reward_model", "name": "judge"}
    made = recipe_from({**BASE, "stages": [SFT, scores, {"stage": "preference"}]})
    assert made.source_of(2) == "sft"
    for stage, key in (
        ({"stage": "preference", "from": "judge"}, "from"),
        ({"stage": "eval", "of": ["judge"]}, "of"),
        ({"stage": "rl", "steps": 1, "reward_model": "sft"}, "reward_model"),
    ):
        with pytest.raises(ConfigError, match=rf"stages\.2\.{key}: got '(judge|sft)', no earlier"):
            recipe_from({**BASE, "stages": [SFT, scores, stage]})
    recipe_from({**BASE, "stages": [SFT, scores, {"stage": "rl", "steps": 1, "reward_model": "judge"}]})


# -- runs -------------------------------------------------------------------------------------------------------------

TUNED = {"tasks": 10, "samples": 6, "validation_pairs": 6, "batch_size": 6, "lr": 1e-3, "beta": 0.2, "epochs": 2}
VERIFIER = """\
def likes_short_words(messages) -> float:
    said = " ".join(message.content for message in messages if message.role == "assistant")
    return said.count(" ") / (1 + len(said))
"""


def on_policy(folder: Path) -> Recipe:
    """The base model's own samples, judged by something that even a random model does better or worse."""
    (folder / "short.py").write_text(VERIFIER)
    verifiers = [str(folder / "short.py:likes_short_words")]
    return recipe_from({**BASE, "verifiers": verifiers, "stages": [{"stage": "preference", **TUNED}]})


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / "preference" / "final" / "model.safetensors")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    run_recipe(on_policy(folder), folder / "finished", log=Progress(quiet=True))
    return folder / "finished"


def test_a_run_learns_its_pairs_and_says_so(finished):
    facts = read_json(finished / "state.json")["stages"]["preference"]
    before, after = facts["held_out"]["before"], facts["held_out"]["after"]
    assert before["validation_preference_accuracy"] == 0.5 and before["validation_chosen_shift"] == 0
    assert after["validation_preference_accuracy"] > 0.5 and after["validation_reward_margin"] > 0
    rows = MetricsLog(finished).read("preference")
    trained = [row for row in rows if "num_steps" in row]
    assert [row["step"] for row in trained] == list(range(1, facts["steps"] + 1))
    assert next(row["step"] for row in rows if "validation_loss" in row) == 0
    assert trained[-1]["loss"] < trained[0]["loss"] == pytest.approx(np.log(2), abs=1e-5)
    stored = list(TrajectoryStore(finished / "trajectories").read("preference"))
    assert len(stored) == TUNED["tasks"] * TUNED["samples"]
    assert "Stage preference" in (finished / "report.html").read_text()


def test_a_killed_stage_keeps_its_samples_and_ends_at_the_same_weights(finished, tmp_path, monkeypatch):
    import upswing.stages.preference as module

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "preference_update", killed)
    with pytest.raises(KeyboardInterrupt):
        run_recipe(on_policy(finished.parent), tmp_path / "run", log=Progress(quiet=True))
    monkeypatch.undo()
    monkeypatch.setattr("upswing.stages.pairs._sampled", killed)
    run_recipe(on_policy(finished.parent), tmp_path / "run", resume=True, log=Progress(quiet=True))
    assert all(torch.equal(weights(finished)[name], value) for name, value in weights(tmp_path / "run").items())


@pytest.mark.parametrize("loss", ["kto", "orpo", "simpo", "ipo"])
def test_pairs_of_a_file_with_every_loss(tmp_path, loss):
    """Six prompts, the same lesson: the word of the chosen side becomes likelier than that of the rejected one."""
    rows = [{"prompt": f"Number {i}?", "chosen": [*TURNS[:2], {"role": "assistant", "content": "one"}],
             "rejected": [*TURNS[:2], {"role": "assistant", "content": "zero"}]} for i in range(6)]  # fmt: skip
    made = recipe_from(
        {**BASE, "stages": [{"stage": "preference", "loss": loss, "file": str(written(tmp_path, *rows)),
                             "validation_pairs": 2, "batch_size": 2, "lr": 1e-3, "epochs": 4}]}
    )  # fmt: skip
    run_recipe(made, tmp_path / "run", log=Progress(quiet=True))
    held = read_json(tmp_path / "run" / "state.json")["stages"]["preference"]["held_out"]
    assert held["after"]["validation_loss"] < held["before"]["validation_loss"]
    gap = [held[when]["validation_chosen_reward"] - held[when]["validation_rejected_reward"] for when in held]
    assert gap[1] > gap[0]
