"""Best of n against the definition: every set of n samples, the highest score, ties by lot."""

from itertools import combinations

import numpy as np
import pytest

from upswing.evals.best_of import best_of, best_of_n
from upswing.evals.stats import pass_at_k
from upswing.evals.summary import EvalRecord


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("n", [1, 2, 3, 6])
def test_it_is_the_mean_over_all_sets(seed, n):
    rng = np.random.default_rng(seed)
    scores, solved = rng.integers(0, 4, 6).astype(float), rng.integers(0, 2, 6).astype(float)
    chosen = []
    for members in map(list, combinations(range(6), n)):
        best = [i for i in members if scores[i] == scores[members].max()]
        chosen.append(np.mean(solved[best]))
    assert best_of_n(scores, solved, n) == pytest.approx(np.mean(chosen))


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_it_lies_between_a_blind_and_a_perfect_choice(n):
    """A perfect score is pass@n, a constant one pass@1, and a score that is only often right comes between."""
    rng = np.random.default_rng(0)
    solved = (rng.random((200, 8)) < rng.random((200, 1))).astype(float)
    pass_n = np.mean([pass_at_k(8, int(s.sum()), n) for s in solved])
    assert np.mean([best_of_n(s, s, n) for s in solved]) == pytest.approx(pass_n)
    assert np.mean([best_of_n(0 * s, s, n) for s in solved]) == pytest.approx(solved.mean())
    noisy = np.mean([best_of_n(s + rng.normal(0, 1, 8), s, n) for s in solved])
    assert noisy == pytest.approx(solved.mean()) if n == 1 else solved.mean() + 0.03 < noisy < pass_n - 0.01


@pytest.mark.parametrize(("scores", "n"), [([1.0, 2.0], 3), ([1.0, 2.0], 0), ([1.0, float("nan")], 1)])
def test_what_has_no_best_of_n_is_an_error(scores, n):
    with pytest.raises(ValueError, match="samples, and finite scores"):
        best_of_n(scores, [0.0, 1.0], n)


def record(task, reward, outcome="completed"):
    counts = dict.fromkeys(("turns", "tool_calls", "invalid_calls", "duplicate_calls", "sampled_tokens"), 0)
    return EvalRecord(task_id=task, trajectory_id="t", outcome=outcome, stop_reason="answered", reward=reward,
                      components={}, tags={}, recovered=None, **counts)  # fmt: skip


def test_what_was_not_judged_or_scored_is_left_out_never_lost():
    records = [record("a", 1.0), record("a", 0.0), record("a", None), record("a", 1.0, "errored"), record("a", 0.5),
               record("b", 1.0), record("b", 1.0)]  # fmt: skip
    found = best_of(records, [0.2, 0.9, 5.0, 5.0, None, 0.1, None], 2)
    assert found["best"]["mean"] == 0.0 and (found["pass_1"], found["pass_n"]) == (0.5, 1.0)
    assert (found["tasks"], found["tasks_left_out"]) == (1, 1)
    assert best_of(records, [None] * 7, 2)["best"]["mean"] is None
