"""Verifiers of a whole group: judged once it is finished, combined with the others, and by `upswing rescore` too."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from upswing.cli.main import app
from upswing.engine.base import Sampling
from upswing.engine.scripted import ScriptedEngine
from upswing.envs.base import AssistantMessage, Environment, Observation
from upswing.errors import ConfigError
from upswing.models.tiny import tiny_tokenizer
from upswing.recipe import load_recipe
from upswing.rollout.collect import Rollouts
from upswing.rollout.limits import Limits
from upswing.trajectory.render import ChatRenderer
from upswing.trajectory.store import TrajectoryStore
from upswing.trajectory.types import Group, Message, Outcome, Score, StopReason, Task, Trajectory
from upswing.verify import Episode, Rubric

TASKS = [Task(id=name, messages=(Message(role="user", content="Number?"),), gold=("3",)) for name in ("t", "u")]


class Parrot(Environment):
    """What is said is the answer; `raise` breaks it."""

    async def reset(self, task: Task, seed: int) -> Observation:
        return Observation(messages=task.messages)

    async def step(self, message: AssistantMessage) -> Observation:
        if message.content == "raise":
            raise OSError("disk is gone")
        return Observation(done=True, stop_reason=StopReason.ANSWERED, answer=message.content)


class Ranks:
    """Place of the answer, as a number, in its group: 0 for the lowest, 1 for the highest."""

    def __init__(self) -> None:
        self.seen: list[list[str | None]] = []

    async def __call__(self, episode: Episode) -> Score:
        return Score(value=None, reason="no group")

    async def score_group(self, episodes: list[Episode]) -> list[Score]:
        answers = [episode.answer or "" for episode in episodes]
        self.seen.append([*answers])
        if "hang" in answers:
            await asyncio.sleep(60)
        if "boom" in answers:
            raise ZeroDivisionError("of a tie")
        order = sorted(answers)
        return [Score(value=order.index(a) / (len(order) - 1), components={"place": order.index(a)}) for a in answers]


def exact(answer: str | None, gold: tuple[str, ...]) -> bool:
    return answer in gold


async def play(rubric: Rubric, *scripts: list[str], **limits: Any) -> list[Group]:
    """A group a script, whose lines are its trajectories' answers."""
    tokenizer = tiny_tokenizer()
    renderer = ChatRenderer(tokenizer)

    def say(prompt: Any, sampling: Sampling, session: str | None) -> str:
        row, _, place = (session or "").rpartition("/")[2].partition("-")
        return scripts[int(row)][int(place)]

    parts = Rollouts(
        make_env=Parrot,
        rubric=rubric,
        renderer=renderer,
        end_tokens=(renderer.end_of_turn_id(),),
        limits=Limits(**{"turn_tokens": 32, "context_tokens": 512, **limits}),
        engine=ScriptedEngine(say, tokenizer=tokenizer, end_token=renderer.end_of_turn_id()),
        max_retries=0,
    )
    return await parts.groups(TASKS[: len(scripts)], size=len(scripts[0]), sampling=Sampling(), seed=0)


def rewards(group: Group) -> list[float | None]:
    return [trajectory.reward for trajectory in group.trajectories]


async def test_each_group_is_ranked_by_itself_and_added_to_the_rest() -> None:
    ranks = Ranks()
    rubric = Rubric([("exact", exact, 1.0), ("ranks", ranks, 0.5), ("seen", ranks, 0.0)])
    one, two = await play(rubric, ["1", "3", "2"], ["3", "9", "5"])
    assert rewards(one) == [0.0, 1.5, 0.25] and rewards(two) == [1.0, 0.5, 0.25]
    assert sorted(map(tuple, ranks.seen)) == sorted([("1", "3", "2"), ("3", "9", "5")] * 2)
    score = one.trajectories[1].score
    assert score is not None and score.reason == ""
    assert score.components == {"exact": 1.0, "ranks": 1.0, "seen": 1.0, "ranks.place": 2, "seen.place": 2}


async def test_gates_and_weights_say_the_reward_for_gdpo_too() -> None:
    rubric = Rubric(
        [("ranks", Ranks(), 2.0), ("odd", exact, -1.0), ("gate", lambda answer: answer != "9", 0.0)], gates=["gate"]
    )
    (group,) = await play(rubric, ["1", "3", "9"])
    assert rewards(group) == [0.0, 2 * 0.5 - 1.0, 0.0]
    for trajectory in group.trajectories:
        assert trajectory.score is not None
        told = sum(weight * (trajectory.score.components[name] or 0.0) for name, weight in rubric.weights.items())
        assert trajectory.reward == told


async def test_a_group_verifier_can_be_the_gate() -> None:
    (group,) = await play(Rubric([("exact", exact, 1.0), ("gate", Ranks(), 0.0)], gates=["gate"]), ["3", "1", "5"])
    assert rewards(group) == [0.5, 0.0, 0.0]


async def test_errored_trajectories_take_no_part() -> None:
    ranks = Ranks()
    (group,) = await play(Rubric([("ranks", ranks, 1.0)]), ["1", "raise", "3", "2"])
    assert ranks.seen == [["1", "3", "2"]] and rewards(group) == [0.0, None, 1.0, 0.5]
    assert group.trajectories[1].outcome is Outcome.ERRORED and group.trajectories[1].score is None


@pytest.mark.parametrize(("answer", "why"), [("hang", "longer than 0.2 s"), ("boom", "ZeroDivisionError: of a tie")])
async def test_a_group_that_can_not_be_judged_has_no_reward_and_harms_no_other(answer: str, why: str) -> None:
    scripts = (["1", "3", answer], ["1", "3", "2"])
    for weight, wanted in ((1.0, [None] * 3), (0.0, [0.0, 1.0, 0.0])):  # measured only: the reward stands
        rubric = Rubric([("exact", exact, 1.0), ("ranks", Ranks(), weight)])
        broken, fine = await play(rubric, *scripts, scoring_timeout_s=0.2)
        assert rewards(broken) == wanted and None not in rewards(fine)
        score = broken.trajectories[0].score
        assert score is not None and score.components == {"exact": 0.0, "ranks": None} and why in score.reason


async def test_too_few_scores_are_no_scores() -> None:
    class Short(Ranks):
        async def score_group(self, episodes: list[Episode]) -> list[Score]:
            return [Score(value=1.0)]

    (group,) = await play(Rubric([("ranks", Short(), 1.0)]), ["1", "2"])
    assert rewards(group) == [None, None]
    assert "gave 1 scores for 2 episodes" in (group.trajectories[0].score or Score(value=0)).reason


async def test_what_the_others_could_not_judge_stays_unjudged() -> None:
    def picky(answer: str) -> float:
        return {"1": 1.0, "3": 0.0}[answer]

    (group,) = await play(Rubric([("picky", picky, 1.0), ("ranks", Ranks(), 1.0)]), ["1", "2", "3"])
    assert rewards(group) == [1.0, None, 1.0]
    assert (group.trajectories[1].score or Score(value=0)).reason == "picky: KeyError: '2'"


def test_rescoring_ranks_the_groups_again(echo: Path) -> None:
    (echo.parent / "ranks.py").write_text(
        "class Longest:\n"
        "    def __call__(self, episode):\n        return None\n"
        "    async def score_group(self, episodes):\n"
        "        best = max(len(e.answer) for e in episodes)\n"
        "        return [float(len(e.answer) == best) for e in episodes]\n"
    )
    run = echo.parent / "run"
    task = Task(id="a", messages=(Message(role="user", content="Say."),), gold=("x",))
    # 70 groups, so that some stand where a batch of trajectories would end; the first two are of one task in one step.
    names = [(f"a/5/{row}-{place}", "x" * (place + 1)) for row in range(70) for place in range(3)]
    played = [
        Trajectory(
            id=name,
            task=task,
            branches=(),
            messages=task.messages,
            outcome=Outcome.COMPLETED,
            stop_reason=StopReason.ANSWERED,
            answer=answer,
            score=Score(value=0.0),
        )
        for name, answer in names
    ]
    TrajectoryStore(run / "trajectories").append("rl", 1, played)
    (run / "recipe.yaml").write_text(load_recipe(echo).dump())
    out = echo.parent / "changed.jsonl"
    result = CliRunner().invoke(
        app, ["rescore", str(run), f"verifiers=[{echo.parent}/ranks.py:Longest]", "--out", str(out)]
    )
    assert result.exit_code == 0, result.output
    changed = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["id"], row["after"]) for row in changed] == [(f"a/5/{row}-2", 1.0) for row in range(70)]


def test_a_reward_that_needs_a_group_refuses_groups_of_one() -> None:
    rubric = Rubric([("exact", exact, 1.0), ("ranks", Ranks(), 0.5)])
    with pytest.raises(ConfigError, match=r"samples: got 1, but verifier 'ranks' compares .*; allowed: 2 and more"):
        rubric.check_group(1, "samples")
    with pytest.raises(ConfigError, match="'ranks'"):
        Rubric([("exact", exact, 1.0), ("ranks", Ranks(), 0.0)], gates=["ranks"]).check_group(1, "samples")
    rubric.check_group(2, "samples")
    Rubric([("exact", exact, 1.0), ("ranks", Ranks(), 0.0)]).check_group(1, "samples")
