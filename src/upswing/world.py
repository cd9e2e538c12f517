"""From a recipe to where its tasks are played and scored: everything of it but the model. Torch isn't needed here."""

from __future__ import annotations

import itertools
import random
import time
import traceback
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from upswing.envs import Environment, check_disjoint, environment_factory
from upswing.envs.dataset import problem_of, tasks_from
from upswing.envs.pairs import read_pairs
from upswing.errors import ConfigError, UpswingError
from upswing.recipe import (
    DatasetSection,
    DistillStage,
    EvalStage,
    PairStage,
    Recipe,
    RlBase,
    RlStage,
    SftStage,
    Stage,
)
from upswing.seeding import derive_seed
from upswing.trajectory.types import Message, Task
from upswing.verify import Rubric, rubric_from

TaskStream = Callable[[str, int], Iterator[Task]]
"""`stream(split, seed)`: tasks of a split, the same for the same seed; `train` may be endless."""
SAMPLE = 64
"""So many of an environment's first tasks of a split are looked at before a run, if its stages take as many."""
SAMPLE_S = 2.0
"""No further one after that."""


@dataclass(frozen=True, kw_only=True)
class World:
    """Where tasks come from, are played and are scored."""

    make_env: Callable[[], Environment]
    """A new environment for every trajectory."""
    rubric: Rubric
    tasks: TaskStream
    sampled: Mapping[str, Sequence[Task]] = field(default_factory=dict)
    """The first tasks of the splits that stages take, as `preflight` saw them, which fills it."""


def build_world(recipe: Recipe) -> World:
    """Make the environment, rubric and tasks of a recipe. Raises ConfigError for what is wrong with any of them."""
    make_env = environment_factory(recipe.env.name, recipe.env.args)
    rubric = rubric_from(recipe.verifiers)
    if recipe.dataset is not None:
        judged = {split for stage in recipe.stages for split in _judged(stage)}
        return World(make_env=make_env, rubric=rubric, tasks=_dataset(recipe.dataset, recipe.env.name, rubric, judged))
    with _in_one_line(recipe, "__init__", "env"):
        env = make_env()
    return World(make_env=make_env, rubric=rubric, tasks=env.tasks)


@contextmanager
def _in_one_line(recipe: Recipe, what: str, where: str) -> Iterator[None]:
    """Whatever a user's own environment raises, as a ConfigError: what it was doing, and the place."""
    try:
        yield
    except UpswingError:
        raise
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        said = " ".join(f"{type(error).__name__}: {error}".split())
        place = f"{Path(at.filename).name}:{at.lineno}"
        raise ConfigError(f"{where}: environment '{recipe.env.name}': {what} raised {said} ({place})") from error


def _dataset(section: DatasetSection, env: str, rubric: Rubric, judged: Container[str]) -> TaskStream:
    """The rows of a dataset as a stream.

    `train` is endless: pass after pass, each shuffled anew with the seed, or in the order of the file when `shuffle` is
    false. Other splits come once, in the order of the file. Raises ConfigError for a bad row, one of a `judged` split
    that lacks what the rubric needs, for splits that overlap, and (the stream does) for a split without a file.
    """
    paths = {"train": section.train, "dev": section.dev, "test": section.test}
    splits: Mapping[str, Sequence[Task]] = {
        split: tasks_from(
            path,
            env=env,
            split=split,
            require_gold=section.answer_required,
            columns=section.columns,
            answer_pattern=section.answer_pattern,
            name=section.name,
            lacking=rubric.lacking if split in judged else lambda task: None,
        )
        for split, path in paths.items()
        if path is not None
    }
    check_disjoint(splits)

    def stream(split: str, seed: int) -> Iterator[Task]:
        if split not in splits:
            raise ConfigError(f"the dataset has no {split} rows; set dataset.{split} to a file or a dataset")
        return _passes(splits[split], seed, section.shuffle) if split == "train" else iter(splits[split])

    return stream


def _passes(tasks: Sequence[Task], seed: int, shuffle: bool) -> Iterator[Task]:
    for number in itertools.count():
        order = list(tasks)
        if shuffle:
            random.Random(derive_seed(seed, "dataset", number)).shuffle(order)
        yield from order


def preflight(recipe: Recipe) -> World:
    """`build_world`, and that there are the tasks and the expert that the stages need. Raises ConfigError."""
    world = build_world(recipe)
    sampled: dict[str, list[Task]] = {}
    for index, stage in enumerate(recipe.stages):
        for split in splits_of(stage):
            if split not in sampled:
                sampled[split] = _sample(world.tasks, recipe, split, f"stages.{index}")
        for split in _judged(stage):
            _check_judged(world.rubric, sampled[split], f"stages.{index}", f"{split} task", recipe)
        if isinstance(stage, PairStage) and stage.file is not None:
            read_pairs(stage.file, paired=getattr(stage, "loss", None) != "kto")
        if isinstance(stage, SftStage):
            _check_expert(recipe, stage, world, sampled["train"][0], f"stages.{index}")
            world.rubric.check_group(1, f"stages.{index}: each demonstration is judged alone")
        if isinstance(stage, EvalStage):
            world.rubric.check_group(stage.samples, f"stages.{index}.samples")
        if isinstance(stage, RlStage):
            size = 1 if stage.advantage == "remax" else stage.group_size
            world.rubric.check_group(size, f"stages.{index}.group_size")
    return replace(world, sampled=sampled)


def demonstration_env(recipe: Recipe, stage: SftStage) -> Callable[[], Environment]:
    """The environment that a stage's demonstrations are played in. Raises ConfigError for a wrong argument."""
    return environment_factory(recipe.env.name, {**recipe.env.args, **stage.env_args})


def demonstration_tasks(recipe: Recipe, stage: SftStage, tasks: TaskStream) -> TaskStream:
    """Where a stage's demonstrations take their tasks from: `tasks`, the run's, unless it has task_args. Raises
    ConfigError for a wrong argument, or with a dataset."""
    if not stage.task_args:
        return tasks
    if recipe.dataset is not None:
        raise ConfigError(
            f"stages.{stage.name}.task_args: got {', '.join(stage.task_args)} without effect: tasks are the dataset's "
            "rows; leave it out"
        )
    return environment_factory(recipe.env.name, {**recipe.env.args, **stage.task_args})().tasks


def splits_of(stage: Stage) -> tuple[str, ...]:
    """The splits that a stage takes tasks of."""
    if isinstance(stage, EvalStage):
        return (stage.split,)
    if isinstance(stage, PairStage) and stage.file is not None:
        return ()
    if isinstance(stage, RlBase) and stage.eval_every:
        return ("train", "dev")
    return ("train",)


def _wanted(recipe: Recipe, split: str) -> int:
    """How many tasks of a split to look at: no more than some stage takes at once."""
    counts = [1]
    for stage in recipe.stages:
        if split not in splits_of(stage):
            continue
        if isinstance(stage, EvalStage):
            counts.append(stage.tasks)
        elif isinstance(stage, RlBase):
            counts.append(stage.tasks_per_step if split == "train" else stage.eval_tasks)
        else:
            counts.append(SAMPLE)
    return min(SAMPLE, max(counts))


def _judged(stage: Stage) -> tuple[str, ...]:
    """The splits whose trajectories a stage needs scores of: a distill stage learns from its teacher."""
    return tuple(one for one in splits_of(stage) if one != "train" or not isinstance(stage, DistillStage))


def _check_judged(rubric: Rubric, tasks: Sequence[Task], where: str, what: str, recipe: Recipe) -> None:
    for number, task in enumerate(tasks, start=1):
        if (missing := rubric.lacking(task)) is not None:
            raise ConfigError(f"{where}: {what} {number} of '{recipe.env.name}': {missing}")


def _sample(tasks: TaskStream, recipe: Recipe, split: str, where: str) -> list[Task]:
    """The first tasks of a split, at least one. Raises ConfigError for what is wrong with them."""
    name = recipe.env.name
    with _in_one_line(recipe, f"tasks({split!r}, seed)", where):
        try:
            began, found = time.monotonic(), []
            for task in itertools.islice(tasks(split, recipe.seed), _wanted(recipe, split)):
                found.append(task)
                if time.monotonic() - began > SAMPLE_S:
                    break
        except NotImplementedError as problem:
            raise ConfigError(f"env: {problem} (dataset.train: path of a JSON Lines file)") from None
    if not found:
        raise ConfigError(f"{where}: environment '{name}' has no {split} tasks")
    seen: dict[str, int] = {}
    for number, task in enumerate(found, start=1):
        if not isinstance(task, Task):
            got = type(task).__name__
            raise ConfigError(f"{where}: environment '{name}' yields {got}; tasks() yields upswing.Task objects")
        if not all(isinstance(message, Message) for message in task.messages):
            raise ConfigError(
                f"{where}: environment '{name}': the messages of task '{task.id}' aren't all "
                'upswing.Message objects, as Message(role="user", content="...")'
            )
        before = seen.setdefault(str(task.id), number)
        other = found[before - 1]
        with _in_one_line(recipe, f"tasks({split!r}, seed)", where):
            same = task == other or (problem_of(task), task.gold) == (problem_of(other), other.gold)
        if not same:
            raise ConfigError(
                f"{where}: environment '{name}': {split} tasks {before} and {number} are two problems with one id, "
                f"'{task.id}'; an id may come again only with the same task (put what differs, a seed, say, into it)"
            )
    return found


def _check_expert(recipe: Recipe, stage: SftStage, world: World, task: Task, where: str) -> None:
    with _in_one_line(recipe, "__init__", f"{where}.env_args"):
        env = demonstration_env(recipe, stage)()
    for given, unread, when, other in (
        ("env_args", env.task_options, "where tasks are chosen", "task_args"),
        ("task_args", env.play_options, "where they are played", "env_args"),
    ):
        for key in sorted(unread & getattr(stage, given).keys()):
            raise ConfigError(
                f"{where}.{given}.{key}: got {getattr(stage, given)[key]} without effect: '{recipe.env.name}' reads it "
                f"only {when}; put it under {where}.{other}"
            )
    if stage.task_args:
        own = f"{where}.task_args"
        with _in_one_line(recipe, "__init__", own):
            tasks = demonstration_tasks(recipe, stage, world.tasks)
        found = _sample(tasks, recipe, "train", own)
        _check_judged(world.rubric, found, own, "train task", recipe)
        task = found[0]
    with _in_one_line(recipe, "expert(task, rng)", where):
        try:
            policy = env.expert(task, random.Random(0))
        except NotImplementedError:
            raise ConfigError(
                f"{where}: sft needs demonstrations, but environment '{recipe.env.name}' has no scripted expert; "
                "give it an expert(task, rng) method, or leave the sft stage out"
            ) from None
    if not callable(policy):
        raise ConfigError(
            f"{where}: environment '{recipe.env.name}': expert(task, rng) gave {type(policy).__name__}; it gives a "
            "function: the messages so far in, the agent's next text out"
        )
