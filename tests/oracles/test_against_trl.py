"""Agreement with TRL's own code (1.16), run without a model: its loss method gets log-probs instead of computing them.

Where TRL differs, and why ours doesn't follow:

- A row without loss tokens counts in TRL's `grpo` and `dr_grpo` row means (a 0 in the mean); here it counts nowhere:
  a failed rollout must not shrink the step.
- `grpo`, `dr_grpo` and `sapo` average per micro-batch, then over the micro-batches; here the denominators are those of
  the global batch, so the micro-batches may be of unequal size. The tests use one micro-batch, where both agree.
- CISPO's `epsilon_high` is the absolute cap on the ratio, here `1 + clip_high`; TRL has no lower bound.
- TRL has no dual clip by default; its `delta` is the same thing, and ours is on.
- The off-policy sequence mask counts a token of unknown sampling log-prob as 0 nats; here it counts nowhere.
- Entropy with logits of -inf is NaN in TRL; here such a token adds 0.
- KL in the loss: TRL multiplies k3 by the ratio by default, which is `k3_ratio` here, but for sequence-level ratios by
  the sequence's, which is not the gradient of the KL; here the token's ratio is used always.
"""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from upswing.algo.advantage import group_relative
from upswing.algo.aggregate import token_weights
from upswing.algo.correction import opsm_mask
from upswing.algo.entropy import entropy_from_logits
from upswing.algo.kl import kl_loss
from upswing.algo.loss import LOSSES
from upswing.algo.regularise import overlong_penalty, top_entropy_mask

pytest.importorskip("trl")
from trl.rewards import get_soft_overlong_punishment
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import entropy_from_logits as trl_entropy
from trl.trainer.utils import nanstd

ONE_PROCESS = SimpleNamespace(
    reduce=lambda x, reduction: x,
    gather=lambda x: x,
    pad_across_processes=lambda x, **_: x,
    num_processes=1,
    sync_gradients=True,
)
LENGTHS = [5, 1, 3, 4]
MASK = torch.arange(5)[None] < torch.tensor(LENGTHS)[:, None]
SEQUENCE = torch.arange(4)[:, None].expand(4, 5)[MASK]


def batch(scale=0.4):
    generator = torch.Generator().manual_seed(3)
    old = -torch.rand(4, 5, generator=generator, dtype=torch.float64) * 3
    policy = old + scale * torch.randn(4, 5, generator=generator, dtype=torch.float64)
    ref = old + 0.3 * torch.randn(4, 5, generator=generator, dtype=torch.float64)
    return policy.requires_grad_(), old, ref, torch.tensor([1.2, -0.7, 0.4, -1.5], dtype=torch.float64)


def trl_loss(policy, old, ref, advantages, *, mask=MASK, weights=None, **changes):
    """TRL's `_compute_loss`, and its gradient at the loss tokens."""
    settings = {
        "loss_type": "grpo",
        "importance_sampling_level": "token",
        "beta": 0.0,
        "epsilon_low": 0.2,
        "epsilon_high": 0.28,
        "delta": None,
        "use_bias_correction_kl": True,
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "steps_per_generation": 1,
        **changes,
    }
    trainer = SimpleNamespace(
        **settings,
        args=SimpleNamespace(**settings),
        _get_per_token_logps_and_entropies=lambda *_, **__: (policy, torch.zeros_like(policy), None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=weights is not None,
        vllm_importance_sampling_correction=weights is not None,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=50,
        accelerator=ONE_PROCESS,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
    )
    ids = torch.zeros(mask.shape, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1] + 1,
        "completion_ids": ids,
        "completion_mask": mask.double(),
        "advantages": advantages,
        "old_per_token_logps": old,
        "ref_per_token_logps": ref,
        "num_items_in_batch": mask.sum(),
        "importance_sampling_ratio": weights,
    }
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    return loss.detach(), torch.autograd.grad(loss, policy)[0][mask]


def our_loss(policy, old, ref, advantages, *, loss, mode, beta=0.0, estimator="k3", weights=None, **options):
    flat = policy.detach()[MASK].requires_grad_()
    if LOSSES[loss].level == "sequence":
        options["sequence_N"] = SEQUENCE
    loss_N = LOSSES[loss].function(flat, old[MASK], advantages[SEQUENCE], **options).loss_N
    if weights is not None:
        loss_N = loss_N * weights[MASK]
    if beta:
        loss_N = loss_N + beta * kl_loss(flat, ref[MASK], estimator=estimator, old_logprobs_N=old[MASK])
    share = token_weights(SEQUENCE, mode=mode, norm_length=50 if mode.endswith("norm") else None).double()
    total = (share * loss_N).sum()
    return total.detach(), torch.autograd.grad(total, flat)[0]


CLIP = {"loss": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28, "dual_clip": None}
PER_ROW = "seq-mean-token-mean"


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"loss_type": "grpo"}, {**CLIP, "mode": PER_ROW}),
        ({"loss_type": "dapo"}, {**CLIP, "mode": "token-mean"}),
        ({"loss_type": "bnpo"}, {**CLIP, "mode": "token-mean"}),
        ({"loss_type": "dr_grpo"}, {**CLIP, "mode": "seq-mean-token-sum-norm"}),
        ({"loss_type": "luspo"}, {**CLIP, "mode": "seq-mean-token-sum"}),
        ({"delta": 1.4}, {**CLIP, "mode": PER_ROW, "dual_clip": 1.4}),
        (
            {"importance_sampling_level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.1},
            {"loss": "gspo", "mode": PER_ROW, "clip_low": 0.05, "clip_high": 0.1, "dual_clip": None},
        ),
        ({"loss_type": "cispo", "epsilon_high": 1.3}, {"loss": "cispo", "mode": "token-mean", "clip_high": 0.3}),
        ({"loss_type": "sapo"}, {"loss": "sapo", "mode": PER_ROW}),
        ({"beta": 0.1, "use_bias_correction_kl": False}, {**CLIP, "mode": PER_ROW, "beta": 0.1}),
        ({"beta": 0.1}, {**CLIP, "mode": PER_ROW, "beta": 0.1, "estimator": "k3_ratio"}),
    ],
)
def test_losses(theirs, ours):
    loss, grad = trl_loss(*batch(), **theirs)
    got, got_grad = our_loss(*batch(), **ours)
    torch.testing.assert_close(got, loss, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(got_grad, grad, rtol=1e-6, atol=1e-8)


def test_correction_weights_multiply_the_policy_term_only():
    weights = torch.linspace(0, 2, 20, dtype=torch.float64).reshape(4, 5)
    loss, grad = trl_loss(*batch(), beta=0.1, weights=weights)
    got, got_grad = our_loss(*batch(), **CLIP, mode=PER_ROW, beta=0.1, estimator="k3_ratio", weights=weights)
    torch.testing.assert_close(got, loss, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(got_grad, grad, rtol=1e-6, atol=1e-8)


def test_an_empty_row_counts_in_trl_and_not_here():
    policy, old, ref, advantages = batch()
    mask = torch.cat([MASK, torch.zeros(1, 5, dtype=torch.bool)])
    padded = [torch.cat([x, x[:1]]) for x in (policy.detach(), old, ref, advantages)]
    loss, _ = trl_loss(padded[0].requires_grad_(), *padded[1:], mask=mask)
    ours, _ = our_loss(policy, old, ref, advantages, **CLIP, mode=PER_ROW)
    torch.testing.assert_close(loss * 5 / 4, ours, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("delta", [0.0, 0.1, 0.3])
def test_off_policy_sequence_mask(delta):
    policy, old, _, advantages = batch()
    theirs = GRPOTrainer.get_off_policy_mask(advantages[:, None], policy, old, MASK.double(), delta)
    ours = opsm_mask(policy[MASK], old[MASK], advantages[SEQUENCE], SEQUENCE, delta=delta)
    assert torch.equal(ours, theirs.bool()[SEQUENCE, 0]) and ours.sum() > 0


def test_entropy():
    logits = torch.randn(6, 11, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(entropy_from_logits(logits), trl_entropy(logits))
    banned = logits.index_fill(1, torch.tensor([3]), -torch.inf)
    assert trl_entropy(banned).isnan().all()
    torch.testing.assert_close(entropy_from_logits(banned), trl_entropy(logits[:, [i for i in range(11) if i != 3]]))


def test_high_entropy_tokens():
    entropy = torch.rand(4, 5, generator=torch.Generator().manual_seed(0))
    theirs = GRPOTrainer.get_high_entropy_mask(SimpleNamespace(accelerator=ONE_PROCESS), entropy, MASK, 0.75)
    assert torch.equal(top_entropy_mask(entropy[MASK], fraction=0.31), theirs[MASK])


def test_group_advantage_with_an_unscored_sample():
    rewards = torch.tensor([1.0, torch.nan, 0.0, 1.0])
    theirs = torch.nan_to_num((rewards - rewards.nanmean()) / (nanstd(rewards) + 1e-4))
    torch.testing.assert_close(group_relative(rewards, torch.zeros(4, dtype=torch.long), eps=1e-4), theirs)


def test_overlong_punishment():
    lengths = [0, 79, 80, 81, 90, 99, 100, 101, 500]
    theirs = get_soft_overlong_punishment(100, 20)([[1] * length for length in lengths])
    assert overlong_penalty(torch.tensor(lengths), max_length=100, cache=20).tolist() == pytest.approx(theirs)
