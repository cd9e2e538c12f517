"""On-policy distillation over the whole vocabulary: the student's rows against a teacher.

Axis letters: B rows, M loss tokens of a pack, C of them in a chunk, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from upswing.algo import token_weights
from upswing.algo.distill import reverse_kl
from upswing.algo.entropy import entropy_from_logits
from upswing.learn import logits
from upswing.learn.forward import packed_hidden
from upswing.learn.learner import Learner
from upswing.learn.metrics import Tally, UpdateMetrics, update_metrics
from upswing.learn.modes import mode
from upswing.learn.packing import Pack
from upswing.learn.rows import TrainRow, flatten
from upswing.learn.trainer import Objective
from upswing.models.attention import use_upswing_attention


def distill_update(
    learner: Learner,
    rows: Sequence[TrainRow],
    teacher_model: Any,
    *,
    temperature: float = 1.0,
    aggregation: str = "token-mean",
) -> UpdateMetrics:
    """One optimizer step on KL(student, teacher) over the whole vocabulary at every loss token; `kl` reports it.

    Both distributions are softmax(logits / temperature); rows should be the student's own samples at that temperature.
    The vocabularies must be the same (`algo.distill.check_same_vocabulary`).
    """
    use_upswing_attention(teacher_model)
    with learner.update() as tally, mode(teacher_model, training=False):
        flat = flatten(rows).to(learner.device)
        weights_N = token_weights(flat.sequence_N, mode=aggregation)
        packs = learner.packs(rows)
        skipped = len(rows) - sum(len(one.row_indices) for one in packs)
        tally.counts.update(rows=len(rows), loss_tokens=flat.num_tokens, rows_skipped=skipped)
        learner.step(packs, full_kl_objective(learner, teacher_model, weights_N, temperature, tally), tally)
    return update_metrics(tally)


def full_kl_objective(
    learner: Learner, teacher_model: Any, weights_N: torch.Tensor, temperature: float, tally: Tally
) -> Objective:
    """The objective of `distill_update`: sum over a pack's loss tokens of weight times KL.

    Logits are made a chunk at a time and once more in the backward pass: [M, V] is never held, for either model.
    """

    def objective(one: Pack) -> torch.Tensor:
        with learner.autocast():
            student_MH = packed_hidden(learner.model, one)
            with torch.no_grad():
                teacher_MH = packed_hidden(teacher_model, one)
            heads = learner.model.get_output_embeddings(), teacher_model.get_output_embeddings()
            step = max(1, logits.CHUNK_ELEMENTS // len(heads[0].weight))
            target_M = one.target_M.to(student_MH.device)
            chunks = [
                checkpoint(_chunk_kl, *parts, *heads, temperature, use_reentrant=False)
                for parts in zip(
                    *(torch.split(values, step) for values in (student_MH, teacher_MH, target_M)), strict=True
                )
            ]
        kl_M, entropy_M, policy_M = (torch.cat(part) for part in zip(*chunks, strict=True))
        tally.add("kl", kl_M)
        tally.add("entropy", entropy_M)
        tally.add("policy_logprob", policy_M)
        return (weights_N[one.slot_M.to(weights_N.device)] * kl_M).sum()

    return objective


def _chunk_kl(
    student_CH: torch.Tensor,
    teacher_CH: torch.Tensor,
    target_C: torch.Tensor,
    student_head: torch.nn.Linear,
    teacher_head: torch.nn.Linear,
    temperature: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """KL with gradient, and the student's entropy and log-prob of the sampled tokens without; all [C]."""
    policy_CV = _wide(student_head(student_CH)) / temperature
    with torch.no_grad():
        teacher_CV = _wide(teacher_head(teacher_CH)) / temperature
    # Models of one family may pad the head to different widths; ids past the shorter one are no tokens.
    width = min(policy_CV.shape[-1], teacher_CV.shape[-1])
    policy_CV, teacher_CV = policy_CV[:, :width], teacher_CV[:, :width]
    fixed_CV = policy_CV.detach()
    policy_C = torch.log_softmax(fixed_CV, -1).gather(1, target_C[:, None])[:, 0]
    return reverse_kl(policy_CV, teacher_CV), entropy_from_logits(fixed_CV), policy_C


def _wide(values: torch.Tensor) -> torch.Tensor:
    return values if values.dtype in (torch.float32, torch.float64) else values.float()
