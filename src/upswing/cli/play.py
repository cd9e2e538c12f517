"""`upswing play RECIPE`: a person plays the environment in the terminal and sees the reward and why."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from upswing.cli.common import EXIT_FAILED, fail, user_command
from upswing.errors import ConfigError
from upswing.recipe import Recipe, load_recipe

if TYPE_CHECKING:
    from upswing.envs.base import Environment, Observation
    from upswing.trajectory.types import Message, Score, Task, ToolRecord
    from upswing.verify import Rubric
    from upswing.world import World

HELP = "Type your turn on one line (end a line with \\ to go on). /expert: let the expert take it. /quit: stop."


@user_command
def play_command(
    recipe: Annotated[Path, typer.Argument(help="A recipe or run folder.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes to the recipe, such as env.args.k=1.")
    ] = None,
    split: Annotated[str, typer.Option(help="Split of the task: train, dev or test.")] = "train",
    seed: Annotated[int, typer.Option(help="Seed of the task stream.")] = 0,
    task_index: Annotated[int, typer.Option(min=0, max=10**6, help="Which task of the stream.")] = 0,
) -> None:
    """Play a task yourself, as the agent would, and see the reward and why."""
    config = load_recipe(recipe, overrides or [])
    from upswing.world import build_world

    world = build_world(config)
    (task,) = find_tasks(world, config, split, seed, 1, skip=task_index)
    game = Game(env=world.make_env(), task=task, seed=seed, ask=ask_terminal, say=typer.echo)
    try:
        broke = asyncio.run(game.play())
        if broke:
            fail(f"the environment broke ({broke}); such a trajectory is errored and never scored", EXIT_FAILED)
        if game.last is None or not game.last.done:
            typer.echo("\nStopped before the end: nothing is scored.")
            return
        show_result(asyncio.run(game.score(world.rubric)), game, config)
    except KeyboardInterrupt:
        typer.echo("\nStopped before the end: nothing is scored.")
        raise typer.Exit(130) from None


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


@dataclass(kw_only=True)
class Game:
    """One episode with a person as the agent."""

    env: Environment
    task: Task
    seed: int
    ask: Callable[[], str | None]
    say: Callable[[str], Any]
    messages: list[Message] = field(default_factory=list)
    records: list[ToolRecord] = field(default_factory=list)
    last: Observation | None = None
    turns: int = 0
    env_reward: float = 0.0
    state: dict[str, Any] = field(default_factory=dict)
    policy: Callable[[tuple[Message, ...]], str] | None = None
    """The expert, once it was asked: one for the whole episode, as in an `sft` stage."""

    async def play(self) -> str | None:
        """Until the end of the episode or of the input. Returns what broke in the environment, or None."""
        try:
            try:
                await self._episode()
            finally:
                await call(self.env.close)
        except ConfigError:
            raise
        except Exception as problem:
            return f"{type(problem).__name__}: {problem}"
        return None

    async def _episode(self) -> None:
        from upswing.envs.base import AssistantMessage
        from upswing.trajectory.types import Message

        self._observe(await call(self.env.reset, self.task, self.seed))
        self.say(f"\n{HELP}")
        while self.last is not None and not self.last.done:
            text = self._turn()
            if text is None:
                return
            self.messages.append(Message(role="assistant", content=text))
            self.turns += 1
            self._observe(await call(self.env.step, AssistantMessage(content=text)))
        self.state = {**self.env.state(), "env_reward": self.env_reward}

    def _observe(self, observation: Observation) -> None:
        self.last = observation
        self.messages = [*([] if observation.rewrite else self.messages), *observation.messages]
        self.records.extend(observation.tool_records)
        self.env_reward += observation.reward
        for message in observation.messages:
            self.say(f"\n[{message.name or message.role}]\n{message.content}")
        for tool in observation.tools:
            self.say(f"\n[tool] {json.dumps(tool.get('function', tool), ensure_ascii=False)}")

    def _turn(self) -> str | None:
        """The next turn's text; None when the person stops."""
        while True:
            self.say("")
            text = self.ask()
            if text is None or text.strip() == "/quit":
                return None
            if text.strip() != "/expert":
                if text.strip():
                    return text
                continue
            try:
                self.policy = self.policy or self.env.expert(self.task, random.Random(self.seed))
                text = self.policy(tuple(self.messages))
                self.say(f"expert> {text}")
                return text
            except NotImplementedError:
                self.say("This environment has no expert.")

    async def score(self, rubric: Rubric) -> Score:
        """The rubric's score of the finished episode."""
        from upswing.trajectory.types import Outcome, StopReason, Trajectory
        from upswing.verify.base import Episode

        assert self.last is not None and self.last.done
        reason = self.last.stop_reason or StopReason.ENV_DONE
        ended = reason in (StopReason.ANSWERED, StopReason.ENV_DONE)
        trajectory = Trajectory(
            id=self.task.id,
            task=self.task,
            branches=(),
            messages=tuple(self.messages),
            outcome=Outcome.COMPLETED if ended else Outcome.TRUNCATED,
            stop_reason=reason,
            answer=self.last.answer,
            tool_records=tuple(self.records),
            num_turns=self.turns,
            state=self.state,
        )
        return await rubric.score(Episode.of(trajectory))


async def call(method: Callable[..., Any], *args: Any) -> Any:
    """Call a plain or async method."""
    result = method(*args)
    return await result if inspect.isawaitable(result) else result


def show_result(score: Score, game: Game, recipe: Recipe) -> None:
    """The reward, what it is made of, and the accepted answers."""
    assert game.last is not None
    lines = [f"\nreward   {'could not be scored' if score.value is None else f'{score.value:g}'}"]
    weights = {verifier.name.rpartition(":")[2]: verifier.weight for verifier in recipe.verifiers}
    for name, component in score.components.items():
        shown = "could not score" if component is None else f"{component:g}"
        weight = f"  (weight {weights[name]:g})" if name in weights else ""
        lines.append(f"  {name}: {shown}{weight}")
    if score.reason:
        lines.append(f"why      {score.reason}")
    lines.append(f"answer   {'none given' if game.last.answer is None else game.last.answer}")
    if game.task.gold:
        lines.append(f"accepted {' | '.join(game.task.gold)}")
    ended = game.last.stop_reason or "env_done"
    lines.append(f"ended    {ended} after {game.turns} turns, {len(game.records)} tool calls")
    typer.echo("\n".join(lines))
