"""What of a program each of several parts has: a share of every layer's weights, or some layers.

Shares are made of a program without memory, so that no part ever holds more than its own.
"""

from __future__ import annotations

import copy
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from regauge.backends._divided import divide
from regauge.errors import SettingsError
from regauge.models.init_weights import META
from regauge.models.tensors import put

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from regauge.backends._group import Group

    Shapes = Mapping[str, torch.Size]

Share = Literal["weights", "layers"]


class Summed(nn.Linear):
    """A linear layer of which each part has some of the inputs; every part has the output."""

    group: Group

    def forward(self, value: Tensor) -> Tensor:
        """Add up what the parts find, and the bias once, behind the sum."""
        found = nn.functional.linear(value, self.weight)
        self.group.sum(found)
        return found if self.bias is None else found + self.bias


class Elsewhere(nn.Module):
    """A layer that another part has."""

    def __init__(self, group: Group, owner: int, *, last: bool) -> None:
        super().__init__()
        self._group = group
        self._owner = owner
        self._last = last

    def forward(self, hidden_states: Tensor, *others: Any, **more: Any) -> Tensor:
        """Return what its owner found where that is sent on, else anything of the same form.

        Raises SettingsError where layers keep keys and values: a model asks its first layer how
        many tokens it has seen, and that layer would be elsewhere.
        """
        if any(hasattr(each, "get_seq_length") for each in (*others, *more.values())):
            raise SettingsError("parts that share layers cannot write", 'set share = "weights"')
        if self._last:
            hidden_states = torch.empty_like(hidden_states).contiguous()
            self._group.tell(hidden_states, self._owner)
        return hidden_states


def bare(program: nn.Module) -> nn.Module:
    """Return a copy of a program that lies on the meta device; what is tied stays tied."""
    without: dict[int, Any] = {}
    for value in stored(program).values():
        empty = torch.empty_like(value, device=META)
        weight = isinstance(value, nn.Parameter)
        without[id(value)] = nn.Parameter(empty, requires_grad=False) if weight else empty
    return copy.deepcopy(program, without)


def stored(program: nn.Module) -> dict[str, Tensor]:
    """Return weights and buffers under all of their names."""
    weights = program.named_parameters(remove_duplicate=False)
    return dict(chain(weights, program.named_buffers(remove_duplicate=False)))


def shared(program: nn.Module, group: Group, share: Share) -> nn.Module:
    """Make of a bare program what a part of a group computes; return it.

    Raises SettingsError where so many parts cannot share it.
    """
    if share == "weights":
        _divide(program, group)
    else:
        _spread(program, group)
    return program.eval()


def places(program: nn.Module) -> dict[str, list[str]]:
    """Return all names of each weight and buffer, by its first."""
    names: dict[int, list[str]] = {}
    for name, value in stored(program).items():
        names.setdefault(id(value), []).append(name)
    return {every[0]: every for every in names.values()}


def forms(program: nn.Module) -> dict[str, torch.Size]:
    """Return the shapes of what a part holds, by first names."""
    every = stored(program)
    return {name: every[name].shape for name in places(program)}


def size(program: nn.Module) -> int:
    """Return the bytes of weights and buffers."""
    every = stored(program)
    return sum(every[name].nbytes for name in places(program))


def cut(whole: Tensor, shape: torch.Size, part: int) -> Tensor:
    """Return a part's share of a weight: a piece of the one axis in which it is smaller."""
    for axis, (size, own) in enumerate(zip(whole.shape, shape, strict=True)):
        if size != own:
            return whole.narrow(axis, part * own, own)
    return whole


def place(program: nn.Module, names: list[str], value: Tensor) -> None:
    """Put a weight or a buffer under all names that it has."""
    parent, _, last = names[0].rpartition(".")
    weight = last in dict(program.get_submodule(parent).named_parameters(recurse=False))
    new = nn.Parameter(value, requires_grad=False) if weight else value
    for each in names:
        put(program, each, new)


def _divide(program: nn.Module, group: Group) -> None:
    def outputs(layer: nn.Linear) -> nn.Module:
        return nn.Linear(layer.in_features, layer.out_features // group.parts, **_like(layer))

    def inputs(layer: nn.Linear) -> nn.Module:
        made = Summed(layer.in_features // group.parts, layer.out_features, **_like(layer))
        made.group = group
        return made

    instead = 'set share = "layers"'
    divide(program, group.parts, outputs=outputs, inputs=inputs, who="parts", instead=instead)


def _like(layer: nn.Linear) -> dict[str, Any]:
    """Return what a share of a layer has in common with it."""
    return {"bias": layer.bias is not None, "device": META, "dtype": layer.weight.dtype}


def _spread(program: nn.Module, group: Group) -> None:
    """Leave a part its own layers; the last of each owner's tells all parts what it found."""
    for name, owner, last in _owners(program, group.parts):
        if owner != group.part:
            program.set_submodule(name, Elsewhere(group, owner, last=last))
        elif last:
            program.get_submodule(name).register_forward_hook(_telling(group))


def _owners(program: nn.Module, parts: int) -> Iterator[tuple[str, int, bool]]:
    """Yield the name of each layer with the part that has it, and whether others wait for it."""
    from regauge.models.architectures import blocks

    layers = {id(each) for each in blocks(program)}
    names = [name for name, each in program.named_modules() if id(each) in layers]
    if len(names) < parts:
        problem = f"{parts} parts cannot share {len(names)} layers of {type(program).__name__}"
        raise SettingsError(problem, f"the nearest number that can is {max(1, len(names))}")
    owners = [place * parts // len(names) for place in range(len(names))]
    lists = [name.rpartition(".")[0] for name in names]
    spans = list(zip(owners, lists, strict=True))
    lasts = [*(span != following for span, following in pairwise(spans)), True]
    yield from zip(names, owners, lasts, strict=True)


def _telling(group: Group) -> Any:
    def tell(layer: nn.Module, given: Any, output: Any) -> Tensor:
        del given
        if not isinstance(output, Tensor):
            problem = f"{type(layer).__name__} returns more than hidden states"
            raise SettingsError(problem, 'set share = "weights"')
        value = output.contiguous()
        group.tell(value, group.part)
        return value

    return tell
