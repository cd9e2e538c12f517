"""Reverse KL against torch's own, exact enumeration and finite differences."""

import pytest
import torch

from upswing.algo.distill import check_same_vocabulary, distill_advantages, reverse_kl
from upswing.errors import ConfigError


def logits(seed, rows=3, vocab=5):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_reverse_kl_is_torchs_and_its_gradient_that_of_finite_differences():
    student, teacher = logits(0).requires_grad_(), logits(1)
    want = torch.distributions.kl_divergence(
        torch.distributions.Categorical(logits=student), torch.distributions.Categorical(logits=teacher)
    )
    torch.testing.assert_close(reverse_kl(student, teacher), want)
    assert torch.autograd.gradcheck(lambda one: reverse_kl(one, teacher), [student])


def test_it_is_zero_for_the_teacher_itself_and_not_symmetric():
    student, teacher = logits(0), logits(1)
    assert reverse_kl(student, student + 3.0).abs().max() < 1e-14
    assert (reverse_kl(student, teacher) - reverse_kl(teacher, student)).abs().max() > 0.05


def test_ruled_out_tokens():
    """-inf in both or in the student adds nothing and leaves the gradient finite; in the teacher alone, KL is inf."""
    student, teacher = logits(0, vocab=6), logits(1, vocab=6)
    student[:, 0] = teacher[:, 0] = student[:, 1] = -torch.inf
    student.requires_grad_()
    kl = reverse_kl(student, teacher)
    kl.sum().backward()
    kept = torch.log_softmax(student.detach()[:, 2:], -1)
    want = (kept.exp() * (kept - torch.log_softmax(teacher, -1)[:, 2:])).sum(-1)
    torch.testing.assert_close(kl.detach(), want)
    assert torch.isfinite(student.grad).all() and student.grad[:, :2].abs().max() == 0
    barred = logits(1)
    barred[:, 0] = -torch.inf
    assert torch.isposinf(reverse_kl(logits(0), barred)).all()


def test_the_sampled_form_has_the_same_expected_gradient():
    """Enumerated: sum over tokens of p x advantage x grad log p is minus the gradient of the KL."""
    student, teacher = logits(0, rows=1).requires_grad_(), logits(1, rows=1)
    (want,) = torch.autograd.grad(reverse_kl(student, teacher).sum(), student)
    policy = torch.log_softmax(student, -1)[0]
    advantages = distill_advantages(policy, torch.log_softmax(teacher, -1)[0])
    assert not advantages.requires_grad
    (got,) = torch.autograd.grad(-(policy.exp().detach() * advantages * policy).sum(), student)
    torch.testing.assert_close(got, want)


def test_other_vocabularies_are_refused():
    check_same_vocabulary({"a": 0, "b": 1}, {"b": 1, "a": 0})
    with pytest.raises(ConfigError, match=r"2 tokens differ, such as 'b' with id 1 for the student and none"):
        check_same_vocabulary({"a": 0, "b": 1}, {"a": 0, "c": 1})
