"""The program as its framework computes it, one operation after another: works everywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from regauge.accelerators import Accelerator, Availability
from regauge.backends import Backend, Payload, Runner, Site

if TYPE_CHECKING:
    from regauge.accelerators import Precision
    from regauge.backends import Quantized


class Eager(Backend):
    """Nothing is compiled; what all others are compared with."""

    ahead: ClassVar[bool] = False
    packages: ClassVar[tuple[str, ...]] = ("torch", "transformers")

    @classmethod
    def available(cls) -> Availability:
        return Availability(1, "always there")

    def fits(self, accelerator: Accelerator) -> str | None:
        return "the device records operations" if accelerator.lazy else None

    def forms(self, accelerator: Accelerator) -> tuple[tuple[Precision, Quantized], ...]:
        return tuple((each, "no") for each in accelerator.precisions())

    def load(self, payload: Payload, site: Site) -> Runner:
        from regauge.backends._modules import Module

        return Module(payload, site)
