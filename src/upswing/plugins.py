"""Finding what a user names: a built-in, an entry point, `my_pkg.mod:Name`, or `path/file.py:Name`.

There is nothing to register: a small file with a class or function in it is enough. A package may also declare the
entry point group `upswing.<kind>` (such as `upswing.environment`), whose names can then be used like built-in ones.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from upswing.errors import ConfigError, did_you_mean, nearest


def load_object(spec: str, kind: str, builtin: Mapping[str, str]) -> Any:
    """The object that `spec` names.

    Args:
        spec: a name, `my_pkg.mod:Name` or `path/file.py:Name`; `Name` may have dots.
        kind: what is looked for, in the singular, such as `environment`: used in messages and as entry point group.
        builtin: built-in names to import paths.

    Raises ConfigError, one line, when it isn't there or its module can't be imported.
    """
    if ":" not in spec:
        return _by_name(spec, kind, builtin)
    where, _, attribute = spec.rpartition(":")
    if not where or not attribute:
        raise ConfigError(f"{kind} '{spec}': expected my_pkg.module:Name or path/file.py:Name")
    module = _file_module(where, spec, kind) if where.endswith(".py") else _module(where, spec, kind)
    return _attribute(module, attribute, where, spec, kind)


def is_file_spec(spec: str) -> bool:
    """Whether `spec` is of the form `path/file.py:Name`."""
    return spec.rpartition(":")[0].endswith(".py")


def missing_file(path: str | Path, *, folders: Iterable[Path] = ()) -> str:
    """`file 'x' not found`, with the nearest file of its folder or of `folders`."""
    there = {str(p) for folder in (Path(path).parent, *folders) if folder.is_dir() for p in folder.iterdir()}
    by_name = {Path(p).name: p for p in sorted(there) if Path(p).is_file()}
    close = nearest(Path(path).name, by_name)
    return f"file '{path}' not found" + (f"; did you mean '{by_name[close]}'?" if close else "")


def _by_name(name: str, kind: str, builtin: Mapping[str, str]) -> Any:
    if name in builtin:
        where, _, attribute = builtin[name].partition(":")
        return getattr(importlib.import_module(where), attribute)
    entries = {entry.name: entry for entry in importlib.metadata.entry_points(group=f"upswing.{kind}")}
    if name in entries:
        try:
            return entries[name].load()
        except Exception as problem:
            raise ConfigError(f"{kind} '{name}': its entry point {entries[name].value} {_failed(problem)}") from problem
    allowed = sorted({*builtin, *entries})
    raise ConfigError(
        f"unknown {kind} '{name}'{did_you_mean(name, allowed)} (allowed: {', '.join(allowed)}, "
        f"or an import path my_pkg.module:Name or path/file.py:Name)"
    )


def _module(name: str, spec: str, kind: str) -> ModuleType:
    # A console script doesn't have the current directory on its path, where a user's package usually is.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as problem:
        if problem.name and (name == problem.name or name.startswith(problem.name + ".")):
            raise ConfigError(
                f"{kind} '{spec}': no module '{problem.name}' here or installed; a file is named as path/file.py:Name"
            ) from None
        raise ConfigError(f"{kind} '{spec}': importing {name} {_failed(problem)}") from problem
    except Exception as problem:
        raise ConfigError(f"{kind} '{spec}': importing {name} {_failed(problem)}") from problem


def _file_module(where: str, spec: str, kind: str) -> ModuleType:
    """Import a file under a name of its own, once a process, so that its classes keep one identity."""
    path = Path(where).expanduser()
    if not path.is_file():
        raise ConfigError(f"{kind} '{spec}': {missing_file(path)}")
    path = path.resolve()
    name = f"upswing_user_{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    loading = importlib.util.spec_from_file_location(name, path)
    assert loading is not None and loading.loader is not None  # it is an existing .py file
    module = importlib.util.module_from_spec(loading)
    sys.modules[name] = module
    try:
        loading.loader.exec_module(module)
    except Exception as problem:
        del sys.modules[name]
        raise ConfigError(f"{kind} '{spec}': importing {where} {_failed(problem, path)}") from problem
    return module


def _attribute(module: ModuleType, attribute: str, where: str, spec: str, kind: str) -> Any:
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            own = [
                name
                for name, value in vars(found).items()
                if not name.startswith("_")
                and callable(value)
                and getattr(value, "__module__", None) == module.__name__
            ]
            there = f" (there: {', '.join(own)})" if own else ""
            raise ConfigError(f"{kind} '{spec}': {where} has no '{part}'{did_you_mean(part, own)}{there}")
        found = getattr(found, part)
    if inspect.ismodule(found):
        raise ConfigError(f"{kind} '{spec}': that is a module; name a class or function in it")
    return found


def _failed(problem: BaseException, path: Path | None = None) -> str:
    """`failed: NameError: name 'x' is not defined (line 3)`."""
    line = getattr(problem, "lineno", None)
    traceback = problem.__traceback__
    while path is not None and traceback is not None:
        if traceback.tb_frame.f_code.co_filename == str(path):
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    text = " ".join(str(problem).split())
    return f"failed: {type(problem).__name__}: {text}" + (f" (line {line})" if line else "")
