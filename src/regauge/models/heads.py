"""Task heads: their weights are stored in a separate file of the encoder's folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch

from regauge.models.weights import (
    POOLER_PREFIX,
    StoredWeight,
    base_weight_name,
    list_file_weights,
)
from regauge.system import safetensors_io
from regauge.system.errors import SettingsError
from regauge.system.wording import format_count

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from torch import Tensor, nn
    from transformers import PreTrainedModel

TrainableLayers = Literal["all", "none"] | int
HEAD_FILE = "head.safetensors"
HEAD_PREFIX = "head."
"""Weight name prefix of a head in its module."""


def freeze_encoder(
    model: PreTrainedModel,
    blocks: list[nn.Module],
    trainable_layers: TrainableLayers,
    *,
    trains_pooler: bool,
) -> None:
    """Freeze the encoder except its last `trainable_layers` blocks.

    The head stays trained, and so does the encoder's pooling layer if `trains_pooler`. A head
    weight tied to the embeddings is frozen with them. Raises SettingsError if the model has fewer
    blocks.
    """
    if trainable_layers == "all":
        return
    count = 0 if trainable_layers == "none" else trainable_layers
    if count > len(blocks):
        num_blocks = format_count(len(blocks), "block")
        problem = f"the encoder has {num_blocks}, but model.trainable_layers = {count}"
        raise SettingsError(problem, 'set it lower, or to "all"')
    encoder: Any = model.base_model
    for name, value in encoder.named_parameters():
        value.requires_grad_(trains_pooler and name.startswith(POOLER_PREFIX))
    for block in blocks[len(blocks) - count :]:
        block.requires_grad_(requires_grad=True)


def train_head(model: PreTrainedModel) -> None:
    """Train a new task's head and the encoder's pooling layer, except layers with adapters."""
    encoder: Any = model.base_model
    inner = {
        id(value)
        for name, value in encoder.named_parameters()
        if not name.startswith(POOLER_PREFIX)
    }
    for name, value in model.named_parameters():
        if id(value) not in inner and base_weight_name(name) == name:
            value.requires_grad = True


def check_trained(module: nn.Module, trainable_layers: TrainableLayers) -> None:
    """Raise SettingsError if no weight of a module is trained, or if nothing could be frozen."""
    trained = [value.requires_grad for value in module.parameters()]
    if trainable_layers != "all" and all(trained):
        problem = "model.trainable_layers has no effect on a custom module"
        raise SettingsError(problem, "remove it, and freeze weights in the module")
    if not any(trained):
        problem = "no weight is trained: the task adds no head to the frozen encoder"
        raise SettingsError(problem, 'set model.trainable_layers to a number, or to "all"')


def is_head_weight(name: str) -> bool:
    return name.startswith(HEAD_PREFIX)


def write_head(folder: Path, weights: dict[str, Tensor]) -> None:
    if weights:
        safetensors_io.write_tensors(folder / HEAD_FILE, weights)


def find_head_weights(module: nn.Module, folder: Path) -> dict[str, StoredWeight]:
    """Return the stored weights of a module's head by name; empty if the folder lacks a head.

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
