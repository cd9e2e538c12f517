"""`upswing play`: a person plays, here through standard input."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from upswing.cli.main import app


def play(recipe: Path, typed: str, *args: str) -> Result:
    return CliRunner().invoke(app, ["play", str(recipe), *args], input=typed)


def test_the_question_the_tool_result_and_the_reward_are_shown(echo: Path):
    result = play(echo, "look\nlima-0-0\n")
    assert result.exit_code == 0, result.output
    shown = result.stdout
    assert shown.index("Say lima-0-0.") < shown.index("you> look") < shown.index("[look]\nlima-0-0")
    assert "reward   1.5" in shown  # exact_match 1 + 0.5 * f1 1
    assert "exact_match: 1  (weight 1)" in shown and "f1: 1  (weight 0.5)" in shown
    assert "accepted lima-0-0" in shown and "after 2 turns, 1 tool calls" in shown


def test_a_wrong_answer_is_worth_what_the_rubric_says(echo: Path):
    result = play(echo, "lima-0-1\n")
    assert "reward   0\n" in result.stdout and "answer   lima-0-1" in result.stdout


def test_split_seed_index_and_overrides_choose_the_task(echo: Path):
    shown = play(echo, "x\n", "--split", "dev", "--seed", "4", "--task-index", "1", "env.args.word=oslo").stdout
    assert "Say oslo-4-1." in shown


def test_the_expert_can_take_turns(echo: Path):
    shown = play(echo, "/expert\n/expert\n").stdout
    assert "expert> look" in shown and "expert> lima-0-0" in shown and "reward   1.5" in shown


def test_the_expert_may_be_absent(echo: Path):
    result = play(echo, "/expert\nlima-0-0\n", "env.args.has_expert=false")
    assert "no expert" in result.stdout and "reward   1.5" in result.stdout


def test_a_turn_may_have_several_lines(echo: Path):
    assert "answer   lima\n0" in play(echo, "lima\\\n0\n").stdout


def test_one_expert_plays_the_whole_episode(echo: Path):
    """An expert may remember what it did: here one that looks twice before it answers."""
    source = Path("echo_env.py").read_text()
    remembers = "turns = iter(['look', 'look', task.gold[0]])\n        return lambda messages: next(turns)"
    kept, _ = source.split("return lambda messages: task", 1)
    rest = source[source.index("class Taskless") :]
    Path("echo_env.py").write_text(f"{kept}{remembers}\n\n\n{rest}")
    assert "after 3 turns, 2 tool calls" in play(echo, "/expert\n/expert\n/expert\n").stdout


def test_a_task_number_beyond_any_stream_is_refused(echo: Path):
    assert play(echo, "", "--task-index", "99999999999999999999").exit_code == 2


@pytest.mark.parametrize("typed", ["", "look\n", "/quit\n", "\n\n"])
def test_the_end_of_the_input_stops_cleanly(echo: Path, typed: str):
    result = play(echo, typed)
    assert result.exit_code == 0
    assert "Stopped before the end: nothing is scored." in result.stdout and "reward" not in result.stdout


def test_ctrl_c_stops_cleanly(echo: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupt() -> str | None:
        raise KeyboardInterrupt

    monkeypatch.setattr("upswing.cli.play.ask_terminal", interrupt)
    result = play(echo, "")
    assert result.exit_code == 130 and "nothing is scored" in result.stdout


def test_a_broken_environment_is_no_reward(echo: Path):
    result = play(echo, "look\n", "env.args.broken=true")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: the environment broke (OSError: the disk is gone)")
    assert "reward" not in result.stdout


def test_an_environment_that_breaks_in_close_is_no_reward_either(echo: Path):
    source = Path("echo_env.py").read_text()
    close = "    def close(self):\n        raise OSError('still gone')\n\n    def reset("
    Path("echo_env.py").write_text(source.replace("    def reset(", close, 1))
    result = play(echo, "lima-0-0\n")
    assert result.exit_code == 1 and result.stderr.startswith("error: the environment broke (OSError: still gone)")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--task-index", "9"], "fewer train tasks"),
        (["--split", "tset"], "allowed: train, dev, test"),
        (["env.args.wrod=x"], "did you mean 'word'?"),
        (["env=echo_env.py:Taskless"], "dataset"),
    ],
)
def test_bad_input_is_one_line(echo: Path, args: list[str], words: str):
    result = play(echo, "", *args)
    assert result.exit_code == 2 and words in result.stderr and result.stderr.count("\n") == 1


def test_a_new_session_forgets_the_old_one(echo: Path):
    """Where an environment rewrites the conversation, the expert sees what the agent would."""
    shown = play(echo, "/expert\n" * 8, "env=memory").stdout
    assert "after 8 turns" in shown and "reward   1.5" in shown
