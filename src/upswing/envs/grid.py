"""Grid: a small world of walls, a key and a locked door, walked one step a turn. Long episodes, one decision each."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from upswing.envs.base import Expert
from upswing.envs.generated import GeneratedEnv
from upswing.envs.tools import tool
from upswing.trajectory.types import Message, Task
from upswing.verify.options import Share

MOVES = {"north": (-1, 0), "south": (1, 0), "west": (0, -1), "east": (0, 1)}
MAX_BUMPS = 3
"""Steps into something shut that end an episode. Without this, a path that is the same in every world won up to 44 %
of the small ones by sliding along the walls; with it and ways of at least `size + 2` steps, fewer than 5 %."""
Place = tuple[int, int]


class Grid(GeneratedEnv):
    """`move(direction)` until the goal `G` is reached; `#` is wall, `K` the key, `D` a door that needs it.

    The agent sees the squares within `view` steps of it and nothing else (`view: 0`: everything). The episode ends at
    the goal, after `max_turns`, or with the third step into what is shut (a wall, the edge, the door without the key);
    the final state's `at_goal` says which. A turn's second step fails.

    Options: `size`, squares a side; `door_frac`, the share of worlds with a locked door; `expert_noise`, the chance of
    a random step of the expert, into nothing shut.
    """

    name = "grid"
    task_options = frozenset({"door_frac"})
    only_acts = True
    protocol = "tags"
    size: Annotated[int, Field(ge=5, le=20)] = 6
    view: Annotated[int, Field(ge=0, le=20)] = 0
    door_frac: Share = 0.5

    def enough_turns(self) -> int:
        """4 more than the world has squares, three times as many where it is seen in part."""
        return self.size**2 * (3 if self.view else 1) + 4

    def draw(self, rng: random.Random) -> Task:
        while (rows := _world(self.size, rng.random() < self.door_frac, rng)) is None:
            pass
        world = "\n".join(rows)
        text = "Find the goal G. # is wall, K a key, D a door that needs the key, ? not seen yet, A is you.\n"
        text += f"{MAX_BUMPS} steps into what is shut end it.\n"
        return self.make_task(
            world,
            text + _shown(rows, _find(rows, "A"), False, self.view),
            rows=list(rows),
            kind="door" if "D" in world else "open",
            start_state={"at_goal": False},
            final_state={"at_goal": True},
        )

    def start(self, task: Task) -> None:
        self._world: tuple[str, ...] = tuple(task.data["rows"])
        self._at, self._has_key, self._moved = _find(self._world, "A"), False, 0
        self._bumps = 0

    def final(self) -> Mapping[str, Any]:
        return {"at_goal": self._on("G"), "has_key": self._has_key}

    def is_done(self) -> bool:
        return self._on("G") or self._bumps == MAX_BUMPS

    def _on(self, mark: str) -> bool:
        return self._world[self._at[0]][self._at[1]] == mark

    @tool()
    async def move(self, direction: Literal["north", "south", "west", "east"]) -> str:
        """Go one step."""
        return self._move(direction)

    def _move(self, direction: str) -> str:
        if self._moved == self._turns:
            raise ValueError("one step a turn: look where you are first")
        self._moved = self._turns
        to = _step(self._at, direction)
        problem = _blocked(self._world, to, self._has_key)
        if problem:
            self._bumps += 1
            return f"{problem}\n{self._seen()}"
        self._at = to
        self._has_key = self._has_key or self._on("K")
        return ("You reached the goal.\n" if self._on("G") else "") + self._seen()

    def _seen(self) -> str:
        return _shown(self._world, self._at, self._has_key, self.view)

    def expert(self, task: Task, rng: random.Random) -> Expert:
        """Walks the shortest way over what it has seen: to the goal, else to the key, else to what is still hidden."""
        known: dict[Place, str] = {}

        def act(messages: tuple[Message, ...]) -> str:
            text = next(m.content for m in reversed(messages) if m.role in ("tool", "user"))
            has_key = "You have the key." in text
            rows = [line for line in text.splitlines() if line and set(line) <= set("#.AKDG?")]
            for r, line in enumerate(rows[-self.size :]):
                known.update({(r, c): mark for c, mark in enumerate(line) if mark != "?"})
            here = next(place for place, mark in known.items() if mark == "A")
            known[here] = "."
            if rng.random() < self.expert_noise:
                free = [way for way in MOVES if not _is_shut(known.get(_step(here, way), "#"), has_key)]
                return self.call("move", direction=rng.choice(free))
            way = _route(known, here, has_key, self.size)
            return self.call("move", direction=way[0] if way else "north")

        return act


def _shown(world: tuple[str, ...], at: Place, has_key: bool, view: int) -> str:
    """The world as the agent sees it from a place."""

    def mark(r: int, c: int) -> str:
        if view and abs(r - at[0]) + abs(c - at[1]) > view:
            return "?"
        there = world[r][c]
        return "A" if (r, c) == at else "." if there == "A" or (there == "K" and has_key) else there

    lines = ["".join(mark(r, c) for c in range(len(world))) for r in range(len(world))]
    return "\n".join([*lines, "You have the key."] if has_key else lines)


def _step(place: Place, direction: str) -> Place:
    return place[0] + MOVES[direction][0], place[1] + MOVES[direction][1]


def _find(rows: tuple[str, ...], mark: str) -> Place:
    return next((r, line.index(mark)) for r, line in enumerate(rows) if mark in line)


def _blocked(rows: tuple[str, ...], to: Place, has_key: bool) -> str:
    if not (0 <= to[0] < len(rows) and 0 <= to[1] < len(rows)):
        return "That is the edge of the world."
    mark = rows[to[0]][to[1]]
    if not _is_shut(mark, has_key):
        return ""
    return "There is a wall." if mark == "#" else "The door is locked; find the key."


def _is_shut(mark: str | None, has_key: bool) -> bool:
    return mark == "#" or (mark == "D" and not has_key)


def _ways(known: Mapping[Place, str], start: Place, has_key: bool, size: int) -> dict[Place, list[str]]:
    """The shortest way to every square that can be reached over known ones, the nearest first."""
    ways, queue = {start: list[str]()}, [start]
    for place in queue:
        for direction in MOVES if place in known else ():
            to = _step(place, direction)
            inside = 0 <= to[0] < size and 0 <= to[1] < size
            if inside and to not in ways and not _is_shut(known.get(to), has_key):
                ways[to] = [*ways[place], direction]
                queue.append(to)
    return ways


def _route(known: Mapping[Place, str], start: Place, has_key: bool, size: int) -> list[str]:
    """The shortest way to the goal, else the key, else the nearest square not seen yet; empty when there is none."""
    ways = _ways(known, start, has_key, size)
    wanted = ("G", None) if has_key else ("G", "K", None)
    found = (way for mark in wanted for place, way in ways.items() if place != start and known.get(place) == mark)
    return next(found, [])


def _world(size: int, door: bool, rng: random.Random) -> tuple[str, ...] | None:
    """A world whose goal is far enough to go, through the door when there is one; None when this one's isn't."""
    squares = [(r, c) for r in range(size) for c in range(size)]
    marks = {place: "#" if rng.random() < 0.35 else "." for place in squares}
    if door:  # a wall across, with a door in it; the key is on the agent's side
        across = rng.randrange(2, size - 2)
        marks |= {(across, c): "#" for c in range(size)}
        marks[across, rng.randrange(size)] = "D"
        above, below = ([p for p in squares if (p[0] < across) is side and p[0] != across] for side in (True, False))
        (agent, key), goal = rng.sample(above, 2), rng.choice(below)
        marks |= {agent: "A", key: "K", goal: "G"}
    else:
        agent, goal = rng.sample(squares, 2)
        key = agent
        marks |= {agent: "A", goal: "G"}
    first, then = _ways(marks, agent, False, size), _ways(marks, key, door, size)
    if key not in first or goal not in then or len(first[key]) + len(then[goal]) < size + 2 or (door and goal in first):
        return None
    return tuple("".join(marks[r, c] for c in range(size)) for r in range(size))
