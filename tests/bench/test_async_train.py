"""The arms of bench/async_train.py differ in staleness alone, and the asynchronous one corrects."""

import asyncio
import importlib.util
import itertools
import random
import sys
from pathlib import Path

import pytest

from upswing.preflight.checks import option_findings
from upswing.rollout.virtual import run_virtual

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))
SPEC = importlib.util.spec_from_file_location("bench_async_train", BENCH / "async_train.py")
bench = importlib.util.module_from_spec(SPEC)
sys.modules["bench_async_train"] = bench  # dataclasses look their module up
SPEC.loader.exec_module(bench)


def test_the_asynchronous_arm_is_the_default_and_corrects():
    recipes = {name: bench.slow_recipe("tiny", 0, **keys) for name, keys in bench.ARMS.items()}
    assert set(recipes) == {"sync", "async"}
    stages = {name: one.stages[0].model_dump() for name, one in recipes.items()}
    changed = {key: value for key, value in stages["async"].items() if value != stages["sync"][key]}
    assert changed == {"max_staleness": 2, "stale": "requeue", "correction": "tis", "correction_high": 2.0}
    assert stages["sync"]["old_logprobs"] is None, "no arm runs a forward that the other doesn't"
    modes = {finding.mode for finding in option_findings(recipes["async"], recipes["async"].stages[0])}
    assert "stale_without_correction" not in modes


def test_new_weights_are_paid_for_once_and_prompts_once_a_group():
    costs = bench.COSTS

    async def main():
        devices, loop, ends = bench.Devices(), asyncio.get_running_loop(), [0.0]
        for waits in (
            lambda: devices.learn([2, 1]),
            lambda: devices.generate("q/7/0-0", 5),
            lambda: devices.generate("q/7/0-1", 5),
            lambda: devices.generate("q/7/0-1", 5),
        ):
            await waits()
            ends.append(loop.time())
        return [later - earlier for earlier, later in itertools.pairwise(ends)]

    learned, *turns = run_virtual(main())
    tokens = 2 * bench.PROMPT_TOKENS + 3 * bench.TURN_TOKENS * 1.648721 + bench.RESULT_TOKENS
    assert learned == pytest.approx(tokens * costs.train_token_s + costs.sync_s)
    sampled = round(bench.TURN_TOKENS * random.Random("length 5").lognormvariate(0, bench.TURN_SPREAD))

    def turn_s(read, before):
        cached = costs.cache_token_s * (before + read + sampled / 2)
        return read * costs.prefill_token_s + sampled * (costs.step_s + cached)

    prompt, result = bench.PROMPT_TOKENS, bench.RESULT_TOKENS
    assert turns == pytest.approx([turn_s(prompt, 0), turn_s(0, prompt), turn_s(result, prompt + sampled)])


def test_a_quick_run_comes_to_the_simulator_before_it_trains(monkeypatch, capsys):
    done = []

    def start(seed, out):
        done.append(f"start {seed}")
        return f"model {seed}"

    def errors(model, folder, tool_s, steps):
        done.append(f"simulator from {model}")
        return {"twice the batch": 0.04, "slower tools": 0.08}

    def trained(models, folder, steps):
        done.append(f"train {models}")
        fast, slow = ([bench.Arm(step_s=s, success=0.9, staleness=0.0) for _ in models] for s in (10.0, 28.0))
        return {"sync": slow, "async": fast}

    for name, stand_in in (("cold_start", start), ("simulator_errors", errors), ("trained", trained)):
        monkeypatch.setattr(bench, name, stand_in)
    monkeypatch.setattr(sys, "argv", ["async_train.py", "--quick"])
    assert bench.main() == 0
    models = {0: "model 0", 1: "model 1"}
    assert done == ["start 0", "start 1", "simulator from model 0", f"train {models}"]
    found = bench.figures_of(trained(models, None, 8), errors("", None, 0.2, 5))
    assert found["step_speedup"].value == found["speedup_equal_bypass"].value == pytest.approx(2.8)
    targets = {"step_speedup": 2.67, "speedup_equal_bypass": 2.0, "reward_gap_in_seed_sd": 1.0, "simulator_error": 0.1}
    assert {name: one.target for name, one in found.items() if one.target is not None} == targets
