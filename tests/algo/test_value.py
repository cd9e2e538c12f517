"""The value loss by hand, by finite differences and by its properties."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from upswing.algo.value import explained_variance, value_loss
from upswing.errors import ConfigError


def wide(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_by_hand():
    values, returns, old = wide(1.0, 1.0, 0.1, -1.0, 0.5), wide(2.0, 0.0, 3.0, -2.0, 0.5), wide(0.0, 0.0, 0.0, 0.0, 0.5)
    loss, clipped = value_loss(values, returns, old, clip=0.2)
    # (v, R, clipped v): (1, 2, .2) (1, 0, .2) (.1, 3, .1) (-1, -2, -.2) (.5, .5, .5)
    torch.testing.assert_close(loss, 0.5 * wide(1.8**2, 1.0, 2.9**2, 1.8**2, 0.0))
    assert clipped.tolist() == [True, False, False, True, False]
    plain, none = value_loss(values, returns)
    torch.testing.assert_close(plain, 0.5 * wide(1.0, 1.0, 2.9**2, 1.0, 0.0))
    assert not none.any()


number = st.floats(-3, 3)


@given(st.lists(st.tuples(number, number, number), min_size=1, max_size=8), st.floats(0.05, 1))
@example([(2.2250738585072014e-308, 0.0, 0.5)], 1.0)
def test_gradients_are_the_finite_differences_and_vanish_exactly_where_clipped(triples, clip):
    values, returns, old = (torch.tensor(column, dtype=torch.float64) for column in zip(*triples, strict=True))
    values.requires_grad_()
    loss, clipped = value_loss(values, returns, old, clip=clip)
    (got,) = torch.autograd.grad(loss.sum(), values)
    step = 1e-6
    up, low = (value_loss(values.detach() + s, returns, old, clip=clip)[0] for s in (step, -step))
    error, other = (values.detach() - returns) ** 2, (old + (values.detach() - old).clamp(-clip, clip) - returns) ** 2
    # Not at a kink, where a finite difference means nothing.
    outside = (values.detach() - old).abs()
    smooth = ((outside - clip).abs() > 1e-4) & (((error - other).abs() > 1e-4) | (outside < clip))
    torch.testing.assert_close(got[smooth], ((up - low) / (2 * step))[smooth], atol=1e-4, rtol=1e-4)
    assert (got[clipped] == 0).all()
    # Where both squares underflow to the same number the maximum shares the gradient: exact only up to that.
    plain = ~clipped & smooth
    torch.testing.assert_close(got[plain], (values.detach() - returns)[plain], atol=1e-12, rtol=1e-12)
    assert (loss >= 0.5 * error).all(), "clipping is pessimistic"


def test_wrong_use_is_refused():
    with pytest.raises(ConfigError, match=r"value_clip is -0\.1"):
        value_loss(wide(1.0), wide(1.0), wide(1.0), clip=-0.1)
    with pytest.raises(ValueError, match="old_values_N"):
        value_loss(wide(1.0), wide(1.0), clip=0.2)


def test_explained_variance():
    returns = np.random.default_rng(0).normal(size=50)
    noise = np.random.default_rng(1).normal(size=50)
    values = returns + 0.5 * noise + 3.0
    assert explained_variance(torch.tensor(values), torch.tensor(returns)) == pytest.approx(
        1 - np.var(0.5 * noise) / np.var(returns)
    )
    same = torch.tensor(returns)
    assert explained_variance(same, same) == 1.0
    assert explained_variance(torch.zeros(50), same) == pytest.approx(0.0)
    assert explained_variance(-same, same) == pytest.approx(-3.0)
    for constant in (torch.full((5,), 0.1), torch.zeros(1), torch.zeros(0)):
        assert math.isnan(explained_variance(constant, constant))
