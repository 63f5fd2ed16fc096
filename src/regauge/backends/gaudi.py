"""One graph for each shape of the ladder on Intel Gaudi, made when the program is loaded.

Written to the documentation of the Gaudi software 1.21 and later, and not run on its hardware.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from regauge import choices
from regauge.backends import Backend, Payload, Runner, Shape, Site

if TYPE_CHECKING:
    from torch import Tensor

    from regauge.accelerators import Accelerator, Availability


class Gaudi(Backend):
    """HPU graphs where the accelerator's mode is lazy, and torch.compile where it is eager."""

    ahead: ClassVar[bool] = False
    symbolic: ClassVar[bool] = False
    packages: ClassVar[tuple[str, ...]] = ("torch", "habana_torch_plugin", "transformers")

    tensor_cache: Literal["no", "yes"] = "no"
    """Whether HPU graphs keep their tensors between replays; without, they need less memory."""

    @classmethod
    def available(cls) -> Availability:
        found: Availability = choices.load("accelerators", "gaudi").available()
        return found

    def fits(self, accelerator: Accelerator) -> str | None:
        if accelerator.kind != "gaudi":
            return f"it makes graphs for gaudi, not for {accelerator.kind}"
        return None

    def load(self, payload: Payload, site: Site) -> Runner:
        """Return what computes a payload, when every declared shape has its graph."""
        return (self._recorded if site.accelerator.lazy else _compiled)(payload, site)

    def _recorded(self, payload: Payload, site: Site) -> Runner:
        """Return what replays HPU graphs, which exist in lazy mode alone."""
        import torch
        from habana_frameworks.torch import hpu

        from regauge.backends._static import Static
        from regauge.models.tensors import move

        site.accelerator.use(payload.precision)
        program = payload.program().eval()
        move(program, site.device)
        replayed = hpu.wrap_in_hpu_graph(
            program,
            disable_tensor_cache=self.tensor_cache == "no",
            max_graphs=len(payload.shapes),
        )
        seen: set[Shape] = set()

        @torch.no_grad()
        def compute(shape: Shape, inputs: tuple[Tensor, ...]) -> Tensor:
            seen.add(shape)
            output: Tensor = replayed(*(each.to(site.device) for each in inputs))
            return output.to("cpu", copy=True)  # the next replay writes to the same address

        return Static(payload.inputs, payload.shapes, compute, lambda: len(seen)).warmed()


def _compiled(payload: Payload, site: Site) -> Runner:
    """Return a program that torch compiles by the vendor's backend, for each shape anew."""
    from torch._dynamo import config as compiler

    from regauge.backends._modules import Module
    from regauge.backends._static import Static

    # Past its limit (8 of one function) it would compute all others operation by operation.
    compiler.recompile_limit += len(payload.shapes)
    backend = site.accelerator.compile_backend()
    module = Module(payload, site).compiled(backend=backend, dynamic=False)

    def compute(_: Shape, inputs: tuple[Tensor, ...]) -> Tensor:
        return module(*inputs).cpu()

    return Static(payload.inputs, payload.shapes, compute, module.graphs).warmed()
