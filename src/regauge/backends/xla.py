"""One graph for each shape of the ladder, compiled by XLA when the program is loaded.

Run with torch_xla 2.9 on the CPU; for TPUs and NeuronCores it is written to the same interface.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from regauge import choices
from regauge.backends import Backend, Payload, Runner, Shape, Site
from regauge.errors import SettingsError

if TYPE_CHECKING:
    from torch import Tensor

    from regauge.accelerators import Accelerator, Availability

DEVICES = ("xla", "neuron")
CACHE = "XLA_PERSISTENT_CACHE_PATH"


class Xla(Backend):
    """Every declared shape is computed once when the program is loaded; no graph comes later."""

    ahead: ClassVar[bool] = False
    symbolic: ClassVar[bool] = False
    packages: ClassVar[tuple[str, ...]] = ("torch", "torch_xla", "transformers")

    cache: str | None = None
    """Folder where graphs persist; XLA's client for the CPU writes them and cannot read them."""

    @classmethod
    def available(cls) -> Availability:
        found: Availability = choices.load("accelerators", "xla").available()
        return found

    def fits(self, accelerator: Accelerator) -> str | None:
        if accelerator.kind not in DEVICES:
            return f"it compiles for {' and '.join(DEVICES)}, not for {accelerator.kind}"
        return None

    def load(self, payload: Payload, site: Site) -> Runner:
        """Return what computes a payload, when every declared shape has its graph.

        Raises SettingsError for a `cache` in a process that has compiled something before.
        """
        from regauge.backends._modules import Module
        from regauge.backends._static import Static

        if self.cache is not None:
            _keep(site.accelerator, Path(self.cache))
        module = Module(payload, site)

        def compute(_: Shape, inputs: tuple[Tensor, ...]) -> Tensor:
            return module(*inputs).cpu()

        return Static(payload.inputs, payload.shapes, compute, module.graphs).warmed()


def _keep(accelerator: Accelerator, folder: Path) -> None:
    """Keep compiled graphs in a folder; a process can be told of one, before it compiles."""
    try:
        accelerator.use_cache(folder)
    except AssertionError:  # torch_xla's answer to a second time
        if os.environ.get(CACHE) != str(folder):
            problem = f"cache = '{folder}' comes too late: this process has compiled graphs"
            raise SettingsError(problem, "load this artifact first, or leave cache out") from None
