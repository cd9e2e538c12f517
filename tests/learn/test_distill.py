"""Full-vocabulary distillation equals the KL written out on plain logits, in chunks and packs of any size."""

import numpy as np
import pytest
import torch

from upswing.learn import Learner
from upswing.learn import logits as chunked
from upswing.learn.distill import distill_update

from .helpers import assert_same_gradients, gradients, plain_at_loss, random_rows, tiny
from .test_preference import Recording


def plain_kl(student, teacher, rows, temperature):
    """Mean over all loss tokens, one unpacked row at a time."""
    found = []
    for one in rows:
        tokens = torch.from_numpy(one.tokens.astype(np.int64))[None]
        at = torch.from_numpy(one.loss_positions) - 1
        p, q = (torch.log_softmax(m(input_ids=tokens).logits[0, at] / temperature, -1) for m in (student, teacher))
        found.append((p.exp() * (p - q.detach())).sum(-1))
    return torch.cat(found).mean()


@pytest.mark.parametrize(("elements", "max_tokens"), [(61, 10_000), (61 * 7, 60), (1 << 24, 120)])
def test_value_and_gradient_are_those_of_whole_logits(monkeypatch, elements, max_tokens):
    monkeypatch.setattr(chunked, "CHUNK_ELEMENTS", elements)
    rows, teacher = random_rows(), tiny(seed=1)
    one = Recording(tiny(), lr=1e-3, max_tokens_per_pack=max_tokens)
    metrics = distill_update(one, rows, teacher, temperature=0.8)
    student = tiny()
    want = plain_kl(student, tiny(seed=1), rows, 0.8)
    assert metrics.loss == pytest.approx(want.item(), rel=1e-5)
    assert metrics.kl.value == pytest.approx(want.item(), rel=1e-5)
    assert metrics.policy_logprob.value == pytest.approx(plain_at_loss(student, rows, 0.8).mean().item(), rel=1e-4)
    assert_same_gradients(one.gradient, gradients(student, want))
    assert all(parameter.grad is None for parameter in teacher.parameters())


def test_training_moves_the_student_to_the_teacher_and_a_twin_has_nothing_to_learn():
    rows, teacher = random_rows(), tiny(seed=1)
    one = Learner(tiny(), lr=3e-3)
    found = [distill_update(one, rows, teacher).kl.value for _ in range(6)]
    assert found == sorted(found, reverse=True) and found[-1] < 0.7 * found[0]
    twin = distill_update(Learner(tiny(), lr=1e-3), rows, tiny())
    assert abs(twin.loss) < 1e-6 and twin.grad_norm < 1e-4


def test_a_teacher_with_a_padded_head_is_compared_on_the_tokens_both_have():
    rows, wide, narrow = random_rows(), tiny(seed=1, vocab_size=64), tiny(seed=1)
    with torch.no_grad():
        for (name, target), source in zip(narrow.named_parameters(), wide.parameters(), strict=True):
            target.copy_(source[:61] if "embed" in name else source)
    losses = [distill_update(Learner(tiny(), lr=1e-3), rows, teacher).loss for teacher in (wide, narrow)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
