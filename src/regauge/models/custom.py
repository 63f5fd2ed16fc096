"""A user's own module in the place of an architecture of transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from regauge.errors import DataError
from regauge.models.attention_masks import Reading
from regauge.models.dropout import DropoutKeys
from regauge.models.losses import Batch
from regauge.models.modules import TextModule

if TYPE_CHECKING:
    from torch import Tensor

RULES = ("reset_parameters", "_reset_parameters")
"""How torch's layers, and those of most people, call what draws their weights."""


class Own(TextModule):
    """Any module that takes a batch of its task and returns what the task's loss reads.

    Each part that has weights of its own draws them in `reset_parameters`, as torch's layers do:
    the module is made without memory, and a constructor draws nothing. Its dropout is torch's own,
    so the same bits need the same device and microbatch. Raises DataError where a part breaks that.
    """

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        _check(module)
        self.model = Shell(module)
        self.dropout_keys = DropoutKeys()
        self.compute_dtype = torch.float32
        self.reading = Reading()

    @property
    def longest(self) -> int | None:
        """None: the module itself says what it cannot read."""
        return None

    def forward(self, batch: Batch) -> Batch:
        """Return what the module does of a batch."""
        found: dict[str, Tensor] = self.model(batch)
        return found


class Shell(PreTrainedModel):
    """What transformers and files of weights ask of a model, around a module that knows neither."""

    config_class = PretrainedConfig
    base_model_prefix = "module"

    def __init__(self, module: nn.Module) -> None:
        super().__init__(PretrainedConfig())
        self.module = module

    def forward(self, batch: Batch) -> Batch:
        """Return what the module does of a batch."""
        found: dict[str, Tensor] = self.module(batch)
        return found

    def _init_weights(self, module: Any) -> None:
        for rule in RULES:
            if hasattr(module, rule):
                getattr(module, rule)()
                return


def _check(module: nn.Module) -> None:
    """Raise DataError for weights that nothing draws, and for buffers that nothing fills."""
    for name, part in module.named_modules():
        kind = f"{type(part).__name__}{f' ({name})' if name else ''}"
        drawn = any(hasattr(part, rule) for rule in RULES)
        if not drawn and next(part.parameters(recurse=False), None) is not None:
            raise DataError(
                f"{kind} has weights that nothing draws", "give it reset_parameters(self)"
            )
        if any(not weight.dim() for weight in part.parameters(recurse=False)):
            raise DataError(f"{kind} has a weight without dimensions", "give it the shape (1,)")
        if any(buffer.is_meta for buffer in part.buffers(recurse=False)):
            raise DataError(f"{kind} has a buffer without values", 'make it with device="cpu"')
