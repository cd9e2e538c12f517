"""`upswing play RECIPE`: a person plays the environment in the terminal and sees the reward and why."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from upswing.cli.common import EXIT_FAILED, EXIT_INTERRUPTED, Overrides, UnsafeLocal, fail, recipe_of, user_command
from upswing.errors import ConfigError
from upswing.recipe import Recipe

if TYPE_CHECKING:
    from upswing.envs.base import Environment, Observation
    from upswing.trajectory.types import Message, Score, Task
    from upswing.verify import Episode
    from upswing.world import World

HELP = "Type your turn on one line (end a line with \\ to go on). /expert: let the expert take it. /quit: stop."


class Stopped(Exception):
    """The person stopped before the end."""


@user_command
def play_command(
    recipe: Annotated[Path, typer.Argument(help="A recipe or run folder.")],
    overrides: Overrides = None,
    split: Annotated[str, typer.Option(help="Split of the task: train, dev or test.")] = "train",
    seed: Annotated[int, typer.Option(help="Seed of the task stream.")] = 0,
    task_index: Annotated[int, typer.Option(min=0, max=10**6, help="Which task of the stream.")] = 0,
    unsafe_local: UnsafeLocal = False,
) -> None:
    """Play a task yourself, as the agent would, and see the reward and why."""
    config = recipe_of(recipe, overrides, unsafe_local=unsafe_local)
    from upswing.audit import scripted_episode
    from upswing.world import build_world

    world = build_world(config)
    (task,) = find_tasks(world, config, split, seed, 1, skip=task_index)
    env = world.make_env()
    typer.echo(f"\n{HELP}")
    try:
        episode = asyncio.run(scripted_episode(env, task, person(env, task, seed), seed, show=show))
    except (Stopped, KeyboardInterrupt) as stop:
        typer.echo("\nStopped before the end: nothing is scored.")
        if isinstance(stop, Stopped):
            return
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except ConfigError:
        raise
    except Exception as problem:
        broke = f"{type(problem).__name__}: {problem}"
        fail(f"the environment broke ({broke}); such a trajectory is errored and never scored", EXIT_FAILED)
    show_result(asyncio.run(world.rubric.score(episode)), episode, config)


def find_tasks(world: World, recipe: Recipe, split: str, seed: int, count: int, skip: int = 0) -> list[Task]:
    """Up to `count` tasks of the split's stream after the first `skip`. Raises ConfigError when there is none."""
    if split not in ("train", "dev", "test"):
        raise ConfigError(f"--split: got '{split}' (allowed: train, dev, test)")
    try:
        found = list(itertools.islice(world.tasks(split, seed), skip, skip + count))
    except NotImplementedError as problem:
        raise ConfigError(f"env: {problem}") from None
    if not found:
        index = f"--task-index: got {skip}, but there are fewer" if skip else "there are no"
        raise ConfigError(f"{index} {split} tasks of '{recipe.env.name}'")
    return found


def ask_terminal() -> str | None:
    """One turn from standard input; None at its end."""
    lines: list[str] = []
    try:
        while True:
            line = input("...> " if lines else "you> ")
            if not sys.stdin.isatty():
                typer.echo(line)
            lines.append(line.removesuffix("\\"))
            if line == lines[-1]:
                break
    except EOFError:
        pass
    return "\n".join(lines) if lines else None


def person(env: Environment, task: Task, seed: int) -> Callable[[tuple[Message, ...]], str]:
    """A person's turns. `/expert` gives one to the expert: the same for the whole episode, as in an `sft` stage.
    Raises Stopped."""
    policy: Callable[[tuple[Message, ...]], str] | None = None

    def turn(messages: tuple[Message, ...]) -> str:
        nonlocal policy
        while True:
            typer.echo("")
            text = ask_terminal()
            if text is None or text.strip() == "/quit":
                raise Stopped
            if text.strip() not in ("", "/expert"):
                return text
            if text.strip():
                try:
                    policy = policy or env.expert(task, random.Random(seed))
                    text = policy(messages)
                except NotImplementedError:
                    typer.echo("This environment has no expert.")
                else:
                    typer.echo(f"expert> {text}")
                    return text

    return turn


def show(seen: Observation) -> None:
    for message in seen.messages:
        typer.echo(f"\n[{message.name or message.role}]\n{message.content}")
    for tool in seen.tools:
        typer.echo(f"\n[tool] {json.dumps(tool.get('function', tool), ensure_ascii=False)}")


def show_result(score: Score, episode: Episode, recipe: Recipe) -> None:
    """The reward, what it is made of, and the accepted answers."""
    lines = [f"\nreward   {'could not be scored' if score.value is None else f'{score.value:g}'}"]
    weights = {verifier.name.rpartition(":")[2]: verifier.weight for verifier in recipe.verifiers}
    for name, component in score.components.items():
        shown = "could not score" if component is None else f"{component:g}"
        weight = f"  (weight {weights[name]:g})" if name in weights else ""
        lines.append(f"  {name}: {shown}{weight}")
    if score.reason:
        lines.append(f"why      {score.reason}")
    lines.append(f"answer   {'none given' if episode.answer is None else episode.answer}")
    if episode.gold:
        lines.append(f"accepted {' | '.join(episode.gold)}")
    calls = sum(bool(record.call.name) for record in episode.tool_records)
    lines.append(f"ended    {episode.stop_reason} after {episode.num_turns} turns, {calls} tool calls")
    typer.echo("\n".join(lines))
