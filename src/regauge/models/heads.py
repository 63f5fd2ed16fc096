"""Task heads: their weights are stored in a separate file of the encoder's folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from regauge import safetensors_io
from regauge.errors import SettingsError
from regauge.models.weights import StoredWeight, list_file_weights

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from torch import Tensor, nn

HEAD_FILE = "head.safetensors"
HEAD_PREFIX = "head."
"""Prefix of the weight names of a head in its module."""


def freeze_except_last(model: nn.Module, layers: list[nn.Module], trained: int) -> None:
    """Freeze all weights of a model except its last `trained` layers.

    Raises SettingsError if the model has fewer layers.
    """
    model.requires_grad_(requires_grad=False)
    if trained > len(layers):
        raise SettingsError(
            f"the encoder has {len(layers)} blocks, but task.trainable_layers = {trained}",
            'set it lower, or to "all"',
        )
    for layer in layers[len(layers) - trained :]:
        layer.requires_grad_(requires_grad=True)


def is_head_weight(name: str) -> bool:
    """Return whether a weight name of a module belongs to its head."""
    return name.startswith(HEAD_PREFIX)


def write_head(folder: Path, weights: dict[str, Tensor]) -> None:
    """Write the weights of a head, if there are any."""
    if weights:
        safetensors_io.write_tensors(folder / HEAD_FILE, weights)


def find_head_weights(module: nn.Module, folder: Path) -> dict[str, StoredWeight]:
    """Return the stored weights of a module's head by name; empty if the folder has no head.

    Raises SettingsError if the stored head has other shapes.
    """
    parameters = _select_head(module.named_parameters())
    if not parameters or not (folder / HEAD_FILE).exists():
        return {}
    stored = list_file_weights(folder / HEAD_FILE)
    tensors = {**parameters, **_select_head(module.named_buffers())}
    for name in sorted({*tensors, *stored}):
        shape = tuple(tensors[name].shape) if name in tensors else "absent"
        stored_shape = stored[name].shape if name in stored else "absent"
        if shape != stored_shape:
            raise SettingsError(
                f"the head in {folder} has other features: {name} is {stored_shape}, not {shape}",
                f"set the features that it was trained with, or delete its {HEAD_FILE}",
            )
    return {name: stored[name] for name in parameters}


def read_head_buffers(module: nn.Module, folder: Path) -> None:
    """Copy the stored buffers of a module's head, if the folder has a head.

    Reads on the CPU even if torch's default device is meta.
    """
    if (folder / HEAD_FILE).exists():
        stored = list_file_weights(folder / HEAD_FILE)
        with torch.device("cpu"):
            for name, value in _select_head(module.named_buffers()).items():
                if name in stored and stored[name].shape == tuple(value.shape):
                    value.copy_(stored[name][:])


def _select_head(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: value for name, value in tensors if is_head_weight(name)}
