"""`upswing rescore`: stored trajectories judged anew; nothing sampled, nothing written into the run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from upswing.cli.main import app
from upswing.recipe import load_recipe
from upswing.trajectory.store import TrajectoryStore
from upswing.trajectory.types import Message, Outcome, Score, StopReason, Task, Trajectory

VERIFIERS = """
def loud(answer, gold):
    return answer in gold or (answer or "").lower() in gold

def breaks(answer):
    raise RuntimeError("the judge is down")

async def hangs(answer):
    import asyncio
    await asyncio.sleep(60)
"""


def upswing(*args: str | Path) -> Result:
    return CliRunner().invoke(app, list(map(str, args)))


def attempt(name: str, answer: str | None, reward: float | None, outcome: Outcome = Outcome.COMPLETED) -> Trajectory:
    task = Task(id=name.partition("/")[0], messages=(Message(role="user", content="Say lima."),), gold=("lima",))
    return Trajectory(
        id=name,
        task=task,
        branches=(),
        messages=(*task.messages, Message(role="assistant", content=answer or "")),
        outcome=outcome,
        stop_reason=StopReason.ERROR if outcome is Outcome.ERRORED else StopReason.ANSWERED,
        answer=answer,
        score=None if outcome is Outcome.ERRORED else Score(value=reward),
    )


@pytest.fixture
def run(echo: Path) -> Path:
    folder = echo.parent / "run"
    (echo.parent / "judges.py").write_text(VERIFIERS)
    store = TrajectoryStore(folder / "trajectories")
    store.append("rl", 1, [attempt("a/0", "lima", 1.0), attempt("a/1", "Lima", 0.0), attempt("a/2", "oslo", 0.0)])
    store.append("rl", 2, [attempt("b/0", "LIMA", 0.0), attempt("b/1", None, None, Outcome.ERRORED)])
    store.append("test", 0, [attempt("c/0", "lima", 0.0)])
    (folder / "recipe.yaml").write_text(load_recipe(echo).dump())
    return folder


def tables(result: Result) -> list[dict]:
    assert result.exit_code == 0, result.output
    events = [json.loads(line) for line in result.stdout.splitlines()]
    return [event for event in events if event["event"] == "table"]


def by_stage(result: Result) -> dict[str, list[str]]:
    return {row[0]: row[1:] for row in tables(result)[0]["rows"]}


def test_a_laxer_verifier_shows_what_would_have_risen(run: Path, tmp_path: Path):
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    out = tmp_path / "changed.jsonl"
    result = upswing("rescore", run, f"verifiers=[{run.parent}/judges.py:loud]", "--stage", "rl", "--out", out)
    # Of five stored, one errored; two rose; the groups' rewards differed in one of two, and still do.
    assert by_stage(result) == {"rl": ["5", "0.2500", "0.7500", "2", "0", "1", "1", "1", "1"]}
    changed = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["id"], row["before"], row["after"]) for row in changed] == [("a/1", 0.0, 1.0), ("b/0", 0.0, 1.0)]
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_every_stage_by_default_and_the_changes_are_shown(run: Path):
    result = upswing("rescore", run, "verifiers=[strict_match]")
    assert by_stage(result)["test"] == ["1", "0.0000", "1.0000", "1", "0", "0", "0", "0", "0"]
    (example,) = tables(result)[1]["rows"]
    assert example[0] == "test 0: c/0" and example[3:5] == ["0", "1"]


@pytest.mark.parametrize(("judge", "why"), [("breaks", "the judge is down"), ("hangs", "took longer than 0.2 s")])
def test_a_verifier_that_breaks_is_not_a_zero(run: Path, judge: str, why: str):
    text = (run / "recipe.yaml").read_text()
    (run / "recipe.yaml").write_text(re.sub(r"scoring_timeout_s: \S+", "scoring_timeout_s: 0.2", text))
    result = upswing("rescore", run, f"verifiers=[{run.parent}/judges.py:{judge}]", "--stage", "rl")
    assert by_stage(result)["rl"][:2] == ["5", "0.2500"] and by_stage(result)["rl"][2] == "-"
    assert by_stage(result)["rl"][6] == "5"  # the errored one was never judged, then or now
    assert all(row[4] == "not scored" and why in row[5] for row in tables(result)[1]["rows"])


def test_a_weight_that_changes_over_steps_is_that_of_the_step(run: Path):
    """RL's step s is stored as s + 1: its first two, 0 and 1, had weights 1 and 2; other stages have the last, 3."""
    ramp = "verifiers=[{name: strict_match, weight: 3.0, weight_from: 1.0, weight_steps: 2}]"
    store = TrajectoryStore(run / "trajectories")
    for step in (1, 2, 3, 9):
        store.append("rl", step, [attempt("a/0", "lima", 0.0)])
    rows = tables(upswing("rescore", run, ramp))[1]["rows"]
    assert {row[0]: row[4] for row in rows} == {
        "rl 1: a/0": "1",
        "rl 2: a/0": "2",
        "rl 3: a/0": "3",
        "rl 9: a/0": "3",
        "test 0: c/0": "3",
    }


def test_a_task_that_a_step_holds_twice_makes_two_groups(run: Path):
    store = TrajectoryStore(run / "trajectories")
    names = [("a-b/7/0-0", "lima"), ("a-b/7/0-1", "lima"), ("a-b/7/1-0", "oslo"), ("a-b/7/1-1", "oslo")]
    store.append("rl", 3, [attempt(name, answer, float(answer == "lima")) for name, answer in names])
    for step in (1, 2):
        (run / "trajectories" / f"rl-00000{step}.jsonl.gz").unlink()
    assert by_stage(upswing("rescore", run, "verifiers=[strict_match]", "--stage", "rl"))["rl"][-2:] == ["0", "0"]


def test_an_unchanged_rubric_changes_nothing(run: Path):
    (run / "trajectories" / "test-000000.jsonl.gz").unlink()
    assert len(tables(upswing("rescore", run, "verifiers=[strict_match]"))) == 1


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["env.name=lookup"], "'env.name=lookup' changes nothing here"),
        (["--stage", "rll"], "did you mean 'rl'?"),
        (["verifiers=[strict_mach]"], "did you mean 'strict_match'?"),
        (["--out", "no/where.jsonl"], "no folder 'no'"),
    ],
)
def test_what_it_refuses(run: Path, args: list[str], words: str):
    result = upswing("rescore", run, *args)
    assert result.exit_code == 2 and words in result.stderr and result.stderr.count("\n") == 1


def test_a_run_without_trajectories_and_what_is_no_run(run: Path):
    for path in (run / "trajectories").iterdir():
        path.unlink()
    assert "has no stored trajectories" in upswing("rescore", run).stderr
    assert "isn't a run folder" in upswing("rescore", run / "trajectories").stderr
