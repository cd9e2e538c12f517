"""What every trained model has, policy, critic or reward model: weights, optimizer, schedule, clipping, checkpoints.

denominators over the whole minibatch -> pack -> forward, backward per pack -> clip -> step
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from upswing.learn.activations import RECOMPUTE_COST, Fits
from upswing.learn.checkpoint import SHARDS, load_checkpoint, load_optimizer, save_checkpoint
from upswing.learn.in_place import gradients_in_place
from upswing.learn.metrics import Tally
from upswing.learn.modes import mode
from upswing.learn.packing import Pack, pack
from upswing.learn.precision import compute_context
from upswing.learn.rows import TrainRow
from upswing.learn.schedule import Schedule
from upswing.models.attention import use_upswing_attention

Objective = Callable[[Pack], torch.Tensor]
"""A pack -> its share of the loss, a scalar with gradient; shares add up to the same however rows are cut."""
FLOOR = 256
"""A pack of fewer tokens takes about as long as one of this many."""


CPU_PACK, GPU_PACK = 1024, 8192
"""Tokens a pack where nothing else is said: on a CPU larger ones are hardly faster and hold more memory."""


class Trainer:
    """Trains one model. Weights and optimizer state are float32; `compute_dtype` is used by autocast only."""

    def __init__(
        self,
        model: Any,
        *,
        lr: float,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        grad_clip: float = 1.0,
        schedule: Schedule | None = None,
        max_tokens_per_pack: int | None = None,
        compute_dtype: torch.dtype | None = None,
        gradient_checkpointing: bool | float | None = False,
        seed: int = 0,
        version: int = 0,
    ) -> None:
        """`model`: its weights that require a gradient are trained in place.

        `lr` is the peak, `schedule` its factor by update (constant by default). `grad_clip` bounds the gradient's norm.
        `version`: where to count updates from. `gradient_checkpointing`: whether to recompute activations in the
        backward pass, or the GB that a pack's may take: `packs` then cuts smaller ones or has some recomputed; 0 or
        None: no. Raises ValueError for anything else.
        """
        use_upswing_attention(model)
        self.model = model
        self.version = version
        """Updates that changed the weights."""
        self.updates = 0
        """Updates asked for, skipped ones included; the schedule goes by it."""
        self.extra: dict[str, Any] = {}
        """What else a checkpoint keeps: numbers that its stage adapts."""
        on_cpu = next(model.parameters()).device.type == "cpu"
        self.max_tokens_per_pack = max_tokens_per_pack or (CPU_PACK if on_cpu else GPU_PACK)
        self.peak_lr, self._grad_clip, self._schedule = lr, grad_clip, schedule or Schedule()
        self._compute_dtype = compute_dtype
        self._rng = np.random.default_rng(seed)
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.device = self._parameters[0].device
        self._optimizer = _make_optimizer(self._parameters, lr=lr, betas=betas, weight_decay=weight_decay)
        self._fits = self._recompute(gradient_checkpointing)

    def _recompute(self, wanted: bool | float | None) -> Fits:
        if not wanted:
            return Fits()
        if wanted is not True and not (isinstance(wanted, int | float) and 0 < wanted < math.inf):
            raise ValueError(f"gradient_checkpointing is {wanted!r}; allowed: True, False or a number of GB above 0")
        fits = Fits(kept=0) if wanted is True else Fits.measure(self.model, self.autocast, wanted)
        # The older name warns in newer transformers.
        enable = getattr(self.model, "activation_checkpointing_enable", None)
        (enable or self.model.gradient_checkpointing_enable)({"use_reentrant": False})
        return fits

    @property
    def lr(self) -> float:
        """The learning rate of the next update."""
        return self.peak_lr * self._schedule(self.updates)

    def autocast(self) -> AbstractContextManager[object]:
        """The compute precision of a forward."""
        return compute_context(self.device.type, self._compute_dtype)

    @contextmanager
    def update(self) -> Iterator[Tally]:
        """Around the steps of one update: training mode, learning rate, version, wall time."""
        started, tally = time.perf_counter(), Tally(lr=self.lr)
        for group in self._optimizer.param_groups:
            group["lr"] = tally.lr
        try:
            with mode(self.model, training=True):
                yield tally
        finally:
            self._optimizer.zero_grad(set_to_none=True)
        self.updates += 1
        self.version += 1 if tally.counts["steps"] else 0
        tally.seconds = time.perf_counter() - started

    def packs(self, rows: Sequence[TrainRow], **options: Any) -> list[Pack]:
        """`pack` for a forward with gradient, within the budget for activations unless a row alone is beyond it.

        In smaller packs a beginning shared by rows of different packs is computed in each, and very small ones are
        slow; what costs less of that and of recomputing packs that are too large is taken.
        """
        limits = [limit for limit in (self._fits.recomputed, self._fits.kept) if limit >= 1] or [1]
        sizes = dict.fromkeys(int(min(self.max_tokens_per_pack, limit)) for limit in limits)
        return min((pack(rows, size, **options) for size in sizes), key=lambda packs: sum(map(self._cost, packs)))

    def _cost(self, one: Pack) -> float:
        """In tokens computed once."""
        return max(one.num_tokens, FLOOR) * (RECOMPUTE_COST if self._fits.recomputes(one) else 1.0)

    def step(self, packs: Sequence[Pack], objective: Objective, tally: Tally, *, over: str | None = None) -> None:
        """Forward and backward of every pack, then one optimizer step if there is a gradient and it is finite.

        `over`: the tally whose total divides loss and gradient: of weights that only the forward passes know.
        """
        if not packs:
            tally.counts["steps_skipped"] += 1
            return
        loss = self._accumulate(packs, objective, tally)
        total = tally.mean(over).total if over else 1.0
        if total not in (0.0, 1.0):
            torch._foreach_div_([p.grad for p in self._parameters if p.grad is not None], total)
        tally.add_value("loss", loss / (total or 1.0))
        self._apply_gradient(tally)

    def _accumulate(self, packs: Sequence[Pack], objective: Objective, tally: Tally) -> float:
        """Forward and backward of every pack -> their loss."""
        total = 0.0
        for one in packs:
            recompute = self._fits.recomputes(one)
            if self._fits.kept < math.inf:
                for module in self.model.modules():
                    if hasattr(module, "gradient_checkpointing"):
                        module.gradient_checkpointing = recompute
            with gradients_in_place():
                part = objective(one)
                torch.autograd.backward(part)
            total += float(part.detach())
            tally.counts["tokens"] += one.num_tokens
            tally.counts["tokens_recomputed"] += one.num_tokens * recompute
        return total

    def _apply_gradient(self, tally: Tally) -> None:
        found: Any = torch.nn.utils.clip_grad_norm_(self._parameters, self._grad_clip)
        norm = float(found.full_tensor() if hasattr(found, "full_tensor") else found)  # of shards: not their own alone
        if math.isfinite(norm):
            tally.add_value("grad_norm", norm)
        if 0.0 < norm < math.inf:
            self._optimizer.step()
            tally.counts["steps"] += 1
        else:  # at exactly 0, all tokens rejected say, momentum and weight decay would still move the weights
            tally.counts["steps_skipped"] += 1
            tally.counts["nonfinite"] += not math.isfinite(norm)
        self._optimizer.zero_grad(set_to_none=True)

    def save(self, path: str | Path, *, tokenizer: Any | None = None) -> None:
        """Write a Hugging Face model folder plus `learner_state.pt`; `path` appears whole or not at all.

        An adapted model is written merged, as any model, with its adapter as peft has it in `adapter/`.
        """
        save_checkpoint(Path(path), self.model, tokenizer, self._state())

    def load(self, path: str | Path) -> None:
        """Go on from what `save` wrote, bit for bit; torch's global generator is set back too.

        Raises ConfigError when `path` isn't such a folder or holds another model.
        """
        self._restore(load_checkpoint(Path(path), self.model))

    def _state(self) -> dict[str, Any]:
        """What going on needs besides the weights."""
        return {
            "version": self.version,
            "updates": self.updates,
            "optimizer": self._optimizer.state_dict(),
            "numpy_rng": self._rng.bit_generator.state,
            "torch_rng": torch.get_rng_state(),
            "extra": self.extra,
        }

    def _restore(self, state: dict[str, Any]) -> None:
        if state["optimizer"] is None:
            load_optimizer(state["folder"] / SHARDS, self.model, self._optimizer)
        else:
            self._optimizer.load_state_dict(state["optimizer"])
        self.version, self.updates = state["version"], state["updates"]
        self._rng.bit_generator.state = state["numpy_rng"]
        torch.set_rng_state(state["torch_rng"])
        self.extra = state["extra"]


def _make_optimizer(
    parameters: Sequence[torch.nn.Parameter], *, lr: float, betas: tuple[float, float], weight_decay: float
) -> torch.optim.Optimizer:
    """Fused AdamW; norms and biases aren't decayed."""
    matrices = [p for p in parameters if p.ndim >= 2]
    vectors = [p for p in parameters if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=lr, betas=betas, fused=True)
