"""What a task puts on an encoder: kept beside the encoder's own folder, and found there again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from regauge import safetensors_io
from regauge.errors import SettingsError
from regauge.models.weights import Stored, listed

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from torch import Tensor, nn

HEAD = "head.safetensors"
OF_HEAD = "head."
"""Beginning of the names of a head's weights in a module."""


def freeze(model: nn.Module, layers: list[nn.Module], trained: int) -> None:
    """Train nothing of a model but so many of its last layers."""
    model.requires_grad_(requires_grad=False)
    if trained > len(layers):
        raise SettingsError(
            f"the encoder has {len(layers)} blocks, and task.encoder = {trained} of them",
            'name fewer, or "whole"',
        )
    for layer in layers[len(layers) - trained :]:
        layer.requires_grad_(requires_grad=True)


def of_head(name: str) -> bool:
    """Return whether a weight of a module is one of its head."""
    return name.startswith(OF_HEAD)


def write_head(folder: Path, weights: dict[str, Tensor]) -> None:
    """Write what a module has beside its model, if it has anything."""
    if weights:
        safetensors_io.write(folder / HEAD, weights)


def places(module: nn.Module, folder: Path) -> dict[str, Stored]:
    """Return where the weights of a module's head lie in a folder; nothing where it has none.

    Raises SettingsError for the head of another task.
    """
    weights = dict(module.named_parameters())
    own = _of_head(weights.items())
    if not own or not (folder / HEAD).exists():
        return {}
    found = listed(folder / HEAD)
    buffers = _of_head(module.named_buffers())
    wanted = {name: tuple(value.shape) for name, value in {**own, **buffers}.items()}
    for name in sorted({*wanted, *found}):
        ours = wanted.get(name, "not there")
        theirs = found[name].shape if name in found else "not there"
        if ours != theirs:
            raise SettingsError(
                f"the head in {folder} is of other features: {name} is {theirs} there, {ours} here",
                f"give the task the features that it was trained with, or delete {HEAD} there",
            )
    return {name: found[name] for name in own}


def read_buffers(module: nn.Module, folder: Path) -> None:
    """Fill the buffers of a module's head from a folder, where it has a head.

    They are read on the CPU, also where weights are being made on the meta device.
    """
    if (folder / HEAD).exists():
        found = listed(folder / HEAD)
        with torch.device("cpu"):
            for name, value in _of_head(module.named_buffers()).items():
                if name in found and found[name].shape == tuple(value.shape):
                    value.copy_(found[name][:])


def _of_head(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: value for name, value in named if of_head(name)}
