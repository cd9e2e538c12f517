"""Detectors on synthetic runs: each failure found and named, healthy runs left alone, nothing said without inputs."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.monitor.series import FACTS, FAULTS, HEALTHY, MORE, Row, run

from upswing.monitor.detectors import DETECTORS, MODES, Detector, Readings, Verdict, judge
from upswing.monitor.findings import SEVERITIES, Finding, Judgement
from upswing.monitor.history import History

SEEDS, STEPS = 20, 45
BATCHES = (32, 64, 128, 512)


def judged(rows: list[Row], facts: dict[str, Any] | None = None, **more: Any) -> dict[str, Judgement]:
    history = History("rl", rows, facts=FACTS if facts is None else facts, **more)
    return {judgement.mode: judgement for judgement in judge(history)}


def serious(judgements: dict[str, Judgement]) -> dict[str, Finding]:
    found = {mode: judgement.finding for mode, judgement in judgements.items()}
    return {mode: finding for mode, finding in found.items() if finding is not None and finding.severity != "info"}


def runs_of(mode: str) -> Iterator[tuple[int, list[Row]]]:
    for seed in range(SEEDS):
        kind = "saturates" if mode == "entropy_collapse" else ("learns", "saturates", "slow")[seed % 3]
        yield seed, run(kind, seed, steps=STEPS, batch=BATCHES[seed % 4], fault=mode)[0]


@pytest.mark.parametrize("mode", FAULTS)
def test_failure_is_found_and_is_the_severest_or_earliest(mode: str):
    """And begins about where the fault sets in, whenever it is asked."""
    named, begun = 0, []
    for seed, rows in runs_of(mode):
        found = serious(judged(rows))
        if mode not in found:
            continue
        assert found[mode].evidence
        assert found[mode].remedies
        severest = max(SEVERITIES.index(finding.severity) for finding in found.values())
        earliest = min(finding.since for finding in found.values())
        named += SEVERITIES.index(found[mode].severity) == severest or found[mode].since <= earliest + 2
        begun.append(found[mode].since)
        if seed < 5 and (sooner := serious(judged(rows[:-8])).get(mode)):
            assert abs(sooner.since - found[mode].since) <= 6
    assert named >= 0.95 * SEEDS
    assert STEPS // 3 - 5 <= np.median(begun) <= STEPS // 3 + 14
    assert np.percentile(begun, 90) - np.percentile(begun, 10) <= 12


@pytest.mark.parametrize("kind", HEALTHY)
def test_healthy_runs_raise_no_alarm(kind: str):
    false = {}
    for seed in range(SEEDS):
        rows, _ = run(kind, seed + 100, steps=(20, 45, 90)[seed % 3], batch=BATCHES[seed % 4])
        for end in (len(rows) * 2 // 3, len(rows)):
            if found := serious(judged(rows[:end])):
                false[seed] = found
    assert len(false) <= 0.05 * SEEDS, false


@pytest.mark.parametrize("more", MORE)
def test_healthy_runs_with_more_to_watch_raise_no_alarm_at_any_time(more: str):
    false, (facts, change) = {}, MORE[more]
    for kind in HEALTHY:
        for seed in range(3):
            rows = [{**row, **change(row)} for row in run(kind, seed + 100, steps=45, batch=64)[0]]
            for end in (3, 6, 9, 12, 20, 45):
                if found := serious(judged(rows[:end], {**FACTS, **facts})):
                    false[kind, seed, end] = found
    assert len({key[:2] for key in false}) <= 1, false


def test_rows_without_signals_are_skipped_never_ok():
    rows = [{"step": step, "loss": 0.1} for step in range(1, 40)]
    assert {judgement.status for judgement in judged(rows, {}).values()} == {"skipped"}
    assert all(judgement.missing for judgement in judged(rows, {}).values())


@pytest.mark.parametrize("detector", DETECTORS, ids=lambda detector: detector.mode)
def test_each_missing_input_is_named(detector: Detector):
    rows, _ = run("learns", 0, steps=30)
    for need in detector.needs:
        names = (need,) if isinstance(need, str) else need
        beginnings = tuple(name.removesuffix("*") for name in names)
        left = [{k: v for k, v in row.items() if k == "step" or not k.startswith(beginnings)} for row in rows]
        judgement = judged(left)[detector.mode]
        assert judgement.status == "skipped"
        assert any(all(name in said for name in names) for said in judgement.missing)


@pytest.mark.parametrize("facts", [{"tools": 0}, {"max_turns": 1}])
def test_calls_mean_nothing_without_tools(facts: dict[str, Any]):
    rows, _ = run("learns", 0, steps=30, fault="tool_call_collapse")
    found = judged(rows, {**FACTS, **facts})
    assert found["tool_call_collapse"].status == found["repeated_calls"].status == "skipped"


def test_no_call_in_the_whole_run_means_no_tools_unless_the_facts_say_so():
    rows = [{**row, "tool_calls": 0.0, "invalid_call_frac": 0.0, "no_call_frac": 1.0} for row in run("flat", 0)[0]]
    unknown = {key: value for key, value in FACTS.items() if key != "tools"}
    assert judged(rows, unknown)["tool_call_collapse"].status == "skipped"
    never = judged(rows)["tool_call_collapse"].finding
    assert never is not None and never.severity == "info", "they may be optional"


def test_one_row_and_no_row_tell_nothing():
    rows, _ = run("learns", 0, steps=3)
    assert {judgement.status for judgement in judged([]).values()} == {"skipped"}
    assert {judgement.status for judgement in judged(rows[:1]).values()} <= {"warming_up", "skipped", "ok"}
    assert judged(rows[:1])["entropy_collapse"].status == "warming_up"


def test_constant_series_raise_nothing():
    row = run("flat", 0, steps=1)[0][0]
    rows = [{**row, "zero_variance_frac": 0.2, "step": step} for step in range(1, 60)]
    assert not serious(judged(rows))


@pytest.mark.parametrize("mode", ["entropy_collapse", "reward_hacking", "tool_call_collapse"])
def test_gaps_and_other_first_steps_change_nothing_but_the_steps(mode: str):
    rows, _ = run("saturates", 3, steps=STEPS, batch=128, fault=mode)
    there = serious(judged(rows))[mode]
    shifted = serious(judged([{**row, "step": row["step"] + 1000} for row in rows]))[mode]
    assert (shifted.since, shifted.severity) == (there.since + 1000, there.severity)
    holes = [{**row, **dict.fromkeys(list(row)[1:], math.nan)} if row["step"] % 7 == 0 else row for row in rows]
    nulls = [{key: None if isinstance(v, float) and math.isnan(v) else v for key, v in row.items()} for row in holes]
    assert abs(serious(judged(holes))[mode].since - there.since) <= 3
    assert judged(nulls) == judged(holes)


def test_a_signal_that_stopped_is_missing_now():
    rows, _ = run("learns", 0, steps=50)
    late = [{k: v for k, v in row.items() if k != "entropy" or row["step"] < 20} for row in rows]
    assert judged(late)["entropy_collapse"].missing == ("entropy",)


def test_judging_is_a_pure_function_of_the_rows():
    rows, _ = run("saturates", 1, steps=STEPS, fault="likelihood_displacement")
    history = History("rl", (), facts=FACTS)
    for row in rows:
        history.add(row)
        judge(history)
    assert judge(history) == list(judged(rows).values()) == list(judged(rows[::-1]).values())


def test_evaluation_rows_join_their_step():
    history = History("rl", [{"step": 1, "reward": 0.5}, {"step": 2, "reward": None}, {"step": 1, "eval_reward": 0.4}])
    assert list(history.steps_S) == [1, 2]
    assert history.series("eval_reward")[0] == 0.4
    assert history.known("reward")[1].tolist() == [0.5]


def test_success_is_the_reward_without_penalties():
    """Fewer calls raise a reward that charges for them; success, which falls, decides."""
    rows, _ = run("saturates", 2, steps=STEPS, batch=128, fault="tool_call_collapse")
    charged = [
        {**row, "reward": row["reward"] - 0.3 * row["tool_calls"], "score_cost": row["tool_calls"]} for row in rows
    ]
    found = serious(judged(charged, {**FACTS, "weights": {"answer": 1.0, "cost": -0.3}}))
    assert "penalty" in found["tool_call_collapse"].causes[0]


def test_causes_are_ranked_by_the_other_signals():
    rows, _ = run("saturates", 1, steps=STEPS, batch=128, fault="entropy_collapse")
    pushed = [{**row, "kl_old": 0.2} for row in rows]
    alone = [{**row, "grad_good": 1.0, "grad_bad": 0.0} for row in rows]
    first = [serious(judged(case))["entropy_collapse"].causes[0] for case in (pushed, alone)]
    assert "steps are large" in first[0]
    assert "only good attempts" in first[1]


def test_own_detector():
    always = Detector(
        mode="mine",
        title="Mine",
        needs=("loss",),
        warm_up=1,
        find=lambda r: Verdict(severity="warning", since=1, evidence=[f"{r.now('loss')}"]),
    )
    (found,) = judge(History("rl", [{"step": 1, "loss": 2.0}]), [always])
    assert found.finding is not None
    assert found.finding.evidence == ("2.0",)


def test_modes_are_those_of_the_lab():
    assert set(MODES) == set(FAULTS)


def test_a_call_is_cheap():
    rows = run("learns", 0, steps=500)[0]
    history = History("rl", [{**row, **{f"more_{i}": 1.0 for i in range(20)}} for row in rows], facts=FACTS)
    assert len(history.names) >= 75
    costs = []
    for _ in range(7):
        start = time.process_time()
        judge(history)
        costs.append(time.process_time() - start)
    assert min(costs) < 0.01


def test_noise_of_a_batch_is_known():
    """32 binary rewards at 0.5 have a standard error of 0.09, however still the series seems."""
    rows = [{"step": i, "reward": 0.5, "reward_std": 0.5, "num_trajectories": 32} for i in range(10)]
    assert Readings(History("rl", rows)).noise("reward") == pytest.approx(0.5 / math.sqrt(32))


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("zero_variance_frac", 4),
        ("same_first_turn_frac", 4),
        ("displaced_frac", 4),
        ("mi_retrieval", 6),
        ("x_frac", 32),
    ],
)
def test_a_share_is_as_noisy_as_what_it_counts_is_few(name: str, count: int):
    rows = [{"step": i, name: 0.5, "num_trajectories": 32, "mi_pairs": 6} for i in range(10)]
    assert Readings(History("rl", rows, facts=FACTS)).noise(name) == pytest.approx(0.5 / math.sqrt(count))


@pytest.mark.parametrize(("probed", "count"), [(1, 1), (3, 3), (8, 8)])
def test_a_share_of_the_probed_rows_is_as_noisy_as_these_are_few(probed: int, count: int):
    """Of one row it is 0 or 1, whatever stood still so far; a step without such rows has no share."""
    rows = [{"step": i, "displaced_frac": 1.0, "num_probed_good": probed, "num_trajectories": 64} for i in range(6)]
    rows += [{"step": i, "displaced_frac": math.nan, "num_probed_good": 0} for i in range(6, 14)]
    share = min(0.5, 1 / count)
    noise = Readings(History("rl", rows, facts=FACTS)).noise("displaced_frac")
    assert noise == pytest.approx(math.sqrt(share * (1 - share) / count))


def test_drift_that_forks_nothing_is_no_fault():
    noted = [{**row, "num_drift_events": 200} for row in run("learns", 0, steps=30)[0]]
    assert judged(noted)["retokenisation_drift"].status == "ok"
    without = [{name: value for name, value in row.items() if name != "num_forks"} for row in noted]
    assert judged(without)["retokenisation_drift"].missing == ("num_forks",)


def test_fewer_pairs_are_no_template():
    """What a first turn can say about its task is bounded by ln of the number of pairs."""
    rows = run("flat", 1, steps=40)[0]
    for row in rows:
        if "mi_pairs" in row:
            pairs = 6 if row["step"] < 15 else 2
            row |= {"mi_pairs": pairs, "mi_first_turn": 0.95 * math.log(pairs), "mi_retrieval": 1.0}
    assert judged(rows)["template_collapse"].status == "ok"


def test_a_reward_that_hardly_rises_while_success_vanishes_is_hacked_at_every_step():
    rng, rows = np.random.default_rng(0), []
    for step in range(1, 41):
        paid, true = 0.75 + 0.08 * min(1, step / 8), 0.12 * max(0.0, 1 - step / 10)
        shares = {"reward": rng.binomial(64, paid) / 64, "score_strict": rng.binomial(64, true) / 64}
        rows.append({"step": step, **shares, "reward_std": 0.4, "num_trajectories": 64})
    found = [judged(rows[:end], {})["reward_hacking"].status == "finding" for end in range(20, 41)]
    assert np.mean(found) > 0.8


def test_groups_that_all_win_or_all_lose_teach_nothing_however_much_was_gained():
    rows = run("learns", 3, steps=40, batch=512)[0]
    dead = {"zero_variance_frac": 1.0, "too_easy_frac": 0.72, "too_hard_frac": 0.28, "reward": 0.72}
    rows = [{**row, **dead} if row["step"] > 25 else row for row in rows]
    assert "advantage_collapse" in serious(judged(rows))


SPIKY = [0.008, 0.005, 0.006, 0.005, 0.02, 0.001, 0.003, 0.017, -0.22, 0.012, -0.002, 0.02, -0.007, -0.62]
"""delta_good of a run that died of it at step 15: small gains between rare large losses, whose median is above 0."""


@pytest.mark.parametrize(
    ("deltas", "displaced", "found"),
    [
        (SPIKY, [0, 0.5, 0, 0.25, 0.33, 0.67, 0.5, 0.5, 0.75, 0.75, 1, 0.33, 1, 1], 11),
        ([-1.1, -0.24], [1, 1], 2),  # dead after two steps
        ([-0.001, -0.002, -0.001], [1, 1, 1], None),  # as little as rounding may do
        ([0.008, 0.005, 0.006, 0.005, 0.02, 0.001, 0.003, 0.017, -0.22, 0.012], [0.3] * 10, None),  # one bad step
        ([0.01, -0.01] * 10, [0.5, 0.75] * 10, None),
    ],
)
def test_rare_large_losses_and_a_fast_collapse_are_displacement(
    deltas: list[float], displaced: list[float], found: int | None
):
    steps = [
        {"delta_good": d, "displaced_frac": s, "reward": 0.3, "reward_std": 0.4, "num_trajectories": 64}
        for d, s in zip(deltas, displaced, strict=True)
    ]
    rows = [{"step": number, **row} for number, row in enumerate(steps, 1)]
    seen = [n for n in range(1, len(rows) + 1) if "likelihood_displacement" in serious(judged(rows[:n]))]
    assert seen[:1] == ([] if found is None else [found])


def test_a_rise_of_entropy_by_a_fifth_of_a_nat_counts_where_noise_is_less():
    rng, rows = np.random.default_rng(1), run("flat", 1, steps=30, batch=128)[0]
    for row in rows:
        row["entropy"] = (0.15 + 0.03 * max(0, row["step"] - 12)) * rng.lognormal(0, 0.08)
    found = serious(judged(rows[:22]))["entropy_explosion"]
    assert abs(found.since - 14) <= 3
    noisy = [{**row, "entropy": 0.3 * rng.lognormal(0, 0.5)} for row in run("flat", 1, steps=60)[0]]
    assert not any("entropy_explosion" in serious(judged(noisy[:end])) for end in range(10, 60, 3))


def test_scattered_gradients_of_a_small_batch_are_stable():
    """A step's norm is within a factor of e in two of three steps."""
    rng, false, late = np.random.default_rng(0), 0, []
    for _ in range(60):
        values = 0.5 * rng.lognormal(0, 0.5, 50)
        rows = [{"step": step, "grad_norm": value} for step, value in enumerate(values)]
        false += any("gradient_instability" in serious(judged(rows[:end])) for end in range(8, 50, 3))
        for row in rows[30:]:
            row["grad_norm"] *= 20
        late.append(next(e for e in range(31, 51) if "gradient_instability" in serious(judged(rows[:e]))))
    assert not false and np.median(late) <= 33


@pytest.mark.parametrize(
    ("every", "moved", "found"),
    [(4, 0.08, True), (4, 0.0005, False), (7, 0.08, False)],
    ids=["far steps", "small steps", "rare jumps"],
)
def test_gradients_that_jump_again_and_again_are_unstable_where_steps_are_far(every: int, moved: float, found: bool):
    first = []
    for seed in range(20):
        rows = run("flat", seed, steps=30)[0]
        for number, row in enumerate(rows):
            row["grad_norm"] = 2.5 if number > 10 and number % every == 0 else 0.3 + 0.01 * (number % 7)
            row["kl_old"] = moved
        seen = (end for end in range(12, 31, 3) if "gradient_instability" in serious(judged(rows[:end])))
        first.append(next(seen, None))
    assert first.count(21) >= 17 if found else not any(first)  # the luck of five steps may look like a gain


@pytest.mark.parametrize(
    ("moved", "grad", "found"),
    [(0.3, 2.0, {"kl_explosion", "gradient_instability"}), (0.3, 0.3, {"kl_explosion"}), (0.05, 2.0, set())],
    ids=["too far", "small gradients", "as far as it may"],
)
def test_a_warm_up_tells_how_far_steps_will_go(moved: float, grad: float, found: set[str]):
    """KL grows with the square of the learning rate; `moved`: at its peak."""
    facts = {**FACTS, "warmup_steps": 10}
    rows = [
        {**row, "lr": 1e-4 * row["step"], "kl_old": moved * (row["step"] / 10) ** 2, "grad_norm": grad}
        for row in run("flat", 2, steps=9)[0]
    ]
    early = {"kl_explosion", "gradient_instability"} & serious(judged(rows[:4], facts)).keys()
    assert early == found and (not early or moved * 0.4**2 < 0.2)
    assert not {"kl_explosion"} & serious(judged(rows[:3], facts)).keys(), "two steps may be luck"
    halved = [{**row, "lr": row["lr"] / 2, "kl_old": row["kl_old"] / 4, "set_lr": 5e-4} for row in rows]
    assert ("kl_explosion" in serious(judged(halved, facts))) == (moved / 4 > 0.2)


def test_a_kl_that_is_not_measured_is_not_called_fine():
    rows = [{key: value for key, value in row.items() if key != "kl"} for row in run("flat", 1, steps=30)[0]]
    assert (judged(rows)["kl_explosion"].status, judged(rows)["kl_explosion"].missing) == ("ok", ("kl",))
    far = judged([{**row, "kl_old": 0.3} for row in rows])["kl_explosion"].finding
    assert far is not None and "isn't measured" in far.evidence[-1]
    assert judged(run("flat", 1, steps=30)[0])["kl_explosion"].missing == ()


def test_a_bonus_without_a_target_that_lifts_entropy_is_found_before_it_has_doubled():
    rng, rows = np.random.default_rng(2), run("flat", 1, steps=22, batch=128)[0]
    for row in rows:
        row["entropy"] = (0.5 + 0.02 * max(0, row["step"] - 10)) * rng.lognormal(0, 0.01)
    pushed = {**FACTS, "entropy_coef": 0.2}
    assert rows[-1]["entropy"] < 1.5 * rows[0]["entropy"]
    assert "entropy_explosion" in serious(judged(rows, pushed))
    for facts in (FACTS, {**pushed, "entropy_target": 0.4}, {**pushed, "entropy_coef": 0.005}):
        assert "entropy_explosion" not in serious(judged(rows, facts))
    assert "entropy_explosion" not in serious(judged([{**row, "set_entropy_coef": 0.0} for row in rows], pushed))
    held = {"set_entropy_coef": 0.2, "set_entropy_target": 0.6}
    rows = [{**row, "entropy": 0.4 * row["entropy"] + (0.3 if row["step"] > 15 else 0), **held} for row in rows]
    assert "entropy_explosion" not in serious(judged(rows, pushed)), "up to its target it is what was asked for"
    assert "entropy_explosion" in serious(judged([*rows, {**rows[-1], "step": 23, "entropy": 1.3},
                                                  {**rows[-1], "step": 24, "entropy": 1.4}], pushed))  # fmt: skip


def test_a_length_penalty_below_good_attempts_is_found_at_once_until_it_is_taken_off():
    rows = run("slow", 4, steps=20, batch=128)[0]
    charged = [{**row, "reward": row["reward"] - 1.0} for row in rows]
    low, high = ({**FACTS, "overlong_length": length, "overlong_cache": 40} for length in (80, 200))
    assert "the length penalty begins at 40" in serious(judged(charged[:3], low))["length_collapse"].evidence[1]
    assert "length_collapse" not in serious(judged(charged[:3], high))
    assert judged([*charged[:3], *rows[3:8]], low)["length_collapse"].status == "ok", "a safeguard took it off"
    light = judged([{**row, "reward": row["reward"] - 0.2} for row in rows[:3]], low)["length_collapse"].finding
    assert light is not None and light.severity == "info"
    learns = run("learns", 3, steps=45, batch=512)[0]
    assert judged([{**row, "reward": row["reward"] - 1} for row in learns], low)["length_collapse"].status == "ok"


@pytest.mark.parametrize(
    ("mode", "signal", "corr"),
    [
        ("tool_call_collapse", "side_calls_corr", -0.6),
        ("repeated_calls", "side_repeats_corr", 0.6),
        ("length_explosion", "side_length_corr", 0.6),
        ("length_collapse", "side_length_corr", -0.6),
    ],
)
def test_a_side_term_that_pays_for_it_is_found_before_anything_moves(mode: str, signal: str, corr: float):
    facts = {**FACTS, "weights": {"answer": 1.0, "side": 1.0}}
    rows = [{**row, signal: corr, "variance_share_side": 0.8} for row in run("flat", 6, steps=8)[0]]
    assert mode in serious(judged(rows[:6], facts)) and mode not in serious(judged(rows[:5], facts))
    others: list[dict[str, float]] = [{signal: -corr}, {signal: corr / 4}, {"variance_share_side": 0.2}]
    for other in others:
        assert mode not in serious(judged([*rows[:6], {**rows[6], **other}], facts)) or "variance_share_side" in other
        assert mode not in serious(judged([{**row, **other} for row in rows], facts))
    unpaid = {key: value for key, value in rows[7].items() if key != signal}
    assert mode not in serious(judged([*rows[:7], unpaid], facts)), "a safeguard took it out of the reward"
    cold = [{**row, "score_answer": 0.0, "score_side": 0.9, "reward": 0.9} for row in rows]
    strict = {**facts, "weights": {"strict_match": 1.0, "side": 1.0}}
    cold = [{**row, "score_strict_match": 0.0} for row in cold]
    assert mode not in serious(judged(cold, strict)), "what is learned first is the way in"
    assert mode in serious(judged([{**row, "score_side": -0.9, "reward": -0.9} for row in cold], strict))
    learns = [{**row, signal: corr, "variance_share_side": 0.8} for row in run("learns", 3, steps=45, batch=512)[0]]
    assert mode not in serious(judged(learns, facts))


@pytest.mark.parametrize(
    ("broken", "reward", "status"), [(0.9, 0.0, "info"), (0.9, 0.4, "warning"), (0.05, 0.0, "warning")]
)
def test_what_a_template_makes_of_gibberish_is_no_fault_of_it(broken: float, reward: float, status: str):
    rows = run("flat", 1, steps=30, batch=128)[0]
    new = {"num_forks": 128 * 1.5, "turns": 3.0, "invalid_call_frac": broken, "reward": reward, "score_answer": reward}
    found = judged([{**row, **new} for row in rows])["retokenisation_drift"].finding
    assert found is not None and found.severity == status


def test_the_luck_of_few_training_tasks_is_no_overfitting():
    assert "overfitting" not in serious(judged(run("slow", 200, steps=45, batch=32)[0][:28]))


@pytest.mark.parametrize(
    "mode",
    [
        *("entropy_collapse", "entropy_explosion", "advantage_collapse", "echo_trap", "template_collapse"),
        *("kl_explosion", "likelihood_displacement", "repeated_calls"),
    ],
)
def test_failures_are_found_before_success_has_lost_a_tenth(mode: str):
    early = 0
    for seed in range(9):
        kind = "saturates" if mode == "entropy_collapse" else ("learns", "saturates", "slow")[seed % 3]
        rows, success = run(kind, seed, steps=STEPS, batch=(64, 128, 512)[seed // 3], fault=mode)
        lost = int(np.flatnonzero(np.array(success) < 0.9 * np.maximum.accumulate(success))[0])
        early += mode in serious(judged(rows[:lost]))
    assert early >= 7
