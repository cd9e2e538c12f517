"""On-policy distillation: the reverse KL from student to teacher on what the student sampled.

Axis letters: N loss tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from upswing.errors import ConfigError


def distill_advantages(policy_logprobs_N: torch.Tensor, teacher_logprobs_N: torch.Tensor) -> torch.Tensor:
    """teacher - policy log-prob of the sampled tokens [N], detached: each token's advantage, with no return-to-go.

    As a policy gradient its expectation is that of the per-token reverse KL at the states that the student visited;
    what a token does to later states is left out (gamma 0), on purpose: it only adds variance.
    """
    return (teacher_logprobs_N - policy_logprobs_N).detach()


def reverse_kl(policy_logits_NV: torch.Tensor, teacher_logits_NV: torch.Tensor) -> torch.Tensor:
    """KL(policy, teacher) [N] over the whole vocabulary, exact; gradient flows to both (detach the teacher's).

    Logits of -inf have probability 0: where the policy's is, the term is 0; where only the teacher's is, the KL is inf.
    """
    policy_NV = torch.log_softmax(policy_logits_NV, dim=-1)
    teacher_NV = torch.log_softmax(teacher_logits_NV, dim=-1)
    ruled_out = policy_NV.isneginf()
    # Filled before, not only after: 0 * inf would be NaN in the gradient even where the term isn't used.
    difference_NV = policy_NV.masked_fill(ruled_out, 0.0) - teacher_NV.masked_fill(ruled_out, 0.0)
    return (policy_NV.exp() * difference_NV).sum(dim=-1)


def check_same_vocabulary(student: Mapping[str, int], teacher: Mapping[str, int]) -> None:
    """Raises ConfigError unless both tokenizers (`get_vocab()`) give the same id to every token."""
    differing = sorted(token for token in student.keys() | teacher.keys() if student.get(token) != teacher.get(token))
    if differing:
        first = differing[0]
        raise ConfigError(
            f"student and teacher have different vocabularies: {len(differing)} tokens differ, such as {first!r} with "
            f"id {student.get(first, 'none')} for the student and {teacher.get(first, 'none')} for the teacher; "
            "distillation compares distributions over the same tokens, so use a teacher of the same model family"
        )
