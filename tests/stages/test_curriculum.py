"""The curriculum in the loop: what is sometimes solved comes more often, and a kill changes nothing."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from upswing.errors import UpswingError
from upswing.recipe import recipe_from
from upswing.stages.rl import _success
from upswing.trajectory.store import TrajectoryStore
from upswing.trajectory.types import Message, Score, Task

from .test_algorithms import TwoTurns, run
from .test_safeguards import killed_after, same, small

KINDS = ("always", "never", "open")


class Kinds(TwoTurns):
    """Tasks of three kinds in turn."""

    def tasks(self, split: str, seed: int):
        for number in range(10_000):
            kind = KINDS[number % 3]
            yield Task(id=f"{number}", messages=(Message(role="user", content=f"say {kind}"),), tags={"kind": kind})


def solved(messages: tuple[Message, ...]) -> float:
    asked = next(m.content for m in messages if m.role == "user").removeprefix("say ")
    return {"always": 1.0, "never": 0.0}.get(asked, float(len(messages[-1].content) % 2))


def costly() -> float:
    return -1.0


def chosen(verifiers: tuple[str, ...] = ("solved",), **rl: Any) -> Any:
    one = small(steps=12, tasks_per_step=3, group_size=4, **rl)
    here = "tests.stages.test_curriculum"
    return recipe_from({**one.to_dict(), "env": f"{here}:Kinds", "verifiers": [f"{here}:{name}" for name in verifiers]})


def kinds(out: Path) -> list[str]:
    return [s.trajectory.task.tags["kind"] for s in TrajectoryStore(out / "trajectories").read("rl")][::4]


def test_what_is_sometimes_solved_comes_more_often_also_after_a_kill(tmp_path: Path) -> None:
    one = chosen(curriculum={})
    run(one, tmp_path / "whole")
    played = kinds(tmp_path / "whole")
    assert Counter(played[9:])["open"] > 0.6 * len(played[9:])  # a third without a curriculum
    out = killed_after(tmp_path / "whole", tmp_path / "killed", 5)
    run(one, out, resume=True)
    assert kinds(out) == played and same(tmp_path / "whole", out)


def test_a_penalty_that_leaves_no_reward_positive_is_no_part_of_success(tmp_path: Path) -> None:
    run(chosen(("solved", "costly"), curriculum={}), tmp_path / "run")
    played = kinds(tmp_path / "run")
    assert Counter(played[9:])["open"] > 0.6 * len(played[9:])


def test_success_is_the_scores_that_the_safeguards_look_at() -> None:
    def success(paid: dict[str, float], *components: dict[str, float | None]) -> float | None:
        scores = [Score(value=-0.5, components=one) for one in components]
        return _success(SimpleNamespace(trajectories=[SimpleNamespace(score=one) for one in scores]), paid)  # type: ignore

    mixed = {"strict_match": 1.0, "a": 0.0, "b": 1.0}
    assert success({"strict_match": 1.0}, mixed, {**mixed, "strict_match": 0.0}) == 0.5
    assert success({"a": 1.0, "b": 3.0}, mixed) == 0.75, "of what there is to earn"
    assert success({"a": 1.0}, {"a": None}, {"a": 1.0}) == 1.0 and success({"a": 1.0}, {"a": None}) is None
    assert success({}, mixed) == 0.0, "a reward without such a score"


def test_a_tag_that_tasks_lack_is_named_with_theirs(tmp_path: Path) -> None:
    with pytest.raises(UpswingError, match=r"rl\.curriculum\.tag: task '\d+' has no tag 'level'; its tags: kind"):
        run(chosen(curriculum={"tag": "level"}), tmp_path / "run")
