"""Preference updates: a learner, chosen and rejected rows with what the reference says of them, one optimizer step.

The reference is a policy of before, usually the learner's own at the start: its log-probs are computed once and kept
with the rows, so that no second model is loaded. Sequence log-probs are exact sums over loss tokens, tool tokens out.

Axis letters: B rows of a minibatch, P pairs, M loss tokens of a pack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from upswing.algo.preference import (
    PREFERENCE_LOSSES,
    PreferenceTerms,
    kto_baseline,
    kto_loss,
    pair_terms,
    preferred,
)
from upswing.errors import ConfigError, did_you_mean
from upswing.learn.forward import packed_forward
from upswing.learn.learner import Learner
from upswing.learn.metrics import Tally
from upswing.learn.packing import Pack
from upswing.learn.rows import TrainRow, flatten


@dataclass(frozen=True, kw_only=True)
class PreferenceOptions:
    """The loss and its numbers; an option that a loss doesn't have isn't read. See `algo.preference`."""

    loss: str = "dpo"
    beta: float = 0.1
    label_smoothing: float = 0.0
    robust: bool = False
    margin: float = 0.0
    nll_coef: float = 0.0
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    def __post_init__(self) -> None:
        if self.loss not in PREFERENCE_LOSSES:
            hint = did_you_mean(self.loss, PREFERENCE_LOSSES)
            raise ConfigError(f"loss is '{self.loss}'; allowed: {', '.join(PREFERENCE_LOSSES)}{hint}")


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """A row, and sums of the reference's log-probs over its loss tokens."""

    row: TrainRow
    ref_logprob: float
    mismatched: TrainRow | None = None
    """For KTO: this row's prompt followed by what another row says; None: no row has another prompt."""
    ref_mismatched: float = 0.0


def candidates(learner: Learner, rows: Sequence[TrainRow], *, loss: str) -> list[Candidate]:
    """`rows` with the log-probs of the learner's *current* weights as reference, in evaluation mode.

    For `kto` each is also matched with the completion of the next row (cyclic) that has another prompt, once for the
    whole dataset, so that the reference's log-probs can be kept. Raises ValueError for a row without loss tokens.
    """
    empty = next((index for index, row in enumerate(rows) if not len(row.loss_positions)), None)
    if empty is not None:
        raise ValueError(f"row {empty} has no loss tokens: there is nothing to prefer")
    others = _mismatched(rows) if loss == "kto" else [None] * len(rows)
    known = iter(sequence_logprobs(learner, [row for row in others if row is not None]))
    return [
        Candidate(
            row=row,
            ref_logprob=float(ref),
            mismatched=other,
            ref_mismatched=float(next(known)) if other is not None else 0.0,
        )
        for row, ref, other in zip(rows, sequence_logprobs(learner, rows), others, strict=True)
    ]


def sequence_logprobs(learner: Learner, rows: Sequence[TrainRow]) -> np.ndarray:
    """Sum of the loss tokens' log-probs under the learner's current weights: float64 [B]."""
    values = zip(rows, learner.logprobs(rows), strict=True)
    return np.array([one[row.loss_positions].sum(dtype=np.float64) for row, one in values], dtype=np.float64)


def _mismatched(rows: Sequence[TrainRow]) -> list[TrainRow | None]:
    """Each row's tokens up to its first loss token, then the next other-prompted row's from there on."""
    starts = [int(row.loss_positions[0]) for row in rows]
    prompts = [row.tokens[:start].tobytes() for row, start in zip(rows, starts, strict=True)]
    found: list[TrainRow | None] = []
    for index, (row, start) in enumerate(zip(rows, starts, strict=True)):
        following = (j % len(rows) for j in range(index + 1, index + len(rows)))
        other = next((j for j in following if prompts[j] != prompts[index]), None)
        if other is None:
            found.append(None)
            continue
        tail = slice(starts[other], None)
        mask = np.concatenate([np.zeros(start, np.bool_), rows[other].loss_mask[tail]])
        found.append(TrainRow(tokens=np.concatenate([row.tokens[:start], rows[other].tokens[tail]]), loss_mask=mask))
    return found


@dataclass(frozen=True, kw_only=True, eq=False)
class _Batch:
    """Both sides laid end to end, chosen first; as tensors on the learner's device where a loss reads them."""

    sides: list[Candidate]
    num_chosen: int
    ref_B: torch.Tensor
    length_B: torch.Tensor

    @classmethod
    def of(cls, chosen: Sequence[Candidate], rejected: Sequence[Candidate], loss: str, device: torch.device) -> _Batch:
        """Raises ValueError when a paired loss gets unequal numbers of sides."""
        if loss != "kto" and len(chosen) != len(rejected):
            raise ValueError(f"{loss} compares pairs, but got {len(chosen)} chosen and {len(rejected)} rejected rows")
        sides = [*chosen, *rejected]
        lengths = [len(side.row.loss_positions) for side in sides]
        return cls(
            sides=sides,
            num_chosen=len(chosen),
            ref_B=torch.tensor([side.ref_logprob for side in sides], dtype=torch.float64, device=device),
            length_B=torch.tensor(lengths, dtype=torch.float64, device=device),
        )

    def rows(self) -> list[TrainRow]:
        """A pair is a group of its own, so that it can be kept in one pack and shares its prompt."""
        return [
            replace(side.row, group=i if i < self.num_chosen else i - self.num_chosen, trajectory=i, advantage=0.0)
            for i, side in enumerate(self.sides)
        ]


def preference_update(
    learner: Learner, chosen: Sequence[Candidate], rejected: Sequence[Candidate], options: PreferenceOptions
) -> dict[str, float]:
    """One optimizer step on the mean loss over the minibatch's pairs (for `kto`: over its rows) -> its metrics.

    Pair i is `chosen[i]` and `rejected[i]`; `kto` takes any number of either. How rows are packed changes nothing.
    `chosen_shift` and `rejected_shift` are changes of sequence log-prob since the reference, in nats: both falling is
    likelihood displacement (arXiv 2410.08847), which `nll_coef` counters. Raises ValueError for unequal sides.
    """
    batch = _Batch.of(chosen, rejected, options.loss, learner.device)
    rows = batch.rows()
    with learner.update() as tally:
        flat = flatten(rows).to(learner.device)
        tally.counts.update(rows=len(rows), loss_tokens=flat.num_tokens)
        baseline = _baseline(learner, batch, options, tally)
        packs = learner.packs(rows, keep_groups=True)

        def objective(one: Pack) -> torch.Tensor:
            with learner.autocast():
                policy_M, entropy_M = packed_forward(learner.model, one, 1.0)
            tally.add("policy_logprob", policy_M)
            tally.add("entropy", entropy_M)
            row_M = flat.row_N[one.slot_M.to(learner.device)]
            policy_B = torch.zeros_like(batch.ref_B).index_add(0, row_M, policy_M.double())
            here = torch.tensor(sorted(one.row_indices), device=learner.device)
            return _loss(batch, policy_B, here, baseline, options, tally)

        learner.step(packs, objective, tally)
    means = {name: mean.value for name, mean in tally.means.items()}
    counts = {f"num_{name}": float(count) for name, count in tally.counts.items()}
    return {**means, **counts, "lr": tally.lr, "seconds": tally.seconds}


def preference_metrics(
    learner: Learner,
    chosen: Sequence[Candidate],
    rejected: Sequence[Candidate],
    options: PreferenceOptions,
    *,
    unchanged: bool = False,
) -> dict[str, float]:
    """Loss, rewards, accuracy and shifts under the learner's current weights, named as an update's; nothing is trained.

    `unchanged`: the weights still are the reference's, so nothing is computed, and with a reference in the loss the
    margins are exactly 0 and accuracy 0.5.
    """
    batch, tally = _Batch.of(chosen, rejected, options.loss, learner.device), Tally()
    policy_B = batch.ref_B
    if not unchanged:
        policy_B = torch.from_numpy(sequence_logprobs(learner, batch.rows())).to(learner.device)
    with torch.no_grad():
        baseline = _baseline(learner, batch, options, tally) if not unchanged else policy_B.new_zeros(())
        here = torch.arange(len(batch.sides), device=learner.device)
        loss = float(_loss(batch, policy_B, here, baseline, options, tally))
    return {"loss": loss, **{name: mean.value for name, mean in tally.means.items()}}


def _baseline(learner: Learner, batch: _Batch, options: PreferenceOptions, tally: Tally) -> torch.Tensor:
    """KTO's z0 over the whole minibatch; 0 for other losses."""
    if options.loss != "kto":
        return torch.zeros((), dtype=torch.float64, device=learner.device)
    known = [(side.mismatched, side.ref_mismatched) for side in batch.sides if side.mismatched is not None]
    policy = sequence_logprobs(learner, [row for row, _ in known])
    log_ratios = torch.from_numpy(policy - np.array([ref for _, ref in known], dtype=np.float64)).to(learner.device)
    baseline = kto_baseline(log_ratios)
    tally.add_value("kto_baseline", float(baseline))
    return baseline


def _loss(
    batch: _Batch,
    policy_B: torch.Tensor,
    here: torch.Tensor,
    baseline: torch.Tensor,
    options: PreferenceOptions,
    tally: Tally,
) -> torch.Tensor:
    """The share of the rows `here` (whole pairs) in the minibatch's mean loss; adds to the metrics."""
    chosen, rejected = here[here < batch.num_chosen], here[here >= batch.num_chosen]
    shift_B = (policy_B - batch.ref_B).detach()
    tally.add("chosen_shift", shift_B[chosen])
    tally.add("rejected_shift", shift_B[rejected])
    if options.loss == "kto":
        desirable = here < batch.num_chosen
        loss = kto_loss(
            (policy_B - batch.ref_B)[here],
            desirable,
            baseline,
            beta=options.beta,
            desirable_weight=options.desirable_weight,
            undesirable_weight=options.undesirable_weight,
        )
        rewards_B = options.beta * shift_B
        tally.add("chosen_reward", rewards_B[chosen])
        tally.add("rejected_reward", rewards_B[rejected])
        tally.add("preference_accuracy", torch.cat([preferred(rewards_B[chosen]), preferred(-rewards_B[rejected])]))
        return loss.sum() / len(batch.sides)
    terms = _pair_terms(batch, policy_B, chosen, rejected, options)
    margin_P = terms.chosen_rewards_P - terms.rejected_rewards_P
    tally.add("chosen_reward", terms.chosen_rewards_P)
    tally.add("rejected_reward", terms.rejected_rewards_P)
    tally.add("reward_margin", margin_P)
    tally.add("preference_accuracy", preferred(margin_P))
    return terms.loss_P.sum() / batch.num_chosen


def _pair_terms(
    batch: _Batch, policy_B: torch.Tensor, chosen: torch.Tensor, rejected: torch.Tensor, options: PreferenceOptions
) -> PreferenceTerms:
    return pair_terms(
        options.loss,
        policy_B[chosen],
        policy_B[rejected],
        batch.ref_B[chosen],
        batch.ref_B[rejected],
        batch.length_B[chosen],
        batch.length_B[rejected],
        beta=options.beta,
        label_smoothing=options.label_smoothing,
        robust=options.robust,
        margin=options.margin,
        nll_coef=options.nll_coef,
    )
