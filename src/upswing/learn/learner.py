"""The learner of a policy: supervised and policy-gradient updates, and log-probs of what was sampled.

Axis letters: B rows, T tokens of one row, N loss tokens of a minibatch, M loss tokens of a pack.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from upswing.algo.aggregate import focal_weights, token_weights, turn_ids
from upswing.algo.correction import correction_weights, opsm_mask
from upswing.algo.kl import kl_clamped, kl_k3, kl_loss
from upswing.algo.loss import LossTerms, safe_ratio
from upswing.algo.regularise import llds
from upswing.algo.value import value_loss
from upswing.errors import ConfigError
from upswing.learn.forward import check_trainable, head_logprobs, packed_forward, packed_hidden
from upswing.learn.lora import PlainWeights, is_adapted
from upswing.learn.metrics import Tally, UpdateMetrics, update_metrics
from upswing.learn.modes import mode
from upswing.learn.options import RLOptions
from upswing.learn.packing import Pack, pack
from upswing.learn.reference import Reference
from upswing.learn.rows import FlatBatch, TrainRow, at_loss, flatten, spread
from upswing.learn.trainer import Trainer


class Learner(Trainer):
    """Trains a policy on rows.

    Turn dropout off for RL: with it, the policy that is trained isn't quite the one that sampled.
    """

    def __init__(self, model: Any, *, ref_model: Any | None = None, value_head: bool = False, **options: Any) -> None:
        """`model`: a Hugging Face causal language model; its weights are trained in place.

        `ref_model` is the frozen reference for KL (`frozen_copy(model)`); an adapted model needs none: what it is now
        is the reference. `value_head`: a zero Linear(H, 1) on the last hidden state, a critic that shares the policy's
        weights. `options` are the Trainer's.
        Raises ConfigError for a model that the packed forward can't train.
        """
        check_trainable(model)
        super().__init__(model, **options)
        self.value_head = torch.nn.Linear(model.config.hidden_size, 1, device=self.device) if value_head else None
        if self.value_head is not None:
            torch.nn.init.zeros_(self.value_head.weight)
            torch.nn.init.zeros_(self.value_head.bias)
            self._parameters += list(self.value_head.parameters())
            self._optimizer.add_param_group({"params": list(self.value_head.parameters()), "weight_decay": 0.0})
        self.reference = Reference(model, ref_model) if ref_model is not None or is_adapted(model) else None
        self.old_logprobs: Sequence[np.ndarray] = ()
        """[T] a row of the last `rl_update`: before it, NaN where nothing was computed."""

    def forward(self, one: Pack, temperature: float, tally: Tally) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """policy_logprobs [M] and entropy [M] of a pack's loss tokens, with gradient and counted in `tally`, and the
        hidden states [M, H] that they come from."""
        with self.autocast():
            hidden_MH = packed_hidden(self.model, one)
            policy_M, entropy_M = head_logprobs(self.model, hidden_MH, one, temperature)
        tally.add("policy_logprob", policy_M)
        tally.add("entropy", entropy_M)
        return policy_M, entropy_M, hidden_MH

    # -- training ------------------------------------------------------------------------------------------------------

    def sft_update(
        self, rows: Sequence[TrainRow], *, aggregation: str = "token-mean", focal_gamma: float = 0.0
    ) -> UpdateMetrics:
        """One optimizer step on the negative log-likelihood of the loss tokens, by `focal_weights` if gamma isn't 0."""
        with self.update() as tally:
            flat = flatten(rows).to(self.device)
            weights_N = token_weights(flat.sequence_N, mode=aggregation)
            _count_batch(tally, rows, flat)
            packs = self.packs(rows)
            tally.counts["rows_skipped"] = len(rows) - sum(len(p.row_indices) for p in packs)

            def objective(one: Pack) -> torch.Tensor:
                policy_M, *_ = self.forward(one, 1.0, tally)
                weights_M = weights_N[one.slot_M.to(self.device)]
                if focal_gamma:
                    weights_M = weights_M * focal_weights(policy_M, focal_gamma)
                    tally.add("weight", weights_M)
                return -(weights_M * policy_M).sum()

            self.step(packs, objective, tally, over="weight" if focal_gamma else None)
        return update_metrics(tally)

    def rl_update(
        self,
        rows: Sequence[TrainRow],
        options: RLOptions | None = None,
        *,
        old: Sequence[np.ndarray] | None = None,
        **overrides: Any,
    ) -> UpdateMetrics:
        """`updates_per_batch` passes of `minibatches` optimizer steps on the clipped policy gradient.

        Options come as an `RLOptions` or as its fields. Advantages are the rows', computed over whole groups before;
        how rows are cut into minibatches or packs doesn't change them. With a single step, old_logprobs are the
        policy's own, detached (ratio 1, no second forward), or the engine's if the options say so; otherwise they come
        from a forward before the first step, or are `old`, what `logprobs` gave for the rows under the current weights
        at this temperature.

        Rows whose advantage is exactly 0 at every loss token are left out when nothing else is in the loss: their
        gradient is exactly zero. They still count in every denominator, but not in the metrics over computed tokens.

        Raises ConfigError for a KL without a reference, ValueError for rows that lack what the options read.
        """
        options = _options(options, overrides)
        if options.kl_coef > 0 and self.reference is None:
            raise ConfigError(f"kl_coef is {options.kl_coef} but the learner has no reference model; give it ref_model")
        with self.update() as tally:
            flat = flatten(rows)
            _check_rows(flat, options)
            _count_batch(tally, rows, flat)
            tally.counts["rows_skipped"] = len(rows) - len(_active_rows(flat, everything=options.regularised))
            old = self._old_logprobs(rows, options, old)
            chosen_N = _select(flat, rows, old, options, self._rng)
            order = [part for _ in range(options.updates_per_batch) for part in self._minibatches(rows, options)]
            for number, chosen in enumerate(order):
                part = [rows[i] for i in chosen]
                part_old = None if old is None else [old[i] for i in chosen]
                # Both are in row order.
                part_chosen_N = None if chosen_N is None else chosen_N[torch.isin(flat.row_N, torch.tensor(chosen))]
                before = tally.mean("kl_old")
                self._rl_step(part, part_old, part_chosen_N, options, tally)
                moved = (tally.mean("kl_old") - before).value
                if options.kl_stop is not None and moved > options.kl_stop:
                    tally.counts["steps_stopped"] = len(order) - number - 1
                    break
            self.old_logprobs = _own_before(rows, tally) if old is None else old
        return update_metrics(tally)

    def _old_logprobs(
        self, rows: Sequence[TrainRow], options: RLOptions, known: Sequence[np.ndarray] | None
    ) -> Sequence[np.ndarray] | None:
        """Per row [T]; None: the policy's own of the only step. Raises ValueError when the engine's are missing."""
        if options.on_policy:
            return None
        if options.old_logprobs == "recompute":
            return self.logprobs(rows, options.temperature) if known is None else known
        found = [row.engine_logprobs for row in rows]
        for index, (row, values) in enumerate(zip(rows, found, strict=True)):
            if values is None or not np.isfinite(values[row.loss_positions]).all():
                raise ValueError(f"row {index} has loss tokens without engine_logprobs; use old_logprobs='recompute'")
        return [values for values in found if values is not None]

    def _rl_step(
        self,
        rows: Sequence[TrainRow],
        old: Sequence[np.ndarray] | None,
        selected_N: torch.Tensor | None,
        options: RLOptions,
        tally: Tally,
    ) -> None:
        """One optimizer step on one minibatch, whose denominators count all of its rows."""
        flat = flatten(rows).to(self.device)
        weights_N = token_weights(flat.sequence_N, mode=options.aggregation, norm_length=options.norm_length)
        active = _active_rows(flat, everything=options.regularised)
        packs = self.packs(rows, include=active)
        old_N = None if old is None else torch.from_numpy(at_loss(rows, old)).to(self.device)
        num_preserved, answer_N = int((flat.advantages_N >= 0).sum()), _answers(flat)

        def objective(one: Pack) -> torch.Tensor:
            policy_M, entropy_M, hidden_MH = self.forward(one, options.temperature, tally)
            slot_M = one.slot_M.to(self.device)
            part, old_M = flat.at(slot_M), policy_M.detach() if old_N is None else old_N[slot_M]
            if old_N is None:
                tally.add_all(old=old_M, slot=slot_M)
            chosen_M = None if selected_N is None else selected_N[one.slot_M].to(self.device)
            terms = policy_loss(policy_M, old_M, part, chosen_M, options)
            loss_M = terms.loss_N * _sample_weights(policy_M, old_M, part, options, tally)
            if options.kl_coef > 0:
                ref_M = self._ref_logprobs(one, options.temperature)
                kl_M = kl_loss(policy_M, ref_M, estimator=options.kl_estimator, old_logprobs_N=old_M)
                loss_M = loss_M + options.kl_coef * kl_M
                tally.add("kl", kl_k3(policy_M.detach(), ref_M))
                tally.add("kl_clamped_frac", kl_clamped(policy_M, ref_M))
            if options.entropy_coef:
                loss_M = loss_M - options.entropy_coef * entropy_M
            total = (weights_N[slot_M] * loss_M).sum()
            if options.llds_coef:
                penalty_M = llds(
                    policy_M,
                    old_M,
                    part.advantages_N,
                    part.row_N,
                    part.turn_N,
                    num_preserved=num_preserved,
                    gate=options.llds_gate,
                    answer_N=answer_N[slot_M],
                    answer_weight=options.llds_answer_weight,
                )
                tally.add("llds", penalty_M.detach() * num_preserved)
                total = total + options.llds_coef * penalty_M.sum()
            if options.value_coef:
                value_M, _ = value_loss(
                    self._head_values(hidden_MH), part.returns_N, part.old_values_N, clip=options.value_clip
                )
                total = total + options.value_coef * value_M.sum() / flat.num_tokens
                tally.add("value_loss", value_M)
            _tally_policy(tally, terms, policy_M.detach(), old_M, part)
            _tally_turns(tally, entropy_M.detach(), hidden_MH, part)
            return total

        self.step(packs, objective, tally)
        tally.end_step()

    def _minibatches(self, rows: Sequence[TrainRow], options: RLOptions) -> list[list[int]]:
        """Row indices of each minibatch: whole groups in random order, as many in each as divide evenly."""
        if options.minibatches == 1 or not rows:
            return [list(range(len(rows)))]
        groups = np.array([row.group for row in rows])
        parts = np.array_split(self._rng.permutation(np.unique(groups)), options.minibatches)
        return [np.flatnonzero(np.isin(groups, part)).tolist() for part in parts if len(part)]

    # -- evaluation ----------------------------------------------------------------------------------------------------

    def sft_loss(self, rows: Sequence[TrainRow]) -> float:
        """Mean negative log-likelihood of the loss tokens, in evaluation mode; NaN when there are none."""
        found_N = at_loss(rows, self.logprobs(rows))
        return float(-found_N.mean(dtype=np.float64)) if len(found_N) else math.nan

    def logprobs(
        self, rows: Sequence[TrainRow], temperature: float = 1.0, *, reference: bool = False
    ) -> list[np.ndarray]:
        """Log-probs of every row's loss tokens under the current weights, or the reference's: float32 [T] a row, NaN
        elsewhere."""

        def own(one: Pack) -> torch.Tensor:
            with self.autocast():
                return packed_forward(self.model, one, temperature)[0]

        return self._measured(rows, (lambda one: self._ref_logprobs(one, temperature)) if reference else own)

    def values(self, rows: Sequence[TrainRow]) -> list[np.ndarray]:
        """The value head's value of the state before every loss token: float32 [T] a row, NaN elsewhere."""

        def own(one: Pack) -> torch.Tensor:
            with self.autocast():
                hidden_MH = packed_hidden(self.model, one)
            return self._head_values(hidden_MH)

        return self._measured(rows, own)

    def _measured(self, rows: Sequence[TrainRow], measure: Callable[[Pack], torch.Tensor]) -> list[np.ndarray]:
        """`measure` [M] of every pack in evaluation mode -> float32 [T] a row, NaN where nothing is trained."""
        values_N = np.full(sum(len(row.loss_positions) for row in rows), np.nan, np.float32)
        with torch.no_grad(), mode(self.model, training=False):
            for one in pack(rows, self.max_tokens_per_pack):
                values_N[one.slot_M.numpy()] = measure(one).float().cpu().numpy()
        return spread(rows, values_N)

    def _head_values(self, hidden_MH: torch.Tensor) -> torch.Tensor:
        if self.value_head is None:
            raise ValueError("the learner has no value head; give it one, or use a separate Critic")
        values_M: torch.Tensor = self.value_head(hidden_MH.float())[:, 0]
        return values_M

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
        head = None if self.value_head is None else self.value_head.state_dict()
        return {**super()._state(), "reference": self.reference and self.reference.state(), "value_head": head}

    def _restore(self, state: dict[str, Any]) -> None:
        super()._restore(state)
        if self.reference is not None:
            self.reference.restore(state["reference"])
        if self.value_head is not None:
            self.value_head.load_state_dict(state["value_head"])


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


def _check_rows(flat: FlatBatch, options: RLOptions) -> None:
    """Raises ValueError for what would otherwise do nothing, or make the gradient NaN."""
    engine_N = flat.engine_logprobs_N
    if (options.correction or options.opsm_delta) and len(engine_N) and not torch.isfinite(engine_N).any():
        raise ValueError("correction and opsm_delta need the rows' engine_logprobs, but no loss token has one")
    if options.value_coef:
        known_N = torch.isfinite(flat.returns_N + (0.0 if options.value_clip is None else flat.old_values_N))
        if not known_N.all():
            row = int(flat.row_N[~known_N][0])
            raise ValueError(f"row {row} has loss tokens without returns (or old_values, for value_clip)")


def _answers(flat: FlatBatch) -> torch.Tensor:
    """bool [N]: the tokens of each trajectory's last turn."""
    ids, index_N = torch.unique(flat.sequence_N, return_inverse=True)
    return flat.turn_N == flat.turn_N.new_zeros(len(ids)).scatter_reduce(0, index_N, flat.turn_N, "amax")[index_N]


def policy_loss(
    policy_M: torch.Tensor, old_M: torch.Tensor, part: FlatBatch, chosen_M: torch.Tensor | None, options: RLOptions
) -> LossTerms:
    """The loss of `options` on a pack's loss tokens; a sequence is a row, all of whose tokens are in the pack."""
    args = options.loss_args
    if options.spec.level == "sequence":
        args["sequence_N"] = part.row_N if options.ratio_level == "sequence" else turn_ids(part.row_N, part.turn_N)
    if options.spec.select is not None:
        args["selected_N"] = chosen_M
    return options.spec.function(policy_M, old_M, part.advantages_N, **args)


def _select(
    flat: FlatBatch,
    rows: Sequence[TrainRow],
    old: Sequence[np.ndarray] | None,
    options: RLOptions,
    rng: np.random.Generator,
) -> torch.Tensor | None:
    """bool [N] over the whole batch: the tokens that a covariance loss picks; None for other losses."""
    if options.spec.select is None or old is None:
        return None
    args: dict[str, Any] = {} if options.cov_fraction is None else {"fraction": options.cov_fraction}
    if "generator" in options.spec.select_options:
        args["generator"] = torch.Generator().manual_seed(int(rng.integers(2**62)))
    return options.spec.select(torch.from_numpy(at_loss(rows, old)), flat.advantages_N, **args)


def _sample_weights(
    policy_M: torch.Tensor, old_M: torch.Tensor, part: FlatBatch, options: RLOptions, tally: Tally
) -> torch.Tensor | float:
    """What multiplies the loss of each token because of who sampled it; rejected tokens stay in the denominators."""
    weights_M: torch.Tensor | float = 1.0
    if options.correction is not None:
        terms = correction_weights(
            old_M,
            part.engine_logprobs_N,
            part.row_N,
            kind=options.correction,
            low=options.correction_low,
            high=options.correction_high,
        )
        tally.add("kept", terms.kept_N)
        weights_M = terms.weights_N
    if options.opsm_delta is not None:
        kept_M = opsm_mask(policy_M, part.engine_logprobs_N, part.advantages_N, part.row_N, delta=options.opsm_delta)
        tally.add("kept", kept_M)
        weights_M = weights_M * kept_M
    return weights_M


def _tally_policy(tally: Tally, terms: LossTerms, policy_M: torch.Tensor, old_M: torch.Tensor, part: FlatBatch) -> None:
    """Ratios, clips, how far the update moved, and how far the sampler is from the learner."""
    for name in ("ratio", "clipped_low", "clipped_high", "dual_clipped"):
        tally.add(name, getattr(terms, f"{name}_N"))
    tally.add_max("ratio", terms.ratio_N.detach())
    tally.add_all(ratio=terms.ratio_N)
    tally.add("kl_old", kl_k3(old_M, policy_M))
    tally.add("logprob_good", policy_M[part.advantages_N > 0])
    tally.add("logprob_bad", policy_M[part.advantages_N < 0])
    known_M = torch.isfinite(part.engine_logprobs_N)
    old, engine = old_M[known_M], part.engine_logprobs_N[known_M]
    tally.add("mismatch_abs", (engine - old).abs())
    tally.add("mismatch_k3", kl_k3(engine, old))
    tally.add_max("mismatch", (engine - old).abs())
    rho = safe_ratio(old, engine)
    tally.add("rho", rho)
    tally.add("rho_squared", rho.square())


def _own_before(rows: Sequence[TrainRow], tally: Tally) -> list[np.ndarray]:
    """[T] a row: what the policy said in the forward of its only step."""
    old_N = np.full(tally.counts["loss_tokens"], np.nan, np.float32)
    old_N[tally.all("slot").astype(np.int64)] = tally.all("old")
    return list(spread(rows, old_N))


def _tally_turns(tally: Tally, entropy_M: torch.Tensor, hidden_MH: torch.Tensor, part: FlatBatch) -> None:
    """Entropy of first and later turns; and, once the backward pass gets there, the gradient by advantage's sign."""
    tally.add("entropy_first", entropy_M[part.turn_N == 0])
    tally.add("entropy_later", entropy_M[part.turn_N > 0])

    def split(grad_MH: torch.Tensor) -> None:
        squares_M = grad_MH.float().square().sum(-1)
        tally.add_squares("grad_good", squares_M[part.advantages_N > 0])
        tally.add_squares("grad_bad", squares_M[part.advantages_N < 0])

    if hidden_MH.requires_grad:
        hidden_MH.register_hook(split)  # type: ignore[no-untyped-call]


def frozen_copy(model: Any) -> Any:
    """A copy of `model` that doesn't train: the reference for KL."""
    return copy.deepcopy(model).requires_grad_(False).eval()
