"""Updates against plain autograd on the unpacked model, and what must not change them."""

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from upswing.algo import AGGREGATIONS, token_weights
from upswing.engine.base import Sampling
from upswing.engine.torch import TorchEngine
from upswing.errors import ConfigError
from upswing.learn import Learner, RLOptions, frozen_copy
from upswing.learn.rows import flatten

from .helpers import assert_same_gradients, gradients, plain_at_loss, random_rows, row, tiny


class Recorder(Learner):
    """Keeps the gradient of each optimizer step, before clipping."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **{"lr": 1e-3, **kwargs})
        self.steps = []

    def _apply_gradient(self, tally):
        self.steps.append({n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None})
        super()._apply_gradient(tally)


def rl_gradient(rows, max_tokens=10_000, model=None, **options):
    learner = Recorder(model or tiny(), max_tokens_per_pack=max_tokens)
    metrics = learner.rl_update(rows, **options)
    return learner.steps[0], metrics


def norm(mode):
    return 40.0 if mode.endswith("norm") else None


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_on_policy_gradient_is_minus_advantage_times_logprob(kind, mode):
    rows = random_rows()
    reference = tiny(kind)
    flat = flatten(rows)
    weights = token_weights(flat.sequence_N, mode=mode, norm_length=norm(mode))
    loss = -(weights * flat.advantages_N * plain_at_loss(reference, rows, 0.8)).sum()
    got, metrics = rl_gradient(rows, model=tiny(kind), aggregation=mode, norm_length=norm(mode), temperature=0.8)
    assert_same_gradients(got, gradients(reference, loss))
    assert metrics.ratio.value == 1.0 and metrics.kl_old.value == 0.0


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_the_split_into_micro_batches_does_not_matter(mode):
    """CFG-02 too: packs smaller than a group give the same step."""
    rows = random_rows(groups=4, size=3)
    options = {"aggregation": mode, "norm_length": norm(mode)}
    whole, metrics = rl_gradient(rows, **options)
    for max_tokens in (1, 60, 150):
        split, split_metrics = rl_gradient(rows, max_tokens, **options)
        assert_same_gradients(split, whole)
        assert split_metrics.loss == pytest.approx(metrics.loss, rel=1e-4)
        assert split_metrics.entropy.count == metrics.entropy.count
        assert split_metrics.entropy.value == pytest.approx(metrics.entropy.value, rel=1e-5)


def test_row_order_does_not_matter():
    rows = random_rows()
    whole, _ = rl_gradient(rows)
    shuffled, _ = rl_gradient([rows[i] for i in np.random.default_rng(1).permutation(len(rows))])
    assert_same_gradients(shuffled, whole)


def test_branches_of_one_trajectory_count_as_one_sequence():
    rows = [row(range(5, 25), range(10, 20), advantage=1.0), row(range(30, 50), range(4, 9), advantage=1.0)]
    same = flatten([replace(r, trajectory=3) for r in rows]).sequence_N
    own = flatten(rows).sequence_N
    assert len(same.unique()) == 1 and len(own.unique()) == 2


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_zero_advantage_rows_are_left_out_but_counted(mode):
    """The same gradient as when they are computed (a vanishing entropy term forces that)."""
    rows = random_rows(groups=3)
    rows = [replace(r, advantage=0.0) if r.group == 1 else r for r in rows]
    options = {"aggregation": mode, "norm_length": norm(mode)}
    skipped, metrics = rl_gradient(rows, **options)
    computed, full = rl_gradient(rows, entropy_coef=1e-30, **options)
    assert_same_gradients(skipped, computed, atol=1e-6)
    assert metrics.num_rows_skipped == 4 and full.num_rows_skipped == 0
    assert metrics.num_tokens < full.num_tokens and metrics.num_loss_tokens == full.num_loss_tokens
    alone, _ = rl_gradient([r for r in rows if r.group != 1], **options)
    name = next(iter(alone))
    assert (alone[name] - skipped[name]).abs().max() > 1e-3, "leaving them out of the denominator is another loss"


def test_per_token_advantages():
    rows = random_rows(groups=1, size=2)
    per_token = [replace(r, advantage=np.full(len(r.tokens), r.advantage, np.float32)) for r in rows]
    assert_same_gradients(rl_gradient(per_token)[0], rl_gradient(rows)[0], atol=0)


def test_where_a_row_is_trained_is_found_once():
    """An update asks some ten times; a changed copy is asked anew."""
    one = row(range(5), [0, 2, 4])
    assert one.loss_positions.tolist() == [2, 4] and one.loss_positions is one.loss_positions
    assert replace(one, loss_mask=~one.loss_mask).loss_positions.tolist() == [1, 3]


def test_masked_positions_are_never_read():
    rows = random_rows()
    clean, metrics = rl_gradient(rows)

    def spoilt(r):
        engine = np.where(r.loss_mask, r.engine_logprobs, 1e9).astype(np.float32)
        advantage = np.where(r.loss_mask, r.advantage, np.nan).astype(np.float32)
        return replace(r, engine_logprobs=engine, advantage=advantage)

    got, other = rl_gradient([spoilt(r) for r in rows])
    assert_same_gradients(got, clean, atol=0)
    assert other.mismatch_max == metrics.mismatch_max and other.mismatch_abs == metrics.mismatch_abs


def test_engine_logprobs_only_enter_the_mismatch():
    rows = random_rows()
    model = tiny()
    exact = Learner(model, lr=0.0).logprobs(rows)
    true_rows = [replace(r, engine_logprobs=e) for r, e in zip(rows, exact, strict=True)]
    clean, metrics = rl_gradient(true_rows)
    assert metrics.mismatch_max < 1e-5 and metrics.mismatch_abs.count == metrics.num_loss_tokens
    off = [replace(r, engine_logprobs=r.engine_logprobs + np.float32(0.5)) for r in true_rows]
    got, shifted = rl_gradient(off)
    assert_same_gradients(got, clean, atol=0)
    assert shifted.mismatch_abs.value == pytest.approx(0.5, abs=1e-5)
    assert shifted.mismatch_k3.value == pytest.approx(math.exp(-0.5) - 1 + 0.5, abs=1e-5)


def test_nothing_to_train_skips_the_step():
    learner = Learner(tiny(), lr=1.0)
    before = {n: t.clone() for n, t in learner.weights().items()}
    rows = [row(range(5, 15), [], advantage=1.0), row([7], [0], advantage=1.0)]
    for metrics in (learner.rl_update(rows), learner.sft_update(rows), learner.rl_update([])):
        assert metrics.num_steps == 0 and metrics.num_steps_skipped == 1 and metrics.num_nonfinite == 0
    metrics = learner.rl_update([replace(r, advantage=0.0) for r in random_rows()], updates_per_batch=2)
    assert metrics.num_steps_skipped == 2 and metrics.num_rows_skipped == 12
    assert learner.version == 0 and learner.updates == 4
    assert all(torch.equal(before[n], t) for n, t in learner.weights().items())
    assert math.isnan(learner.sft_loss(rows))


def test_a_gradient_that_is_not_finite_is_skipped_and_counted():
    learner = Learner(tiny(), lr=1.0)
    with torch.no_grad():
        learner.model.model.layers[0].mlp.down_proj.weight[0, 0] = float("nan")
    before = learner.model.model.embed_tokens.weight.clone()
    metrics = learner.sft_update(random_rows())
    assert metrics.num_nonfinite == 1 and metrics.num_steps == 0 and learner.version == 0
    assert torch.equal(before, learner.model.model.embed_tokens.weight)
    assert all(p.grad is None for p in learner.model.parameters())


@pytest.mark.parametrize("advantage", [math.nan, math.inf])
def test_unscored_advantages_are_refused(advantage):
    with pytest.raises(ValueError, match="must be finite"):
        Learner(tiny(), lr=0.1).rl_update([row(range(5, 15), [6], advantage=advantage)])


def test_several_steps_on_a_batch_use_the_policy_before_them():
    """Ratios leave 1 after the first step, and clipping sets in; kl_old says how far it went."""
    learner = Learner(tiny(), lr=0.02)
    metrics = learner.rl_update(random_rows(), updates_per_batch=3, minibatches=2)
    assert metrics.num_steps == 6 and learner.version == 1
    assert metrics.ratio_max > 1.05 and metrics.kl_old.value > 0
    assert metrics.clipped_low.total + metrics.clipped_high.total > 0
    assert metrics.ratio.count == 3 * metrics.num_loss_tokens


def test_first_of_two_passes_equals_a_single_one():
    rows = random_rows()
    learner = Recorder(tiny())
    learner.rl_update(rows, updates_per_batch=2)
    assert_same_gradients(learner.steps[0], rl_gradient(rows)[0], atol=1e-6)


def test_kl_pulls_towards_the_reference():
    rows = [replace(r, advantage=0.0) for r in random_rows()]
    reference = tiny()
    learner = Learner(tiny(seed=1), lr=3e-3, ref_model=frozen_copy(reference))
    values = [learner.rl_update(rows, kl_coef=1.0).kl.value for _ in range(8)]
    assert values[-1] < 0.8 * values[0]
    with pytest.raises(ConfigError, match="no reference model"):
        Learner(tiny(), lr=0.1).rl_update(rows, kl_coef=0.1)


def test_kl_gradient_is_that_of_k2_on_the_plain_model():
    rows = [replace(r, advantage=0.0) for r in random_rows()]
    reference, policy = tiny(), tiny(seed=1)
    learner = Recorder(tiny(seed=1), ref_model=tiny())
    learner.rl_update(rows, kl_coef=0.3)
    difference = plain_at_loss(policy, rows) - plain_at_loss(reference, rows).detach()
    assert_same_gradients(learner.steps[0], gradients(policy, 0.3 * (difference.square() / 2).mean()))


def test_entropy_bonus_raises_entropy():
    rows = [replace(r, advantage=0.0) for r in random_rows()]
    learner = Learner(tiny(), lr=3e-3)
    values = [learner.rl_update(rows, entropy_coef=1.0).entropy.value for _ in range(6)]
    assert values[-1] > values[0] + 0.1


def test_sft_learns_and_equals_the_plain_gradient():
    rows = random_rows(groups=1)
    reference = tiny()
    learner = Recorder(tiny(), lr=0.01)
    first = learner.sft_update(rows)
    assert_same_gradients(learner.steps[0], gradients(reference, -plain_at_loss(reference, rows).mean()))
    assert first.loss == pytest.approx(-plain_at_loss(reference, rows).mean().item(), rel=1e-5)
    for _ in range(15):
        learner.sft_update(rows)
    assert learner.sft_loss(rows) < 0.5 * first.loss and learner.version == 16


@pytest.mark.parametrize("max_tokens", [4096, 60])
def test_the_focal_loss_is_the_mean_by_its_weights_however_it_is_cut(max_tokens):
    rows = random_rows(groups=2)
    reference = tiny()
    learner = Recorder(tiny(), lr=0.01, max_tokens_per_pack=max_tokens)
    metrics = learner.sft_update(rows, focal_gamma=2.0)
    logprobs = plain_at_loss(reference, rows)
    weights = (1 - logprobs.detach().double().exp()) ** 2
    loss = -(weights * logprobs).sum() / weights.sum()
    assert metrics.loss == pytest.approx(loss.item(), rel=1e-5)
    assert_same_gradients(learner.steps[0], gradients(reference, loss))
    assert metrics.loss > -logprobs.mean().item()  # what is known less counts more


def test_a_batch_that_is_known_by_heart_has_no_focal_gradient():
    learner = Learner(tiny(), lr=0.0)
    rows = random_rows(groups=1)
    known = Learner(tiny(), lr=0.0)
    known.forward = lambda one, temperature, tally: (
        (found := learner.forward(one, temperature, tally))[0] * 0.0,
        *found[1:],
    )
    metrics = known.sft_update(rows, focal_gamma=1.0)
    assert metrics.loss == 0.0 and metrics.num_steps_skipped == 1


def test_logprobs_in_row_order_with_nan_elsewhere():
    rows = random_rows()
    got = Learner(tiny(), lr=0.1, max_tokens_per_pack=90).logprobs(rows, 0.7)
    for one, values in zip(rows, got, strict=True):
        assert np.isnan(values[~one.loss_mask]).all()
        np.testing.assert_allclose(values[one.loss_mask], plain_at_loss(tiny(), [one], 0.7).detach(), atol=1e-5)


def test_modes_are_restored_also_after_an_exception(monkeypatch):
    """DROP-02: training, scoring and updates leave every module as it was."""
    learner = Learner(tiny(attention_dropout=0.0), lr=0.0)
    rows = random_rows()
    learner.model.train()
    learner.model.model.layers[1].eval()  # someone's own choice
    before = [m.training for m in learner.model.modules()]
    seen = []

    def watch(*args):
        seen.append(learner.model.training)

    learner.model.model.norm.register_forward_pre_hook(watch)
    learner.sft_loss(rows)
    learner.rl_update(rows)
    assert seen == [False, True]
    assert [m.training for m in learner.model.modules()] == before

    def broken(*args, **kwargs):
        raise RuntimeError("boom")

    for name in ("packed_forward", "packed_hidden"):
        monkeypatch.setattr(f"upswing.learn.learner.{name}", broken)
    for phase in (learner.sft_loss, learner.logprobs, learner.rl_update, learner.sft_update):
        with pytest.raises(RuntimeError, match="boom"):
            phase(rows)
        assert [m.training for m in learner.model.modules()] == before


LAST_STEP = """
import sys, torch
from tests.learn.helpers import random_rows, tiny
from tests.learn.test_learner import Recorder
torch.set_num_threads(1)
learner = Recorder(tiny(seed=5), gradient_checkpointing=True)
learner.load(sys.argv[1])
learner.rl_update(random_rows())
torch.save(learner.steps[-1], sys.argv[2])
"""


async def test_the_last_of_a_sequence_of_phases_has_the_gradient_of_a_fresh_process(tmp_path):
    """DROP-02, its own sequence: train, rollout, score old, loss step, evaluate, loss step."""
    rows, learner = random_rows(), Recorder(tiny(), gradient_checkpointing=True)
    learner.model.train()
    engine = TorchEngine.from_model(learner.model, dtype=torch.float32, device="cpu")

    def in_training_mode():
        return all(module.training for module in learner.model.modules())

    async def rollout(prompt):
        await engine.update_weights(learner.weights(), learner.version)
        await engine.generate(prompt, Sampling(max_tokens=4))

    await rollout([1, 5, 7])
    assert in_training_mode()
    old = learner.logprobs(rows)
    assert in_training_mode()
    first = learner.rl_update(rows, old=old)
    assert in_training_mode() and first.num_tokens_recomputed > 0
    await rollout([1, 5, 9])  # evaluate, and the loss that an evaluation may be
    learner.sft_loss(rows)
    with pytest.raises(ValueError):
        await rollout([])
    await engine.close()
    assert in_training_mode()
    learner.save(tmp_path / "before")
    last = learner.rl_update(rows)
    assert in_training_mode() and last.num_tokens_recomputed > 0
    command = [sys.executable, "-c", LAST_STEP, tmp_path / "before", tmp_path / "gradient.pt"]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2])
    assert_same_gradients(learner.steps[-1], torch.load(tmp_path / "gradient.pt"), atol=0)


def test_scoring_between_updates_changes_nothing():
    rows = random_rows()
    plain, scored = Recorder(tiny()), Recorder(tiny())
    for learner in (plain, scored):
        learner.rl_update(rows)
        if learner is scored:
            learner.sft_loss(rows)
            learner.logprobs(rows)
        learner.rl_update(rows)
    assert_same_gradients(scored.steps[1], plain.steps[1], atol=0)


def test_gradient_checkpointing_gives_the_same_gradient():
    rows = random_rows()
    learner = Recorder(tiny(), gradient_checkpointing=True)
    metrics = learner.rl_update(rows)
    assert_same_gradients(learner.steps[0], rl_gradient(rows)[0], atol=0)
    assert metrics.num_tokens_recomputed == metrics.num_tokens > 0


def test_bf16_compute_keeps_float32_weights():
    rows = random_rows()
    learner = Recorder(tiny(), compute_dtype=torch.bfloat16)
    metrics = learner.rl_update(rows)
    assert {t.dtype for t in learner.weights().values()} == {torch.float32}
    want = rl_gradient(rows)[0]
    for name, grad in learner.steps[0].items():
        assert torch.nn.functional.cosine_similarity(grad.flatten(), want[name].flatten(), dim=0) > 0.97, name
    assert metrics.num_steps == 1


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"kl_coef": -1}, "kl_coef"),
        ({"temperature": 0}, "temperature"),
        ({"minibatches": 0}, "minibatches"),
        ({"aggregation": "token"}, "aggregation"),
        ({"kl_estimator": "k1"}, "kl_estimator"),
        ({"clip_low": -0.2}, "clip_low"),
    ],
)
def test_options_are_checked_when_made(options, named):
    with pytest.raises(ConfigError, match=named):
        RLOptions(**options)


def test_rows_of_wrong_shape_are_refused():
    with pytest.raises(ValueError, match=r"engine_logprobs has shape \(2,\)"):
        row([1, 2, 3], [1], engine_logprobs=np.zeros(2, np.float32))


def test_the_engines_logprobs_serve_as_old_ones_when_they_are_equal():
    rows = random_rows()
    learner = Learner(tiny(), lr=1e-3)
    with_engine = [replace(r, engine_logprobs=values) for r, values in zip(rows, learner.logprobs(rows), strict=True)]
    results = []
    for old in ("recompute", "engine"):
        learner = Recorder(tiny())
        learner.rl_update(with_engine, minibatches=2, old_logprobs=old)
        results.append(learner.steps)
    for one, other in zip(*results, strict=True):
        assert_same_gradients(one, other)


def test_the_only_step_of_a_batch_takes_its_ratio_to_the_engine_if_it_is_told_to():
    """Log-probs 0.5 lower when sampled: every ratio is e^0.5 = 1.65, so good tokens are clipped, and learn nothing."""
    rows = [replace(r, advantage=1.0) for r in random_rows()]
    now = Learner(tiny(), lr=1e-3).logprobs(rows)
    stale = [replace(r, engine_logprobs=values - np.float32(0.5)) for r, values in zip(rows, now, strict=True)]
    norms = [Learner(tiny(), lr=1e-3).rl_update(stale, old_logprobs=old).grad_norm for old in ("recompute", "engine")]
    assert norms[0] > 0 and norms[1] == 0


def test_old_logprobs_from_the_engine_must_be_there():
    with pytest.raises(ValueError, match="recompute"):
        Learner(tiny(), lr=1e-3).rl_update(
            [replace(r, engine_logprobs=None) for r in random_rows()], minibatches=2, old_logprobs="engine"
        )
    with pytest.raises(ConfigError, match="did you mean 'engine'"):
        RLOptions(old_logprobs="engin")
