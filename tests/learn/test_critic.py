"""Values and their updates against the unpacked model with plain autograd."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from upswing.errors import ConfigError
from upswing.learn import Learner
from upswing.learn.critic import Critic
from upswing.models.heads import scalar_model

from .helpers import VOCAB, assert_same_gradients, gradients, random_rows, row, tiny
from .scalars import plain_values, recording, scalar


def targets(rows, seed=0):
    """Returns at loss tokens, NaN elsewhere: what isn't a loss token must never be read."""
    rng = np.random.default_rng(seed)
    return [np.where(r.loss_mask, rng.normal(size=len(r.tokens)), np.nan).astype(np.float32) for r in rows]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
@pytest.mark.parametrize("max_tokens", [1, 60, 10_000])
def test_a_value_is_of_the_state_before_its_token(kind, max_tokens):
    rows = [*random_rows(), row([5], [0]), row(range(9), [])]
    critic = Critic(scalar(kind), lr=0.1, max_tokens_per_pack=max_tokens)
    for one, values in zip(rows, critic.values(rows), strict=True):
        plain = plain_values(critic.model, one).detach().numpy()
        found = one.loss_positions
        np.testing.assert_allclose(values[found], plain[found - 1], atol=2e-5)
        assert values.dtype == np.float32 and np.isnan(np.delete(values, found)).all()


def test_recomputed_tokens_are_reported():
    rows = random_rows()
    critic = Critic(scalar(), lr=0.1, gradient_checkpointing=True)
    metrics = critic.value_update(rows, targets(rows), critic.values(rows))
    assert metrics["num_tokens_recomputed"] == metrics["num_tokens"] > 0


def test_a_token_is_not_seen_by_its_own_value():
    one = row(range(5, 25), range(10, 20))
    critic = Critic(scalar(), lr=0.1)
    before = critic.values([one])[0]
    tokens = one.tokens.copy()
    tokens[14:] += 7
    after = critic.values([replace(one, tokens=tokens)])[0]
    assert (before[:15] == after[:15])[10:].all(), "token 14 doesn't enter the value of the state before it"
    assert (before[15:20] != after[15:20]).all()


@pytest.mark.parametrize("clip", [None, 0.2])
def test_the_gradient_is_that_of_the_mean_over_the_minibatch_however_it_is_packed(clip):
    rows = [*random_rows(), row(range(9), [])]
    returns, reference = targets(rows), scalar()
    found = [torch.from_numpy(r.loss_positions) for r in rows]
    values_N = torch.cat([plain_values(reference, r)[p - 1] for r, p in zip(rows, found, strict=True)])
    returns_N = torch.cat([torch.from_numpy(r)[p] for r, p in zip(returns, found, strict=True)])
    old = [v + np.float32(0.3) * np.float32(i % 2) for i, v in enumerate(Critic(scalar(), lr=0.1).values(rows))]
    old_N = torch.cat([torch.from_numpy(o)[p] for o, p in zip(old, found, strict=True)])
    error_N = (values_N - returns_N) ** 2
    if clip is not None:
        error_N = torch.maximum(error_N, (old_N + (values_N - old_N).clamp(-clip, clip) - returns_N) ** 2)
    want = gradients(reference, 0.5 * error_N.mean())
    for max_tokens in (1, 60, 10_000):
        critic = recording(Critic(scalar(), lr=0.1, max_tokens_per_pack=max_tokens))
        metrics = critic.value_update(rows, returns, old, clip=clip)
        assert_same_gradients(critic.steps[0], want)
        assert metrics["loss"] == pytest.approx(0.5 * error_N.mean().item(), rel=1e-4)
        assert metrics["num_steps"] == critic.version == 1
        assert (metrics["clipped"] > 0.1) == (clip is not None)


def test_minibatches_have_denominators_of_their_own_and_cover_each_row_once():
    rows = random_rows(groups=4, size=3)
    critic = recording(Critic(scalar(), lr=0.0))  # so that every step is taken from the same weights
    returns, old = targets(rows), critic.values(rows)
    metrics = critic.value_update(rows, returns, old, minibatches=4, updates_per_batch=2)
    assert metrics["num_steps"] == 8 and critic.version == 1
    alone = []
    for group in range(4):
        one = recording(Critic(scalar(), lr=0.0))
        part = [i for i, r in enumerate(rows) if r.group == group]
        one.value_update([rows[i] for i in part], [returns[i] for i in part], [old[i] for i in part])
        alone.append(one.steps[0]["score.weight"])
    for half in (critic.steps[:4], critic.steps[4:]):
        got = sorted(half, key=lambda step: float(step["score.weight"].sum()))
        for one, want in zip(got, sorted(alone, key=lambda g: float(g.sum())), strict=True):
            torch.testing.assert_close(one["score.weight"], want, atol=1e-5, rtol=1e-4)


def test_dropout_never_touches_a_value():
    sizes = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
    config = GPT2Config(**sizes, resid_pdrop=0.5, embd_pdrop=0.5)
    critic = recording(Critic(scalar_model(GPT2LMHeadModel(config).train()), lr=0.0))
    torch.nn.init.ones_(critic.model.score.weight)
    rows = random_rows(groups=1)
    values = critic.values(rows)
    losses = [critic.value_update(rows, [v + 1 for v in values], values)["loss"] for _ in range(2)]
    assert losses == pytest.approx([0.5, 0.5], abs=1e-5), "the update sees the values that GAE saw"


def last_token(rows):
    """Returns that only the token before the loss token decides."""
    before = [np.concatenate([[0], r.tokens[:-1]]) for r in rows]
    high = [2.0 * (tokens > VOCAB // 2) for tokens in before]
    return [np.where(r.loss_mask, h, np.nan).astype(np.float32) for r, h in zip(rows, high, strict=True)]


def test_a_critic_begins_at_zero_and_learns_what_the_state_before_says():
    critic, unseen = Critic(scalar_model(tiny(initializer_range=0.1)), lr=1e-2), random_rows(99)
    first = critic.values(unseen)
    assert all((v[r.loss_positions] == 0).all() for r, v in zip(unseen, first, strict=True))
    for step in range(15):
        rows = random_rows(step, groups=2, size=3)
        critic.value_update(rows, last_token(rows), critic.values(rows), clip=0.5, updates_per_batch=2)
    metrics = critic.value_update(unseen, last_token(unseen), critic.values(unseen))
    assert metrics["explained_variance"] > 0.6, "and not the loss token itself, whose explained variance is about 0"


def test_resume_is_bit_identical(tmp_path):
    rows = random_rows()

    def train(critic, first, last):
        for step in range(first, last):
            critic.value_update(rows, targets(rows, step), critic.values(rows), clip=0.2, minibatches=2)

    straight, stopped, resumed = (Critic(scalar(seed=s), lr=1e-2, seed=4) for s in (0, 0, 9))
    train(straight, 0, 4)
    train(stopped, 0, 2)
    stopped.save(tmp_path / "critic")
    resumed.load(tmp_path / "critic")
    train(resumed, 2, 4)
    assert resumed.version == 4
    for name, tensor in straight.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name


def test_what_there_is_nothing_to_learn_from():
    critic = Critic(scalar(), lr=1.0)
    before = critic.model.score.weight.clone()
    empty = [row(range(9), []), row([5], [0])]
    for rows in (empty, []):
        metrics = critic.value_update(
            rows, [np.full(len(r.tokens), np.nan, np.float32) for r in rows], critic.values(rows)
        )
        assert metrics["num_steps"] == 0 and math.isnan(metrics["loss"])
    assert critic.version == 0 and torch.equal(before, critic.model.score.weight)
    rows = random_rows(groups=1)
    bad = targets(rows)
    bad[2][rows[2].loss_positions[0]] = np.inf
    with pytest.raises(ValueError, match="row 2 has returns that aren't finite"):
        critic.value_update(rows, bad, critic.values(rows))
    with pytest.raises(ConfigError, match="value_clip is 0"):
        critic.value_update(rows, targets(rows), critic.values(rows), clip=0.0)


def test_the_head_is_not_rounded_under_autocast():
    one = random_rows(groups=1)
    low = Critic(scalar(), lr=0.1, compute_dtype=torch.bfloat16)
    high = Critic(scalar(), lr=0.1)
    values = low.predict(one)
    assert not np.array_equal(values, torch.from_numpy(values).bfloat16().float().numpy())
    np.testing.assert_allclose(values, high.predict(one), atol=0.5)


def test_models_with_the_wrong_head_are_refused():
    with pytest.raises(ConfigError, match="no scalar head"):
        Critic(tiny(), lr=0.1)
    with pytest.raises(ConfigError, match="no language-model head"):
        Learner(scalar(), lr=0.1)
