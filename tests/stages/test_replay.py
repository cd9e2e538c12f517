"""A server or tool that is down for a while costs no task; one that stays down is named, and holds up nobody long."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pytest

from upswing.envs.base import Observation
from upswing.recipe import recipe_from
from upswing.rollout.simulate import run_virtual
from upswing.stages.replay import Replays
from upswing.trajectory.store import TrajectoryStore
from upswing.trajectory.types import Group, Message, Outcome, StopReason, Task, Trajectory
from upswing.view.run_folder import read_json_lines

from .test_algorithms import TwoTurns, recipe, run


def group(task: str, outcome: Outcome, attempt: int) -> Group:
    one = Task(id=task, messages=(Message(role="user", content="?"),))
    fields: dict[str, Any] = {"task": one, "branches": (), "messages": one.messages, "outcome": outcome}
    error = f"ConnectError: port {8000 + attempt}" if outcome is Outcome.ERRORED else None
    played = Trajectory(id=f"{task}/{attempt}", stop_reason=StopReason.ERROR, error=error, **fields)
    return Group(task=one, trajectories=(played,))


def test_it_waits_until_something_works_and_then_gives_up_for_all() -> None:
    """By the clock: what is up at 3 s is played a third time at 1 + 4 s; what is never up is given up after 21 s, and
    the next one at once, until something works again."""
    heard: list[tuple[str, ...]] = []

    async def main() -> list[Any]:
        replays, found, clock = Replays(warn=lambda *words: heard.append(words)), [], asyncio.get_running_loop().time

        async def play(task: str, up_at: float) -> None:
            async def once(broken: int) -> Group:
                return group(task, Outcome.COMPLETED if clock() - start >= up_at else Outcome.ERRORED, broken)

            start = clock()
            one = await replays.group(once)
            found.append((task, clock() - start, [t.outcome is Outcome.ERRORED for t in one.trajectories]))

        await play("slow", 3.0)
        for task, up_at in (("dead", 1e9), ("next", 1e9), ("fine", 0.0), ("later", 3.0)):
            await play(task, up_at)
        return found

    assert run_virtual(main()) == [
        ("slow", 5.0, [True, True, False]),
        ("dead", 21.0, [True] * 4),
        ("next", 0.0, [True]),
        ("fine", 0.0, [False]),
        ("later", 5.0, [True, True, False]),
    ]
    assert [title for title, *_ in heard] == ["a task broke", "a task broke", "a task was given up", "a task broke"]
    assert heard[2][1] == (
        "task 'dead': 4 of 4 trajectories errored or have no score, 4 of them: ConnectError: port 8000"
    )


class Down(TwoTurns):
    """Each task's first attempts meet a server that is down."""

    attempts: ClassVar[Counter[str]] = Counter()
    for_attempts: ClassVar[int] = 4  # a whole group of two, each tried twice

    def reset(self, task: Task, seed: int) -> Observation:
        self.attempts[task.id] += 1
        if self.attempts[task.id] <= self.for_attempts:
            raise OSError("the server is down")
        return super().reset(task, seed)


@pytest.mark.parametrize("dead", [False, True])
def test_no_task_is_lost_to_an_outage_and_what_stays_down_is_named(
    dead: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Replays, "waits_s", (0.0, 0.0, 0.0))
    monkeypatch.setattr(Down, "attempts", Counter(train0=-1))  # a run looks at its template with the first task
    monkeypatch.setattr(Down, "for_attempts", 10**9 if dead else 4)
    rl = {"steps": 2, "tasks_per_step": 2, "group_size": 2, "early_warning": {"steps": 1}}
    rows = run(recipe_from({**recipe(rl).to_dict(), "env": f"{__name__}:Down"}), tmp_path)
    found = {row["title"]: row for row in read_json_lines(tmp_path / "findings.jsonl")}
    played = [stored.trajectory for stored in TrajectoryStore(tmp_path / "trajectories").read("rl")]
    if not dead:
        worked = Counter(t.task.id for t in played if t.outcome is not Outcome.ERRORED)
        assert worked == {f"train{number}": 2 for number in range(4)}
        assert [row["num_errored"] for row in rows] == [8, 8] and found.keys() >= {"a task broke"}
        assert "every trajectory broke" not in found
        return
    assert {Down.attempts[f"train{number}"] for number in (2, 3)} == {4}, "it waits again for each task"
    assert max(Down.attempts.values()) == 16
    for title in ("a task was given up", "every trajectory broke"):
        assert "OSError: the server is down" in found[title]["evidence"], title
    noted = (tmp_path / "events.log").read_text()
    assert "rl step 2: 8 of 8 trajectories errored or have no score, 8 of them: OSError: the server is down" in noted
