import pytest
import torch

from upswing.algo import entropy_from_logits
from upswing.learn import logits as module
from upswing.learn.logits import token_logprobs


def case(bias):
    torch.manual_seed(0)
    hidden, weight = torch.randn(23, 8, dtype=torch.float64), torch.randn(31, 8, dtype=torch.float64)
    return (
        hidden.requires_grad_(),
        weight.requires_grad_(),
        torch.randn(31, dtype=torch.float64).requires_grad_() if bias else None,
        torch.randint(31, (23,)),
    )


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk", [1, 5 * 31, 1 << 24])
def test_equals_full_softmax(monkeypatch, bias, temperature, chunk):
    """Values and gradients of log-prob and entropy, for any chunking."""
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", chunk)
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", 2 * 31)
    hidden, weight, bias_V, target = case(bias)
    inputs = [t for t in (hidden, weight, bias_V) if t is not None]
    logprobs, entropy = token_logprobs(hidden, weight, bias_V, target, temperature)
    logits = torch.nn.functional.linear(hidden, weight, bias_V) / temperature
    want = torch.log_softmax(logits, -1).gather(1, target[:, None])[:, 0]
    want_entropy = entropy_from_logits(logits)
    torch.testing.assert_close(logprobs, want, rtol=0, atol=1e-12)
    torch.testing.assert_close(entropy, want_entropy, rtol=0, atol=1e-12)
    weights = torch.linspace(-1, 2, 23, dtype=torch.float64)
    for coef in (0.0, 0.3):
        got = torch.autograd.grad((weights * (logprobs + coef * entropy)).sum(), inputs, retain_graph=True)
        right = torch.autograd.grad((weights * (want + coef * want_entropy)).sum(), inputs, retain_graph=True)
        torch.testing.assert_close(got, right, rtol=0, atol=1e-10)


def test_temperature_zero_is_refused():
    hidden, weight, _, target = case(False)
    with pytest.raises(ValueError, match="temperature is 0"):
        token_logprobs(hidden, weight, None, target, 0.0)
