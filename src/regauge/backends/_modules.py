"""A program on a device, as its framework computes it: shared by what compiles when it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from regauge.models.tensors import move

if TYPE_CHECKING:
    from torch import Tensor, nn

    from regauge.backends import Payload, Site


class Module:
    """A program that is called as it is."""

    def __init__(self, payload: Payload, site: Site) -> None:
        site.accelerator.use(payload.precision)
        self.program = payload.program().eval()
        move(self.program, site.device)
        self.site = site
        self._before = site.accelerator.graphs_compiled()
        self._called: Any = self.program

    def compiled(self, **options: Any) -> Module:
        """Let torch compile the program when it is called first; return it."""
        self._called = torch.compile(self.program, **options)
        return self

    def wrapped(self) -> Module:
        """Let the accelerator make of the program what it computes the fastest; return it."""
        self._called = self.site.accelerator.for_inference(self.program)
        return self

    @torch.no_grad()
    def __call__(self, *inputs: Tensor) -> Tensor:
        """Return what the program does."""
        placed = [each.to(self.site.device, non_blocking=True) for each in inputs]
        output: Tensor = self._called(*placed)
        self.site.accelerator.end_microbatch()
        return output

    def graphs(self) -> int:
        """Return how many graphs were compiled since the program was loaded."""
        return self.site.accelerator.graphs_compiled() - self._before


def named(program: nn.Module) -> str:
    """Return what a program is called where it fails."""
    return type(program).__name__
