"""Reasoning Gym's generated tasks, judged by its own scorers in a process that ends when its time is over.

An entry travels with its task as a Python literal, for its metadata holds tuples and sets that a scorer reads. Some of
the scorers call `eval` or SymPy's `parse_expr`, which is `eval` too, on the answer; the worker replaces both.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import importlib
import json
import random
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from upswing.envs.adapters import library
from upswing.envs.base import Expert, check_split
from upswing.envs.generated import GeneratedEnv
from upswing.errors import ConfigError, did_you_mean
from upswing.trajectory.types import Score, Task
from upswing.verify.options import Positive, problem
from upswing.verify.text import TimedReader, unscored
from upswing.verify.worker import Workers

CHUNK = 50
"""Entries drawn from one dataset object before the next, of another seed, is made."""
GIVE_UP = 300
"""Draws in a row without a new question of the split, after which there are no more."""
_EXAMPLES = ("example_correct_answer", "example_answer", "possible_answer")
"""Where tasks of many right answers keep one."""
_EVALS = ("string_insertion", "spiral_matrix", "binary_matrix", "n_queens")
_NAME = re.compile(r"[A-Za-z_][A-Za-z_0-9]*")
_FUNCTIONS = frozenset(
    re.findall(r"\w+", "sin cos tan cot sec csc sinh cosh tanh asin acos atan asinh acosh atanh exp log ln sqrt pi Abs")
)
_workers = Workers("upswing.envs.adapters.reasoning_gym:scored")


class ReasoningGym(GeneratedEnv):
    """One question, one answer. Options: `tasks`, names of Reasoning Gym's tasks, or name -> {weight, config}; `all`
    for every one.

    Questions are split by what they ask, so that none is in two splits. `dev` and `test` never ask the same twice.
    """

    name = "reasoning_gym"
    fixed = GeneratedEnv.fixed | {"expert_noise"}
    protocol = "tags"
    max_turns = 1

    def __init__(self, *, tasks: str | Sequence[str] | Mapping[str, Any], **options: Any) -> None:
        """Raises ConfigError for an unknown task or a configuration that it refuses."""
        super().__init__(**options)
        self.weights, self.configs = _read(tasks)

    def tasks(self, split: str, seed: int = 0) -> Iterator[Task]:
        """Tasks of a split, the same for the same seed: endless for `train`, others end when nothing new comes."""
        check_split(self.name, split)
        return self._drawn(split, random.Random(f"{self.name} {split} {seed}"))

    def _drawn(self, split: str, rng: random.Random) -> Iterator[Task]:
        streams = {name: _entries(name, config, rng) for name, config in self.configs.items()}
        asked, missed = set[str](), 0
        while missed < GIVE_UP:
            name = rng.choices(list(streams), list(self.weights.values()))[0]
            task = self._task(name, next(streams[name]))
            missed = missed + 1 if task.split != split or task.id in asked else 0
            if not missed:
                if split != "train":
                    asked.add(task.id)
                yield task
        if split == "train":
            raise ConfigError(f"{self.name}: none of {GIVE_UP} questions of {', '.join(streams)} is one to train on")

    def draw(self, rng: random.Random) -> Task:
        name = rng.choices(list(self.weights), list(self.weights.values()))[0]
        return self._task(name, next(_entries(name, self.configs[name], rng)))

    def _task(self, name: str, entry: Mapping[str, Any]) -> Task:
        gold, question = _oracle(entry), entry["question"]
        config, text = self.configs[name], repr(_plain(entry))
        golds = () if gold is None else (gold,)
        return self.make_task(f"{name} {question}", question, gold=golds, kind=name, config=config, entry=text)

    def expert(self, task: Task, rng: random.Random) -> Expert:
        """Says the oracle's answer; where there is none (`rush_hour`, `boxnet`), nothing, which scores 0."""
        return lambda messages: self.say(task.gold[0] if task.gold else "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scorer(TimedReader):
    """A verifier: what Reasoning Gym's own scorer gives, its partial credit included; no answer is 0."""

    timeout_s: float = 10.0

    async def __call__(self, answer: str | None, gold: Sequence[str], data: Mapping[str, Any]) -> float | Score:
        if "entry" not in data:
            return unscored("the task isn't one of the environment reasoning_gym")
        text = self.read(answer)
        if not text:
            return 0.0
        task = {"name": data["kind"], "config": data["config"], "entry": data["entry"]}
        found: float | Score = await _workers.judge(self.timeout_s, "".join(gold[:1]), text=text, **task)
        return found


def scored(text: str, name: str, config: dict[str, Any], entry: str) -> float:
    """Runs in the worker. A scorer that trips over an answer has refused it, unless it trips over its own as well."""
    dataset, found = _dataset(name, json.dumps(config)), ast.literal_eval(entry)
    try:
        return float(dataset.score_answer(text, found))
    except (MemoryError, RecursionError):
        raise
    except Exception:
        if (gold := _oracle(found)) is not None:
            dataset.score_answer(gold, found)
        return 0.0


def warm_up() -> None:
    """What every worker starts with: nothing that an answer says is run."""
    _registry()
    for name in _EVALS:
        _module(name).eval = ast.literal_eval
    sympy: Any = importlib.import_module("sympy")
    real = sympy.parse_expr
    for holder in (sympy, _module("countdown"), _module("puzzle24")):
        holder.parse_expr = functools.partial(_parse, real)


def _parse(real: Any, text: str, *args: Any, **kwargs: Any) -> Any:
    """`parse_expr` for formulas only. Raises ValueError for names that are neither a variable nor a known function."""
    names = (name for name in _NAME.findall(re.sub(r"[0-9.]+[eE](?=[-+0-9])", "", text)) if len(name) > 1)
    wrong = next((name for name in names if name not in _FUNCTIONS), None)
    if wrong or re.search(r"[^\w\s+\-*/^().,=!]|_|\.\s*[A-Za-z]|\)\s*\.", text):
        raise ValueError(f"no formula: {wrong or text!r:.50}")
    return real(text, *args, **kwargs)


def _registry() -> Mapping[str, Any]:
    """Task name -> (dataset class, configuration class). `composite` is what `tasks` says itself."""
    library("reasoning_gym", "reasoning-gym")
    from reasoning_gym.factory import DATASETS

    return {name: classes for name, classes in sorted(DATASETS.items()) if name != "composite"}


def _module(name: str) -> Any:
    return sys.modules[_registry()[name][0].__module__]


def _read(tasks: Any) -> tuple[dict[str, float], dict[str, dict[str, Any]]]:
    """Weights and configurations by task name."""
    known = _registry()
    if tasks == "all":
        tasks = list(known)
    if isinstance(tasks, str) or not isinstance(tasks, Sequence | Mapping) or not tasks:
        raise ConfigError(f"reasoning_gym option tasks is {tasks!r}; allowed: 'all', a list of names, or a mapping")
    weights: dict[str, float] = {}
    configs: dict[str, dict[str, Any]] = {}
    for name in tasks:
        if name not in known:
            there = f"it has {len(known)}, such as leg_counting, countdown, sudoku; 'all' means every one"
            raise ConfigError(f"reasoning_gym has no task '{name}'{did_you_mean(str(name), known)} ({there})")
        try:
            chosen = _Chosen.model_validate((tasks[name] if isinstance(tasks, Mapping) else None) or {})
        except ValidationError as error:
            raise ConfigError(f"reasoning_gym task {name}: {problem(error, known=_Chosen.model_fields)}") from None
        _check(name, known[name][1], chosen.config)
        weights[name], configs[name] = chosen.weight, chosen.config
    return weights, configs


class _Chosen(BaseModel):
    """What a recipe says of a task."""

    model_config = ConfigDict(extra="forbid", strict=True)
    weight: Positive = 1.0
    config: dict[str, Any] = Field(default_factory=dict)


def _check(name: str, cls: Any, config: Mapping[str, Any]) -> None:
    fields = [field.name for field in dataclasses.fields(cls) if field.name not in ("seed", "size")]
    for key in config:
        if key not in fields:
            allowed = f"{did_you_mean(key, fields)} (allowed: {', '.join(fields)})"
            raise ConfigError(f"reasoning_gym task {name} has no option '{key}'{allowed}")
    try:
        getattr(cls(**config, seed=0, size=CHUNK), "validate", lambda: None)()
    except Exception as error:
        raise ConfigError(f"reasoning_gym task {name}: {type(error).__name__}: {error}") from None


@functools.lru_cache(maxsize=128)
def _dataset(name: str, config: str, seed: int = 0) -> Any:
    cls, config_cls = _registry()[name]
    return cls(config_cls(**json.loads(config), seed=seed, size=CHUNK))


def _entries(name: str, config: Mapping[str, Any], rng: random.Random) -> Iterator[Mapping[str, Any]]:
    """Endless entries of a task."""
    while True:
        seed = rng.randrange(2**31)
        with _global_seed(seed):
            dataset = _dataset.__wrapped__(name, json.dumps(config), seed)
        for index in range(CHUNK):
            with _global_seed(seed + index):
                entry = dataset[index]
            yield entry


@contextlib.contextmanager
def _global_seed(seed: int) -> Iterator[None]:
    """Some generators draw from the process's own random numbers; those go on afterwards as if nothing had been."""
    numpy = importlib.import_module("numpy").random
    ours, theirs = random.getstate(), numpy.get_state()
    random.seed(seed)
    numpy.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(ours)
        numpy.set_state(theirs)


def _oracle(entry: Mapping[str, Any]) -> str | None:
    found = entry["answer"]
    if found is None:
        found = next((entry["metadata"][key] for key in _EXAMPLES if key in entry["metadata"]), None)
    return found if isinstance(found, str | None) else json.dumps(found)


def _plain(value: Any) -> Any:
    """Without NumPy's scalars, which aren't literals."""
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return type(value)(map(_plain, value))
    return value.item() if callable(getattr(value, "item", None)) else value
