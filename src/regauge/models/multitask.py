"""One encoder with the heads of several tasks, which take turns on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from regauge.errors import SettingsError
from regauge.models.dropout import CounterDropout
from regauge.models.tensors import put

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import Tensor
    from transformers import PreTrainedModel

    from regauge.models.dropout import DropoutKeys
    from regauge.models.modules import TextModule


class MultiTaskModel(nn.Module):
    """The modules of several tasks whose models share the layers of one body.

    Weights are named `tasks.<task>.…`; what is shared belongs to the first task that has it.
    """

    def __init__(self, parts: Mapping[str, TextModule]) -> None:
        super().__init__()
        _share(parts)
        self.tasks = nn.ModuleDict(parts)
        self.turn = next(iter(parts))
        """The task that is computed."""

    @property
    def first(self) -> TextModule:
        """The module of the first task."""
        return next(iter(modules_by_task(self).values()))

    @property
    def model(self) -> PreTrainedModel:
        """The first task's model."""
        return self.first.model

    @property
    def dropout_keys(self) -> DropoutKeys:
        """The keys that all parts share."""
        return self.first.dropout_keys

    @property
    def compute_dtype(self) -> torch.dtype:
        """The type of the computation."""
        return self.first.compute_dtype

    @compute_dtype.setter
    def compute_dtype(self, dtype: torch.dtype) -> None:
        for part in modules_by_task(self).values():
            part.compute_dtype = dtype

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return what the module of the task returns whose turn it is."""
        output: dict[str, Tensor] = self.tasks[self.turn](batch)
        return output


def combine(found: Mapping[str, TextModule]) -> TextModule | MultiTaskModel:
    """Return one module for all tasks: the only one, or one of several."""
    return MultiTaskModel(found) if len(found) > 1 else next(iter(found.values()))


def modules_by_task(module: nn.Module) -> dict[str, TextModule]:
    """Return the module of each task by its name; a run's only task has none."""
    tasks: Any = module.tasks if isinstance(module, MultiTaskModel) else {"": module}
    return dict(tasks.items())


def prefix(name: str) -> str:
    """Return what stands before the names of a task's weights."""
    return f"tasks.{name}." if name else ""


def set_active_task(module: nn.Module, name: str) -> None:
    """Let a module compute for a task from now on."""
    if isinstance(module, MultiTaskModel):
        module.turn = name


def _share(found: Mapping[str, TextModule]) -> None:
    """Give every part the layers of the first that has them, and one set of dropout keys.

    Raises SettingsError where one part trains what another keeps as it is.
    """
    owners: dict[str, str] = {}
    layers: dict[str, nn.Module] = {}
    keys = next(iter(found.values())).dropout_keys
    for name, part in found.items():
        body = part.model.base_model
        instead: dict[int, nn.Parameter] = {}
        for key, layer in list(body.named_children()):
            owner = owners.setdefault(key, name)
            if _trained(layers.setdefault(key, layer)) != _trained(layer):
                raise SettingsError(
                    f"tasks '{owner}' and '{name}' train other parts of the encoder they share",
                    "let both train the same",
                )
            pairs = zip(layer.parameters(), layers[key].parameters(), strict=True)
            instead |= {id(old): new for old, new in pairs}
            setattr(body, key, layers[key])
        for key, value in part.named_parameters(remove_duplicate=False):
            if id(value) in instead:  # a head that is tied to what is shared
                put(part, key, instead[id(value)])
        part.dropout_keys = keys
        for each in part.modules():
            if isinstance(each, CounterDropout):
                each.keys = keys


def _trained(layer: nn.Module) -> list[bool]:
    return [value.requires_grad for value in layer.parameters()]
