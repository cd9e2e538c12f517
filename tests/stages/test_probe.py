"""What an update did to sampled rows and what first turns say of their task, against the unpacked model."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.learn.helpers import plain_at_loss, random_rows, row, tiny

from upswing.learn import Learner, TrainRow
from upswing.learn.lora import add_lora
from upswing.stages.probe import DISPLACEMENT_SHARE, EVERY, FORWARDS, Probe, first_turn_information, forward_tokens
from upswing.trajectory.types import Branch, Group, Message, Outcome, StopReason, Task, Trajectory

from .test_algorithms import recipe, run

NEW = """
tokens_good tokens_bad tokens_finished tokens_min tokens_max repetition distinct_4 unique_frac no_call_frac
max_turns_frac empty_frac novelty reward_length_corr group_reward_std effective_frac same_first_turn_frac entropy_first
entropy_later delta_good delta_good_first delta_bad displaced_frac num_probed_good invalid_attempt_frac
ratio_p01 ratio_p99 ratio_p999 kl_clamped_frac grad_good grad_bad errored_frac unscored_frac probe_s
"""


def with_turns(rows: list[TrainRow]) -> list[TrainRow]:
    """The later half of what was sampled is a second turn."""
    middle = [one.loss_positions[len(one.loss_positions) // 2] for one in rows]
    turns = [(np.arange(len(one.tokens)) > at).astype(np.int16) for one, at in zip(rows, middle, strict=True)]
    return [replace(one, turn=turn) for one, turn in zip(rows, turns, strict=True)]


def change(after: Any, before: Any, rows: list[TrainRow], temperature: float = 1.0) -> list[np.ndarray]:
    return [
        (plain_at_loss(after, [one], temperature) - plain_at_loss(before, [one], temperature)).detach().numpy()
        for one in rows
    ]


@pytest.mark.parametrize("case", ["one step", "two steps", "lora"])
def test_the_change_is_told_also_of_one_on_policy_update_whatever_the_engine_says(case: str) -> None:
    rows = with_turns(random_rows(groups=1, size=8))  # of an engine that disagrees
    if case == "lora":
        pytest.importorskip("peft")
    learner = Learner(add_lora(tiny(), r=4) if case == "lora" else tiny(), lr=0.01, max_tokens_per_pack=90)
    probe = Probe(learner, rows, temperature=0.8, passes=1000)  # a step so long that all may be looked at
    update = learner.rl_update(rows, temperature=0.8, updates_per_batch=2 if case == "two steps" else 1)
    assert (update.kl_old.value == 0.0) == (case != "two steps")
    found = probe.after([], 1, update)
    good, bad = ([r for r in rows if r.advantage * side > 0] for side in (1, -1))
    assert min(len(good), len(bad)) <= 4 < len(rows)
    picked = [[int((i + 0.5) / min(4, n) * n) for i in range(min(4, n))] for n in (len(good), len(bad))]
    good, bad = ([side[i] for i in places] for side, places in zip((good, bad), picked, strict=True))
    moved, sunk = (change(learner.model, tiny(), side, 0.8) for side in (good, bad))
    first = [values[r.turn[r.loss_positions] == 0] for r, values in zip(good, moved, strict=True) if r.turn is not None]
    right = {
        "delta_good": np.concatenate(moved).mean(),
        "delta_good_first": np.concatenate(first).mean(),
        "delta_bad": np.concatenate(sunk).mean(),
        "displaced_frac": np.mean([values.sum() <= 0 for values in moved]),
        "num_probed_good": len(good),
    }
    assert {name: found[name] for name in right} == {n: pytest.approx(v, abs=1e-5) for n, v in right.items()}
    assert found["delta_good"] > 0 > found["delta_bad"]


def test_what_probing_costs_is_bounded_and_one_row_of_either_sign_is_looked_at() -> None:
    rows = random_rows(groups=16, size=8)
    learner, seen = Learner(tiny(), lr=1e-3), []
    real = learner.logprobs
    learner.logprobs = lambda found, *args, **options: seen.append(found) or real(found, *args, **options)
    update = learner.rl_update(rows)
    Probe(learner, rows, temperature=1.0).after([], 1, update)
    Probe(learner, rows[:4], temperature=1.0).after([], 1, update)
    Probe(learner, [replace(r, advantage=-1.0) for r in rows], temperature=1.0, passes=100).after([], 1, update)
    whole = FORWARDS * (forward_tokens(rows) + update.num_loss_tokens)
    assert forward_tokens(seen[0]) <= DISPLACEMENT_SHARE * whole < 1.5 * forward_tokens(seen[0])
    assert len({one.group for one in seen[0]}) > 1 and len(seen[1]) <= 2
    assert {one.advantage for one in seen[2]} == {-1.0} and len(seen[2]) == 8


def test_training_is_the_same_bit_for_bit_with_a_probe_and_without() -> None:
    rows, states = random_rows(), []
    for probed in (False, True):
        learner = Learner(tiny(), lr=0.01)
        for step in range(2):
            probe = Probe(learner, rows, temperature=1.0) if probed else None
            update = learner.rl_update(rows, minibatches=2)
            if probe is not None:
                probe.after(GROUPS, step * EVERY, update)
        weights = [p.detach().clone() for p in learner.model.parameters()]
        states.append((weights, learner._rng.bit_generator.state, torch.get_rng_state()))
    assert all(torch.equal(a, b) for a, b in zip(states[0][0], states[1][0], strict=True))
    assert states[0][1] == states[1][1] and torch.equal(states[0][2], states[1][2])


def test_where_nothing_changed_nothing_is_said_of_a_change() -> None:
    rows = [replace(one, advantage=0.0) for one in random_rows(groups=1)]
    learner = Learner(tiny(), lr=0.01)
    probe = Probe(learner, rows, temperature=1.0)
    skipped = probe.after([], 1, learner.rl_update(rows))
    warming_up = probe.after([], 1, None)
    assert skipped.keys() == warming_up.keys() == {"probe_s"}
    with_kl = Learner(tiny(), lr=0.01, ref_model=tiny(seed=1))
    found = Probe(with_kl, rows, temperature=1.0).after([], 1, with_kl.rl_update(rows, kl_coef=1.0))
    assert found.pop("num_probed_good") == 0 and "delta_good" in found
    assert all(math.isnan(value) for name, value in found.items() if name != "probe_s")


# -- first turns ------------------------------------------------------------


def group(name: str, prompt: list[int], turn: list[int], **changes: Any) -> Group:
    tokens = [*prompt, *turn, 5, 6, 7]
    sampled = np.array([False] * len(prompt) + [True] * len(turn) + [False, True, True])
    branch = Branch(
        tokens=np.array(tokens, np.int32),
        sampled=sampled,
        engine_logprobs=np.where(sampled, -1.0, np.nan).astype(np.float32),
        policy_version=np.where(sampled, 0, -1).astype(np.int32),
        turn=np.array([0] * (len(prompt) + len(turn)) + [1] * 3, np.int16),
    )
    task = Task(id=name, messages=(Message(role="user", content="?"),))
    fields: dict[str, Any] = {"outcome": Outcome.COMPLETED, "stop_reason": StopReason.ANSWERED}
    one = Trajectory(id=name, task=task, branches=(branch,), messages=task.messages, **fields | changes)
    return Group(task=task, trajectories=(one,))


PROMPTS = [[10, 11, 12, *range(20, 20 + 3 * i)] for i in range(8)]
TURNS = [[30 + i, 31, 40 + i, 33][: 2 + i % 3] for i in range(8)]
GROUPS = [group(str(i), x, z) for i, (x, z) in enumerate(zip(PROMPTS, TURNS, strict=True))]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_information_in_first_turns_is_the_formula_on_the_unpacked_model(temperature: float) -> None:
    broken = group("broken", [9, 9, 9], [8], outcome=Outcome.ERRORED, stop_reason=StopReason.ERROR)
    again = group("again", PROMPTS[0], [50])  # the same prompt tells nothing apart
    found = first_turn_information(
        Learner(tiny(), lr=0.0), [broken, GROUPS[0], again, *GROUPS[1:]], temperature, budget=10_000
    )

    def logprob(x: list[int], z: list[int]) -> float:
        one = row([*x, *z], range(len(x), len(x) + len(z)))
        return float(plain_at_loss(tiny(), [one], temperature).detach().sum())

    total = [[logprob(x, z) for x in PROMPTS[:6]] for z in TURNS[:6]]
    own = [total[i][i] - math.log(sum(map(math.exp, total[i])) / 6) for i in range(6)]
    hits = [max(range(6), key=total[i].__getitem__) == i for i in range(6)]
    right = {"mi_first_turn": np.mean(own), "mi_retrieval": np.mean(hits), "mi_pairs": 6}
    assert found == {name: pytest.approx(value, abs=1e-4) for name, value in right.items()}


def test_first_turns_that_a_prompt_decides_say_all_and_others_nothing() -> None:
    """Trained to say something else after each prompt: log 4; the same after all: 0."""
    prompts, turns = PROMPTS[1:5], [[40 + i, 41] for i in range(4)]
    for said, right in ((turns, math.log(4)), ([turns[0]] * 4, 0.0)):
        learner = Learner(tiny(), lr=0.01)
        rows = [row([*x, *z], range(len(x), len(x) + 2)) for x, z in zip(prompts, said, strict=True)]
        for _ in range(60):
            learner.sft_update(rows)
        groups = [group(str(i), x, z) for i, (x, z) in enumerate(zip(prompts, said, strict=True))]
        found = first_turn_information(learner, groups, 1.0, budget=10_000)
        assert found["mi_first_turn"] == pytest.approx(right, abs=0.1) and found["mi_pairs"] == 4
        assert found["mi_retrieval"] == 1.0 or not right


def test_pairs_are_as_many_as_the_budget_allows_and_at_least_two() -> None:
    learner = Learner(tiny(), lr=0.0)
    # 2 pairs: prompts of 3 and 6, turns of 2 and 3, each twice: 19 tokens; 3 pairs: 3 + 6 + 9 + 3 * (2 + 3 + 4) = 45.
    pairs = [first_turn_information(learner, GROUPS, 1.0, budget)["mi_pairs"] for budget in (0, 44, 45)]
    assert pairs == [2, 2, 3]
    alone = first_turn_information(learner, GROUPS[:1], 1.0, 10_000)
    assert alone["mi_pairs"] == 1 and math.isnan(alone["mi_first_turn"]) and math.isnan(alone["mi_retrieval"])


def test_a_run_logs_every_signal_and_first_turns_every_fifth_step(tmp_path: Path) -> None:
    rl = {"algorithm": "grpo", "steps": EVERY + 1, "kl_coef": 0.01, "updates_per_batch": 2}
    rows = run(recipe(rl), tmp_path / "run")
    for number, values in enumerate(rows):
        assert not [name for name in NEW.split() if name not in values]
        assert ("mi_first_turn" in values) == ("mi_pairs" in values) == (number in (0, EVERY))
    for name in (*NEW.split(), "mi_first_turn", "mi_retrieval"):
        assert any(values.get(name) is not None for values in rows), name
    assert rows[0]["mi_pairs"] in (2, 3, 4) and rows[0]["kl_clamped_frac"] == 0.0


def test_while_only_the_critic_trains_nothing_is_displaced_and_a_kl_in_the_reward_is_watched(tmp_path: Path) -> None:
    rows = run(recipe({"algorithm": "ppo", "kl_coef": 0.05, "critic": {"warmup_steps": 1}}), tmp_path / "run")
    assert ["delta_good" in values for values in rows] == ["grad_good" in values for values in rows] == [False, True]
    assert rows[0]["mi_pairs"] >= 2 and [values["kl_clamped_frac"] for values in rows] == [0.0, 0.0]
    assert 0 < rows[1]["effective_frac"] <= 1
