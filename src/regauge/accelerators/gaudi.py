"""Intel Gaudi through its PyTorch bridge (habana_frameworks).

Written from the Gaudi software 1.24 documentation; not run on the hardware. The default there is
eager mode with torch.compile. Lazy mode and HPU graphs are legacy.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from regauge.accelerators import (
    Accelerator,
    Availability,
    ChipPeak,
    Precision,
    _hlml,
)
from regauge.accelerators._environment import set_variable
from regauge.system.errors import SettingsError
from regauge.system.units import TERA

if TYPE_CHECKING:
    import torch
    from torch import nn

    from regauge.system.device_counters import DeviceReader, ErrorReader

DEVICE = Path("/dev/accel/accel0")
PEAKS = {"GAUDI2": 432 * TERA, "GAUDI3": 1835 * TERA}
"""Dense bf16 peaks of the matrix engines (Intel's Gaudi 2 and Gaudi 3 white papers)."""


class Gaudi(Accelerator):
    """One HPU per process; processes communicate over HCCL."""

    peer_names: ClassVar[tuple[str, ...]] = ("hpu", "habana")
    chip_vendors: ClassVar[tuple[str, ...]] = ("Intel/Habana",)

    env_prefixes: ClassVar[tuple[str, ...]] = ("PT_HPU_", "HABANA_", "HCCL_", "ENABLE_")

    mode: Literal["eager", "lazy"] = "eager"
    """`eager` runs operations at once; `lazy` is Intel's legacy mode, which records graphs."""
    hpu_graphs: bool = True
    """Evaluate saved models with recorded HPU graphs; legacy, `lazy` mode only."""
    recipe_cache: str | None = None
    """Folder for the persistent recipe cache (compiled graphs)."""
    recipe_cache_mib: int = 1024
    """Maximum recipe cache size in MiB."""

    @property
    def is_lazy(self) -> bool:
        return self.mode == "lazy"

    @classmethod
    def available(cls) -> Availability:
        if importlib.util.find_spec("habana_frameworks") is None:
            return Availability(0, "habana_frameworks is not installed (Intel Gaudi software)")
        if not DEVICE.exists():
            return Availability(0, f"the Gaudi driver shows no device ({DEVICE})")
        return Availability(100, f"habana_frameworks and {DEVICE}")

    def claim(self, index: int, threads: int) -> torch.device:
        """Set the variables that the bridge reads when it is imported, and select the HPU."""
        for name, value in self.environment().items():
            set_variable(name, value)
        import torch

        del index  # The bridge gives each process of a machine its own HPU.
        torch.set_num_threads(threads)
        return torch.device("hpu")

    def environment(self) -> dict[str, str]:
        """Return the bridge's environment variables."""
        variables = {"PT_HPU_LAZY_MODE": str(int(self.is_lazy))}
        if self.recipe_cache is not None:
            # The folder, whether it is cleared at the start, and its maximum size.
            cache = f"{self.recipe_cache},false,{self.recipe_cache_mib}"
            variables["PT_HPU_RECIPE_CACHE_CONFIG"] = cache
        return variables

    def num_devices(self) -> int:
        from habana_frameworks.torch import hpu

        return int(hpu.device_count())

    def diagnostic_commands(self, num_devices: int) -> tuple[tuple[str, ...], ...]:
        del num_devices
        return (("hl-smi",),)

    def open_counters(self) -> DeviceReader:
        return _hlml.open_counters()

    def open_errors(self) -> ErrorReader:
        return _hlml.open_errors()

    def distributed_backend(self) -> str:
        import habana_frameworks.torch.distributed.hccl  # noqa: F401 - the import registers it

        return "hccl"

    def precisions(self) -> tuple[Precision, ...]:
        return ("bf16", "fp32")

    def end_microbatch(self) -> None:
        if self.is_lazy:
            import habana_frameworks.torch.core as bridge

            bridge.mark_step()

    def end_step(self) -> None:
        self.end_microbatch()

    def compile_backend(self) -> str:
        return "hpu_backend"

    def compile_obstacle(self) -> str | None:
        return "the bridge compiles recorded graphs itself" if self.is_lazy else None

    def set_graph_cache(self, folder: Path) -> None:
        """Raise SettingsError, because the bridge reads its cache settings when it is imported."""
        raise SettingsError(
            f"execution.compile_cache = '{folder}' has no effect on gaudi",
            "set accelerator.recipe_cache instead",
        )

    def prepare_for_inference(self, module: nn.Module) -> nn.Module:
        if not self.is_lazy or not self.hpu_graphs:
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

    def chip_peak(self, precision: Precision) -> ChipPeak:
        from habana_frameworks.torch import hpu

        name = str(hpu.get_device_name())
        peak = PEAKS.get(name)
        if peak is None or precision != "bf16":
            return ChipPeak(name)
        return ChipPeak(name, {"bf16": peak}, "the vendor's white paper, dense")
