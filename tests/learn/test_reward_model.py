"""Scores by position, Bradley-Terry updates against plain autograd, and trajectories that can't be scored."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from upswing.errors import ConfigError
from upswing.learn.reward_model import RewardModel, load_reward_model, score_steps, score_trajectories
from upswing.models.heads import scalar_model
from upswing.trajectory.types import Branch, Message, Outcome, StopReason, Task, Trajectory

from .helpers import VOCAB, assert_same_gradients, gradients, random_rows, row, tiny
from .scalars import plain_values, recording, scalar

EOS = 2  # of the tiny models, and their padding too


def pairs_of(rows):
    return list(zip(rows[0::2], rows[1::2], strict=True))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
@pytest.mark.parametrize("max_tokens", [1, 60, 10_000])
def test_a_score_is_read_at_the_last_token_whatever_it_is(kind, max_tokens):
    prompt = list(range(20, 40))
    rows = [
        *random_rows(),
        row([*prompt, 7, EOS], []),
        row([*prompt, 7, EOS, EOS], [20]),  # the row before is a prefix of it
        row([*prompt, 7], [5]),
        row([EOS], []),
    ]
    model = RewardModel(scalar(kind), lr=0.1, max_tokens_per_pack=max_tokens)
    plain = [float(plain_values(model.model, one)[-1].detach()) for one in rows]
    np.testing.assert_allclose(model.scores(rows), plain, atol=2e-5)
    with pytest.raises(ValueError, match="without tokens"):
        model.scores([row([], [])])


def test_hugging_face_reads_the_same_score():
    """Its own forward, on a row that doesn't end in padding."""
    one = row(range(5, 30), [])
    model = RewardModel(scalar("qwen2"), lr=0.1)
    logits = model.model(input_ids=torch.arange(5, 30)[None]).logits
    assert logits.shape == (1, 1)
    assert model.scores([one])[0] == pytest.approx(logits.item(), abs=1e-5)


@pytest.mark.parametrize("margins", [None, [0.0, 1.0, 0.33, 0.0, 0.67, 1.0]])
def test_the_gradient_is_that_of_the_mean_over_pairs_however_they_are_packed(margins):
    pairs, reference = pairs_of(random_rows()), scalar()
    chosen = torch.stack([plain_values(reference, c)[-1] for c, _ in pairs])
    rejected = torch.stack([plain_values(reference, r)[-1] for _, r in pairs])
    gap = chosen - rejected - torch.tensor(margins or [0.0] * len(pairs))
    loss = (-F.logsigmoid(gap) + 0.05 * (chosen + rejected) ** 2).mean()
    want = gradients(reference, loss)
    for max_tokens in (1, 120, 10_000):
        model = recording(RewardModel(scalar(), lr=0.1, max_tokens_per_pack=max_tokens))
        metrics = model.pair_update(pairs, margins=margins, centring=0.05)
        assert_same_gradients(model.steps[0], want)
        assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-4)
        assert metrics["accuracy"] == pytest.approx(float((chosen > rejected).float().mean()))
        assert metrics["num_steps"] == model.version == 1


def test_a_pair_of_one_row_and_its_continuation():
    short, long = row(range(5, 30), []), row(range(5, 34), [])
    model = recording(RewardModel(scalar(), lr=0.1))
    model.pair_update([(short, long), (long, short)], centring=0.0)
    reference = scalar()
    gap = plain_values(reference, short)[-1] - plain_values(reference, long)[-1]
    loss = 0.5 * (F.softplus(-gap) + F.softplus(gap))
    assert_same_gradients(model.steps[0], gradients(reference, loss))


def preferences(seed, count):
    """Chosen ends in a high token, rejected in a low one; all else is random and of the same length."""
    rng = np.random.default_rng(seed)
    ends = (range(VOCAB // 2, VOCAB), range(3, VOCAB // 2))
    prompts = rng.integers(3, VOCAB, (count, 12)).tolist()
    return [tuple(row([*prompt, int(rng.choice(end))], [12]) for end in ends) for prompt in prompts]


def test_a_reward_model_learns_preferences_it_was_not_shown(tmp_path):
    model, held_out = RewardModel(scalar_model(tiny(initializer_range=0.1)), lr=1e-2), preferences(1, 64)
    before = model.pair_metrics(held_out)
    assert before["loss"] == pytest.approx(math.log(2)) and before["accuracy"] == 0.5 and before["ece"] == 0.0
    assert math.isnan(before["length_correlation"])
    train = preferences(0, 256)
    for step in range(16):
        model.pair_update(train[step * 16 % 256 :][:16])
    after = model.pair_metrics(held_out)
    assert after["accuracy"] > 0.9 and after["loss"] < 0.4
    rows = [one for pair in held_out for one in pair]
    scores = model.scores(rows)
    assert abs(float(scores.mean())) < 1.0, "centring holds the level"
    model.save(tmp_path / "rm")
    loaded = load_reward_model(tmp_path / "rm")
    np.testing.assert_array_equal(loaded.scores(rows), scores)
    tiny().save_pretrained(tmp_path / "causal")
    with pytest.raises(ConfigError, match="has no scalar head"):
        load_reward_model(tmp_path / "causal")


def test_bad_pairs_are_refused_before_anything_changes():
    model = RewardModel(scalar(), lr=1.0)
    pairs = pairs_of(random_rows(groups=1))
    with pytest.raises(ValueError, match="1 margins for 2 pairs"):
        model.pair_update(pairs, margins=[1.0])
    with pytest.raises(ConfigError, match="centring is -1"):
        model.pair_update(pairs, centring=-1.0)
    metrics = model.pair_update([])
    assert metrics["num_steps"] == 0 and model.version == 0
    assert math.isnan(model.pair_metrics([])["accuracy"])


def branch(tokens):
    length = len(tokens)
    return Branch(
        tokens=np.array(tokens, np.int32),
        sampled=np.arange(length) > 1,
        engine_logprobs=np.zeros(length, np.float32),
        policy_version=np.zeros(length, np.int32),
        turn=np.zeros(length, np.int16),
    )


def trajectory(*branches, outcome=Outcome.COMPLETED, task="a"):
    return Trajectory(
        id="t", task=Task(id=task, messages=(Message(role="user", content="?"),)), branches=branches,
        messages=(), outcome=outcome, stop_reason=StopReason.ANSWERED,
    )  # fmt: skip


def test_trajectories_are_scored_by_their_last_branch_and_never_0_for_want_of_a_score():
    model = RewardModel(scalar(), lr=0.1)
    first, last, other = branch(range(5, 20)), branch([9, 8, 7, EOS]), branch(range(30, 45))
    trajectories = [
        trajectory(first, last),
        trajectory(first, outcome=Outcome.ERRORED),
        trajectory(other, outcome=Outcome.TRUNCATED, task="b"),
        trajectory(first, outcome=Outcome.CANCELLED),
        trajectory(outcome=Outcome.COMPLETED),
    ]
    want = model.scores([row(last.tokens, []), row(other.tokens, [])])
    scores = score_trajectories(model, trajectories)
    assert scores[1] is scores[3] is scores[4] is None
    assert [scores[0], scores[2]] == pytest.approx(want.tolist(), abs=1e-5)
    with torch.no_grad():
        model.model.score.weight[0, 0] = math.nan
    assert score_trajectories(model, trajectories[:1]) == [None]
    assert score_trajectories(model, []) == []


def labelled_rows():
    """Labels at the loss tokens of some rows, which share beginnings."""
    rng = np.random.default_rng(3)
    rows = random_rows()
    return [replace(one, returns=np.where(one.loss_mask, rng.random(len(one.tokens)), 9).astype(np.float32))
            for one in rows]  # fmt: skip


def test_the_gradient_of_labels_is_that_of_their_cross_entropy_in_float64():
    rows, reference = labelled_rows(), scalar().double()
    logits = torch.cat([plain_values(reference, one)[one.loss_positions - 1] for one in rows])
    labels = torch.tensor(np.concatenate([one.returns[one.loss_positions] for one in rows]), dtype=torch.float64)
    chances = 1 / (1 + torch.exp(-logits))
    loss = -(labels * chances.log() + (1 - labels) * (1 - chances).log()).mean()
    want = {name: grad.float() for name, grad in gradients(reference, loss).items()}
    for max_tokens in (1, 120, 10_000):
        model = recording(RewardModel(scalar(), lr=0.1, max_tokens_per_pack=max_tokens))
        metrics = model.label_update(rows)
        assert_same_gradients(model.steps[0], want)
        assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-4) and metrics["num_steps"] == 1
    figures = RewardModel(scalar(), lr=0.1).label_metrics(rows)
    assert figures["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert figures["brier"] == pytest.approx(((chances - labels) ** 2).mean().item(), rel=1e-4)
    with pytest.raises(ValueError, match="isn't a number from 0 to 1"):
        model.label_update([replace(rows[0], returns=None)])


def test_steps_are_read_in_the_branch_that_sampled_them():
    """Three turns, the last one in a branch of its own, and one that broke before it had any."""
    model = RewardModel(scalar(), lr=0.1)
    first = replace(
        branch(range(5, 15)), sampled=np.isin(range(10), [3, 4, 7]), turn=np.array([0] * 5 + [1] * 5, np.int16)
    )
    second = replace(branch(range(20, 26)), sampled=np.isin(range(6), [4, 5]), turn=np.full(6, 2, np.int16))
    forked = replace(trajectory(first, second), num_turns=3)
    broken, late = trajectory(outcome=Outcome.ERRORED), replace(trajectory(first, task="b"), num_turns=2)
    scores = score_steps(model, [forked, broken, late])
    heads = [plain_values(model.model, row(one.tokens, [])).sigmoid().tolist() for one in (first, second)]
    np.testing.assert_allclose(scores[0], [heads[0][2], heads[0][4], heads[0][7], heads[1][5]], atol=1e-5)
    np.testing.assert_allclose(scores[2], scores[0][:3], atol=1e-5)
    assert len(scores[1]) == 0
