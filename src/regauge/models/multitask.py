"""One encoder with several task heads; each step trains one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from regauge.models.dropout import CounterDropout
from regauge.models.tensors import set_tensor
from regauge.system.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import Tensor
    from transformers import PreTrainedModel

    from regauge.models.dropout import DropoutKeys
    from regauge.models.modules import TextModule


class MultiTaskModel(nn.Module):
    """The modules of several tasks, whose models share one encoder's layers.

    Weights are named `tasks.<task>.…`; a shared layer is named after the first task that has it.
    """

    def __init__(self, modules: Mapping[str, TextModule]) -> None:
        super().__init__()
        _share_layers(modules)
        self.tasks = nn.ModuleDict(modules)
        self.active_task = next(iter(modules))
        """Task that `forward` computes."""

    @property
    def first_module(self) -> TextModule:
        return next(iter(modules_by_task(self).values()))

    @property
    def model(self) -> PreTrainedModel:
        return self.first_module.model

    @property
    def dropout_keys(self) -> DropoutKeys:
        """Dropout keys shared by all tasks."""
        return self.first_module.dropout_keys

    @property
    def compute_dtype(self) -> torch.dtype:
        return self.first_module.compute_dtype

    @compute_dtype.setter
    def compute_dtype(self, dtype: torch.dtype) -> None:
        for module in modules_by_task(self).values():
            module.compute_dtype = dtype

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        output: dict[str, Tensor] = self.tasks[self.active_task](batch)
        return output


def combine_modules(modules: Mapping[str, TextModule]) -> TextModule | MultiTaskModel:
    """Return one module for all tasks; a single module is returned unchanged."""
    return MultiTaskModel(modules) if len(modules) > 1 else next(iter(modules.values()))


def modules_by_task(module: nn.Module) -> dict[str, TextModule]:
    """Return task name -> module; a single task is named `""`."""
    tasks: Any = module.tasks if isinstance(module, MultiTaskModel) else {"": module}
    return dict(tasks.items())


def weight_prefix(name: str) -> str:
    """Return the weight name prefix of a task."""
    return f"tasks.{name}." if name else ""


def set_active_task(module: nn.Module, name: str) -> None:
    """Select the task that a module computes from now on; no effect on a single task."""
    if isinstance(module, MultiTaskModel):
        module.active_task = name


def _share_layers(modules: Mapping[str, TextModule]) -> None:
    """Replace equal layers by the first task's layers, and share one set of dropout keys.

    Raises SettingsError if one task trains a layer that another task freezes.
    """
    owners: dict[str, str] = {}
    layers: dict[str, nn.Module] = {}
    keys = next(iter(modules.values())).dropout_keys
    for task, module in modules.items():
        encoder = module.model.base_model
        replacements: dict[int, nn.Parameter] = {}
        for name, layer in list(encoder.named_children()):
            owner = owners.setdefault(name, task)
            if _requires_grad(layers.setdefault(name, layer)) != _requires_grad(layer):
                raise SettingsError(
                    f"tasks '{owner}' and '{task}' train different layers of the shared encoder",
                    "train the task without texts in a run of its own",
                )
            pairs = zip(layer.parameters(), layers[name].parameters(), strict=True)
            replacements |= {id(old): new for old, new in pairs}
            setattr(encoder, name, layers[name])
        for name, value in module.named_parameters(remove_duplicate=False):
            if id(value) in replacements:  # a head that is tied to a shared layer
                set_tensor(module, name, replacements[id(value)])
        module.dropout_keys = keys
        for layer in module.modules():
            if isinstance(layer, CounterDropout):
                layer.keys = keys


def _requires_grad(layer: nn.Module) -> list[bool]:
    return [value.requires_grad for value in layer.parameters()]
