"""Adapts a custom `nn.Module` to the transformers model interface."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from regauge.models.attention_masks import AttentionSpec
from regauge.models.dropout import DropoutKeys
from regauge.models.losses import Batch
from regauge.models.modules import TextModule
from regauge.system.errors import DataError, SettingsError

INIT_METHODS = ("reset_parameters", "_reset_parameters")
"""Methods that initialize layer weights, in torch and by convention."""


class CustomModule(TextModule):
    """Wraps a module that maps a task's batch to the tensors its loss reads.

    Each submodule with weights must initialize them in `reset_parameters`, as torch's layers do:
    the module is built on the meta device, so constructors cannot initialize weights. Dropout is
    torch's, so equal bits need the same device and microbatch.

    Raises DataError if a weight lacks an initializer, or a buffer lacks values.
    """

    def __init__(self, module: nn.Module) -> None:
        _check_initializable(module)
        super().__init__(PretrainedAdapter(module), DropoutKeys(), AttentionSpec())

    @property
    def max_tokens(self) -> int | None:
        """None, because the module checks its inputs."""
        return None

    def forward(self, batch: Batch) -> Batch:
        """Return the outputs of the module for a batch.

        Raises SettingsError if the module does not return a dictionary.
        """
        output: object = self.model(batch)
        if isinstance(output, dict):
            return output
        name, returned = type(self.model.module).__name__, type(output).__name__
        problem = f"{name}.forward returns an object of type {returned}"
        raise SettingsError(problem, "return a dictionary of the tensors that the loss reads")


class PretrainedAdapter(PreTrainedModel):
    """Gives a plain module the weight and configuration interface of transformers models."""

    config_class = PretrainedConfig
    base_model_prefix = "module"

    def __init__(self, module: nn.Module) -> None:
        super().__init__(PretrainedConfig())
        self.module = module

    def forward(self, batch: Batch) -> Batch:
        output: Batch = self.module(batch)
        return output

    def _init_weights(self, module: Any) -> None:
        for method in INIT_METHODS:
            if hasattr(module, method):
                getattr(module, method)()
                return


def _check_initializable(module: nn.Module) -> None:
    """Raise DataError for weights without an initializer, and for buffers without values."""
    for name, layer in module.named_modules():
        label = f"{type(layer).__name__}{f' ({name})' if name else ''}"
        has_init = any(hasattr(layer, method) for method in INIT_METHODS)
        if not has_init and next(layer.parameters(recurse=False), None) is not None:
            raise DataError(
                f"{label} has weights but no initializer", "define reset_parameters(self)"
            )
        if any(not weight.dim() for weight in layer.parameters(recurse=False)):
            raise DataError(f"{label} has a weight without dimensions", "give it the shape (1,)")
        if any(buffer.is_meta for buffer in layer.buffers(recurse=False)):
            raise DataError(f"{label} has a buffer without values", 'create it with device="cpu"')
