"""Bradley-Terry by hand and by finite differences; calibration and correlation against slow references."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from upswing.algo.reward_model import bradley_terry, label_figures, length_correlation, pair_accuracy, pair_ece
from upswing.errors import ConfigError


def wide(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_by_hand():
    chosen, rejected = wide(2.0, 0.0, -1.0), wide(1.0, 0.0, 1.0)
    sigmoid = [1 / (1 + math.exp(-d)) for d in (1.0, 0.0, -2.0)]
    torch.testing.assert_close(bradley_terry(chosen, rejected), wide(*(-math.log(p) for p in sigmoid)))
    sigmoid = [1 / (1 + math.exp(-d)) for d in (0.0, -0.5, -2.0)]
    got = bradley_terry(chosen, rejected, margins_B=wide(1.0, 0.5, 0.0), centring=0.01)
    torch.testing.assert_close(got, wide(-math.log(sigmoid[0]) + 0.09, -math.log(sigmoid[1]), -math.log(sigmoid[2])))
    with pytest.raises(ConfigError, match="centring is nan"):
        bradley_terry(chosen, rejected, centring=math.nan)


score = st.floats(-8, 8)


@given(score, score, st.floats(0, 2), st.floats(0, 0.5))
def test_gradient_is_the_finite_difference(chosen, rejected, margin, centring):
    pair = wide(chosen, rejected).requires_grad_()

    def loss(scores):
        return bradley_terry(scores[:1], scores[1:], margins_B=wide(margin), centring=centring).sum()

    torch.autograd.gradcheck(loss, (pair,), eps=1e-5, atol=1e-6)
    (got,) = torch.autograd.grad(loss(pair), pair)
    pull = -1 / (1 + math.exp(chosen - rejected - margin))
    centre = 2 * centring * (chosen + rejected)
    torch.testing.assert_close(got, wide(pull + centre, centre - pull))


@pytest.mark.parametrize("gap", [1e4, -1e4])
def test_no_difference_overflows(gap):
    chosen = torch.tensor([gap], requires_grad=True)
    loss = bradley_terry(chosen, torch.zeros(1), margins_B=torch.ones(1))
    loss.sum().backward()
    assert loss.item() == pytest.approx(max(0.0, 1 - gap)) and chosen.grad.item() == (0.0 if gap > 0 else -1.0)


def test_accuracy_counts_a_tie_half():
    assert pair_accuracy(wide(1.0, 0.0, 2.0, 0.0), wide(0.0, 1.0, 1.0, 0.0)) == 0.625
    assert math.isnan(pair_accuracy(wide(), wide()))


def slow_ece(chosen, rejected, bins):
    total = 0.0
    for b in range(bins):
        low, high = 0.5 + b / bins / 2, 0.5 + (b + 1) / bins / 2
        inside = []
        for c, r in zip(chosen, rejected, strict=True):
            confidence = 1 / (1 + math.exp(-abs(c - r)))
            if low <= confidence < high or (b == bins - 1 and confidence >= low):
                inside.append((confidence, 1.0 if c > r else 0.5 if c == r else 0.0))
        if inside:
            gap = np.mean([win for _, win in inside]) - np.mean([confidence for confidence, _ in inside])
            total += len(inside) / len(chosen) * abs(gap)
    return total


@pytest.mark.parametrize("bins", [1, 7, 10])
def test_calibration_error_against_a_slow_reference(bins):
    rng = np.random.default_rng(bins)
    chosen, rejected = rng.normal(0.4, 2, 300), rng.normal(0, 2, 300)
    chosen[:5] = rejected[:5]
    got = pair_ece(torch.tensor(chosen), torch.tensor(rejected), bins=bins)
    assert got == pytest.approx(slow_ece(chosen, rejected, bins), abs=1e-12)


def test_calibration_knows_calibrated_from_overconfident():
    rng = np.random.default_rng(0)
    difference = rng.normal(0, 1.5, 20_000)
    prefers_first = rng.random(20_000) < 1 / (1 + np.exp(-difference))
    true = torch.tensor(np.where(prefers_first, difference, -difference))
    zero = torch.zeros_like(true)
    assert pair_ece(true, zero) < 0.02
    assert pair_ece(4 * true, zero) > 0.1
    assert pair_ece(true * 1e4, zero) == pytest.approx(1 - pair_accuracy(true, zero), abs=1e-3)
    assert pair_ece(zero, zero) == 0.0 and math.isnan(pair_ece(zero[:0], zero[:0]))


def test_length_correlation():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 50, 40)
    scores = 0.1 * lengths + rng.normal(size=40)
    got = length_correlation(torch.tensor(scores, dtype=torch.float32), torch.tensor(lengths))
    assert got == pytest.approx(np.corrcoef(scores, lengths)[0, 1], abs=1e-6)
    assert length_correlation(torch.tensor(-2.0 * lengths), torch.tensor(lengths)) == pytest.approx(-1.0)
    for same, other in ((wide(1.0, 1.0), wide(1.0, 2.0)), (wide(1.0, 2.0), wide(3.0, 3.0)), (wide(1.0), wide(1.0))):
        assert math.isnan(length_correlation(same, other))


def test_figures_of_labels_are_what_they_say():
    """Against their definitions on draws: every position is good with the chance that its label says."""
    rng = np.random.default_rng(0)
    labels, logits = rng.random(40), rng.integers(-3, 4, 40).astype(float)
    found = label_figures(torch.tensor(logits), torch.tensor(labels))
    pairs = [(labels[i] * (1 - labels[j]), (logits[i] > logits[j]) + 0.5 * (logits[i] == logits[j]))
             for i in range(40) for j in range(40)]  # fmt: skip
    assert found["auc"] == pytest.approx(sum(w * v for w, v in pairs) / sum(w for w, _ in pairs))
    right = np.where(logits > 0, labels, np.where(logits < 0, 1 - labels, 0.5))
    assert found["accuracy"] == pytest.approx(right.mean())
    assert found["base_brier"] == pytest.approx(labels.var())
    assert found["brier"] == pytest.approx(np.mean((1 / (1 + np.exp(-logits)) - labels) ** 2))
    perfect = label_figures(torch.tensor([9.0, -9.0]), torch.tensor([1.0, 0.0]))
    assert perfect["auc"] == perfect["accuracy"] == 1.0 and perfect["brier"] < 1e-6
    assert math.isnan(label_figures(torch.tensor([1.0]), torch.tensor([1.0]))["auc"])
