"""A task whose attempts all broke is played again: a server or a tool that is down for a while costs no task."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from upswing.stages.rl_metrics import trouble
from upswing.trajectory.types import Group, Outcome, Trajectory


@dataclass(kw_only=True)
class Replays:
    """For all tasks of a stage."""

    warn: Callable[[str, str, str], None]
    """`warn(title, evidence, remedy)`."""
    waits_s: Sequence[float] = (1.0, 4.0, 16.0)
    """Before each further time; then the task is given up."""
    _told: int = 0
    """Of what hasn't worked since: 0 nothing, 1 that a task broke, 2 that one was given up."""

    async def group(self, play: Callable[[int], Awaitable[Group]]) -> Group:
        """`play(broken)`: the task's group, after so many broken attempts. They stay in it, so that they are counted,
        and are all there is of a task that is given up. Until something works again no other is waited for."""
        played: tuple[Trajectory, ...] = ()
        for wait_s in (*self.waits_s, None):
            group = await play(len(played))
            played += group.trajectories
            if any(t.outcome is not Outcome.ERRORED for t in group.trajectories):
                self._told = 0
                break
            if self._told == 2:
                break
            told, title, remedy = 1, "a task broke", f"It is played again, at most {len(self.waits_s)} times."
            if wait_s is None:
                told, title, remedy = 2, "a task was given up", "Mend what breaks: the run goes on without this task."
            if told > self._told:
                self.warn(title, f"task '{group.task.id}': {trouble(played)}", remedy)
                self._told = told
            if wait_s is not None:
                await asyncio.sleep(wait_s)
        return replace(group, trajectories=played)
