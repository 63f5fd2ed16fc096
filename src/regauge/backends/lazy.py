"""The program compiled by torch when it is called first: for development, without an export."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from regauge.accelerators import Accelerator, Availability
from regauge.backends import Backend, Payload, Runner, Site

if TYPE_CHECKING:
    from regauge.accelerators import Precision
    from regauge.backends import Quantized


class Lazy(Backend):
    """torch.compile: seconds for the first batch, and again where the weights are loaded anew."""

    ahead: ClassVar[bool] = False
    packages: ClassVar[tuple[str, ...]] = ("torch", "transformers")

    @classmethod
    def available(cls) -> Availability:
        return Availability(1, "torch compiles")

    def fits(self, accelerator: Accelerator) -> str | None:
        return accelerator.obstacle_to_compiling()

    def forms(self, accelerator: Accelerator) -> tuple[tuple[Precision, Quantized], ...]:
        return tuple((each, "no") for each in accelerator.precisions())

    def load(self, payload: Payload, site: Site) -> Runner:
        from regauge.backends._modules import Module

        accelerator = site.accelerator
        options = accelerator.compile_options() or None
        dynamic = accelerator.symbolic
        module = Module(payload, site)
        return module.compiled(
            dynamic=dynamic, backend=accelerator.compile_backend(), options=options
        )
