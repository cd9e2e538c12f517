"""A Ray of two nodes, of which the one that isn't the head's is killed in the middle of a step."""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray")

from ray.cluster_utils import Cluster as Nodes  # noqa: E402
from tests.cluster.test_ray import kill_at, learned, recipe  # noqa: E402

from upswing.monitor.progress import Progress  # noqa: E402
from upswing.stages.runner import run_recipe  # noqa: E402
from upswing.trajectory.types import Outcome  # noqa: E402


@pytest.fixture
def nodes() -> Iterator[Any]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    size = {"num_cpus": 2, "object_store_memory": 100_000_000}
    found = Nodes(initialize_head=True, head_node_args={**size, "include_dashboard": False})
    found.add_node(**size)
    ray.init(found.address, log_to_driver=False, logging_level=logging.FATAL)
    yield found
    ray.shutdown()
    found.shutdown()


def test_a_run_goes_on_when_a_node_is_lost(
    nodes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its engine or worker, whichever was there, gets a place on the other."""
    [other] = nodes.worker_nodes
    kill_at(monkeypatch, 3, lambda: nodes.remove_node(other, allow_graceful=False), engine=False)
    out = tmp_path / "run"
    run_recipe(recipe(2, {"env_workers": 1, "placement": "spread"}), out, log=Progress(quiet=True))
    assert re.search("(engine|env worker) 1 of 1 is replaced", capsys.readouterr().out)
    played = Counter((step, t.task.id) for step, t in learned(out) if t.outcome is not Outcome.ERRORED)
    assert played == {(step, f"train{2 * step - 2 + n}"): 4 for step in (1, 2) for n in (0, 1)}
