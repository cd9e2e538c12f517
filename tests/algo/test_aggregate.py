import pytest
import torch

from upswing.algo import AGGREGATIONS, entropy_from_logits, token_weights
from upswing.errors import ConfigError

SEQUENCES = torch.tensor([4, 4, 4, 4, 9, 2, 2])
LOSS = torch.tensor([1.0, 2, 3, 4, 10, -1, 5])
BY_HAND = {
    "token-mean": 24 / 7,
    "seq-mean-token-mean": (2.5 + 10 + 2) / 3,
    "seq-mean-token-sum": (10 + 10 + 4) / 3,
    "seq-mean-token-sum-norm": 24 / (3 * 50),
}


def norm(mode):
    return 50 if mode.endswith("norm") else None


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_by_hand(mode):
    weights = token_weights(SEQUENCES, mode=mode, norm_length=norm(mode))
    assert (weights * LOSS).sum().item() == pytest.approx(BY_HAND[mode], rel=1e-6)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_order_and_sequence_numbers_do_not_matter(mode):
    order = torch.tensor([5, 0, 4, 2, 6, 1, 3])
    renamed = 100 - SEQUENCES[order]
    weights = token_weights(renamed, mode=mode, norm_length=norm(mode))
    assert torch.equal(weights, token_weights(SEQUENCES, mode=mode, norm_length=norm(mode))[order])


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_no_tokens(mode):
    assert token_weights(SEQUENCES[:0], mode=mode, norm_length=norm(mode)).shape == (0,)


def test_refusals():
    with pytest.raises(ConfigError, match="did you mean 'token-mean'"):
        token_weights(SEQUENCES, mode="token_mean")
    with pytest.raises(ConfigError, match="needs norm_length"):
        token_weights(SEQUENCES, mode="seq-mean-token-sum-norm")
    with pytest.raises(ConfigError, match="no effect"):
        token_weights(SEQUENCES, mode="token-mean", norm_length=5)


def test_entropy():
    logits = torch.tensor([[0.0, 0, 0, 0], [0, 0, -torch.inf, -torch.inf], [50.0, 0, 0, 0]])
    assert entropy_from_logits(logits).tolist() == pytest.approx([1.3862944, 0.6931472, 0.0], abs=1e-6)
