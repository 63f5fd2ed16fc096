"""Tensor utilities: moving modules to a device, tied weights, and bit sums.

`Module.to` may create new parameters if a device cannot share storage with the CPU. Tied weights
then become two weights that diverge, and hooks are lost. `move_module` restores and verifies both.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch

from regauge.system.errors import PreflightError

if TYPE_CHECKING:
    from typing import TypeGuard

    from torch import Tensor, nn
    from torch.distributed.tensor import DTensor

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtype by element size in bytes."""


def precision_dtype(precision: str) -> torch.dtype:
    """Return a precision's compute dtype; TF32 is fp32, rounded in matrix products.

    With fp8, linear layers round their inputs to fp8, and all else is in bf16.
    """
    dtypes = {"bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp16": torch.float16}
    return dtypes.get(precision, torch.float32)


def is_sharded(value: object) -> TypeGuard[DTensor]:
    """Return whether a value is a DTensor.

    None exists before its module is imported. The import takes half a second, so a process that
    shards nothing does without it.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local_shard(value: Tensor) -> Tensor:
    """Return a DTensor's local shard; other tensors are returned unchanged."""
    return value.to_local() if is_sharded(value) else value


def move_module(module: nn.Module, device: torch.device) -> None:
    """Move a module to a device in place; tied weights stay tied, hooks and dtypes are kept.

    Raises PreflightError naming a tensor that changed.
    """
    groups = find_tied_weights(module)
    before = {name: _tensor_state(value) for name, value in _named_tensors(module).items()}
    module.to(device)
    for name, *tied_names in groups:
        parameter = module.get_parameter(name)
        for tied_name in tied_names:
            set_tensor(module, tied_name, parameter)
    after = {name: _tensor_state(value) for name, value in _named_tensors(module).items()}
    changed = [name for name in before if before[name] != after.get(name)]
    not_moved = [
        name for name, value in _named_tensors(module).items() if value.device.type != device.type
    ]
    if find_tied_weights(module) != groups or changed or not_moved or len(before) != len(after):
        broken = next(iter([*changed, *not_moved]), "a tied weight")
        raise PreflightError(
            f"'{broken}' was changed by the move to {device}",
            "this is a bug of torch on that device; use another accelerator and report it",
        )


def find_tied_weights(module: nn.Module) -> list[list[str]]:
    """Return the names of each weight that has several."""
    names: dict[int, list[str]] = {}
    for name, value in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(value), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def set_tensor(module: nn.Module, name: str, value: Tensor) -> None:
    """Replace the weight or buffer with this name."""
    parent, _, attribute = name.rpartition(".")
    setattr(module.get_submodule(parent), attribute, value)


def bit_sum(value: Tensor) -> Tensor:
    """Return the int64 sum over a tensor's elements, with their bits read as integers."""
    words = value.detach().contiguous().view(INTEGERS[value.element_size()])
    return words.sum(dtype=torch.int64)


def _named_tensors(module: nn.Module) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    return {**weights, **dict(module.named_buffers(remove_duplicate=False))}


def _tensor_state(value: Tensor) -> tuple[object, ...]:
    """Return the tensor properties that a move must not change."""
    hooks = (value._backward_hooks, getattr(value, "_post_accumulate_grad_hooks", None))  # noqa: SLF001
    count = sum(len(registered) for registered in hooks if registered)
    return tuple(value.shape), value.dtype, value.requires_grad, count
