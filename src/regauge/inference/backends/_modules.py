"""Runner that calls the module itself on a device, optionally compiled at the first call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from regauge.models.tensors import move_module

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from regauge.inference.backends import ExecutionContext, Payload


class ModuleRunner:
    """Calls a program as a module on a device."""

    def __init__(self, payload: Payload, context: ExecutionContext) -> None:
        context.accelerator.set_precision(payload.precision)
        self.program = payload.build_program().eval()
        """The module on the device."""
        move_module(self.program, context.device)
        self._context = context
        self._graphs_before = context.accelerator.num_compiled_graphs()
        self._callable: Any = self.program

    def compile(self, **options: Any) -> ModuleRunner:
        """Compile the program with torch.compile at the first call; return this runner."""
        self._callable = torch.compile(self.program, **options)
        return self

    @torch.no_grad()
    def __call__(self, *inputs: np.ndarray | Tensor) -> Tensor:
        """Return the program's output, on the device."""
        on_host = map(torch.as_tensor, inputs)
        on_device = [value.to(self._context.device, non_blocking=True) for value in on_host]
        output: Tensor = self._callable(*on_device)
        self._context.accelerator.end_microbatch()
        return output

    def num_graphs(self) -> int:
        """Return how many graphs were compiled since the program was loaded."""
        return self._context.accelerator.num_compiled_graphs() - self._graphs_before
