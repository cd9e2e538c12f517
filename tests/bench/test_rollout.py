"""The arms of bench/rollout.py do the same work, so that their times may be compared."""

import importlib.util
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))

import peers  # noqa: E402
from arms import ArmFailed, Worker, measured  # noqa: E402

SPEC = importlib.util.spec_from_file_location("bench_rollout", BENCH / "rollout.py")
rollout = importlib.util.module_from_spec(SPEC)
sys.modules["bench_rollout"] = rollout  # dataclasses look their module up
SPEC.loader.exec_module(rollout)

UNEVEN = [[(5, 3), (9, 6)], [(12, 7), (4, 2)], [(3, 5), (7, 4)]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(rollout.model_folder("tiny", tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def expected(folder):
    """One conversation at a time: nothing is padded, nothing is cached between turns."""
    conversations = rollout.Workload(UNEVEN).filled(928, seed=1)
    arm = peers.HFArm(folder, "float32", greedy=True)
    return conversations, [arm.play([conversation])[0] for conversation in conversations]


@pytest.mark.parametrize("arm", [peers.HFArm, peers.EngineArm, peers.ContinuousArm])
def test_every_arm_plays_the_same_conversations(folder, expected, arm):
    conversations, texts = expected
    player = arm(folder, "float32", greedy=True)
    player.setup(conversations)
    try:
        assert player.play(conversations) == texts
    finally:
        if arm is peers.ContinuousArm:
            player.manager.stop(block=True, timeout=10)


def test_lengths_are_as_documented():
    full = rollout.workloads(quick=False)
    assert full["fixed"].shape == [[(64, 64)]] * 64
    assert full["shared_prompt"].shape == [[(512, 64)]] * 64 and full["shared_prompt"].group == 8
    new = [turns[0][1] for turns in full["ragged"].shape]
    assert len(new) >= 64 and 16 <= min(new) < 40 < 230 < max(new) <= 256
    for turns in full["multiturn"].shape:
        assert len(turns) == 8 and all(64 <= given <= 160 and 16 <= new <= 48 for given, new in turns)
        assert sum(map(sum, turns)) <= 2048
    for name, part in rollout.workloads(quick=True).items():
        assert sum(new for turns in part.shape for _, new in turns) < 0.3 * sum(
            new for turns in full[name].shape for _, new in turns
        )


def test_only_a_group_shares_tokens_and_rounds_share_none():
    work = rollout.Workload([[(40, 2), (30, 2)]] * 4, group=2)
    first, again, other = work.filled(928, 1), work.filled(928, 1), work.filled(928, 2)
    assert first == again and first[0] == first[1] and first[2] == first[3]
    starts = [tuple(conversations[i][0][0][:4]) for conversations in (first, other) for i in (0, 2)]
    assert len(set(starts)) == 4


def test_the_floor_counts_every_product_once_and_the_gap_is_small(folder, monkeypatch):
    conversations = rollout.Workload([[(16, 8)]] * 4).filled(928, 1)
    arm = peers.EngineArm(folder, "float32")
    assert arm.logprob_gap(conversations) < 1e-5
    assert arm.run(conversations)["peak_mb"] > 100
    assert arm.floor(conversations) > 0
    monkeypatch.setattr(arm, "_products", lambda linears, rows, *_: rows * sum(m.weight.numel() for m in linears))
    # Two layers: q and o 64 x 64, k and v 64 x 32, three of 64 x 192. The head sees each prompt's last token only.
    layers, head = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 192), 64 * 928
    assert arm.floor(conversations) == layers * 4 * (16 + 7) + head * 4 * 8


def test_peak_memory_is_of_what_runs_inside():
    held = bytearray(300 << 20)
    del held
    with measured() as before:
        pass
    with measured() as during:
        held = bytearray(200 << 20)
        del held
    assert 190 < during["peak_mb"] - before["peak_mb"] < 215


def test_an_arm_says_why_it_failed():
    code = f"""
import sys
sys.path.insert(0, {str(BENCH)!r})
import arms
class A:
    def __init__(self, name): print("noise")
    def f(self, x): print("noise"); return 1 / x
arms.serve(A, "name")
"""
    arm = Worker("a", [sys.executable, "-c", code], {})
    assert arm("f", x=4) == 0.25
    with pytest.raises(ArmFailed, match="ZeroDivisionError: division by zero"):
        arm("f", x=0)
    assert arm("f", x=2) == 0.5
    arm.close()
    dead = Worker("b", [sys.executable, "-c", "import no_such_peer"], {})
    with pytest.raises(ArmFailed, match="No module named 'no_such_peer'"):
        dead("f", x=1)
    dead.close()


def test_figures_have_the_published_names_and_a_missing_arm_is_null():
    run = {"seconds": 2.0, "peak_mb": 100.0, "floor": 1.5}
    slow = {"seconds": 6.0, "peak_mb": 300.0}
    results = {("fixed", "engine"): [run, run | {"seconds": 3.0}], ("fixed", "hf"): [slow, slow]}
    found = rollout.figures(results, rollout.workloads(False), {"float32": 1e-6, "bfloat16": None})
    names = "fixed_vs_hf fixed_vs_vllm ragged_vs_hf multiturn_vs_hf shared_prompt_vs_hf floor_fraction int8_vs_bf16"
    targets = [2.5, 2.0, 4.0, 5.0, 3.5, 0.70, 1.5]
    assert {name: found[name].target for name in names.split()} == dict(zip(names.split(), targets, strict=True))
    assert found["fixed_vs_hf"].value == pytest.approx(2.4) and found["fixed_vs_hf"].spread == (2.0, 3.0)
    assert found["floor_fraction"].value == pytest.approx((0.75 + 0.5) / 2)
    assert found["fixed_vs_vllm"].value is None and not found["fixed_vs_vllm"].meets_target
    assert found["logprob_gap_fp32"].target == 1e-4 and found["logprob_gap_fp32"].meets_target
    assert found["tokens_per_second.fixed.hf"].value == pytest.approx(64 * 64 / 6)
