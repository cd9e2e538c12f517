"""Learner checkpoints: a Hugging Face model folder with `learner_state.pt` beside the weights."""

from __future__ import annotations

import os
import shutil
from collections.abc import Set
from pathlib import Path
from typing import Any

import torch

from upswing.errors import ConfigError
from upswing.learn.lora import ADAPTER, PlainWeights, is_adapted, load_adapter, save_adapter

STATE_FILE = "learner_state.pt"


def save_checkpoint(path: Path, model: Any, tokenizer: Any | None, state: dict[str, Any]) -> None:
    """Write everything to a folder beside `path`, then rename: a kill leaves the old checkpoint, or none, or the new.

    Between the two renames of an overwrite the old one is at `path` + '.old'; `load_checkpoint` looks there.
    """
    partial, old = _beside(path, ".partial"), _beside(path, ".old")
    for stale in (partial, old) if path.exists() else (partial,):
        shutil.rmtree(stale, ignore_errors=True)
    partial.mkdir(parents=True)
    if is_adapted(model):
        model.save_pretrained(partial, state_dict=dict(PlainWeights(model)))
        save_adapter(model, partial / ADAPTER)
    else:
        model.save_pretrained(partial)
    if tokenizer is not None:
        tokenizer.save_pretrained(partial)
    torch.save(state, partial / STATE_FILE)
    for file in partial.rglob("*"):
        _sync(file)
    _sync(partial)
    if path.exists():
        path.rename(old)
    partial.rename(path)
    _sync(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def load_checkpoint(path: Path, model: Any) -> dict[str, Any]:
    """Copy the weights in `path` into `model`, and return the state saved with them.

    An adapted model gets the adapter alone: its frozen weights stay as they are, and must give the merged ones that
    were saved. Raises ConfigError when there is no checkpoint or it is of another model.
    """
    folder = path if path.exists() else _beside(path, ".old")
    if not (folder / STATE_FILE).is_file():
        raise ConfigError(f"no checkpoint at '{path}' ({STATE_FILE} isn't there); give a folder that a learner saved")
    if (folder / ADAPTER).is_dir() != is_adapted(model):
        have, want = ("all weights", "lora") if is_adapted(model) else ("lora", "all weights")
        raise ConfigError(f"the checkpoint at '{path}' is of training {have}, but now {want} are trained; start anew")
    saved = PlainWeights(type(model).from_pretrained(folder, dtype=torch.float32))
    own = PlainWeights(model)
    names = own.keys() | saved.keys()
    _check_same(path, names, {n for n in names if n in own and n in saved and own[n].shape == saved[n].shape})
    if is_adapted(model):
        load_adapter(model, folder / ADAPTER)
        _check_same(path, names, {name for name in names if torch.equal(own[name], saved[name])})
    else:
        for name, tensor in own.items():
            tensor.copy_(saved[name])
    state: dict[str, Any] = torch.load(folder / STATE_FILE, weights_only=True)
    return state


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
