"""The program as its framework computes it, one operation after another: works everywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from regauge.accelerators import Accelerator, Availability
from regauge.backends import Backend, Payload, Runner, Site

if TYPE_CHECKING:
    from regauge.accelerators import Precision
    from regauge.backends import Quantized


class Eager(Backend):
    """Nothing is compiled; what all others are compared with."""

    ahead: ClassVar[bool] = False
    looping: ClassVar[bool] = True
    packages: ClassVar[tuple[str, ...]] = ("torch", "transformers")

    parts: int = Field(default=1, ge=1)
    """Devices of one machine that a program lies on, with a process for each."""
    share: Literal["weights", "layers"] = "weights"
    """What they share: `weights` of each layer by tensor parallelism, or whole `layers` in turn."""
    part_seconds: float = Field(default=60.0, gt=0)
    """Longest wait of one part for another."""

    @property
    def devices(self) -> int:
        return self.parts

    @classmethod
    def available(cls) -> Availability:
        return Availability(1, "always there")

    def fits(self, accelerator: Accelerator) -> str | None:
        if accelerator.lazy:
            return "the device records operations"
        return _obstacle(accelerator.collectives()) if self.parts > 1 else None

    def forms(self, accelerator: Accelerator) -> tuple[tuple[Precision, Quantized], ...]:
        return tuple((each, "no") for each in accelerator.precisions())

    def load(self, payload: Payload, site: Site) -> Runner:
        """Return what computes a payload; raises SettingsError where parts cannot share it."""
        if self.parts > 1:
            from regauge.backends._parallel import Parallel
            from regauge.backends._parts import Sharing

            return Parallel(payload, site, Sharing(self.parts, self.share, self.part_seconds))
        from regauge.backends._modules import Module

        return Module(payload, site)


def _obstacle(collectives: str) -> str | None:
    """Return why parts cannot meet, or None."""
    from regauge.backends._group import kind_of

    return None if kind_of(collectives) else f"parts cannot meet over '{collectives}'"
