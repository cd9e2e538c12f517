"""YAML as recipes need it: `1e-5` is a number, a repeated key is an error, dates stay text."""

from __future__ import annotations

import re
from typing import Any

import yaml

from upswing.errors import ConfigError

_FLOAT = re.compile(r"^[-+]?(?:\d[\d_]*\.[\d_]*(?:[eE][-+]?\d+)?|\.\d[\d_]*(?:[eE][-+]?\d+)?|\d[\d_]*[eE][-+]?\d+)$")


class _Loader(yaml.SafeLoader):
    """SafeLoader without its surprises."""


# Copied, not changed in place: the tables belong to the class that they are inherited from.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
# YAML 1.1 reads 1e-5 (no dot) as text; everybody who writes it means a number.
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node)
        if not isinstance(key, str):
            raise yaml.constructor.ConstructorError(
                None, None, f"got the key {key!r}, expected text", key_node.start_mark
            )
        if key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"key '{key}' is there twice", key_node.start_mark)
        seen.add(key)
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)


def parse_yaml(text: str, source: str) -> Any:
    """Parse one document. Raises ConfigError with the line."""
    try:
        return yaml.load(text, Loader=_Loader)  # a SafeLoader
    except yaml.MarkedYAMLError as problem:
        mark = problem.problem_mark or problem.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ConfigError(f"{source}: {where}{problem.problem or problem.context}") from None
    except yaml.YAMLError as problem:
        raise ConfigError(f"{source}: {' '.join(str(problem).split())}") from None


def parse_value(text: str) -> Any:
    """The value of an override: YAML, or the text itself where it isn't valid YAML (such as `a: b: c`)."""
    try:
        return yaml.load(text, Loader=_Loader) if text.strip() else ""
    except yaml.YAMLError:
        return text
