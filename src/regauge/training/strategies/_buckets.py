"""Gradient buckets: several parameters' fp32 gradients, summed over processes together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Mapping


class GradientBucket:
    """Several parameters' fp32 gradients, reduced and scaled together."""

    def __init__(self, shapes: Mapping[str, torch.Size], owner: int | None) -> None:
        self.names = list(shapes)
        self.owner = owner
        self.num_missing = len(shapes)

    @property
    def buffers(self) -> list[Tensor]:
        """Tensors with a step's gradients; valid between `close` and `clear`."""
        raise NotImplementedError

    def attach(self, name: str, parameter: nn.Parameter, master: nn.Parameter | None) -> None:
        """Register a parameter, and its master weight if this process owns it."""
        raise NotImplementedError

    def add(self, name: str, parameter: Tensor) -> None:
        """Add a parameter's new gradient, unless torch accumulated it in place."""
        raise NotImplementedError

    def close(self) -> None:
        """Complete a step's gradients: parameters without a gradient get zeros."""

    def clear(self) -> None:
        raise NotImplementedError


class FlatBucket(GradientBucket):
    """Gradients are views of one buffer, reduced by one collective.

    torch accumulates fp32 gradients in the views. Gradients of low-precision parameters are copied:
    a step's first one overwrites the previous step's stale view, later ones are added.
    """

    def __init__(
        self, shapes: Mapping[str, torch.Size], owner: int | None, device: torch.device
    ) -> None:
        super().__init__(shapes, owner)
        sizes = [shape.numel() for shape in shapes.values()]
        self._flat = torch.zeros(sum(sizes), device=device)
        pieces = zip(shapes, self._flat.split(sizes), strict=True)
        self._views = {name: piece.view(shapes[name]) for name, piece in pieces}
        self._low_precision: set[str] = set()
        self._stale: set[str] = set()

    @property
    def buffers(self) -> list[Tensor]:
        return [self._flat]

    def attach(self, name: str, parameter: nn.Parameter, master: nn.Parameter | None) -> None:
        view = self._views[name]
        if master is not None:
            master.grad = view
        if parameter.dtype == torch.float32:
            parameter.grad = view
        else:
            self._low_precision.add(name)

    def add(self, name: str, parameter: Tensor) -> None:
        view = self._views[name]
        if parameter.grad is None or parameter.grad is view:
            return
        if name in self._stale:
            view.copy_(parameter.grad)
            self._stale.remove(name)
        else:
            view.add_(parameter.grad)
        parameter.grad = None

    def close(self) -> None:
        for name in self._stale:
            self._views[name].zero_()
        self._stale.clear()

    def clear(self) -> None:
        self._stale = set(self._low_precision)
        if len(self._low_precision) < len(self._views):
            self._flat.zero_()


class PerParameterBucket(GradientBucket):
    """One tensor per parameter, created by a step's first microbatch; for lazy devices.

    A shared buffer would need two more passes over the memory in every step.
    """

    def __init__(self, shapes: Mapping[str, torch.Size], owner: int | None) -> None:
        super().__init__(shapes, owner)
        self._gradients: dict[str, Tensor] = {}
        self._parameters: dict[str, nn.Parameter] = {}
        self._masters: dict[str, nn.Parameter] = {}

    @property
    def buffers(self) -> list[Tensor]:
        return [self._gradients[name] for name in self.names]

    def attach(self, name: str, parameter: nn.Parameter, master: nn.Parameter | None) -> None:
        self._parameters[name] = parameter
        if master is not None:
            self._masters[name] = master

    def add(self, name: str, parameter: Tensor) -> None:
        if parameter.grad is not None:
            gradient, total = parameter.grad.float(), self._gradients.get(name)
            self._gradients[name] = gradient if total is None else total.add_(gradient)
            parameter.grad = None

    def close(self) -> None:
        for name in self.names:
            if name not in self._gradients:
                zeros = torch.zeros_like(self._parameters[name], dtype=torch.float32)
                self._gradients[name] = zeros
        for name, master in self._masters.items():
            master.grad = self._gradients[name]

    def clear(self) -> None:
        self._gradients.clear()
        for master in self._masters.values():
            master.grad = None
