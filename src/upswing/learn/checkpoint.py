"""Learner checkpoints: a Hugging Face model folder with `learner_state.pt` beside the weights.

One of several ranks has the optimizer's state in shards, in `optimizer/`.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from upswing.errors import ConfigError
from upswing.learn.lora import ADAPTER, PlainWeights, is_adapted, load_adapter, save_adapter, trained

STATE_FILE = "learner_state.pt"
SHARDS = "optimizer"


def save_checkpoint(path: Path, model: Any, tokenizer: Any | None, state: dict[str, Any]) -> None:
    """Write model, tokenizer and state; `path` appears whole or not at all."""
    with whole_folder(path) as partial:
        if is_adapted(model):
            write_checkpoint(partial, model, tokenizer, state, weights=dict(PlainWeights(model)))
            save_adapter(model, partial / ADAPTER)
        else:
            write_checkpoint(partial, model, tokenizer, state)


def write_checkpoint(
    folder: Path,
    model: Any,
    tokenizer: Any | None,
    state: dict[str, Any],
    weights: dict[str, torch.Tensor] | None = None,
) -> None:
    """The files themselves; `weights`: other ones than the model's own."""
    model.save_pretrained(folder, state_dict=weights)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    torch.save(state, folder / STATE_FILE)


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A folder beside `path` to write to, renamed at the end: a kill leaves the old checkpoint, or none, or the new.

    Between the two renames of an overwrite the old one is at `path` + '.old'; `load_checkpoint` looks there.
    """
    partial, old = partial_folder(path), _beside(path, ".old")
    for stale in (partial, old) if path.exists() else (partial,):
        shutil.rmtree(stale, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    for file in partial.rglob("*"):
        _sync(file)
    _sync(partial)
    if path.exists():
        path.rename(old)
    partial.rename(path)
    _sync(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def partial_folder(path: Path) -> Path:
    """Where a checkpoint is written."""
    return _beside(path, ".partial")


def load_checkpoint(
    path: Path, model: Any, kind: Any = None, copy: Callable[[torch.Tensor, torch.Tensor], object] = torch.Tensor.copy_
) -> dict[str, Any]:
    """Copy the weights in `path` into `model` by `copy`, and return the state saved with them, and its `folder`.

    `kind`: the class to read them with, where `model` isn't plainly of it. An adapted model gets the adapter alone: its
    frozen weights stay as they are, and must give the merged ones that were saved. Raises ConfigError when there is no
    checkpoint or it is of another model.
    """
    state = load_state(path)
    folder = state["folder"]
    if (folder / ADAPTER).is_dir() != is_adapted(model):
        have, want = ("all weights", "lora") if is_adapted(model) else ("lora", "all weights")
        raise ConfigError(f"the checkpoint at '{path}' is of training {have}, but now {want} are trained; start anew")
    saved = PlainWeights((kind or type(model)).from_pretrained(folder, dtype=torch.float32))
    own = PlainWeights(model)
    names = own.keys() | saved.keys()
    _check_same(path, names, {n for n in names if n in own and n in saved and own[n].shape == saved[n].shape})
    if is_adapted(model):
        load_adapter(model, folder / ADAPTER)
        _check_same(path, names, {name for name in names if torch.equal(own[name].cpu(), saved[name])})
    else:
        for name, tensor in own.items():
            copy(tensor, saved[name])
    return state


def load_state(path: Path) -> dict[str, Any]:
    """What was saved beside the weights, and the `folder`. Raises ConfigError when there is no checkpoint."""
    folder = path if path.exists() else _beside(path, ".old")
    if not (folder / STATE_FILE).is_file():
        raise ConfigError(f"no checkpoint at '{path}' ({STATE_FILE} isn't there); give a folder that a learner saved")
    return {**torch.load(folder / STATE_FILE, weights_only=True, map_location="cpu"), "folder": folder}


def save_optimizer(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Every rank its shards, into one folder of torch.distributed.checkpoint; called on all ranks."""
    parts = {name: optimizer.state.get(parameter, {}) for name, parameter in trained(model).items()}
    found = {f"{name}.{key}": value for name, part in parts.items() for key, value in part.items()}
    save(found, checkpoint_id=folder)


def load_optimizer(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """What `save_optimizer` wrote on any number of ranks, on any number of ranks, one process without any included."""
    saved = FileSystemReader(folder).read_metadata().state_dict_metadata
    parameters, found = trained(model), dict[str, torch.Tensor]()
    for name, spec in saved.items():
        assert isinstance(spec, TensorStorageMetadata)
        parameter = parameters[name.rpartition(".")[0]]
        if spec.size == parameter.shape:
            found[name] = torch.zeros_like(parameter, requires_grad=False)
        else:  # Adam's count of steps
            found[name] = torch.zeros(spec.size, dtype=spec.properties.dtype, device=parameter.device)
    with warnings.catch_warnings():  # of loading without ranks
        warnings.simplefilter("ignore", UserWarning)
        load(found, checkpoint_id=folder)
    optimizer.state.clear()
    for name, value in found.items():
        owner, _, key = name.rpartition(".")
        optimizer.state[parameters[owner]][key] = value


def _check_same(path: Path, names: Set[str], same: Set[str]) -> None:
    if names - same:
        raise ConfigError(f"the checkpoint at '{path}' is of another model: '{min(names - same)}' differs")


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _sync(path: Path) -> None:
    """Flush to disk, so that the rename never gets there before the contents."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
