"""Log-probs and entropy of chosen tokens without ever holding [M, V] logits.

Axis letters: M tokens, H hidden size, V vocabulary, C rows of one chunk.
"""

from __future__ import annotations

from typing import Any

import torch

from upswing.learn.in_place import grad_of, is_in_place

CHUNK_ELEMENTS = 1 << 24
"""Logits held at a time (64 MiB in float32)."""
RULED_OUT = -1e30
"""Logits are at least this: a probability of 0 without an infinity."""
BLOCK_ELEMENTS = 1 << 19
"""Logits worked on at a time within a chunk (2 MiB): the passes of a softmax then stay in the CPU's cache."""


def token_logprobs(
    hidden_MH: torch.Tensor,
    weight_VH: torch.Tensor,
    bias_V: torch.Tensor | None,
    target_M: torch.Tensor,
    temperature: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of `target_M` and entropy of its distribution, softmax(logits / temperature); both [M].

    Float32 whatever the precision of the matrix product, float64 for a float64 model. Both results carry gradient to
    hidden states, weight and bias. Logits are computed a chunk at a time and once more in the backward pass. Under
    `gradients_in_place` the weight's gradient is added to `weight_VH.grad`.
    """
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; training needs one above 0, the one that was sampled with")
    apply: Any = _TokenLogprobs.apply
    options = temperature, _matmul_dtype(hidden_MH), is_in_place(weight_VH)
    logprobs_M, entropy_M = apply(hidden_MH, weight_VH, bias_V, target_M, *options)
    return logprobs_M, entropy_M


def _matmul_dtype(hidden: torch.Tensor) -> torch.dtype:
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


def _scaled_logits(
    hidden_CH: torch.Tensor,
    weight_VH: torch.Tensor,
    bias_V: torch.Tensor | None,
    temperature: float,
    buffer_CV: torch.Tensor,
) -> torch.Tensor:
    """Logits / temperature [C, V], in float32 or float64; made in `buffer_CV`, which one call uses for all chunks."""
    logits_CV = buffer_CV[: len(hidden_CH)]
    if bias_V is None:
        torch.mm(hidden_CH, weight_VH.t(), out=logits_CV)
    else:
        torch.addmm(bias_V, hidden_CH, weight_VH.t(), out=logits_CV)
    if logits_CV.dtype not in (torch.float32, torch.float64):
        logits_CV = logits_CV.float()
    if bias_V is not None:
        # A token that the bias rules out has -inf, which would make 0 * inf of its share of the entropy.
        logits_CV.clamp_(min=RULED_OUT)
    return logits_CV if temperature == 1.0 else logits_CV.div_(temperature)


def _chunk_buffer(hidden_MH: torch.Tensor, weight_VH: torch.Tensor) -> torch.Tensor:
    """Uninitialised [C, V] in the weight's dtype."""
    num_rows, vocab = len(hidden_MH), len(weight_VH)
    return weight_VH.new_empty(max(1, min(num_rows, CHUNK_ELEMENTS // vocab)), vocab)


def _block_rows(vocab: int, logits: torch.Tensor) -> int:
    return max(1, BLOCK_ELEMENTS // vocab) if logits.device.type == "cpu" else len(logits)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_MH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        target_M: torch.Tensor,
        temperature: float,
        dtype: torch.dtype,
        in_place: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weight = weight_VH.to(dtype)
        bias = None if bias_V is None else bias_V.to(dtype)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        num_rows, vocab = len(hidden_MH), len(weight_VH)
        buffer_CV = _chunk_buffer(hidden_MH, weight)
        step = len(buffer_CV)
        logprobs_M = torch.empty(num_rows, dtype=wide, device=hidden_MH.device)
        entropy_M, normalizer_M = torch.empty_like(logprobs_M), torch.empty_like(logprobs_M)
        for start in range(0, num_rows, step):
            chunk_CV = _scaled_logits(hidden_MH[start : start + step].to(dtype), weight, bias, temperature, buffer_CV)
            inner = _block_rows(vocab, chunk_CV)
            for offset in range(0, len(chunk_CV), inner):
                rows = slice(start + offset, start + min(offset + inner, len(chunk_CV)))
                logprobs_CV = torch.log_softmax(chunk_CV[offset : offset + inner], dim=-1)
                target = target_M[rows, None]
                logprobs_M[rows] = logprobs_CV.gather(1, target)[:, 0]
                # The normaliser is recovered from the target's logit; the backward pass needs no second reduction.
                normalizer_M[rows] = chunk_CV[offset : offset + inner].gather(1, target)[:, 0] - logprobs_M[rows]
                entropy_M[rows] = -(logprobs_CV.exp().mul_(logprobs_CV)).sum(-1)
        ctx.save_for_backward(hidden_MH, weight_VH, bias_V, target_M, normalizer_M, entropy_M)
        ctx.temperature, ctx.dtype, ctx.parameter = temperature, dtype, weight_VH if in_place else None
        return logprobs_M, entropy_M

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, ...]:
        grad_logprobs_M, grad_entropy_M = grads
        hidden_MH, weight_VH, bias_V, target_M, normalizer_M, entropy_M = ctx.saved_tensors
        weight = weight_VH.to(ctx.dtype)
        bias = None if bias_V is None else bias_V.to(ctx.dtype)
        num_rows, vocab = len(hidden_MH), len(weight_VH)
        buffer_CV = _chunk_buffer(hidden_MH, weight)
        step = len(buffer_CV)
        grad_hidden_MH = torch.empty_like(hidden_MH)
        grad_weight_VH = torch.zeros_like(weight_VH) if ctx.needs_input_grad[1] and ctx.parameter is None else None
        weight_grad_VH = grad_weight_VH if ctx.parameter is None else grad_of(ctx.parameter)
        grad_bias_V = torch.zeros_like(bias_V) if bias_V is not None and ctx.needs_input_grad[2] else None
        with_entropy = bool(grad_entropy_M.any())
        for start in range(0, num_rows, step):
            hidden_CH = hidden_MH[start : start + step].to(ctx.dtype)
            chunk_CV = _scaled_logits(hidden_CH, weight, bias, ctx.temperature, buffer_CV)
            inner = _block_rows(vocab, chunk_CV)
            for offset in range(0, len(chunk_CV), inner):
                rows = slice(start + offset, start + min(offset + inner, len(chunk_CV)))
                _logits_grad_(
                    chunk_CV[offset : offset + inner],
                    target_M[rows],
                    normalizer_M[rows],
                    grad_logprobs_M[rows] / ctx.temperature,
                    (grad_entropy_M[rows] / ctx.temperature, entropy_M[rows]) if with_entropy else None,
                )
            low_CV = chunk_CV.to(ctx.dtype)
            grad_hidden_MH[start : start + step] = low_CV @ weight
            if weight_grad_VH is not None:
                _accumulate(weight_grad_VH, low_CV, hidden_CH)
            if grad_bias_V is not None:
                grad_bias_V += chunk_CV.sum(0)
        return grad_hidden_MH, grad_weight_VH, grad_bias_V, None, None, None, None


def _logits_grad_(
    logits_CV: torch.Tensor,
    target_C: torch.Tensor,
    normalizer_C: torch.Tensor,
    grad_C: torch.Tensor,
    entropy_terms: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    """Overwrite logits by the gradient: g (onehot - p), and for entropy H: -h p (log p + H)."""
    logits_CV.sub_(normalizer_C[:, None])
    if entropy_terms is None:
        logits_CV.exp_().mul_(-grad_C[:, None])
    else:
        grad_entropy_C, entropy_C = entropy_terms
        probs_CV = logits_CV.exp()
        logits_CV.add_(entropy_C[:, None]).mul_(grad_entropy_C[:, None]).add_(grad_C[:, None]).mul_(probs_CV).neg_()
    logits_CV.scatter_add_(1, target_C[:, None], grad_C[:, None].to(logits_CV.dtype))


def _accumulate(total_VH: torch.Tensor, grad_CV: torch.Tensor, hidden_CH: torch.Tensor) -> None:
    """total += grad^T @ hidden, in the precision of `total`."""
    if total_VH.dtype == grad_CV.dtype:
        total_VH.addmm_(grad_CV.t(), hidden_CH)
        return
    step = max(1, CHUNK_ELEMENTS // total_VH.shape[1])  # a product in low precision is another [V, H]
    for total, grad in zip(torch.split(total_VH, step), torch.split(grad_CV, step, dim=1), strict=True):
        total += grad.t() @ hidden_CH
