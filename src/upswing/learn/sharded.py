"""The learner on several ranks: weights, gradients and optimizer state in shards (PyTorch's FSDP2).

Every rank gets all rows and cuts the same packs, computes some of them, and sums over ranks: denominators count the
whole batch, so gradients are sums, never means. Gloo between CPUs, NCCL between GPUs.
"""

from __future__ import annotations

import copy
import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from upswing.errors import ConfigError
from upswing.learn.checkpoint import (
    SHARDS,
    load_checkpoint,
    load_state,
    partial_folder,
    save_optimizer,
    whole_folder,
    write_checkpoint,
)
from upswing.learn.forward import check_trainable
from upswing.learn.learner import Learner
from upswing.learn.lora import PlainWeights, is_adapted
from upswing.learn.metrics import Tally
from upswing.learn.modes import mode
from upswing.learn.packing import Pack, pack
from upswing.learn.reference import Reference
from upswing.learn.rows import TrainRow, spread
from upswing.learn.sharded_ranks import BUILD, Ranks
from upswing.learn.trainer import Objective

SLACK = (1.0, 1.1, 1.25, 1.5)
"""Sizes of packs that are tried, in shares of what would fill all ranks evenly."""
SHARED = ("peak_lr", "_grad_clip", "_schedule", "version", "updates", "max_tokens_per_pack")
"""Attributes that the other ranks take from rank 0 with every order."""
INNER = {"autocast", "forward", "packs", "step", "update", "weights"}
"""Public methods that aren't orders of their own."""

_ranks: Ranks | None = None


@contextmanager
def lead(place: Mapping[str, str] = os.environ, **options: Any) -> Iterator[None]:
    """On rank 0: learners made inside are on all ranks. Place and options are those of Ranks."""
    global _ranks  # there is one process group to a process, too
    _ranks = Ranks(place, **options)
    try:
        with _ranks.losses_named():
            yield
    finally:
        _ranks.end()
        _ranks = None


def follow(place: Mapping[str, str] = os.environ) -> None:
    """On the other ranks: work for rank 0 until it ends the run."""
    Ranks(place).obey(ShardedLearner.built)


def on_several_ranks() -> bool:
    """Whether learners made now are on several ranks, which then take the weights to their devices, a layer each."""
    return _ranks is not None


def make_learner(model: Any, **options: Any) -> Learner:
    """A Learner; on all ranks if there are several."""
    return Learner(model, **options) if _ranks is None else ShardedLearner(_ranks, model, **options)


class ShardedLearner(Learner):
    """A Learner whose methods, called on rank 0, are done by all ranks."""

    def __init__(self, ranks: Ranks, model: Any, *, ref_model: Any | None = None, **options: Any) -> None:
        """As Learner's; the other ranks make theirs from rank 0's.

        Raises ConfigError for an adapted model, a value head, or activations within a number of GB.
        """
        check_trainable(model)
        if options.get("value_head") or is_adapted(model):
            raise ConfigError("a value head and LoRA work on one rank only; leave them out, or start without torchrun")
        if (wanted := options.get("gradient_checkpointing")) and wanted is not True:
            raise ConfigError(f"gradient_checkpointing is {wanted} GB; allowed on several ranks: true, false")
        self.ranks = ranks
        ranks.built = self._number = ranks.built + 1
        # What the model is, without its weights: the other ranks' start, and how files are written and read.
        self._plain = _remade(model, "meta")
        ref = None if ref_model is None else _remade(ref_model, "meta")
        with ranks.order(BUILD, self._plain, ref, options):
            _shard(model, ranks)
            super().__init__(model, ref_model=ref_model, **options)

    @classmethod
    def built(cls, ranks: Ranks, model: Any, ref_model: Any | None, options: dict[str, Any]) -> ShardedLearner:
        """On the other ranks, from the models without weights."""
        ref = None if ref_model is None else _remade(ref_model, "cpu")
        return cls(ranks, _remade(model, "cpu"), ref_model=ref, **options)

    # -- work --------------------------------------------------------------------------------------------------------

    def packs(self, rows: Sequence[TrainRow], **options: Any) -> list[Pack]:
        return self._evened(super().packs(rows, **options), rows, **options)

    def _evened(self, packs: list[Pack], rows: Sequence[TrainRow], **options: Any) -> list[Pack]:
        """`packs`, or smaller ones if that keeps more ranks busy: what counts is the longest pack of each round."""
        if not packs:
            return packs
        rounds = -(-len(packs) // self.ranks.size)
        even = sum(one.num_tokens for one in packs) / (rounds * self.ranks.size)
        sizes = {int(even * slack) + 1 for slack in SLACK}
        largest = max(one.num_tokens for one in packs)
        others = [pack(rows, size, **options) for size in sorted(sizes) if size < largest]
        return min((packs, *others), key=lambda found: sum(sorted(map(self._cost, found))[:: -self.ranks.size]))

    def _share(self, packs: Sequence[Pack]) -> tuple[list[Pack], list[Pack]]:
        """This rank's packs, the longest first, and those that it runs only to stay in step and doesn't count."""
        order = sorted(packs, key=self._cost, reverse=True)
        mine = order[self.ranks.rank :: self.ranks.size]
        return mine, order[-1:] * (-(-len(order) // self.ranks.size) - len(mine))

    def _accumulate(self, packs: Sequence[Pack], objective: Objective, tally: Tally) -> float:
        def in_full(one: Pack) -> torch.Tensor:
            self.model.unshard()  # what isn't in a layer: it is used outside the model's own forward too
            return objective(one)

        mine, idle = self._share(packs)
        before = _taken(tally)
        mine_done = super()._accumulate(mine, in_full, tally), _taken(tally)
        super()._accumulate(idle, lambda one: 0.0 * in_full(one), tally)
        _taken(tally)
        found = self.ranks.gathered(mine_done)
        for part in (before, *(part for _, part in found)):
            _add(tally, part)
        return float(sum(loss for loss, _ in found))

    def _measured(self, rows: Sequence[TrainRow], measure: Callable[[Pack], torch.Tensor]) -> list[np.ndarray]:
        values_N = np.zeros(sum(len(row.loss_positions) for row in rows), np.float32)
        packs = self._evened(pack(rows, self.max_tokens_per_pack), rows)
        mine, idle = self._share(packs)
        with torch.no_grad(), mode(self.model, training=False):
            for one in mine:
                values_N[one.slot_M.numpy()] = measure(one).float().cpu().numpy()
            for one in idle:
                measure(one)
        self.model.reshard()  # else what was gathered would be taken for the weights after the next update
        if packs:
            dist.all_reduce(torch.from_numpy(values_N))  # each is on one rank and 0 on the others
        return spread(rows, values_N)

    def _ref_logprobs(self, one: Pack, temperature: float) -> torch.Tensor:
        found = super()._ref_logprobs(one, temperature)
        assert self.reference is not None
        with self.reference.model() as model:
            model.reshard()
        return found

    @property
    def reference(self) -> Reference | None:
        """The one of all ranks, who get a new one when rank 0 does."""
        return self._reference

    @reference.setter
    def reference(self, value: Reference | None) -> None:
        model = None if value is None else value._model
        plain = None if model is None else _remade(model, "meta")
        with self.ranks.order("_refer_to", (plain,), {}, self._shared()):
            self._refer(model)

    def _refer_to(self, plain: Any | None) -> None:
        self._refer(None if plain is None else _remade(plain, "cpu"))

    def _refer(self, model: Any | None) -> None:
        if model is not None:
            _shard(model, self.ranks)
        self._reference = None if model is None else _Reference(self, model)

    def _shared(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in SHARED}

    def refresh_reference(self) -> None:
        """What `reference.refresh` does."""
        assert self.reference is not None
        Reference.refresh(self.reference)

    # -- weights -----------------------------------------------------------------------------------------------------

    def weights(self) -> Mapping[str, torch.Tensor]:
        return _Weights(self)

    def weight(self, name: str) -> torch.Tensor:
        """One of `weights`, whole."""
        return _full(PlainWeights(self.model)[name])

    def save(self, path: str | Path, *, tokenizer: Any | None = None) -> None:
        """As Learner's, which reads it too, but every rank writes its shards of the optimizer's state."""
        path, leads, weights = Path(path), self.ranks.rank == 0, dict[str, torch.Tensor]()
        for name, tensor in PlainWeights(self.model).items():
            whole = _full(tensor)  # a collective: on all ranks, of which one keeps it
            if leads:
                weights[name] = whole.cpu()
        state = self._state()
        if not leads:
            dist.all_reduce(torch.zeros(1))
            if not partial_folder(path).is_dir():
                raise ConfigError(
                    f"rank 0 made '{path}' where this rank doesn't see it; --out must be on a shared disk"
                )
            save_optimizer(partial_folder(path) / SHARDS, self.model, self._optimizer)
        else:
            with whole_folder(path) as partial:
                dist.all_reduce(torch.zeros(1))  # the folder is there
                save_optimizer(partial / SHARDS, self.model, self._optimizer)
                write_checkpoint(partial, self._plain, tokenizer, state, weights)
        dist.all_reduce(torch.zeros(1))

    def load(self, path: str | Path) -> None:
        """As Learner's; `path` may be of any number of ranks."""
        path = Path(path)
        if self.ranks.rank == 0:
            state = load_checkpoint(path, self.model, type(self._plain), _fill)
        else:
            for tensor in PlainWeights(self.model).values():
                _fill(tensor, None)
            state = load_state(path)
        self._restore(state)

    def _state(self) -> dict[str, Any]:
        return {**super()._state(), "optimizer": None}

    def _restore(self, state: dict[str, Any]) -> None:
        super()._restore(state)
        for parameter in self._parameters if state["optimizer"] is not None else ():  # from a single process
            held = self._optimizer.state[parameter]
            for name, value in held.items():
                if value.shape == parameter.shape:
                    held[name] = _placed(value, parameter, None)


class _Reference(Reference):
    """In the same shards as the policy."""

    def __init__(self, learner: ShardedLearner, ref_model: Any) -> None:
        super().__init__(learner.model, ref_model)
        self._learner = learner

    def refresh(self) -> None:
        self._learner.refresh_reference()

    def state(self) -> list[torch.Tensor] | None:
        found = super().state()
        return None if found is None else [_full(tensor).cpu() for tensor in found]

    def restore(self, state: list[torch.Tensor] | None) -> None:
        if state is not None:
            self._changed = True
            for own, saved in zip(super().state() or (), state, strict=True):
                own.copy_(_placed(saved, own, None))


class _Weights(Mapping[str, torch.Tensor]):
    """A weight is put together, by all ranks, when it is read, and only rank 0 keeps it."""

    def __init__(self, learner: ShardedLearner) -> None:
        self._learner, self._names = learner, list(PlainWeights(learner.model))

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._learner.weight(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _order(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def ordered(self: ShardedLearner, *args: Any, **kwargs: Any) -> Any:
        if self._number != self.ranks.built:
            raise RuntimeError("only the newest learner works on several ranks")
        sent = {name: None if name == "tokenizer" else value for name, value in kwargs.items()}
        with self.ranks.order(method.__name__, args, sent, self._shared()):
            return method(self, *args, **kwargs)

    return ordered


for _name, _method in inspect.getmembers(ShardedLearner, inspect.isfunction):
    if not _name.startswith("_") and _name not in INNER:
        setattr(ShardedLearner, _name, _order(_method))


# -- models and tensors ------------------------------------------------------------------------------------------------


def _remade(model: Any, device: str) -> Any:
    """A copy with parameters that hold nothing yet; tied ones stay tied."""
    empty = {id(p): torch.nn.Parameter(torch.empty_like(p, device=device), p.requires_grad) for p in model.parameters()}
    return copy.deepcopy(model, empty)


def decoder_layers(model: Any) -> Sequence[torch.nn.Module]:
    """Raises ConfigError when there is no list of them."""
    lists = [one for one in model.base_model.modules() if isinstance(one, torch.nn.ModuleList)]
    layers = next((one for one in lists if len(one) == model.config.num_hidden_layers), None)
    if layers is None:
        raise ConfigError(f"model type '{model.config.model_type}' has no list of decoder layers; use one rank")
    return tuple(layers)


def _shard(model: Any, ranks: Ranks) -> None:
    """In place, from rank 0's weights: a unit for each decoder layer, and one for embeddings, last norm and head."""
    for unit in (*decoder_layers(model), model):
        for parameter in unit.parameters():
            if not isinstance(parameter, DTensor):
                parameter.data = parameter.data.to(ranks.device)
                dist.broadcast(parameter.data, 0)
        fully_shard(unit, mesh=ranks.mesh)
        unit.set_gradient_divide_factor(1.0)  # gradients are summed
        unit.set_force_sum_reduction_for_comms(True)
    base, forward = model.base_model, model.base_model.forward
    # The base model is what runs, so the unit around it opens there. Its inputs are hidden in a call: the unit would
    # close at their gradient, before what the embedding adds to it in place.
    model.opened = lambda call: call()
    register_fsdp_forward_method(model, "opened")
    base.forward = lambda *args, **kwargs: model.opened(lambda: forward(*args, **kwargs))
    assert isinstance(model, FSDPModule)


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _placed(whole: torch.Tensor, like: Any, source: int | None) -> torch.Tensor:
    """`whole` in shards as `like` is: rank `source`'s, or None: each rank has the same one."""
    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=source)


@torch.no_grad()
def _fill(own: Any, whole: torch.Tensor | None) -> None:
    """Copy rank 0's tensor into the shards of all; elsewhere `whole` is None."""
    own.copy_(_placed(torch.empty(own.shape, dtype=own.dtype) if whole is None else whole, own, 0))


def _taken(tally: Tally) -> Tally:
    """What is in it, which leaves it empty: those who count hold the object itself."""
    found = Tally(**vars(tally))
    vars(tally).update({**vars(Tally()), "lr": tally.lr, "seconds": tally.seconds})
    return found


def _add(total: Tally, part: Tally) -> None:
    for name, mean in part.means.items():
        total.means[name] = total.mean(name) + mean
    for name, most in part.maxima.items():
        total.maxima[name] = max(most, total.maxima.get(name, most))
    total.counts.update(part.counts)
    for name, arrays in part.values.items():
        total.values.setdefault(name, []).extend(arrays)
    for name, square in part.squares.items():
        total.squares[name] = total.squares.get(name, 0.0) + square
