"""The same as an ordinary user. Where the tests run as root, a child becomes one; else every test here is that test."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import upswing
from upswing.verify import deadline, sandbox

from .programs import PROGRAMS

# As root: give user 1000 sight of Python and of the sandbox's source alone, then become that user for good.
BECOME = """
import os, sys
source, prefix, python, script = sys.argv[1:]
sys.path.insert(0, source + "/upswing/verify/sandbox")
from jail import linux
linux.unshare(linux.NEWNS)
linux.mount(None, "/", flags=linux.REC | linux.PRIVATE)
linux.mount("tmpfs", "/mnt", "tmpfs", 0, "mode=755")
for name, path in (("python", prefix), ("source", source)):
    os.mkdir("/mnt/" + name)
    linux.mount(path, "/mnt/" + name, flags=linux.BIND | linux.REC)
top = "/" + prefix.split("/")[1]
if top != "/usr":
    linux.mount("tmpfs", top, "tmpfs", 0, "mode=755")
    os.makedirs(prefix)
    linux.mount("/mnt/python", prefix, flags=linux.BIND | linux.REC)
os.chdir("/")
os.setgroups([]), os.setresgid(1000, 1000, 1000), os.setresuid(1000, 1000, 1000)
os.environ.update(PYTHONPATH="/mnt/source", HOME="/", TMPDIR="/tmp")
os.execv(python, [python, "-c", script])
"""
PLAY = """
import asyncio, json, os
from upswing.verify.sandbox import Sandbox
from faults.sandbox.harness import Canaries, faults_of
from faults.sandbox.programs import PROGRAMS
async def main():
    with Canaries() as canaries:
        sandbox = Sandbox()
        played = [one for one in PROGRAMS if "refused" in one.ends]
        faults = {one.name: await faults_of(sandbox, canaries, one) for one in played}
        print(json.dumps([os.getuid(), len(faults), {name: found for name, found in faults.items() if found}]))
asyncio.run(main())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="not root: the other tests ran as an ordinary user already")
def test_an_ordinary_user_has_the_same_isolation(tmp_path: Path):
    (tmp_path / "upswing" / "verify").mkdir(parents=True)
    for name in ("upswing", "upswing/verify"):
        (tmp_path / name / "__init__.py").touch()
    shutil.copy(Path(upswing.__file__).parent / "errors.py", tmp_path / "upswing")
    shutil.copy(Path(deadline.__file__), tmp_path / "upswing" / "verify")
    shutil.copytree(Path(sandbox.__file__).parent, tmp_path / "upswing" / "verify" / "sandbox")
    shutil.copytree(Path(__file__).parent, tmp_path / "faults" / "sandbox")
    for path in (tmp_path, *tmp_path.rglob("*")):
        path.chmod(0o755)
    python = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    argv = [python, "-c", BECOME, str(tmp_path), os.path.realpath(sys.base_prefix), python, PLAY]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    uid, count, faults = json.loads(done.stdout.splitlines()[-1])
    assert uid == 1000 and count > 60 and not faults
    assert count < len(PROGRAMS)
