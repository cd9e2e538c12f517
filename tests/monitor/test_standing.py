"""One measure of success for detectors, checkpoints and rollbacks; and the part of a reward that pays against it."""

from __future__ import annotations

from typing import Any

import pytest

from upswing.monitor.detectors import Readings
from upswing.monitor.history import History
from upswing.monitor.standing import best_checkpoint, is_worse, normal_of, side_part


def played(*rows: dict[str, Any], **facts: Any) -> History:
    return History("rl", rows, facts=facts)


def trained(name: str, *values: float) -> list[dict[str, Any]]:
    return [{"step": step, name: value} for step, value in enumerate(values, 1)]


def test_the_best_checkpoint_is_by_evaluation_or_else_by_smoothed_success():
    rewards = trained("reward", 0.1, 0.2, 0.9, 0.2, 0.2, 0.2, 0.8, 0.8, 0.8, 0.1)
    assert best_checkpoint(played(*rewards), [3, 6, 9, 10]) == 9 and best_checkpoint(played(), [3]) is None
    assert is_worse(played(*rewards), 9) and not is_worse(played(*rewards), 3)
    evals = [{"step": 2, "eval_reward": 0.5}, {"step": 6, "eval_reward": 0.4}, {"step": 9, "eval_reward": None}]
    both = played(*rewards, *evals)
    assert best_checkpoint(both, [3, 6, 9]) == 3 and is_worse(both, 3)
    fallen = trained("reward", *[0.8] * 4, *[0.0] * 4)
    assert best_checkpoint(played({"step": 0, "eval_reward": 0.7}, *fallen), [2, 4, 8]) == 4, "8 was not evaluated yet"
    starts = played({"step": 1, "reward": 0.4}, *fallen[4:])
    assert best_checkpoint(starts, [0]) == 0 and is_worse(starts, 0), "the start weights sampled the first step"
    assert best_checkpoint(played(*rewards), [0, 3]) == 3, "one batch may be luck"
    assert best_checkpoint(played({"step": 0, "eval_reward": 0.7}, *evals), [0, 3]) == 0
    assert normal_of(played(*({"step": s, "entropy": v} for s, v in enumerate([1.0, None, 3.0, 2.0])))) == {
        "entropy": 2.0
    }


PAYS = {"call_penalty": 1.0, "strict_match": 1.0}


def collapse() -> History:
    """Calls cost as much as an answer earns: who stops calling has more reward and less success."""
    rows = [
        {"step": s, "reward": r, "score_strict_match": m, "score_call_penalty": r - m, "reward_std": 0.4}
        for s, (r, m) in enumerate([(-0.1, 0.4)] * 10 + [(0.12, 0.13)] * 10, 1)
    ]
    evals = [{"step": 10, "eval_reward": -0.1, "eval_strict_match": 0.4, "eval_call_penalty": -0.5}]
    evals += [{"step": 20, "eval_reward": 0.12, "eval_strict_match": 0.13, "eval_call_penalty": -0.01}]
    return played(*rows, *evals, weights=PAYS, tasks_per_step=8, group_size=8)


def test_the_collapsed_checkpoint_is_not_the_best_however_its_reward_is():
    assert best_checkpoint(collapse(), [10, 20]) == 10 and is_worse(collapse(), 10)
    assert Readings(collapse()).dropped


@pytest.mark.parametrize("weights", [{"exact_match": 1.0}, PAYS, {"strict_match": 0.5, "format": 1.0}])
def test_strict_match_is_success_wherever_it_is_measured(weights: dict[str, float]):
    r = Readings(played(*trained("score_strict_match", 0.5, 0.4), *trained("reward", 1.0, 2.0), weights=weights))
    assert r.known("success").values.tolist() == [0.5, 0.4] and r.ceiling == 1.0


def test_without_strict_match_success_is_the_paid_parts_and_no_penalty_of_a_safeguard_is_in_it():
    rows = [{"step": s, "reward": 0.1, "score_a": 0.5, "score_b": 0.2, "score_cost": -0.5} for s in (1, 2)]
    facts: dict[str, Any] = {"weights": {"a": 1.0, "b": 2.0, "cost": 1.0}, "overlong_length": None}
    assert played(*rows, **facts).success().tolist() == pytest.approx([0.9, 0.9])
    assert played(*rows, **{**facts, "weights": {"a": 1.0}}).success().tolist() == [0.5, 0.5], "overlong is in reward"
    assert played(*rows, **facts, reward_model="r").success().tolist() == [0.1, 0.1]
    assert played(*rows).success("eval_").size == 2


def lured(*ends: float, form: float = 0.9) -> list[dict[str, Any]]:
    """Success from and to, then the score of `finds`."""
    was, now, found, finds = ends
    return [
        {"step": s, "score_strict_match": was if s < 7 else now, "score_finds": found if s < 7 else finds,
         "score_format": form, "num_trajectories": 64}
        for s in range(1, 13)
    ]  # fmt: skip


def test_the_side_part_that_pays_against_success_is_blamed_and_never_the_main_one():
    assert side_part(collapse(), PAYS) == "call_penalty" and side_part(collapse(), PAYS, ["call_penalty"]) is None
    assert side_part(collapse(), {"strict_match": 1.0, "format": 0.0}) is None
    paid, rows = {"finds": 3.0, "strict_match": 1.0, "format": 0.1}, lured(0.5, 0.2, 0.4, 1.0)
    shares = [{"step": s, "variance_share_finds": 0.8, "variance_share_format": 0.05} for s in range(1, 13)]
    assert side_part(played(*rows, *shares, weights=paid), paid) == "finds"
    assert side_part(played(*rows, weights=paid), paid) is None, "nothing says that it decides"
    for ends in ((0.0, 0.0, 0.4, 1.0), (0.2, 0.5, 0.4, 1.0), (0.5, 0.2, 1.0, 0.4)):
        assert side_part(played(*lured(*ends), *shares, weights=paid), paid) is None, "it isn't paid against success"
    never = {"strict_match": 1.0, "format": 0.2}
    assert side_part(played(*lured(0.0, 0.0, 0.0, 0.0, form=0.0), weights=never), never) is None, "never earned"
    for tied in ({"format": 0.5, "finds": 0.5}, {"format": 2.0, "finds": 1.0, "strict_match": 0.0}):
        assert side_part(played(*rows, *shares, weights=tied), tied) is None, "nothing says which is the main one"
    lenient = {"exact_match": 1.0, "strict_match": 0.0}
    only = {"step": 1, "score_strict_match": 0.3, "variance_share_exact_match": 1.0}
    assert side_part(played(only, weights=lenient), lenient) is None
    unmeasured = {"answer": 1.0, "style": 0.5}
    assert side_part(played({"step": 1, "variance_share_style": 0.9}, weights=unmeasured), unmeasured) is None
    wrong_sign = {"length_penalty": -4.0, "strict_match": 1.0}
    assert side_part(played(*rows, weights=wrong_sign), wrong_sign) == "length_penalty"


def test_a_part_that_pays_for_the_very_mode_is_blamed_before_success_falls():
    """Answering at once pays four times as much as answering rightly: calls get rarer, success stays where it is."""
    paid = {"answered": 4.0, "strict_match": 1.0, "format": 0.0}

    def steps(success: float, together: float) -> History:
        return played(
            *(
                {"step": s, "score_strict_match": 0.4 if s < 7 else success, "score_answered": 0.5 + 0.03 * s,
                 "score_format": 0.9, "num_trajectories": 64, "variance_share_answered": 0.8,
                 "side_calls_corr": -together, "side_length_corr": -together}
                for s in range(1, 13)
            ),
            weights=paid,
        )  # fmt: skip

    for mode in ("tool_call_collapse", "length_collapse"):
        assert side_part(steps(0.4, 0.8), paid, mode=mode) == "answered"
        assert side_part(steps(0.4, 0.1), paid, mode=mode) is None, "they don't go together"
        assert side_part(steps(0.9, 0.8), paid, mode=mode) is None, "it is the way to success"
    for mode in ("", "length_explosion", "entropy_collapse"):
        assert side_part(steps(0.4, 0.8), paid, mode=mode) is None
