"""Some parameters' gradients, summed over processes together: in one buffer, or apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Mapping


class Bucket:
    """Some parameters' fp32 gradients, which are summed and scaled together."""

    def __init__(self, shapes: Mapping[str, torch.Size], owner: int | None) -> None:
        self.names = list(shapes)
        self.owner = owner
        self.missing = len(shapes)

    @property
    def parts(self) -> list[Tensor]:
        """The tensors that hold all gradients of a step, between `close` and `clear`."""
        raise NotImplementedError

    def attach(self, name: str, parameter: nn.Parameter, master: nn.Parameter | None) -> None:
        """Learn of a parameter, and of its master where it is here."""
        raise NotImplementedError

    def add(self, name: str, parameter: Tensor) -> None:
        """Add a gradient that has just been computed, where torch did not add it in place."""
        raise NotImplementedError

    def close(self) -> None:
        """Take note that every gradient of the step is there."""

    def clear(self) -> None:
        """Begin the next step without gradients."""
        raise NotImplementedError


class Flat(Bucket):
    """Views of one buffer, so that one message sums all of them.

    A step's first gradients are written over those of the step before, unless torch adds them in
    place.
    """

    def __init__(
        self, shapes: Mapping[str, torch.Size], owner: int | None, device: torch.device
    ) -> None:
        super().__init__(shapes, owner)
        sizes = [shape.numel() for shape in shapes.values()]
        self._flat = torch.zeros(sum(sizes), device=device)
        pieces = zip(shapes, self._flat.split(sizes), strict=True)
        self._views = {name: piece.view(shapes[name]) for name, piece in pieces}
        self._apart: set[str] = set()
        self._old: set[str] = set()

    @property
    def parts(self) -> list[Tensor]:
        return [self._flat]

    def attach(self, name: str, parameter: nn.Parameter, master: nn.Parameter | None) -> None:
        view = self._views[name]
        if master is not None:
            master.grad = view
        if parameter.dtype == torch.float32:
            parameter.grad = view
        else:
            self._apart.add(name)

    def add(self, name: str, parameter: Tensor) -> None:
        view = self._views[name]
        if parameter.grad is None or parameter.grad is view:
            return
        if name in self._old:
            view.copy_(parameter.grad)
            self._old.remove(name)
        else:
            view.add_(parameter.grad)
        parameter.grad = None

    def close(self) -> None:
        for name in self._old:
            self._views[name].zero_()
        self._old.clear()

    def clear(self) -> None:
        self._old = set(self._apart)
        if len(self._apart) < len(self._views):
            self._flat.zero_()


class Loose(Bucket):
    """Tensors of their own, made by a step's first microbatch: for a lazy device.

    A buffer that is cleared and added to would be two more passes over the memory in every step.
    """

    def __init__(self, shapes: Mapping[str, torch.Size], owner: int | None) -> None:
        super().__init__(shapes, owner)
        self._found: dict[str, Tensor] = {}
        self._parameters: dict[str, nn.Parameter] = {}
        self._masters: dict[str, nn.Parameter] = {}

    @property
    def parts(self) -> list[Tensor]:
        return [self._found[name] for name in self.names]

    def attach(self, name: str, parameter: nn.Parameter, master: nn.Parameter | None) -> None:
        self._parameters[name] = parameter
        if master is not None:
            self._masters[name] = master

    def add(self, name: str, parameter: Tensor) -> None:
        if parameter.grad is not None:
            gradient, known = parameter.grad.float(), self._found.get(name)
            self._found[name] = gradient if known is None else known.add_(gradient)
            parameter.grad = None

    def close(self) -> None:
        for name in self.names:
            if name not in self._found:
                zeros = torch.zeros_like(self._parameters[name], dtype=torch.float32)
                self._found[name] = zeros
        for name, master in self._masters.items():
            master.grad = self._found[name]

    def clear(self) -> None:
        self._found.clear()
        for master in self._masters.values():
            master.grad = None
