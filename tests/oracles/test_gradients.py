"""Every estimator's expected gradient, against the exact one of problems small enough to enumerate."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from upswing.algo import advantage, credit

PATH = Path(__file__).parents[2] / "bench" / "gradient_oracle.py"
SPEC = importlib.util.spec_from_file_location("gradient_oracle", PATH)
oracle = importlib.util.module_from_spec(SPEC)
sys.modules["gradient_oracle"] = oracle  # dataclasses look their module up
SPEC.loader.exec_module(oracle)

T = torch.from_numpy
NUM_BATCHES, MAX_Z = 20_000, 4.5


@pytest.mark.parametrize("name", oracle.ESTIMATORS)
def test_the_expected_gradient_is_the_documented_one(name):
    assert oracle.bias(name) < 1e-12
    assert oracle.gradient_z(name, NUM_BATCHES, seed=0) <= MAX_Z


def test_the_exact_gradients_agree_with_finite_differences():
    def value(name, logits):
        probs = [oracle.softmax(list(x)) for x in logits]
        means = [p @ np.array(r) for p, r in zip(probs, oracle.REWARDS[name], strict=True)]
        return sum(means) / 2 if name == "bandit" else means[0] + probs[0] @ means[1:]

    for name, states in oracle.LOGITS.items():
        flat, sizes = np.concatenate(states), np.cumsum([len(x) for x in states])[:-1]
        step = 1e-5 * np.eye(len(flat))
        slopes = [
            (value(name, np.split(flat + e, sizes)) - value(name, np.split(flat - e, sizes))) / 2e-5 for e in step
        ]
        np.testing.assert_allclose(oracle.make_problem(name).gradient_D, slopes, atol=1e-9)
        assert oracle.make_problem(name).chance_O.sum() == pytest.approx(1.0, abs=1e-12)


def by_position(b):
    return torch.arange(6) // 3


PLANTED = {
    "sign of the advantage": ("rloo", lambda b: -advantage.rloo(T(b.reward_N), T(b.group_B))),
    "sign of the baseline": ("dr_grpo", lambda b: T(b.reward_N + oracle.per_id(b.reward_N, b.group_B, np.mean))),
    "mean taken for leave-one-out": (
        "rloo",
        lambda b: advantage.group_relative(T(b.reward_N), T(b.group_B), normalize_std=False),
    ),
    "groups by position": ("grpo", lambda b: advantage.group_relative(T(b.reward_N), by_position(b))),
    "own sample in the baseline": (
        "reinforce, moving average",
        lambda b: advantage.reinforce(T(b.reward_N), baseline=advantage.ema_baseline(0.2, T(b.reward_N), 0.5)),
    ),
    "biased std": (
        "grpo",
        lambda b: advantage.group_relative(T(b.reward_N), T(b.group_B)) * 1.5**0.5,
    ),
    "lengths forgotten": ("opo", lambda b: advantage.opo(T(b.reward_N), T(b.group_B), torch.ones(6))),
    "reward lost at the end": (
        "returns_to_go",
        lambda b: credit.returns_to_go(T(b.reward_N * (b.state_N == 0)), T(b.sequence_N)),
    ),
    "critic zeroed at the next state": (
        "gae",
        lambda b: credit.gae(T(b.reward_N), T(oracle.WRONG_CRITIC[0] * (b.state_N == 0)), T(b.sequence_N), gamma=0.9)[
            0
        ],
    ),
    "tokens by adjacency": (
        "returns_to_go",
        lambda b: credit.returns_to_go(T(b.reward_N), torch.tensor([0, 1, 2, 0, 1, 2])),
    ),
}


@pytest.mark.parametrize("mistake", PLANTED)
def test_a_planted_mistake_is_found_by_both_figures(mistake):
    name, advantages = PLANTED[mistake]
    wrong = replace(oracle.ESTIMATORS[name], advantages=advantages)
    assert oracle.estimator_bias(wrong) > 1e-3
    assert oracle.estimator_z(wrong, NUM_BATCHES, seed=0) > MAX_Z


def test_pass_at_k_before_its_scale_is_a_gradient_of_pass_at_k():
    """Its numerator estimates (G-k)/(G k) of the exact gradient of pass@k = 1 - (1 - p)^k."""
    problem, group_size, k = oracle.make_problem("bandit"), 3, 2

    def numerator(b):
        right_B = T(b.reward_N == 1).double()
        fail_B = oracle.per_id(1.0 * (b.reward_N == 1), b.group_B, lambda r: np.full(len(r), float(r.sum() == 1) / 3))
        return advantage.pass_at_k(right_B, T(b.group_B), k=k) * T(np.sqrt(fail_B * (1 - fail_B)))

    exact = []
    for probs, rewards in zip(oracle.PROBS["bandit"], oracle.REWARDS["bandit"], strict=True):
        right = np.array(rewards) == 1
        p = probs @ right
        exact.append(k * (1 - p) ** (k - 1) * probs * (right - p) / 2)
    expected = problem.chance_O @ oracle.gradients(problem, numerator)
    np.testing.assert_allclose(expected, np.concatenate(exact) * (group_size - k) / (group_size * k), atol=1e-12)
