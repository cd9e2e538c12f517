"""From a YAML file and overrides to a Recipe, and from a validation error to one clear line."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from upswing.errors import ConfigError
from upswing.plugins import is_file_spec, missing_file
from upswing.recipe.explain import explain
from upswing.recipe.models import Recipe
from upswing.recipe.offline import PairStage
from upswing.recipe.overrides import apply_overrides
from upswing.recipe.yaml_reader import parse_yaml


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and apply `key=value` overrides, such as `rl.lr=1e-5` or `stages.1.steps=3`.

    Raises ConfigError, one line, for a missing file, bad YAML, and unknown, wrong or ineffective keys.
    """
    path = Path(path)
    if path.is_dir() and (path / "recipe.yaml").is_file():
        path = path / "recipe.yaml"  # a run folder
    if not path.is_file():
        raise ConfigError(_not_found(path))
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as problem:
        raise ConfigError(f"{path}: not UTF-8 text ({problem.reason} at byte {problem.start})") from None
    return recipe_from(parse_yaml(text, str(path)), overrides, source=str(path), folder=path.parent)


def recipe_from(
    data: Any, overrides: Sequence[str] = (), *, source: str = "recipe", folder: Path | None = None
) -> Recipe:
    """Validate plain data. `source` starts the error message; files that aren't found from the current directory are
    looked for in `folder`. Raises ConfigError."""
    if not isinstance(data, Mapping):
        got = "nothing" if data is None else type(data).__name__
        raise ConfigError(f"{source}: got {got}, expected keys and values, such as 'model: tiny'")
    data, changed = apply_overrides(data, overrides, top_keys=list(Recipe.model_fields))
    try:
        recipe = Recipe.model_validate(data)
    except ValidationError as problem:
        raise ConfigError(explain(problem, source, changed)) from None
    return _with_files(recipe, source, folder or Path())


def _with_files(recipe: Recipe, source: str, folder: Path) -> Recipe:
    """The recipe with the files that it names found. Raises ConfigError for a missing one."""

    def found(path: str, key: str) -> str:
        for candidate in (Path(path).expanduser(), folder / path):
            if candidate.is_file():
                return str(candidate)
        raise ConfigError(f"{source}: {key}: {missing_file(path, folders=(Path(path).parent, folder))}")

    def found_rows(source: str, key: str) -> str:
        path, mark, part = source.partition("#")
        there = next((one for one in (Path(path).expanduser(), folder / path) if one.exists()), None)
        if there is not None:
            return f"{there}{mark}{part}"
        from upswing.envs.dataset import is_hub_id  # here, for it brings NumPy

        return source if is_hub_id(source) else found(source, key)

    def found_spec(spec: str, key: str) -> str:
        path, _, name = spec.rpartition(":")
        return f"{found(path, key)}:{name}" if is_file_spec(spec) else spec

    env = recipe.env.model_copy(update={"name": found_spec(recipe.env.name, "env.name")})
    verifiers = tuple(
        verifier.model_copy(update={"name": found_spec(verifier.name, f"verifiers.{index}.name")})
        for index, verifier in enumerate(recipe.verifiers)
    )
    template = recipe.chat_template
    if template is not None and not is_jinja(template):
        template = _template(found(template, "chat_template"), source)
    agent = recipe.agent
    if agent is not None and agent.function is not None:
        agent = agent.model_copy(update={"function": found_spec(agent.function, "agent.function")})
    dataset = recipe.dataset
    if dataset is not None:
        splits = {split: getattr(dataset, split) for split in ("train", "dev", "test")}
        paths = {split: found_rows(path, f"dataset.{split}") for split, path in splits.items() if path is not None}
        dataset = dataset.model_copy(update=paths)
    stages = list(recipe.stages)
    for index, stage in enumerate(recipe.stages):
        if isinstance(stage, PairStage) and stage.file is not None:
            stages[index] = stage.model_copy(update={"file": found(stage.file, f"stages.{index}.file")})
    found_all = {"env": env, "agent": agent, "verifiers": verifiers, "dataset": dataset, "stages": tuple(stages)}
    return recipe.model_copy(update={**found_all, "chat_template": template})


def is_jinja(text: str) -> bool:
    """Whether it is a template, not the path of one."""
    return "{%" in text or "{{" in text


def _template(path: str, source: str) -> str:
    """The file's text, so that a run keeps the template that it began with. Raises ConfigError."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError(f"{source}: chat_template: can't read '{path}' ({problem})") from None
    if not is_jinja(text):
        raise ConfigError(f"{source}: chat_template: '{path}' is no Jinja template: neither {{{{ nor {{% is in it")
    return text


def _not_found(path: Path) -> str:
    """`recipe not found` with the nearest existing one, looked for beside the path and in `recipes/`."""
    known = sorted({str(p) for folder in (path.parent, Path("recipes")) for p in folder.glob("*.y*ml")})
    by_stem = {Path(p).stem: p for p in known}
    close = difflib.get_close_matches(path.stem, list(by_stem), n=1, cutoff=0.4)
    hint = f"; did you mean '{by_stem[close[0]]}'?" if close else ""
    there = f" (recipes here: {', '.join(known)})" if known else ""
    return f"recipe '{path}' not found{hint}{there}"


def check_same(before: Recipe, now: Recipe, out: Path) -> None:
    """Raises ConfigError naming the keys in which the resumed recipe differs from that of the run.

    The cluster may be another one, and stages may have been added at the end.
    """
    now = now.model_copy(update={"stages": now.stages[: len(before.stages)]})
    old, new = ({k: v for k, v in flatten(one.to_dict()) if not k.startswith("cluster.")} for one in (before, now))
    keys = [key for key in {**old, **new} if old.get(key, _ABSENT) != new.get(key, _ABSENT)]
    if keys:
        shown = ", ".join(f"{key} ({old.get(key, _ABSENT)} there, {new.get(key, _ABSENT)} now)" for key in keys[:5])
        more = f" and {len(keys) - 5} more" if len(keys) > 5 else ""
        how = f"resume with the same recipe (upswing run {out} --resume), or start anew in another --out"
        raise ConfigError(f"--resume: the recipe differs from that of '{out}' in {shown}{more}; {how}")


_ABSENT = "nothing"


def flatten(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and leaf values; empty containers are leaves."""
    items: Any = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    if not items or not value:
        yield key, value
        return
    for name, inner in items:
        yield from flatten(inner, f"{key}.{name}" if key else str(name))
