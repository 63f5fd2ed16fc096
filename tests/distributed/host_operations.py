"""Finds operations of a training step that compute on tensors of the CPU instead of the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from regauge.training import trainer

COPIES = ("aten::_to_copy", "aten::copy_")
"""Operations that move values between the device and the CPU."""


class HostOperationRefusal(TorchDispatchMode):
    """Fails at an operation whose results are several floating-point numbers on the CPU."""

    num_operations = 0
    """The operations on any device that this process has seen."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        HostOperationRefusal.num_operations += 1
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and _is_computed_on_host(func, tensor):
                raise AssertionError(f"{func} computed {tuple(tensor.shape)} on the CPU")
        return result


def _is_computed_on_host(operation: Any, result: torch.Tensor) -> bool:
    is_large = result.is_floating_point() and result.numel() > 1
    return is_large and result.device.type == "cpu" and operation.name() not in COPIES


@contextmanager
def refuse_host_operations() -> Iterator[None]:
    """Fail a run in this block whose steps compute on the CPU.

    Evaluations add up the results of the device on the CPU.
    """
    step, steps = trainer.optimizer_step, 0

    def run_step(*arguments: Any) -> Any:
        nonlocal steps
        steps += 1
        with HostOperationRefusal():
            return step(*arguments)

    before = HostOperationRefusal.num_operations
    with patch.object(trainer, "optimizer_step", run_step):
        yield
    assert not steps or HostOperationRefusal.num_operations > before, "no step was observed"
