"""Intel Gaudi through its bridge for PyTorch (habana_frameworks).

Written to the documentation of the Gaudi software 1.21 and later, and not run on its hardware.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from regauge.accelerators import (
    Accelerator,
    Availability,
    Chip,
    Precision,
)
from regauge.accelerators._environment import impose
from regauge.errors import SettingsError
from regauge.units import TERA

if TYPE_CHECKING:
    import torch
    from torch import nn

DEVICE = Path("/dev/accel/accel0")
PEAKS = {"GAUDI2": 432 * TERA, "GAUDI3": 1835 * TERA}
"""Dense bf16 peaks of the matrix engines (Intel's white papers of Gaudi 2 and Gaudi 3)."""


class Gaudi(Accelerator):
    """One HPU per process; several of them meet over HCCL."""

    variables: ClassVar[tuple[str, ...]] = ("PT_HPU_", "HABANA_", "HCCL_", "ENABLE_")

    mode: Literal["eager", "lazy"] = "eager"
    """Whether operations run at once, or are recorded; the vendor no longer develops `lazy`."""
    hpu_graphs: Literal["no", "yes"] = "yes"
    """Whether saved models are measured as recorded graphs that are replayed; in mode `lazy`."""
    recipe_cache: str | None = None
    """Folder where compiled recipes persist."""
    recipe_cache_mib: int = 1024
    """Its largest size."""

    @property
    def lazy(self) -> bool:
        return self.mode == "lazy"

    @classmethod
    def available(cls) -> Availability:
        if importlib.util.find_spec("habana_frameworks") is None:
            return Availability(0, "habana_frameworks is not installed (Intel Gaudi software)")
        if not DEVICE.exists():
            return Availability(0, f"the Gaudi driver shows no device ({DEVICE})")
        return Availability(100, f"habana_frameworks and {DEVICE}")

    def claim(self, index: int, threads: int) -> torch.device:
        """Set the bridge's variables, which it reads when it is imported, and take the HPU."""
        for name, value in self.environment().items():
            impose(name, value)
        import torch

        del index  # The bridge gives each process of a machine its own HPU.
        torch.set_num_threads(threads)
        return torch.device("hpu")

    def environment(self) -> dict[str, str]:
        """Return the variables that the bridge is set by."""
        found = {"PT_HPU_LAZY_MODE": str(int(self.lazy))}
        if self.recipe_cache is not None:
            # Folder, whether it is emptied at the start, and its size.
            cache = f"{self.recipe_cache},false,{self.recipe_cache_mib}"
            found["PT_HPU_RECIPE_CACHE_CONFIG"] = cache
        return found

    def count(self) -> int:
        from habana_frameworks.torch import hpu

        return int(hpu.device_count())

    def tools(self, size: int) -> tuple[tuple[str, ...], ...]:
        del size
        return (("hl-smi",),)

    def collectives(self) -> str:
        import habana_frameworks.torch.distributed.hccl  # noqa: F401 - it registers itself

        return "hccl"

    def precisions(self) -> tuple[Precision, ...]:
        return ("bf16", "fp32")

    def end_microbatch(self) -> None:
        self._mark()

    def end_step(self) -> None:
        self._mark()

    def compile_backend(self) -> str:
        return "hpu_backend"

    def obstacle_to_compiling(self) -> str | None:
        return "the bridge compiles what it records" if self.lazy else None

    def use_cache(self, folder: Path) -> None:
        """Raise SettingsError: the bridge is told of its cache when it is imported."""
        raise SettingsError(
            f"execution.compile_cache = '{folder}' comes too late for this device",
            "set accelerator.recipe_cache instead",
        )

    def for_inference(self, module: nn.Module) -> nn.Module:
        if not self.lazy or self.hpu_graphs == "no":
            return module
        from habana_frameworks.torch import hpu

        replayed: nn.Module = hpu.wrap_in_hpu_graph(module)
        return replayed

    def synchronize(self) -> None:
        from habana_frameworks.torch import hpu

        hpu.synchronize()

    def peak_memory_bytes(self) -> int | None:
        from habana_frameworks.torch import hpu

        return int(hpu.max_memory_allocated())

    def chip(self, precision: Precision) -> Chip:
        from habana_frameworks.torch import hpu

        name = str(hpu.get_device_name())
        peak = PEAKS.get(name)
        if peak is None or precision != "bf16":
            return Chip(name)
        return Chip(name, {"bf16": peak}, "the vendor's white paper, dense")

    def _mark(self) -> None:
        if self.lazy:
            import habana_frameworks.torch.core as bridge

            bridge.mark_step()
