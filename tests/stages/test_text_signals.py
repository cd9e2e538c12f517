"""Signals of what was said, against loops over tokens; and public bug reports about logged numbers."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from upswing.learn.rows import TrainRow
from upswing.monitor.history import History
from upswing.monitor.metrics import MetricsLog
from upswing.stages.rl_metrics import batch_metrics, effective_frac
from upswing.stages.rows import make_batch
from upswing.stages.text_signals import first_turn, spearman, succeeded
from upswing.trajectory.types import (
    Branch,
    Group,
    Message,
    Outcome,
    Score,
    StopReason,
    Task,
    ToolCall,
    ToolRecord,
    Trajectory,
)
from upswing.verify.base import Episode
from upswing.verify.rubric import Rubric

STRICT = "strict_match"


def branch(runs: list[tuple[list[int], bool, int]]) -> Branch:
    """Of (tokens, sampled, turn) runs."""
    sampled = np.array([s for tokens, s, _ in runs for _ in tokens], dtype=bool)
    return Branch(
        tokens=np.array([token for tokens, *_ in runs for token in tokens], dtype=np.int32),
        sampled=sampled,
        engine_logprobs=np.where(sampled, -1.0, np.nan).astype(np.float32),
        policy_version=np.where(sampled, 0, -1).astype(np.int32),
        turn=np.array([turn for tokens, _, turn in runs for _ in tokens], dtype=np.int16),
    )


def played(name: str, *branches: Branch, task: str = "t", texts: tuple[str, ...] = (), **changes: Any) -> Trajectory:
    first = Message(role="user", content="start")
    said = [Message(role="assistant" if i % 2 == 0 else "tool", content=text) for i, text in enumerate(texts)]
    fields: dict[str, Any] = {"outcome": Outcome.COMPLETED, "stop_reason": StopReason.ANSWERED, "num_turns": 1}
    return Trajectory(
        id=name, task=Task(id=task, messages=(first,)), branches=branches, messages=(first, *said), **fields | changes
    )


def of_length(name: str, length: int, **changes: Any) -> Trajectory:
    return played(name, branch([([7, 7], False, 0), (list(range(length)), True, 0)]), **changes)


def group(*trajectories: Trajectory) -> Group:
    return Group(task=trajectories[0].task, trajectories=trajectories)


def random_groups(seed: int) -> tuple[list[Group], list[float]]:
    rng = np.random.default_rng(seed)

    def ids(low: int, high: int) -> list[int]:
        return [int(token) for token in rng.integers(0, 3, rng.integers(low, high))]

    groups, rewards = [], []
    for number in range(4):
        members = []
        for member in range(int(rng.integers(1, 5))):
            runs = [(ids(1, 4), False, 0)]
            for turn in range(int(rng.integers(0, 4))):
                runs += [(ids(0, 12), True, turn), (ids(0, 3), False, turn + 1)]
            outcome = Outcome(rng.choice(["completed", "completed", "truncated", "errored", "cancelled"]))
            reward = None if rng.random() < 0.2 else float(rng.choice([-0.5, 0.0, 0.4, 1.0]))
            parts: dict[str, float | None] = {} if rng.random() < 0.5 else {STRICT: float(rng.integers(0, 2))}
            texts = tuple(rng.choice(["start", "a", "b"], int(rng.integers(0, 8))))
            more = {"score": Score(value=reward, components=parts), "outcome": outcome, "texts": texts}
            second = branch([(ids(1, 3), False, 3), (ids(0, 9), True, 3)])
            members.append(played(f"{number}.{member}", branch(runs), second, task=str(number), **more))
        groups.append(group(*members))
        rewards += make_batch(groups[-1:], truncated="as_is").rewards_B.tolist()
    return groups, rewards


def spans_of(one: Trajectory) -> list[list[int]]:
    """Sampled tokens, cut wherever something else stands between or the turn changes."""
    spans: list[list[int]] = []
    for part in one.branches:
        last = None
        for token, sampled, turn in zip(part.tokens.tolist(), part.sampled, part.turn, strict=True):
            if sampled and turn != last:
                spans.append([])
            if sampled:
                spans[-1].append(token)
            last = turn if sampled else None
    return spans


def average(values: list[Any]) -> float:
    return sum(float(value) for value in values) / len(values) if values else math.nan


def by_hand(groups: list[Group], rewards: list[float]) -> dict[str, float]:
    pairs = list(zip([(g.task.id, t) for g in groups for t in g.trajectories], rewards, strict=True))
    counted = [(name, t, r) for (name, t), r in pairs if t.outcome in (Outcome.COMPLETED, Outcome.TRUNCATED)]
    best = max([r for *_, r in counted if r == r], default=0.0)
    good, bad, finished, lengths, repeated, grams, new, known = [], [], [], [], [], [], [], []
    said: dict[str, list[tuple[int, ...]]] = {}
    first: dict[str, list[tuple[int, ...]]] = {}
    spread: dict[str, list[float]] = {}
    for name, t, reward in counted:
        spans = spans_of(t)
        length = sum(map(len, spans))
        lengths.append(length)
        if t.outcome == Outcome.COMPLETED:
            finished.append(length)
        if reward == reward:
            assert t.score is not None
            mark = t.score.components.get(STRICT)
            success = mark == 1.0 if mark is not None else best > 0 and reward > best / 2
            (good if success else bad).append(length)
            spread.setdefault(name, []).append(reward)
            known.append((reward, length))
        had, again, total = set(), 0, 0
        for span in spans:
            for i in range(len(span) - 3):
                gram = tuple(span[i : i + 4])
                grams.append(gram)
                total, again = total + 1, again + (gram in had)
                had.add(gram)
        if total:
            repeated.append(again / total)
        said.setdefault(name, []).append(tuple(token for span in spans for token in span))
        if spans:
            first.setdefault(name, []).append(tuple(spans[0]))
        seen, answers = {"start"}, []
        for i, message in enumerate(t.messages[1:]):
            if i % 2:
                answers.append(message.content not in seen)
                seen.add(message.content)
        if answers:
            new.append(average(answers))
    top = Counter(turn for turns in first.values() for turn in turns).most_common(1)
    tops = [Counter(turns).most_common(1)[0][0] for turns in first.values()]
    return {
        "tokens_good": average(good),
        "tokens_bad": average(bad),
        "tokens_finished": average(finished),
        "tokens_min": min(lengths, default=math.nan),
        "tokens_max": max(lengths, default=math.nan),
        "sampled_tokens": average(lengths),
        "repetition": average(repeated),
        "distinct_4": len(set(grams)) / len(grams) if grams else math.nan,
        "unique_frac": average([len(set(one)) / len(one) for one in said.values() if len(one) > 1]),
        "novelty": average(new),
        "same_first_turn_frac": average([one == top[0][0] for one in tops]) if len(tops) > 1 else math.nan,
        "reward_length_corr": rank_correlation(known),
        "group_reward_std": average([
            math.sqrt(average([(r - average(one)) ** 2 for r in one])) for one in spread.values() if len(one) > 1
        ]),
        "empty_frac": average([length <= 2 for length in lengths]),
    }  # fmt: skip


def rank_correlation(pairs: list[tuple[float, int]]) -> float:
    if len(pairs) < 3:
        return math.nan

    def ranks(values: list[float]) -> list[float]:
        return [sum(v < own for v in values) + (sum(v == own for v in values) + 1) / 2 for own in values]

    x, y = (ranks(list(column)) for column in zip(*pairs, strict=True))
    x, y = [a - average(x) for a in x], [b - average(y) for b in y]
    scale = math.sqrt(sum(a * a for a in x) * sum(b * b for b in y))
    return sum(a * b for a, b in zip(x, y, strict=True)) / scale if scale else math.nan


@pytest.mark.parametrize("seed", range(25))
def test_every_signal_equals_its_definition_written_as_loops(seed: int) -> None:
    groups, rewards = random_groups(seed)
    values, right = batch_metrics(groups, rewards), by_hand(groups, rewards)
    assert {name: values[name] for name in right} == {n: pytest.approx(v, nan_ok=True) for n, v in right.items()}


def test_of_nothing_nothing_is_said() -> None:
    broken = of_length("a", 3, outcome=Outcome.ERRORED, stop_reason=StopReason.ERROR)
    for groups, rewards in (([], []), ([group(broken)], [math.nan])):
        values = batch_metrics(groups, rewards)
        counts = {name for name, value in values.items() if not math.isnan(value)}
        shares = {"informative_frac", "zero_variance_frac", "too_easy_frac", "too_hard_frac"}
        numbers = {"num_trajectories", "num_errored", "num_unscored", "num_drift_events", "num_forks"}
        assert counts - shares == numbers | ({"errored_frac", "unscored_frac"} if groups else set())
    assert (values["errored_frac"], values["unscored_frac"]) == (1.0, 0.0)


def test_errored_and_unscored_ones_enter_no_mean() -> None:
    fine = of_length("a", 5, score=Score(value=1.0))
    unscored = of_length("b", 9, score=Score(value=None))
    broken = of_length("c", 50, outcome=Outcome.ERRORED, stop_reason=StopReason.ERROR)
    values = batch_metrics([group(fine, unscored, broken)], [1.0, math.nan, math.nan])
    assert (values["tokens_good"], values["tokens_max"], values["tokens_finished"]) == (5, 9, 7)
    assert math.isnan(values["tokens_bad"]) and values["errored_frac"] == values["unscored_frac"] == 1 / 3


def test_calls_and_turns_that_ran_out() -> None:
    record = ToolRecord(call=ToolCall(name="look"), result="", ok=True, turn=0)
    cut = {"outcome": Outcome.TRUNCATED, "stop_reason": StopReason.MAX_TURNS}
    members = [
        of_length("a", 1),
        of_length("b", 4, tool_records=(record,)),
        of_length("c", 4, **cut),
        of_length("d", 2),
    ]
    values = batch_metrics([group(*members)], [math.nan] * 4)
    assert [values[f"{name}_frac"] for name in ("no_call", "max_turns", "empty", "truncated")] == [
        0.75,
        0.25,
        0.5,
        0.25,
    ]


@pytest.mark.parametrize(
    ("rewards", "marks", "right"),
    [
        ([0.2, 0.9, 1.0, 0.5], None, [0, 1, 1, 0]),
        ([-1.0, 0.0, -0.5, 0.0], None, [0, 0, 0, 0]),
        ([8.0, 12.0, 20.0, math.nan], None, [0, 1, 1, math.nan]),
        ([0.9, 0.9, 0.0, math.nan], [1.0, 0.0, 1.0, 1.0], [1, 0, 1, math.nan]),
        ([0.9, 0.1, 0.9, 0.9], [None, 1.0, math.nan, 0.0], [math.nan, 1, math.nan, 0]),
    ],
)
def test_who_succeeded(rewards: list[float], marks: list[float | None] | None, right: list[float]) -> None:
    parts = [{} if marks is None else {STRICT: mark} for mark in marks or [None] * 4]
    found = [of_length(str(i), 3, score=Score(value=1.0, components=part)) for i, part in enumerate(parts)]
    np.testing.assert_array_equal(succeeded(found, np.array(rewards)), right)


def test_spearman_knows_order_only() -> None:
    x = np.array([1.0, 2.0, 3.0, 10.0])
    assert spearman(x, np.exp(x)) == pytest.approx(1.0) and spearman(x, -(x**3)) == pytest.approx(-1.0)
    assert math.isnan(spearman(x, np.ones(4))) and math.isnan(spearman(x[:2], x[:2]))
    # Ranks 1, 2, 3, 4 and 1.5, 1.5, 3, 4: 4.5 / sqrt(5 * 4.5).
    assert spearman(x, np.array([0.0, 0.0, 1.0, 2.0])) == pytest.approx(math.sqrt(0.9))


def test_a_first_turn_ends_where_the_next_begins_and_needs_a_prompt() -> None:
    found = first_turn(played("a", branch([([1, 2], False, 0), ([3, 4], True, 0), ([5], True, 1), ([6], False, 2)])))
    assert found is not None and [part.tolist() for part in found] == [[1, 2], [3, 4]]
    assert first_turn(played("a", branch([([1, 2], True, 0)]))) is None
    assert first_turn(played("a", branch([([1, 2], False, 0)]))) is None


@pytest.mark.parametrize(
    ("advantages", "right"), [([1.0, -1.0, 0.0, 0.0], 0.5), ([2.0] * 4, 1.0), ([3.0, 0, 0, 0], 0.25), ([0.0] * 3, 0.0)]
)
def test_the_effective_share_of_a_batch(advantages: list[float], right: float) -> None:
    mask = np.array([False, True, True, False])
    rows = [TrainRow(tokens=np.arange(4, dtype=np.int32), loss_mask=mask, advantage=a) for a in advantages]
    wide = [
        replace(r, advantage=np.where(mask, a, np.nan).astype(np.float32))
        for r, a in zip(rows, advantages, strict=True)
    ]
    masked = replace(rows[0], loss_mask=np.zeros(4, bool), advantage=9.0)
    assert effective_frac(rows) == effective_frac(wide) == right
    assert effective_frac([*rows, masked]) == pytest.approx(right * len(rows) / (len(rows) + 1))
    assert math.isnan(effective_frac([]))


# -- public bug reports ------------------------------------------------------------


async def test_met_02_the_reward_is_weighted_and_its_parts_are_not() -> None:
    rubric = Rubric([("a", lambda answer: 1.0, 0.8), ("b", lambda answer: 0.0, 0.2)])
    score = await rubric.score(Episode.of(of_length("t", 3)))
    values = batch_metrics([group(of_length("t", 3, score=score))], [float(score.value or 0.0)])
    assert (values["reward"], values["score_a"], values["score_b"]) == (pytest.approx(0.8), 1.0, 0.0)


@pytest.mark.parametrize("rule", ["as_is", "mask", "zero"])
def test_met_03_lengths_are_those_that_were_sampled_whatever_is_trained(rule: str) -> None:
    cut = {"outcome": Outcome.TRUNCATED, "stop_reason": StopReason.MAX_TOKENS}
    scores = [Score(value=value) for value in (1.0, 0.5, 0.0)]
    members = [
        of_length("a", 5, score=scores[0]),
        of_length("b", 8, score=scores[1], **cut),
        of_length("c", 8, score=scores[2], **cut),
    ]
    groups = [group(*members)]
    batch = make_batch(groups, truncated=rule)
    values = batch_metrics(groups, batch.rewards_B.tolist())
    names = ("sampled_tokens", "tokens_min", "tokens_max", "tokens_finished")
    assert [values[name] for name in names] == [7, 5, 8, 5]
    assert values["truncated_frac"] == pytest.approx(2 / 3)
    assert int(batch.lengths_B.sum()) == (5 if rule == "mask" else 21)


@pytest.mark.parametrize("missing", [None, math.nan])
def test_met_06_what_could_not_be_scored_leaves_a_gap_and_nothing_that_is_not_json(
    tmp_path: Path, missing: float | None
) -> None:
    log = MetricsLog(tmp_path)
    for step, parts in enumerate([[1.0, missing], [missing, missing], [0.0, 1.0]], 1):
        members = [of_length(str(i), 3, score=Score(value=p, components={"x": p})) for i, p in enumerate(parts)]
        rewards = make_batch([group(*members)], truncated="as_is").rewards_B.tolist()
        log.append("rl", step, batch_metrics([group(*members)], rewards))

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line, parse_constant=refuse) for line in lines]
    assert [row["score_x"] for row in rows] == [row["reward"] for row in rows] == [1.0, None, 0.5]
    steps, values = History("rl", rows).known("score_x")
    assert (steps.tolist(), values.tolist()) == ([1, 3], [1.0, 0.5])
