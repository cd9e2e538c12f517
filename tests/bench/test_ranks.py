"""bench/ranks.py: its figures from losses and seconds, and a run of it on few updates."""

import json
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))

import ranks  # noqa: E402


def test_the_worst_update_and_the_median_round_count():
    losses = [2.0, 1.0, 0.5], [2.0, 1.0 + 3e-5, 0.5]
    found = ranks.compared(losses, ([5.0, 10.0, 5.0], [6.0, 15.0, 5.5]))
    assert found["same_loss_curve"].value == pytest.approx(3e-5) and not found["same_loss_curve"].meets_target
    assert found["overhead"].value == pytest.approx(1.2) and found["overhead"].target is None
    assert found["update_seconds.one"].value == 1.0
    assert ranks.ROUNDS * ranks.EACH >= 20


def test_two_ranks_lose_what_one_process_loses(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ranks.py", "--quick"])
    monkeypatch.setattr(ranks, "ROUNDS", 2)
    monkeypatch.setattr(ranks, "EACH", 1)
    monkeypatch.setattr(ranks, "WARM", 2)
    assert ranks.main() == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])["figures"]
    assert figures["updates"]["value"] == 4 and figures["same_loss_curve"]["value"] < 1e-5
    assert figures["loss_fell"]["value"] > 0
