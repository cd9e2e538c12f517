"""Learner checkpoints: a Hugging Face model folder with `learner_state.pt` beside the weights."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch

from upswing.errors import ConfigError

STATE_FILE = "learner_state.pt"


def save_checkpoint(path: Path, model: Any, tokenizer: Any | None, state: dict[str, Any]) -> None:
    """Write everything to a folder beside `path`, then rename: a kill leaves the old checkpoint, or none, or the new.

    Between the two renames of an overwrite the old one is at `path` + '.old'; `load_checkpoint` looks there.
    """
    partial, old = _beside(path, ".partial"), _beside(path, ".old")
    for stale in (partial, old) if path.exists() else (partial,):
        shutil.rmtree(stale, ignore_errors=True)
    partial.mkdir(parents=True)
    model.save_pretrained(partial)
    if tokenizer is not None:
        tokenizer.save_pretrained(partial)
    torch.save(state, partial / STATE_FILE)
    for file in partial.iterdir():
        _sync(file)
    _sync(partial)
    if path.exists():
        path.rename(old)
    partial.rename(path)
    _sync(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def load_checkpoint(path: Path, model: Any) -> dict[str, Any]:
    """Copy the weights in `path` into `model`, and return the state saved with them.

    Raises ConfigError when there is no checkpoint or it is of another model.
    """
    folder = path if path.exists() else _beside(path, ".old")
    if not (folder / STATE_FILE).is_file():
        raise ConfigError(f"no checkpoint at '{path}' ({STATE_FILE} isn't there); give a folder that a learner saved")
    saved = type(model).from_pretrained(folder, dtype=model.dtype).state_dict()
    own = model.state_dict()
    differing = sorted(name for name in own.keys() | saved.keys() if _shape(own, name) != _shape(saved, name))
    if differing:
        raise ConfigError(f"the checkpoint at '{path}' is of another model: '{differing[0]}' differs in shape")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(saved[name])
    state: dict[str, Any] = torch.load(folder / STATE_FILE, weights_only=True)
    return state


def _shape(state: dict[str, torch.Tensor], name: str) -> tuple[int, ...] | None:
    return tuple(state[name].shape) if name in state else None


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _sync(path: Path) -> None:
    """Flush to disk, so that the rename never gets there before the contents."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
