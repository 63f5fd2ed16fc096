"""PyTorch/XLA: one graph per bucket, compiled at load time.

Run with torch_xla 2.9 on the CPU. The code for TPUs and NeuronCores uses the same interface and was
not run on the hardware.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from regauge.inference.backends import Backend, ExecutionContext, Payload, Runner
from regauge.system import choices
from regauge.system.errors import SettingsError

if TYPE_CHECKING:
    from regauge.accelerators import Accelerator, Availability

DEVICES = ("xla", "neuron")
CACHE_VARIABLE = "XLA_PERSISTENT_CACHE_PATH"


class XlaBackend(Backend):
    """XLA graphs; every declared shape is computed once at load, and no graph is added later."""

    is_ahead_of_time: ClassVar[bool] = False
    has_dynamic_shapes: ClassVar[bool] = False
    packages: ClassVar[tuple[str, ...]] = ("torch", "torch_xla", "transformers")

    cache: str | None = None
    """Persistent graph cache folder. XLA's CPU client writes it but cannot read it."""

    @classmethod
    def available(cls) -> Availability:
        availability: Availability = choices.load("accelerators", "xla").available()
        return availability

    def obstacle(self, accelerator: Accelerator) -> str | None:
        if accelerator.kind not in DEVICES:
            return f"it compiles for {' and '.join(DEVICES)}, not for {accelerator.kind}"
        return None

    def load(self, payload: Payload, context: ExecutionContext) -> Runner:
        """Load a payload and compile every declared shape's graph.

        Raises SettingsError if `cache` is set and the process has already compiled a graph.
        """
        from regauge.inference.backends._runners import ModuleRunner

        if self.cache is not None:
            _set_graph_cache(context.accelerator, Path(self.cache))
        return ModuleRunner(payload, context).in_static_shapes(payload)


def _set_graph_cache(accelerator: Accelerator, folder: Path) -> None:
    """Set the graph cache; a process can have only one, set before the first compilation."""
    try:
        accelerator.set_graph_cache(folder)
    except AssertionError:  # torch_xla raises it at a second call
        if os.environ.get(CACHE_VARIABLE) != str(folder):
            problem = f"cache = '{folder}' has no effect: this process has already compiled graphs"
            raise SettingsError(problem, "load this artifact first, or leave cache out") from None
