"""What an update reports beside its loss, against plain autograd and whatever the split into packs."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from upswing.algo import token_weights
from upswing.learn import Learner, Mean
from upswing.learn.learner import policy_loss
from upswing.learn.rows import flatten

from .helpers import random_rows, tiny

OTHER = {"num_tokens", "num_tokens_recomputed", "seconds"}  # these do depend on packs


def with_turns(rows):
    """Turn 0 up to the first tool's answer, 1 after it."""
    return [
        replace(r, turn=(np.cumsum(np.diff(r.loss_mask.astype(int), prepend=0) < 0) > 0).astype(np.int16)) for r in rows
    ]


def hidden_gradients(model, rows, entropy_coef, temperature):
    """Norms over the positions that predict tokens of positive and of negative advantage, in the unpacked model."""
    flat = flatten(rows)
    weights, start, squares = token_weights(flat.sequence_N, mode="token-mean"), 0, [0.0, 0.0]
    for one in rows:
        at = torch.from_numpy(one.loss_positions)
        tokens = torch.from_numpy(one.tokens.astype(np.int64))
        hidden = model.base_model(input_ids=tokens[None], use_cache=False).last_hidden_state[0, at - 1].detach()
        hidden.requires_grad_(True)
        logprobs = torch.log_softmax(model.get_output_embeddings()(hidden) / temperature, -1)
        own = logprobs.gather(1, tokens[at, None])[:, 0]
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        loss = -(weights[start : start + len(at)] * (one.advantage * own + entropy_coef * entropy)).sum()
        (gradient,) = torch.autograd.grad(loss, hidden)
        squares[one.advantage < 0] += float(gradient.double().square().sum())
        start += len(at)
    return [math.sqrt(value) for value in squares]


@pytest.mark.parametrize("entropy_coef", [0.0, 0.2])
def test_the_gradient_by_sign_of_advantage_is_autograds(entropy_coef):
    rows = random_rows()
    metrics = Learner(tiny(), lr=1e-3, max_tokens_per_pack=90).rl_update(
        rows, entropy_coef=entropy_coef, temperature=0.8
    )
    good, bad = hidden_gradients(tiny(), rows, entropy_coef, 0.8)
    assert metrics.grad_good == Mean(pytest.approx(good, rel=1e-4), 1)
    assert metrics.grad_bad == Mean(pytest.approx(bad, rel=1e-4), 1)


def test_the_gradient_by_sign_is_a_mean_over_steps_and_absent_without_the_sign():
    rows = random_rows()
    metrics = Learner(tiny(), lr=0.0).rl_update(rows, updates_per_batch=2)
    once = Learner(tiny(), lr=0.0).rl_update(rows)
    assert metrics.grad_good.count == 2 and metrics.grad_good.value == pytest.approx(once.grad_good.value, rel=1e-5)
    only = Learner(tiny(), lr=0.0).rl_update([replace(r, advantage=abs(r.advantage)) for r in rows])
    assert only.grad_good.count == 1 and math.isnan(only.grad_bad.value)


@pytest.mark.parametrize(
    "options", [{}, {"updates_per_batch": 2, "minibatches": 2, "kl_coef": 0.1, "entropy_coef": 0.01}]
)
def test_met_04_no_number_depends_on_the_split_into_packs(options):
    """Gradient norm and trained tokens too; what is counted once is not added once a pack."""
    rows = with_turns(random_rows(groups=4, size=3))

    def measured(max_tokens):
        learner = Learner(tiny(seed=1), lr=1e-2, ref_model=tiny(), max_tokens_per_pack=max_tokens)
        return {k: v for k, v in learner.rl_update(rows, **options).as_dict().items() if k not in OTHER}

    whole = measured(10_000)
    assert whole["num_loss_tokens"] == sum(int(r.loss_mask.sum()) for r in rows) and whole["grad_norm"] > 0
    for max_tokens in (1, 60, 150):
        assert measured(max_tokens) == {k: pytest.approx(v, rel=2e-3, abs=2e-5, nan_ok=True) for k, v in whole.items()}


def test_quantiles_of_the_ratio_are_over_all_tokens_of_all_steps(monkeypatch):
    seen = []
    monkeypatch.setattr("upswing.learn.learner.policy_loss", lambda *args: seen.append(policy_loss(*args)) or seen[-1])
    rows = random_rows()
    metrics = Learner(tiny(), lr=0.02, max_tokens_per_pack=90).rl_update(rows, updates_per_batch=3)
    ratio = np.concatenate([terms.ratio_N.detach().numpy() for terms in seen])
    assert len(ratio) == 3 * metrics.num_loss_tokens and ratio.std() > 0.01
    found = (metrics.ratio_p01, metrics.ratio_p99, metrics.ratio_p999, metrics.ratio_max)
    assert found == pytest.approx(np.quantile(ratio, [0.01, 0.99, 0.999, 1.0]))
    once = Learner(tiny(), lr=0.02).rl_update(rows)
    assert once.ratio_p01 == once.ratio_p99 == once.ratio_p999 == 1.0
    assert math.isnan(Learner(tiny(), lr=0.02).rl_update([]).ratio_p99)


def test_entropy_of_first_and_later_turns_makes_up_the_whole():
    rows = with_turns(random_rows())
    metrics = Learner(tiny(), lr=0.0).rl_update(rows)
    first = [replace(r, loss_mask=r.loss_mask & (r.turn == 0)) for r in rows]
    alone = Learner(tiny(), lr=0.0).rl_update(first)
    assert metrics.entropy_first.value == pytest.approx(alone.entropy.value, rel=1e-5)
    assert metrics.entropy_first.count + metrics.entropy_later.count == metrics.entropy.count
    total = metrics.entropy_first.total + metrics.entropy_later.total
    assert total == pytest.approx(metrics.entropy.total) and alone.entropy_later.count == 0


def test_hits_of_the_kl_clamp_are_a_share_of_tokens():
    rows = random_rows()
    near = Learner(tiny(), lr=0.0, ref_model=tiny()).rl_update(rows, kl_coef=0.1)
    assert near.kl_clamped_frac.value == 0.0 and near.kl_clamped_frac.count == near.num_loss_tokens
    reference = tiny()
    with torch.no_grad():
        reference.model.norm.weight.mul_(40.0)  # a reference that is sure of other tokens
    far = Learner(tiny(), lr=0.0, ref_model=reference)
    gap = [(a - b)[r.loss_positions] for r, a, b in zip(
        rows, far.logprobs(rows), far.logprobs(rows, reference=True), strict=True
    )]  # fmt: skip
    right = float((np.abs(np.concatenate(gap)) > 20).mean())
    assert right > 0.0 and far.rl_update(rows, kl_coef=0.1).kl_clamped_frac.value == pytest.approx(right)
    assert math.isnan(Learner(tiny(), lr=0.0).rl_update(rows).kl_clamped_frac.value)
