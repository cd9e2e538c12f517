"""The learner of a policy: supervised and policy-gradient updates, and log-probs of what was sampled.

Axis letters: B rows, T tokens of one row, N loss tokens of a minibatch, M loss tokens of a pack.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from upswing.algo import kl_k3, kl_loss, ppo_clip, token_weights
from upswing.errors import ConfigError
from upswing.learn.forward import check_trainable, packed_forward
from upswing.learn.lora import PlainWeights, is_adapted
from upswing.learn.metrics import Tally, UpdateMetrics, update_metrics
from upswing.learn.modes import mode
from upswing.learn.options import RLOptions
from upswing.learn.packing import Pack, pack
from upswing.learn.reference import Reference
from upswing.learn.rows import FlatBatch, TrainRow, flatten
from upswing.learn.trainer import Trainer


class Learner(Trainer):
    """Trains a policy on rows.

    Turn dropout off for RL: with it, the policy that is trained isn't quite the one that sampled.
    """

    def __init__(self, model: Any, *, ref_model: Any | None = None, **options: Any) -> None:
        """`model`: a Hugging Face causal language model; its weights are trained in place.

        `ref_model` is the frozen reference for KL (`frozen_copy(model)`); an adapted model needs none: what it is now
        is the reference. `options` are the Trainer's.
        Raises ConfigError for a model that the packed forward can't train.
        """
        check_trainable(model)
        super().__init__(model, **options)
        self.reference = Reference(model, ref_model) if ref_model is not None or is_adapted(model) else None

    def forward(self, one: Pack, temperature: float, tally: Tally) -> tuple[torch.Tensor, torch.Tensor]:
        """policy_logprobs [M] and entropy [M] of a pack's loss tokens, with gradient, and counted in `tally`."""
        with self.autocast():
            policy_M, entropy_M = packed_forward(self.model, one, temperature)
        tally.add("policy_logprob", policy_M)
        tally.add("entropy", entropy_M)
        return policy_M, entropy_M

    # -- training ------------------------------------------------------------------------------------------------------

    def sft_update(self, rows: Sequence[TrainRow], *, aggregation: str = "token-mean") -> UpdateMetrics:
        """One optimizer step on the negative log-likelihood of the loss tokens."""
        with self.update() as tally:
            flat = flatten(rows).to(self.device)
            weights_N = token_weights(flat.sequence_N, mode=aggregation)
            _count_batch(tally, rows, flat)
            packs = pack(rows, self.max_tokens_per_pack)
            tally.counts["rows_skipped"] = len(rows) - sum(len(p.row_indices) for p in packs)

            def objective(one: Pack) -> torch.Tensor:
                policy_M, _ = self.forward(one, 1.0, tally)
                return -(weights_N[one.slot_M.to(self.device)] * policy_M).sum()

            self.step(packs, objective, tally)
        return update_metrics(tally)

    def rl_update(self, rows: Sequence[TrainRow], options: RLOptions | None = None, **overrides: Any) -> UpdateMetrics:
        """`updates_per_batch` passes of `minibatches` optimizer steps on the clipped policy gradient.

        Options come as an `RLOptions` or as its fields. Advantages are the rows', computed over whole groups before;
        how rows are cut into minibatches or packs doesn't change them. With a single step, old_logprobs are the
        policy's own, detached (ratio 1, no second forward); otherwise they come from a forward before the first step.

        Rows whose advantage is exactly 0 at every loss token are left out when there is no KL or entropy term: their
        gradient is exactly zero. They still count in every denominator, but not in the metrics over computed tokens.
        """
        options = _options(options, overrides)
        if options.kl_coef > 0 and self.reference is None:
            raise ConfigError(f"kl_coef is {options.kl_coef} but the learner has no reference model; give it ref_model")
        with self.update() as tally:
            flat = flatten(rows)
            _count_batch(tally, rows, flat)
            tally.counts["rows_skipped"] = len(rows) - len(_active_rows(flat, everything=options.regularised))
            old = self._old_logprobs(rows, options)
            for _ in range(options.updates_per_batch):
                for chosen in self._minibatches(rows, options.minibatches):
                    part = [rows[i] for i in chosen]
                    part_old = None if old is None else [old[i] for i in chosen]
                    self._rl_step(part, part_old, options, tally)
        return update_metrics(tally)

    def _old_logprobs(self, rows: Sequence[TrainRow], options: RLOptions) -> Sequence[np.ndarray] | None:
        """Per row [T]; None: the policy's own of the only step. Raises ValueError when the engine's are missing."""
        if options.on_policy:
            return None
        if options.old_logprobs == "recompute":
            return self.logprobs(rows, options.temperature)
        found = [row.engine_logprobs for row in rows]
        for index, (row, values) in enumerate(zip(rows, found, strict=True)):
            if values is None or not np.isfinite(values[row.loss_positions]).all():
                raise ValueError(f"row {index} has loss tokens without engine_logprobs; use old_logprobs='recompute'")
        return [values for values in found if values is not None]

    def _rl_step(
        self,
        rows: Sequence[TrainRow],
        old: Sequence[np.ndarray] | None,
        options: RLOptions,
        tally: Tally,
    ) -> None:
        """One optimizer step on one minibatch, whose denominators count all of its rows."""
        flat = flatten(rows).to(self.device)
        weights_N = token_weights(flat.sequence_N, mode=options.aggregation, norm_length=options.norm_length)
        active = _active_rows(flat, everything=options.regularised)
        packs = pack(rows, self.max_tokens_per_pack, include=active)
        old_N = None if old is None else _gather(rows, old, flat)

        def objective(one: Pack) -> torch.Tensor:
            policy_M, entropy_M = self.forward(one, options.temperature, tally)
            slot_M = one.slot_M.to(self.device)
            old_M = policy_M.detach() if old_N is None else old_N[slot_M]
            terms = ppo_clip(
                policy_M,
                old_M,
                flat.advantages_N[slot_M],
                clip_low=options.clip_low,
                clip_high=options.clip_high,
                dual_clip=options.dual_clip,
            )
            loss_M = terms.loss_N
            if options.kl_coef > 0:
                ref_M = self._ref_logprobs(one, options.temperature)
                kl_M = kl_loss(policy_M, ref_M, estimator=options.kl_estimator, old_logprobs_N=old_M)
                loss_M = loss_M + options.kl_coef * kl_M
                tally.add("kl", kl_k3(policy_M.detach(), ref_M))
            if options.entropy_coef:
                loss_M = loss_M - options.entropy_coef * entropy_M
            for name in ("ratio", "clipped_low", "clipped_high", "dual_clipped"):
                tally.add(name, getattr(terms, f"{name}_N"))
            tally.add_max("ratio", terms.ratio_N.detach())
            tally.add("kl_old", kl_k3(old_M, policy_M.detach()))
            _tally_mismatch(tally, old_M, flat.engine_logprobs_N[slot_M])
            return (weights_N[slot_M] * loss_M).sum()

        self.step(packs, objective, tally)

    def _minibatches(self, rows: Sequence[TrainRow], count: int) -> list[list[int]]:
        """Row indices of each minibatch: groups in random order, kept together where the cut allows."""
        if count == 1 or not rows:
            return [list(range(len(rows)))]
        groups = np.array([row.group for row in rows])
        order = self._rng.permutation(np.unique(groups))
        indices = np.concatenate([np.flatnonzero(groups == group) for group in order])
        return [part.tolist() for part in np.array_split(indices, count) if len(part)]

    # -- evaluation ----------------------------------------------------------------------------------------------------

    def sft_loss(self, rows: Sequence[TrainRow]) -> float:
        """Mean negative log-likelihood of the loss tokens, in evaluation mode; NaN when there are none."""
        values = [row_logprobs[row.loss_positions] for row, row_logprobs in zip(rows, self.logprobs(rows), strict=True)]
        flat = np.concatenate([*values, np.zeros(0, np.float32)])
        return float(-flat.mean(dtype=np.float64)) if len(flat) else math.nan

    def logprobs(self, rows: Sequence[TrainRow], temperature: float = 1.0) -> list[np.ndarray]:
        """Log-probs of every row's loss tokens under the current weights: float32 [T] a row, NaN elsewhere."""
        out = [np.full(len(row.tokens), np.nan, np.float32) for row in rows]
        flat = flatten(rows)
        row_N, position_N = flat.row_N.numpy(), flat.position_N.numpy()
        with torch.no_grad(), mode(self.model, training=False):
            for one in pack(rows, self.max_tokens_per_pack):
                with self.autocast():
                    policy_M, _ = packed_forward(self.model, one, temperature)
                slots = one.slot_M.numpy()
                for slot, value in zip(slots, policy_M.float().cpu().numpy(), strict=True):
                    out[row_N[slot]][position_N[slot]] = value
        return out

    @torch.no_grad()
    def _ref_logprobs(self, one: Pack, temperature: float) -> torch.Tensor:
        assert self.reference is not None
        with self.autocast(), self.reference.model() as model:
            return packed_forward(model, one, temperature)[0]

    # -- weights -------------------------------------------------------------------------------------------------------

    def weights(self) -> Mapping[str, torch.Tensor]:
        """The current weights by Hugging Face name, each once, adapters merged; made when they are read."""
        return PlainWeights(self.model)

    def _state(self) -> dict[str, Any]:
        return {**super()._state(), "reference": self.reference and self.reference.state()}

    def _restore(self, state: dict[str, Any]) -> None:
        super()._restore(state)
        if self.reference is not None:
            self.reference.restore(state["reference"])


def _count_batch(tally: Tally, rows: Sequence[TrainRow], flat: FlatBatch) -> None:
    tally.counts["rows"] = len(rows)
    tally.counts["loss_tokens"] = flat.num_tokens


def _options(options: RLOptions | None, overrides: dict[str, Any]) -> RLOptions:
    if options is None:
        return RLOptions(**overrides)
    if overrides:
        raise TypeError("give rl_update either an RLOptions or its fields, not both")
    return options


def _active_rows(flat: FlatBatch, *, everything: bool) -> list[int]:
    """Rows that can have a gradient."""
    moves_N = torch.ones_like(flat.row_N, dtype=torch.bool) if everything else flat.advantages_N != 0
    return [int(row) for row in torch.unique(flat.row_N[moves_N])]


def _gather(rows: Sequence[TrainRow], values: Sequence[np.ndarray], flat: FlatBatch) -> torch.Tensor:
    """Per-row [T] arrays at the loss tokens, float32 [N]."""
    found = [value[row.loss_positions] for row, value in zip(rows, values, strict=True)]
    return torch.from_numpy(np.concatenate([*found, np.zeros(0, np.float32)])).to(flat.row_N.device)


def _tally_mismatch(tally: Tally, old_M: torch.Tensor, engine_M: torch.Tensor) -> None:
    """How far the sampler's log-probs are from the learner's, before the update."""
    known_M = torch.isfinite(engine_M)
    if not bool(known_M.any()):
        return
    old, engine = old_M[known_M], engine_M[known_M]
    tally.add("mismatch_abs", (engine - old).abs())
    tally.add("mismatch_k3", kl_k3(engine, old))
    tally.add_max("mismatch", (engine - old).abs())


def frozen_copy(model: Any) -> Any:
    """A copy of `model` that doesn't train: the reference for KL."""
    return copy.deepcopy(model).requires_grad_(False).eval()
