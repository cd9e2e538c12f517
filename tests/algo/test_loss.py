import math

import pytest
import torch

from upswing.algo import check_clip, ppo_clip
from upswing.errors import ConfigError


def terms(log_ratio, advantage, **options):
    policy = torch.tensor(log_ratio, dtype=torch.float64, requires_grad=True)
    out = ppo_clip(policy, torch.zeros_like(policy), torch.tensor(advantage, dtype=torch.float64), **options)
    (grad,) = torch.autograd.grad(out.loss_N.sum(), policy)
    return out, grad


def test_on_policy_gradient_is_that_of_minus_advantage_times_logprob():
    advantages = [1.5, -0.5, 0.0, 3.0]
    out, grad = terms([0.0] * 4, advantages)
    assert grad.tolist() == [-a for a in advantages]
    assert not (out.clipped_low_N | out.clipped_high_N | out.dual_clipped_N).any()


def test_clipping_by_hand():
    ratios = [1.5, 0.5, 1.5, 0.5, 1.1]
    out, grad = terms([math.log(r) for r in ratios], [1.0, 1.0, -1.0, -1.0, 1.0], clip_low=0.2, clip_high=0.28)
    assert out.loss_N.tolist() == pytest.approx([-1.28, -0.5, 1.5, 0.8, -1.1])
    assert grad.tolist() == pytest.approx([0.0, -0.5, 1.5, 0.0, -1.1])
    assert out.clipped_high_N.tolist() == [True, False, False, False, False]
    assert out.clipped_low_N.tolist() == [False, False, False, True, False]


@pytest.mark.parametrize("log_ratio", [2.0, math.log(1e6), 90.0, 1e4])
def test_dual_clip_bounds_the_loss_of_a_bad_token(log_ratio):
    out, grad = terms([log_ratio], [-2.0], dual_clip=3.0)
    assert out.loss_N.item() == 6.0 and grad.item() == 0.0 and out.dual_clipped_N.item()
    free, _ = terms([log_ratio], [-2.0], dual_clip=None)
    assert free.loss_N.item() > 6.0 and math.isfinite(free.loss_N.item())


def test_dual_clip_leaves_good_tokens_and_moderate_ratios_alone():
    plain, dual = terms([3.0, 0.5], [1.0, -1.0], dual_clip=None), terms([3.0, 0.5], [1.0, -1.0], dual_clip=3.0)
    assert torch.equal(plain[0].loss_N, dual[0].loss_N) and torch.equal(plain[1], dual[1])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"clip_low": 0.0}, "clip_low"),
        ({"clip_low": 1.5}, "clip_low"),
        ({"clip_high": -0.1}, "clip_high"),
        ({"dual_clip": 1.0}, "dual_clip"),
        ({"clip_high": math.nan}, "clip_high"),
    ],
)
def test_senseless_bounds_are_refused_by_name(options, named):
    with pytest.raises(ConfigError, match=named):
        check_clip(**{"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0, **options})
