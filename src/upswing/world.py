"""From a recipe to where its tasks are played and scored: everything of it but the model. Torch isn't needed here."""

from __future__ import annotations

import itertools
import random
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from upswing.envs import Environment, check_disjoint, environment_factory
from upswing.envs.dataset import tasks_from
from upswing.envs.pairs import read_pairs
from upswing.errors import ConfigError, UpswingError
from upswing.recipe import DatasetSection, EvalStage, PairStage, Recipe, RlBase, RlStage, SftStage, Stage
from upswing.seeding import derive_seed
from upswing.trajectory.types import Message, Task
from upswing.verify import Rubric, rubric_from

TaskStream = Callable[[str, int], Iterator[Task]]
"""`stream(split, seed)`: tasks of a split, the same for the same seed; `train` may be endless."""


@dataclass(frozen=True, kw_only=True)
class World:
    """Where tasks come from, are played and are scored."""

    make_env: Callable[[], Environment]
    """A new environment for every trajectory."""
    rubric: Rubric
    tasks: TaskStream


def build_world(recipe: Recipe) -> World:
    """Make the environment, rubric and tasks of a recipe. Raises ConfigError for what is wrong with any of them."""
    make_env = environment_factory(recipe.env.name, recipe.env.args)
    rubric = rubric_from(recipe.verifiers)
    if recipe.dataset is not None:
        return World(make_env=make_env, rubric=rubric, tasks=dataset_stream(recipe.dataset, recipe.env.name))
    try:
        env = make_env()
    except UpswingError:
        raise
    except Exception as error:
        raise ConfigError(f"env: {_raised(recipe.env.name, '__init__', error)}") from error
    return World(make_env=make_env, rubric=rubric, tasks=env.tasks)


def _raised(name: str, what: str, error: Exception) -> str:
    """What a user's own environment did, and where."""
    at = traceback.extract_tb(error.__traceback__)[-1]
    said = " ".join(f"{type(error).__name__}: {error}".split())
    return f"environment '{name}': {what} raised {said} ({Path(at.filename).name}:{at.lineno})"


def dataset_stream(section: DatasetSection, env: str) -> TaskStream:
    """The rows of a dataset as a stream.

    `train` is endless: pass after pass, each shuffled anew with the seed, or in the order of the file when `shuffle` is
    false. Other splits come once, in the order of the file. Raises ConfigError for a bad row, for splits that overlap,
    and (the stream does) for a split without a file.
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
    first: dict[str, Task] = {}
    for index, stage in enumerate(recipe.stages):
        for split in splits_of(stage):
            if split not in first:
                first[split] = _first_task(world, recipe, split, f"stages.{index}")
        if isinstance(stage, PairStage) and stage.file is not None:
            read_pairs(stage.file, paired=getattr(stage, "loss", None) != "kto")
        if isinstance(stage, SftStage):
            _check_expert(recipe, stage, first["train"], f"stages.{index}")
            world.rubric.check_group(1, f"stages.{index}: each demonstration is judged alone")
        if isinstance(stage, EvalStage):
            world.rubric.check_group(stage.samples, f"stages.{index}.samples")
        if isinstance(stage, RlStage):
            size = 1 if stage.advantage == "remax" else stage.group_size
            world.rubric.check_group(size, f"stages.{index}.group_size")
    return world


def demonstration_env(recipe: Recipe, stage: SftStage) -> Callable[[], Environment]:
    """The environment that a stage's demonstrations are played in. Raises ConfigError for a wrong argument."""
    return environment_factory(recipe.env.name, {**recipe.env.args, **stage.env_args})


def splits_of(stage: Stage) -> tuple[str, ...]:
    """The splits that a stage takes tasks of."""
    if isinstance(stage, EvalStage):
        return (stage.split,)
    if isinstance(stage, PairStage) and stage.file is not None:
        return ()
    if isinstance(stage, RlBase) and stage.eval_every:
        return ("train", "dev")
    return ("train",)


def _first_task(world: World, recipe: Recipe, split: str, where: str) -> Task:
    try:
        found = list(itertools.islice(world.tasks(split, recipe.seed), 1))
    except NotImplementedError as problem:
        raise ConfigError(f"env: {problem} (dataset.train: path of a JSON Lines file)") from None
    except UpswingError:
        raise
    except Exception as error:  # whatever a user's own environment does
        raise ConfigError(f"{where}: {_raised(recipe.env.name, f'tasks({split!r}, seed)', error)}") from error
    if not found:
        raise ConfigError(f"{where}: environment '{recipe.env.name}' has no {split} tasks")
    if not isinstance(found[0], Task):
        got = type(found[0]).__name__
        raise ConfigError(f"{where}: environment '{recipe.env.name}' yields {got}; tasks() yields upswing.Task objects")
    if not all(isinstance(message, Message) for message in found[0].messages):
        raise ConfigError(
            f"{where}: environment '{recipe.env.name}': the messages of task '{found[0].id}' aren't all "
            'upswing.Message objects, as Message(role="user", content="...")'
        )
    return found[0]


def _check_expert(recipe: Recipe, stage: SftStage, task: Task, where: str) -> None:
    try:
        demonstration_env(recipe, stage)().expert(task, random.Random(0))
    except NotImplementedError:
        raise ConfigError(
            f"{where}: sft needs demonstrations, but environment '{recipe.env.name}' has no scripted expert; "
            "give it an expert(task, rng) method, or leave the sft stage out"
        ) from None
