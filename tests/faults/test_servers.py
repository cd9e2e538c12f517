"""An inference server that dies in the middle of a run, and what a killed run leaves with one."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.engine.servers import VllmServer, dying, served_recipe

from upswing.engine import http
from upswing.monitor.metrics import MetricsLog
from upswing.monitor.progress import Progress
from upswing.recipe import recipe_from
from upswing.stages.runner import run_recipe
from upswing.trajectory.store import TrajectoryStore
from upswing.trajectory.types import Outcome


@pytest.mark.parametrize(
    "when",
    [lambda server: server.running > 10, lambda server: server.calls.count("/pause") > 1],
    ids=["while it samples", "while it takes new weights"],
)
def test_a_run_goes_on_over_an_outage(
    when: Callable[[VllmServer], bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No prompt is lost or trained twice, and the server that comes back gets the weights of the run."""
    monkeypatch.setattr(http, "BACKOFF_S", 0.02)
    server = VllmServer()
    with dying(server, lambda: when(server), away_s=3.0) as url:
        one = recipe_from(served_recipe({"kind": "vllm", "url": url, "weights_dir": str(tmp_path)}))
        run_recipe(one, tmp_path / "run", log=Progress(quiet=True))
    rows = MetricsLog(tmp_path / "run").read("rl")
    assert [row["step"] for row in rows] == [1, 2] and all(row["mismatch_abs"] < 1e-3 for row in rows)
    stored = list(TrajectoryStore(tmp_path / "run/trajectories").read("rl"))
    assert Outcome.ERRORED not in {s.trajectory.outcome for s in stored}
    played = Counter((s.step, s.trajectory.task.id) for s in stored)
    assert len(played) == 4 and {*played.values()} == {8}, "two groups a step, each whole and once"
    assert len({task for _, task in played}) == 4
    assert server.version.startswith("upswing-") and server.loads >= 2
    assert not list(tmp_path.glob(f"{http.FOLDER}*"))


def test_weights_of_killed_processes_are_deleted_and_those_of_others_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = platform.node()
    names = (f"dead-{host}", f"alive-{host}", f"new-{host}", f"held-not-{host}", "held-there")
    dead, alive, new, *elsewhere = (tmp_path / f"{http.FOLDER}{name}" for name in names)
    holds = "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], 0), fcntl.LOCK_EX); print(1, flush=True); input()"
    holders = []
    for folder in elsewhere:  # held on another machine, which this one's locks know nothing of
        folder.mkdir()
        os.utime(folder, (0, 0))
    for folder in (dead, alive, new):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"1")
        if folder is not new:
            os.utime(folder, (0, 0))
            pipe = subprocess.PIPE
            holders.append(subprocess.Popen([sys.executable, "-c", holds, str(folder)], stdin=pipe, stdout=pipe))
            assert holders[-1].stdout is not None and holders[-1].stdout.read(1) == b"1"
    http._sweep(tmp_path)
    assert dead.exists() and alive.exists()
    holders[0].send_signal(signal.SIGKILL)
    holders[0].wait()
    http._sweep(tmp_path)
    assert not dead.exists() and alive.exists() and new.exists(), "a new one may not be held yet"
    assert all(folder.exists() for folder in elsewhere)
    monkeypatch.setattr(http, "MEMORY", tmp_path)  # no other machine's, whatever name a container goes by
    http._sweep(tmp_path)
    assert not any(folder.exists() for folder in elsewhere) and alive.exists()
    holders[1].kill()
    holders[1].wait()
