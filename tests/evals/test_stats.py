"""Statistics against independent oracles: scipy-free enumeration, closed forms and coverage by simulation."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from upswing.evals.stats import (
    Interval,
    bootstrap_mean_ci,
    paired_test,
    pass_at_k,
    pass_hat_k,
    wilson_interval,
)


def test_mean_is_over_all_values_whatever_their_batches():
    assert bootstrap_mean_ci([1, 1, 0, 0, 1]).mean == pytest.approx(3 / 5)


def test_order_of_rows_does_not_matter():
    values = [1.0, 0.0, 0.25, 0.5] * 10
    first, second = bootstrap_mean_ci(values), bootstrap_mean_ci(sorted(values))
    assert first.mean == second.mean
    assert first.low == pytest.approx(second.low, abs=0.02)


@pytest.mark.parametrize("values", [[0.0, 1.0] * 60 + [1.0] * 80, list(np.random.default_rng(3).gamma(2.0, 1.0, 300))])
def test_bootstrap_agrees_with_the_normal_interval_on_large_samples(values):
    """The central limit theorem is the oracle: mean +- 1.96 standard errors."""
    found = bootstrap_mean_ci(values)
    error = np.std(values) / math.sqrt(len(values))
    assert found.low == pytest.approx(np.mean(values) - 1.96 * error, abs=0.15 * error)
    assert found.high == pytest.approx(np.mean(values) + 1.96 * error, abs=0.15 * error)


def test_bootstrap_is_exact_on_a_case_small_enough_to_enumerate():
    """All 4^4 resamples of four values, each equally likely: their quantiles are what the bootstrap estimates."""
    values = [0.0, 1.0, 2.5, 7.0]
    means = [np.mean(pick) for pick in itertools.product(values, repeat=4)]
    found = bootstrap_mean_ci(values, level=0.8, resamples=40_000)
    low, high = np.quantile(means, [0.1, 0.9])
    assert found.low == pytest.approx(low, abs=0.13)
    assert found.high == pytest.approx(high, abs=0.13)


def test_interval_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    hits = 0
    for seed in range(400):
        found = bootstrap_mean_ci((rng.random(120) < 0.3).astype(float), resamples=1000, seed=seed)
        hits += found.low <= 0.3 <= found.high
    assert 0.90 <= hits / 400 <= 0.98


def test_none_of_200_still_has_an_upper_bound():
    found = bootstrap_mean_ci([0.0] * 200)
    assert (found.mean, found.low) == (0.0, 0.0)
    z2 = 1.959964**2
    assert found.high == pytest.approx(z2 / (200 + z2), rel=1e-4)  # Wilson at zero successes, in closed form
    assert bootstrap_mean_ci([1.0] * 200).low == pytest.approx(1 - found.high)


def test_equal_values_that_are_no_shares_have_no_width():
    assert bootstrap_mean_ci([3.0, 3.0]) == Interval(3.0, 3.0, 3.0, 2)


def test_wilson_solves_its_defining_equation():
    """Both ends are where the score test is just significant: |p - share| = z sqrt(p (1 - p) / n)."""
    for end in wilson_interval(7, 40):
        assert abs(end - 7 / 40) == pytest.approx(1.959964 * math.sqrt(end * (1 - end) / 40), rel=1e-5)


def test_samples_of_one_task_are_not_independent_evidence():
    values = [0.0, 1.0] * 20
    repeated = [value for value in values for _ in range(8)]
    clusters = [task for task in range(40) for _ in range(8)]
    single, clustered = bootstrap_mean_ci(values), bootstrap_mean_ci(repeated, clusters=clusters)
    naive = bootstrap_mean_ci(repeated)
    assert clustered.high - clustered.low == pytest.approx(single.high - single.low, rel=0.1)
    assert naive.high - naive.low < 0.5 * (single.high - single.low)
    assert clustered.n == 320


def test_uneven_clusters_keep_the_mean_over_all_values():
    found = bootstrap_mean_ci([1.0, 1.0, 1.0, 0.0], clusters=["a", "a", "a", "b"])
    assert found.mean == 0.75
    assert (found.low, found.high) == (0.0, 1.0)


def test_clusters_that_all_agree_count_as_tasks_not_as_samples():
    assert bootstrap_mean_ci([0.0] * 64, clusters=[i // 8 for i in range(64)]).high == wilson_interval(0, 8)[1]


def test_same_seed_same_interval_and_another_seed_another():
    values = list(np.random.default_rng(1).random(30))
    assert bootstrap_mean_ci(values, seed=5) == bootstrap_mean_ci(values, seed=5)
    assert bootstrap_mean_ci(values, seed=5) != bootstrap_mean_ci(values, seed=6)


@pytest.mark.parametrize("num_tasks", [1, 5])
def test_tasks_with_the_same_mixed_samples_are_not_certainty(num_tasks):
    """Every task half solved: resampling tasks changes nothing, yet so few tasks can't prove the share."""
    found = bootstrap_mean_ci([1.0, 0.0] * num_tasks, clusters=[i // 2 for i in range(2 * num_tasks)])
    assert (found.low, found.high) == wilson_interval(num_tasks / 2, num_tasks)
    assert found.low < 0.4 and found.high > 0.6


def test_nothing_to_average_is_nan():
    found = bootstrap_mean_ci([])
    assert all(map(math.isnan, (found.mean, found.low, found.high))) and found.n == 0


@pytest.mark.parametrize(
    ("arguments", "word"),
    [(([1.0, math.nan],), "NaN"), (([1.0], 95.0), "level"), (([[1.0]],), "dimensions")],
)
def test_bad_input_is_refused_with_the_reason(arguments, word):
    with pytest.raises(ValueError, match=word):
        bootstrap_mean_ci(*arguments)


def binomial_two_sided(k: int, n: int) -> float:
    """All outcomes of n fair coins at most as likely as k heads."""
    weight = [math.comb(n, j) / 2**n for j in range(n + 1)]
    return sum(w for w in weight if w <= weight[k] * (1 + 1e-12))


@pytest.mark.parametrize(("only_a", "only_b"), [(0, 5), (3, 9), (6, 6), (1, 0), (40, 75)])
def test_mcnemar_is_the_exact_binomial_test(only_a, only_b):
    a = [1] * only_a + [0] * only_b + [1, 0]
    b = [0] * only_a + [1] * only_b + [1, 0]
    found = paired_test(a, b)
    assert found.test == "mcnemar"
    assert found.p == pytest.approx(min(1.0, binomial_two_sided(only_b, only_a + only_b)))
    assert (found.only_a, found.only_b, found.n) == (only_a, only_b, len(a))
    assert found.diff == pytest.approx((only_b - only_a) / len(a))


def test_sign_flip_is_exact_for_few_pairs():
    a, b = [0.1, 0.5, 0.2, 0.9, 0.3], [0.4, 0.6, 0.1, 1.0, 0.9]
    diffs = np.subtract(b, a)
    flips = [abs(np.dot(signs, diffs)) for signs in itertools.product((-1, 1), repeat=5)]
    oracle = np.mean([flip >= abs(diffs.sum()) - 1e-9 for flip in flips])
    found = paired_test(a, b)
    assert found.test == "sign_flip"
    assert found.p == pytest.approx(oracle)


def test_sign_flip_by_sampling_agrees_with_the_normal_approximation():
    rng = np.random.default_rng(2)
    a = rng.random(200)
    diffs = rng.normal(0.02, 0.15, 200)
    z = abs(diffs.sum()) / math.sqrt((diffs**2).sum())
    oracle = math.erfc(z / math.sqrt(2))
    assert paired_test(a, a + diffs).p == pytest.approx(oracle, abs=0.02)


def test_p_values_are_uniform_when_nothing_differs():
    rng = np.random.default_rng(4)
    found = [paired_test(*(rng.random((2, 12))), resamples=200, seed=i).p for i in range(300)]
    assert np.mean(np.array(found) <= 0.1) == pytest.approx(0.1, abs=0.05)


def test_swapping_the_sides_flips_the_sign_only():
    rng = np.random.default_rng(5)
    a, b = (rng.random((2, 100)) < 0.5).astype(float)
    one, two = paired_test(a, b), paired_test(b, a)
    assert one.diff == -two.diff and one.p == two.p
    assert one.low == pytest.approx(-two.high, abs=0.02)


def test_no_difference_at_all_is_not_certainty():
    found = paired_test([0.0] * 50 + [1.0] * 50, [0.0] * 50 + [1.0] * 50)
    assert (found.diff, found.p) == (0.0, 1.0)
    assert found.low == -found.high and found.high == pytest.approx(wilson_interval(0, 100)[1])


@pytest.mark.parametrize(("a", "b"), [([1.0], [1.0, 0.0]), ([], []), ([math.nan], [1.0])])
def test_pairs_that_are_none_are_refused(a, b):
    with pytest.raises(ValueError):
        paired_test(a, b)


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_figures_equal_enumeration_of_every_subset(case):
    n, c, k = case
    outcomes = [True] * c + [False] * (n - c)
    subsets = list(itertools.combinations(outcomes, k))
    assert pass_at_k(n, c, k) == pytest.approx(np.mean([any(s) for s in subsets]))
    assert pass_hat_k(n, c, k) == pytest.approx(np.mean([all(s) for s in subsets]))


@pytest.mark.parametrize("case", [(4, 5, 1), (4, 2, 5), (4, 2, 0), (4, -1, 1)])
def test_pass_at_k_refuses_impossible_counts(case):
    with pytest.raises(ValueError, match="n="):
        pass_at_k(*case)
