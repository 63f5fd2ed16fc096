"""Moving a module to a device in a type, and the proof that nothing came apart on the way.

`Module.to` may give a module new parameters where a device cannot share storage with the CPU. Then
weights that were one object become two that drift apart, and hooks stay behind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from regauge.errors import PreflightError

if TYPE_CHECKING:
    from torch import Tensor, nn

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Form(NamedTuple):
    """What must be the same before and after."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool
    hooks: int


def dtype_of(precision: str) -> torch.dtype:
    """Return the type in which a precision computes; TF32 is fp32 that is rounded in products."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)


def local(value: Tensor) -> Tensor:
    """Return this process's part of a tensor."""
    return value.to_local() if isinstance(value, DTensor) else value


def move(module: nn.Module, device: torch.device) -> None:
    """Move a module in place: tied weights stay tied, and types, shapes and hooks as they were.

    Raises PreflightError with the name of what came apart.
    """
    groups = ties(module)
    before = {name: _form(value) for name, value in _tensors(module).items()}
    module.to(device)
    for first, *others in groups:
        parameter = module.get_parameter(first)
        for name in others:
            put(module, name, parameter)
    after = {name: _form(value) for name, value in _tensors(module).items()}
    changed = [name for name in before if before[name] != after.get(name)]
    elsewhere = [
        name for name, value in _tensors(module).items() if value.device.type != device.type
    ]
    if ties(module) != groups or changed or elsewhere or len(before) != len(after):
        broken = next(iter([*changed, *elsewhere]), "a tied weight")
        raise PreflightError(
            f"'{broken}' did not survive the move to {device}",
            "this is a fault of that device's torch: use another accelerator and report it",
        )


def ties(module: nn.Module) -> list[list[str]]:
    """Return the names of every weight that has more than one."""
    names: dict[int, list[str]] = {}
    for name, value in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(value), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def put(module: nn.Module, name: str, value: Tensor) -> None:
    """Put a weight or a buffer in the place of the one with that name."""
    parent, _, last = name.rpartition(".")
    setattr(module.get_submodule(parent), last, value)


def bits(value: Tensor) -> Tensor:
    """Return the sum of the bits of a tensor, read as integers."""
    words = value.detach().contiguous().view(INTEGERS[value.element_size()])
    return words.sum(dtype=torch.int64)


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    return {**weights, **dict(module.named_buffers(remove_duplicate=False))}


def _form(value: Tensor) -> _Form:
    hooks = (value._backward_hooks, getattr(value, "_post_accumulate_grad_hooks", None))  # noqa: SLF001
    count = sum(len(found) for found in hooks if found)
    return _Form(tuple(value.shape), value.dtype, value.requires_grad, count)
