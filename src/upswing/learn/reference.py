"""The reference of a policy: what its KL is measured against."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from upswing.engine.weights import load_weights
from upswing.learn.lora import PlainWeights, trained
from upswing.learn.modes import mode
from upswing.models.attention import use_upswing_attention


class Reference:
    """The policy that training started from, or was at the last `refresh`; another model when one is given.

    Without a `ref_model`, an adapted policy is its own reference: the forward runs with the values that its trained
    weights had. That is the start policy exactly: the bare base model for a fresh adapter (which is zero), and base
    plus adapter when training starts from a trained one. It costs a copy of the adapter, not of the model.
    """

    def __init__(self, policy: Any, ref_model: Any | None = None) -> None:
        """`ref_model` is frozen in place and is `policy`'s reference; give one unless `policy` has an adapter."""
        self._policy, self._model = policy, ref_model
        self._changed = False
        if ref_model is not None:
            use_upswing_attention(ref_model)
            ref_model.requires_grad_(False).eval()
        self._values = [] if ref_model is not None else _values(policy)

    @contextmanager
    def model(self) -> Iterator[Any]:
        """The reference as a model in evaluation mode, for forwards without gradient inside the `with` only."""
        if self._model is not None:
            yield self._model
            return
        parameters = list(trained(self._policy).values())
        current = [parameter.data for parameter in parameters]
        try:
            _point(parameters, self._values)
            with mode(self._policy, training=False):
                yield self._policy
        finally:
            _point(parameters, current)

    def refresh(self) -> None:
        """The policy as it is now becomes the reference."""
        self._changed = True
        if self._model is None:
            self._values = _values(self._policy)
        else:
            load_weights(self._model, PlainWeights(self._policy))

    def state(self) -> list[torch.Tensor] | None:
        """For a checkpoint; None: it's the `ref_model` as given."""
        if self._model is None:
            return self._values
        return [p.detach() for p in self._model.parameters()] if self._changed else None

    @torch.no_grad()
    def restore(self, state: list[torch.Tensor] | None) -> None:
        if state is not None:
            self._changed = True
            for own, saved in zip(self.state() or (), state, strict=True):
                own.copy_(saved)


def _values(policy: Any) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in trained(policy).values()]


def _point(parameters: list[torch.nn.Parameter], values: list[torch.Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.data = value
