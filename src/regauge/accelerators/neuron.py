"""AWS Trainium and Inferentia through PyTorch/XLA (torch-neuronx up to 2.9): Trn1, Inf2, Trn2.

Written from the Neuron SDK 2.28 and 2.29 documentation; not run on the hardware.
"""

from __future__ import annotations

import importlib.util
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from regauge.accelerators import Availability, ChipPeak, GraphCollector, Precision
from regauge.accelerators._environment import set_variable
from regauge.accelerators._xla import XlaDevice, torch_xla_obstacle
from regauge.system.errors import SettingsError
from regauge.system.units import TERA

if TYPE_CHECKING:
    import torch

TOOL = "neuron_parallel_compile"
CACHE_VARIABLE = "NEURON_COMPILE_CACHE_URL"
DEVICE = Path("/dev/neuron0")
PRODUCT = Path("/sys/devices/virtual/dmi/id/product_name")
CORE_PEAKS = {"trn1": 95 * TERA, "inf2": 95 * TERA}
"""Dense bf16 peak of one NeuronCore-v2: half of the chip's 190 TFLOP/s (awsdocs-neuron)."""


class Neuron(XlaDevice):
    """One NeuronCore per process."""

    peer_names: ClassVar[tuple[str, ...]] = ("trainium", "inferentia", "trn1", "trn2")
    chip_vendors: ClassVar[tuple[str, ...]] = ("AWS",)

    env_prefixes: ClassVar[tuple[str, ...]] = (*XlaDevice.env_prefixes, "NEURON_", "NEURONCORE_")

    target: Literal["auto", "trn1", "trn2", "inf2"] = "auto"
    """Chip to compile for; `auto` reads the instance type."""
    optlevel: Literal[1, 2, 3] = 1
    """Optimization level; 1 compiles much faster and costs a few per cent of the throughput."""
    auto_cast: Literal["none", "matmult", "all"] = "none"
    """fp32 operations that the compiler may cast; always passed, since the compiler default has
    changed."""
    auto_cast_type: Literal["bf16", "fp16", "tf32"] = "bf16"
    """Target type of the cast."""
    model_type: Literal["transformer", "generic", "unet-inference"] = "transformer"
    """Model family that the compiler optimizes for."""
    stochastic_rounding: bool = False
    """Round stochastically when casting to fewer bits."""
    cache: str | None = None
    """Folder or s3:// address for compiled graphs; default: the SDK's folder."""
    visible_cores: str | None = None
    """NeuronCores that this process may use, such as `0-3`; default: set by the launcher."""

    @classmethod
    def available(cls) -> Availability:
        if importlib.util.find_spec("torch_neuronx") is None:
            return Availability(0, "torch_neuronx is not installed (Neuron SDK)")
        if importlib.util.find_spec("torch_xla") is None:
            reason = f"torch_neuronx {version('torch_neuronx')} is installed without torch_xla"
            return Availability(0, f"{reason}: set accelerator.kind = 'neuron-native'")
        if obstacle := torch_xla_obstacle():
            return Availability(0, obstacle)
        if not DEVICE.exists():
            return Availability(0, f"the Neuron driver shows no device ({DEVICE})")
        return Availability(100, f"torch_neuronx {version('torch_neuronx')} and {DEVICE}")

    def platform(self) -> str:
        return "NEURON"

    def diagnostic_commands(self, num_devices: int) -> tuple[tuple[str, ...], ...]:
        """Return the SDK's all-reduce test over `num_devices` NeuronCores."""
        return (("nccom-test", "-r", str(num_devices), "allr"),)

    def claim(self, index: int, threads: int) -> torch.device:
        """Set the variables that compiler and runtime read at start, and select the device."""
        for name, value in self.environment().items():
            set_variable(name, value)
        return super().claim(index, threads)

    def environment(self) -> dict[str, str]:
        """Return the compiler and runtime environment variables."""
        variables = {
            "NEURON_CC_FLAGS": " ".join(self.flags()),
            "NEURON_RT_STOCHASTIC_ROUNDING_EN": str(int(self.stochastic_rounding)),
        }
        if self.cache is not None:
            variables[CACHE_VARIABLE] = self.cache
        if self.visible_cores is not None:
            variables["NEURON_RT_VISIBLE_CORES"] = self.visible_cores
        return variables

    def flags(self) -> tuple[str, ...]:
        """Return the compiler arguments, in the order of the CLI reference."""
        target = self._target()
        return (
            *(("--target", target) if target else ()),
            "--auto-cast",
            self.auto_cast,
            *(("--auto-cast-type", self.auto_cast_type) if self.auto_cast != "none" else ()),
            "--model-type",
            self.model_type,
            "--optlevel",
            str(self.optlevel),
        )

    def precisions(self) -> tuple[Precision, ...]:
        return ("bf16", "fp32")

    def set_precision(self, precision: Precision) -> None:
        """Raise SettingsError if the compiler would cast the operations of an fp32 run."""
        if precision == "fp32" and self.auto_cast != "none":
            problem = f"accelerator.auto_cast = '{self.auto_cast}' casts fp32 operations"
            problem += f" to {self.auto_cast_type}, but execution.precision is 'fp32'"
            raise SettingsError(problem, 'set accelerator.auto_cast = "none"')

    def fp32_settings(self) -> dict[str, str]:
        return {"auto_cast": self.auto_cast, "auto_cast_type": self.auto_cast_type}

    def features(self) -> frozenset[str]:
        return super().features() | frozenset(self.flags())

    def set_graph_cache(self, folder: Path) -> None:
        """Store the compiler's files (NEFF) in a folder; `cache` sets another address."""
        set_variable(CACHE_VARIABLE, str(folder))

    def graph_collector(self) -> GraphCollector:
        """Return the SDK's tool, which collects graphs without computing, then compiles them."""
        return GraphCollector(
            (TOOL, "--command", "collect"), (TOOL, "--command", "compile"), CACHE_VARIABLE
        )

    def chip_peak(self, precision: Precision) -> ChipPeak:
        target = self._target() or "unknown chip"
        peak = CORE_PEAKS.get(target)
        if peak is None or precision != "bf16":
            return ChipPeak(f"NeuronCore of {target}")
        source = "the vendor's documentation, dense, half of a chip"
        return ChipPeak(f"NeuronCore of {target}", {"bf16": peak}, source)

    def _target(self) -> str | None:
        if self.target != "auto":
            return self.target
        family = (
            PRODUCT.read_text(encoding="utf-8").split(".")[0].strip() if PRODUCT.exists() else ""
        )
        return family if family in ("trn1", "trn2", "inf2") else None
