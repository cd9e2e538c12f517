"""The learner: owns weights and optimizer.

    flatten -> aggregate (denominators over the whole minibatch) -> pack -> forward, backward per pack -> clip -> step

Axis letters: B rows, T tokens of one row, N loss tokens of a minibatch, M loss tokens of a pack.
"""

from __future__ import annotations

import copy
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from upswing.algo import check_aggregation, check_clip, check_kl_estimator, kl_k3, kl_loss, ppo_clip, token_weights
from upswing.errors import ConfigError, did_you_mean
from upswing.learn.checkpoint import load_checkpoint, save_checkpoint
from upswing.learn.forward import check_trainable, packed_forward
from upswing.learn.metrics import Tally, UpdateMetrics, update_metrics
from upswing.learn.modes import mode
from upswing.learn.packing import Pack, pack
from upswing.learn.precision import compute_context
from upswing.learn.rows import FlatBatch, TrainRow, flatten
from upswing.learn.schedule import Schedule
from upswing.models.attention import use_upswing_attention

PackLoss = Callable[[Pack, torch.Tensor, torch.Tensor], torch.Tensor]
"""(pack, policy_logprobs_M, entropy_M) -> per-token loss [M]."""


OLD_LOGPROBS = ("recompute", "engine")


@dataclass(frozen=True, kw_only=True)
class RLOptions:
    """How `rl_update` turns advantages into a step. Checked when made: ConfigError names what is wrong."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = 3.0
    """Bound on the ratio for negative advantages; None: none."""
    kl_coef: float = 0.0
    """Weight of the KL to the reference model, which is run only above 0."""
    kl_estimator: str = "k2"
    entropy_coef: float = 0.0
    """Weight of an entropy bonus."""
    aggregation: str = "token-mean"
    norm_length: float | None = None
    """Tokens to divide by in `seq-mean-token-sum-norm`."""
    temperature: float = 1.0
    """The one that the batch was sampled with."""
    updates_per_batch: int = 1
    """Passes over the batch."""
    minibatches: int = 1
    """Optimizer steps in each pass; each has its own denominators."""
    old_logprobs: str = "recompute"
    """Where they come from when there is more than one optimizer step: `recompute`, a forward before the first one; or
    `engine`, the sampler's own (bypass mode), which saves that forward and is as exact as engine and learner agree."""

    def __post_init__(self) -> None:
        check_clip(clip_low=self.clip_low, clip_high=self.clip_high, dual_clip=self.dual_clip)
        check_kl_estimator(self.kl_estimator)
        check_aggregation(self.aggregation, self.norm_length)
        if self.kl_coef < 0:
            raise ConfigError(f"kl_coef is {self.kl_coef}; it must be 0 (no KL) or above")
        if not self.temperature > 0:
            raise ConfigError(
                f"temperature is {self.temperature}; RL needs one above 0, the one that the batch was sampled with"
            )
        if self.old_logprobs not in OLD_LOGPROBS:
            raise ConfigError(
                f"old_logprobs is '{self.old_logprobs}'; allowed: {', '.join(OLD_LOGPROBS)}"
                f"{did_you_mean(self.old_logprobs, OLD_LOGPROBS)}"
            )
        for name in ("updates_per_batch", "minibatches"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")

    @property
    def regularised(self) -> bool:
        """Whether rows without an advantage have a gradient too."""
        return self.kl_coef > 0 or self.entropy_coef != 0

    @property
    def on_policy(self) -> bool:
        """One step a batch: the policy before the step is the policy of the step."""
        return self.updates_per_batch * self.minibatches == 1


class Learner:
    """Trains one model on rows.

    Weights and optimizer state are float32; `compute_dtype` (bf16 where the hardware has it) is used by autocast only.
    Turn dropout off for RL: with it, the policy that is trained isn't quite the one that sampled.
    """

    def __init__(
        self,
        model: Any,
        *,
        lr: float,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        grad_clip: float = 1.0,
        schedule: Schedule | None = None,
        max_tokens_per_pack: int = 4096,
        compute_dtype: torch.dtype | None = None,
        gradient_checkpointing: bool = False,
        ref_model: Any | None = None,
        seed: int = 0,
        version: int = 0,
    ) -> None:
        """`model`: a Hugging Face causal language model; its weights are trained in place.

        `lr` is the peak, `schedule` its factor by update (constant by default). `grad_clip` bounds the gradient's norm.
        `ref_model` is the frozen reference for KL (`frozen_copy(model)`); `version` where to count updates from.
        Raises ConfigError for a model that the packed forward can't train.
        """
        check_trainable(model)
        use_upswing_attention(model)
        self.model = model
        self.version = version
        """Updates that changed the weights."""
        self.updates = 0
        """Updates asked for, skipped ones included; the schedule goes by it."""
        self.max_tokens_per_pack = max_tokens_per_pack
        self.ref_model = ref_model
        if ref_model is not None:
            use_upswing_attention(ref_model)
            ref_model.requires_grad_(False).eval()
        if gradient_checkpointing:
            # The older name warns in newer transformers.
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": False})
        self._lr, self._grad_clip, self._schedule = lr, grad_clip, schedule or Schedule()
        self._compute_dtype = compute_dtype
        self._rng = np.random.default_rng(seed)
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._device = self._parameters[0].device
        self._optimizer = _make_optimizer(self._parameters, lr=lr, betas=betas, weight_decay=weight_decay)

    @property
    def lr(self) -> float:
        """The learning rate of the next update."""
        return self._lr * self._schedule(self.updates)

    # -- training ------------------------------------------------------------------------------------------------------

    def sft_update(self, rows: Sequence[TrainRow], *, aggregation: str = "token-mean") -> UpdateMetrics:
        """One optimizer step on the negative log-likelihood of the loss tokens."""
        with self._update() as (tally, counts):
            flat = flatten(rows).to(self._device)
            weights_N = token_weights(flat.sequence_N, mode=aggregation)
            self._count_batch(counts, rows, flat)
            packs = pack(rows, self.max_tokens_per_pack)
            counts["rows_skipped"] = len(rows) - sum(len(p.row_indices) for p in packs)

            def negative_logprob(_: Pack, policy_M: torch.Tensor, entropy_M: torch.Tensor) -> torch.Tensor:
                return -policy_M

            self._step(packs, weights_N, negative_logprob, 1.0, tally, counts)
        return self._metrics

    def rl_update(self, rows: Sequence[TrainRow], options: RLOptions | None = None, **overrides: Any) -> UpdateMetrics:
        """`updates_per_batch` passes of `minibatches` optimizer steps on the clipped policy gradient.

        Options come as an `RLOptions` or as its fields. Advantages are the rows', computed over whole groups before;
        how rows are cut into minibatches or packs doesn't change them. With a single step, old_logprobs are the
        policy's own, detached (ratio 1, no second forward); otherwise they come from a forward before the first step.

        Rows whose advantage is exactly 0 at every loss token are left out when there is no KL or entropy term: their
        gradient is exactly zero. They still count in every denominator, but not in the metrics over computed tokens.
        """
        options = _options(options, overrides)
        if options.kl_coef > 0 and self.ref_model is None:
            raise ConfigError(f"kl_coef is {options.kl_coef} but the learner has no reference model; give it ref_model")
        with self._update() as (tally, counts):
            flat = flatten(rows)
            self._count_batch(counts, rows, flat)
            counts["rows_skipped"] = len(rows) - len(_active_rows(flat, everything=options.regularised))
            old = self._old_logprobs(rows, options)
            for _ in range(options.updates_per_batch):
                for chosen in self._minibatches(rows, options.minibatches):
                    part = [rows[i] for i in chosen]
                    part_old = None if old is None else [old[i] for i in chosen]
                    self._rl_step(part, part_old, options, tally, counts)
        return self._metrics

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
        counts: Counter[str],
    ) -> None:
        """One optimizer step on one minibatch, whose denominators count all of its rows."""
        flat = flatten(rows).to(self._device)
        weights_N = token_weights(flat.sequence_N, mode=options.aggregation, norm_length=options.norm_length)
        active = _active_rows(flat, everything=options.regularised)
        packs = pack(rows, self.max_tokens_per_pack, include=active)
        old_N = None if old is None else _gather(rows, old, flat)

        def loss(one: Pack, policy_M: torch.Tensor, entropy_M: torch.Tensor) -> torch.Tensor:
            slot_M = one.slot_M.to(self._device)
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
            return loss_M

        self._step(packs, weights_N, loss, options.temperature, tally, counts)

    def _step(
        self,
        packs: Sequence[Pack],
        weights_N: torch.Tensor,
        loss: PackLoss,
        temperature: float,
        tally: Tally,
        counts: Counter[str],
    ) -> None:
        """Forward and backward of every pack, then one optimizer step if there is a finite gradient."""
        if not packs:
            counts["steps_skipped"] += 1
            return
        total = 0.0
        for one in packs:
            with compute_context(self._device.type, self._compute_dtype):
                policy_M, entropy_M = packed_forward(self.model, one, temperature)
            loss_M = loss(one, policy_M, entropy_M)
            part = (weights_N[one.slot_M.to(self._device)] * loss_M).sum()
            torch.autograd.backward(part)
            total += float(part.detach())
            tally.add("policy_logprob", policy_M)
            tally.add("entropy", entropy_M)
            counts["tokens"] += one.num_tokens
        tally.add_value("loss", total)
        self._apply_gradient(tally, counts)

    def _apply_gradient(self, tally: Tally, counts: Counter[str]) -> None:
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, self._grad_clip))
        if math.isfinite(norm):
            tally.add_value("grad_norm", norm)
            self._optimizer.step()
            counts["steps"] += 1
        else:
            counts["steps_skipped"] += 1
            counts["nonfinite"] += 1
        self._optimizer.zero_grad(set_to_none=True)

    @contextmanager
    def _update(self) -> Iterator[tuple[Tally, Counter[str]]]:
        """Around one update: training mode, learning rate, version, and `self._metrics` at the end."""
        started, lr = time.perf_counter(), self.lr
        tally, counts = Tally(), Counter[str]()
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        try:
            with mode(self.model, training=True):
                yield tally, counts
        finally:
            self._optimizer.zero_grad(set_to_none=True)
        self.updates += 1
        self.version += 1 if counts["steps"] else 0
        self._metrics = update_metrics(tally, counts, lr, time.perf_counter() - started)

    @staticmethod
    def _count_batch(counts: Counter[str], rows: Sequence[TrainRow], flat: FlatBatch) -> None:
        counts["rows"] = len(rows)
        counts["loss_tokens"] = flat.num_tokens

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
                with compute_context(self._device.type, self._compute_dtype):
                    policy_M, _ = packed_forward(self.model, one, temperature)
                slots = one.slot_M.numpy()
                for slot, value in zip(slots, policy_M.float().cpu().numpy(), strict=True):
                    out[row_N[slot]][position_N[slot]] = value
        return out

    @torch.no_grad()
    def _ref_logprobs(self, one: Pack, temperature: float) -> torch.Tensor:
        with compute_context(self._device.type, self._compute_dtype):
            return packed_forward(self.ref_model, one, temperature)[0]

    # -- weights -------------------------------------------------------------------------------------------------------

    def weights(self) -> dict[str, torch.Tensor]:
        """The current weights by Hugging Face name, tied ones under every name; views, not copies."""
        return {name: tensor.detach() for name, tensor in self.model.state_dict().items()}

    def save(self, path: str | Path, *, tokenizer: Any | None = None) -> None:
        """Write a Hugging Face model folder plus `learner_state.pt`; `path` appears whole or not at all."""
        state = {
            "version": self.version,
            "updates": self.updates,
            "optimizer": self._optimizer.state_dict(),
            "numpy_rng": self._rng.bit_generator.state,
            "torch_rng": torch.get_rng_state(),
        }
        save_checkpoint(Path(path), self.model, tokenizer, state)

    def load(self, path: str | Path) -> None:
        """Go on from what `save` wrote, bit for bit; torch's global generator is set back too.

        Raises ConfigError when `path` isn't such a folder or holds another model.
        """
        state = load_checkpoint(Path(path), self.model)
        self._optimizer.load_state_dict(state["optimizer"])
        self.version, self.updates = state["version"], state["updates"]
        self._rng.bit_generator.state = state["numpy_rng"]
        torch.set_rng_state(state["torch_rng"])


def _make_optimizer(
    parameters: Sequence[torch.nn.Parameter], *, lr: float, betas: tuple[float, float], weight_decay: float
) -> torch.optim.Optimizer:
    """Fused AdamW; norms and biases aren't decayed."""
    matrices = [p for p in parameters if p.ndim >= 2]
    vectors = [p for p in parameters if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=lr, betas=betas, fused=True)


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
