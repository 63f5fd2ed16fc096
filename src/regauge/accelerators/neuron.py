"""AWS Trainium and Inferentia through PyTorch/XLA (torch-neuronx up to 2.9): Trn1, Inf2, Trn2.

Written to the documentation of the Neuron SDK 2.28 and 2.29, and not run on its hardware.
"""

from __future__ import annotations

import importlib.util
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from regauge.accelerators import Availability, Chip, Collecting, Precision
from regauge.accelerators._environment import impose
from regauge.accelerators._xla import XlaDevice, missing
from regauge.units import TERA

if TYPE_CHECKING:
    import torch

TOOL = "neuron_parallel_compile"
CACHE = "NEURON_COMPILE_CACHE_URL"
DEVICE = Path("/dev/neuron0")
PRODUCT = Path("/sys/devices/virtual/dmi/id/product_name")
CORE_PEAKS = {"trn1": 95 * TERA, "inf2": 95 * TERA}
"""Dense bf16 peak of one NeuronCore-v2: half of a chip's 190 (awsdocs-neuron, architecture)."""


class Neuron(XlaDevice):
    """One NeuronCore per process."""

    variables: ClassVar[tuple[str, ...]] = (*XlaDevice.variables, "NEURON_", "NEURONCORE_")

    target: Literal["auto", "trn1", "trn2", "inf2"] = "auto"
    """Chip that is compiled for; `auto` reads the name of the instance."""
    optlevel: Literal[1, 2, 3] = 1
    """Effort of the compiler; 1 compiles much faster for a few per cent of the throughput."""
    auto_cast: Literal["none", "matmult", "all"] = "none"
    """Which fp32 operations the compiler may narrow; always passed, its default has changed."""
    auto_cast_type: Literal["bf16", "fp16", "tf32"] = "bf16"
    """What they are narrowed to."""
    model_type: Literal["transformer", "generic", "unet-inference"] = "transformer"
    """Which optimisations the compiler prefers."""
    stochastic_rounding: Literal["no", "yes"] = "no"
    """Whether results that are narrowed round at random."""
    cache: str | None = None
    """Folder or s3:// address of compiled graphs; the SDK's own folder by default."""
    visible_cores: str | None = None
    """Cores that this process may use, such as `0-3`; the launcher's choice by default."""

    @classmethod
    def available(cls) -> Availability:
        if importlib.util.find_spec("torch_neuronx") is None:
            return Availability(0, "torch_neuronx is not installed (Neuron SDK)")
        if importlib.util.find_spec("torch_xla") is None:
            reason = f"torch_neuronx {version('torch_neuronx')} has no torch_xla beside it"
            return Availability(0, f"{reason}: use accelerator.kind = 'neuron-native'")
        if problem := missing():
            return Availability(0, problem)
        if not DEVICE.exists():
            return Availability(0, f"the Neuron driver shows no device ({DEVICE})")
        return Availability(100, f"torch_neuronx {version('torch_neuronx')} and {DEVICE}")

    def platform(self) -> str:
        return "NEURON"

    def tools(self, size: int) -> tuple[tuple[str, ...], ...]:
        """Return the SDK's sum over `size` cores."""
        return (("nccom-test", "-r", str(size), "allr"),)

    def claim(self, index: int, threads: int) -> torch.device:
        """Hand the settings to the compiler and the runtime, which read them when they start."""
        for name, value in self.environment().items():
            impose(name, value)
        return super().claim(index, threads)

    def environment(self) -> dict[str, str]:
        """Return the variables that the compiler and the runtime are set by."""
        found = {
            "NEURON_CC_FLAGS": " ".join(self.flags()),
            "NEURON_RT_STOCHASTIC_ROUNDING_EN": str(int(self.stochastic_rounding == "yes")),
        }
        if self.cache is not None:
            found[CACHE] = self.cache
        if self.visible_cores is not None:
            found["NEURON_RT_VISIBLE_CORES"] = self.visible_cores
        return found

    def flags(self) -> tuple[str, ...]:
        """Return the compiler's arguments, in the order of its reference."""
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

    def features(self) -> frozenset[str]:
        return super().features() | frozenset(self.flags())

    def use_cache(self, folder: Path) -> None:
        """Keep the compiler's files (NEFF) in a folder; `cache` names an address for them."""
        impose(CACHE, str(folder))

    def collecting(self) -> Collecting:
        """Return the SDK's tool: a trial computes nothing, then its graphs compile in parallel."""
        return Collecting((TOOL, "--command", "collect"), (TOOL, "--command", "compile"), CACHE)

    def chip(self, precision: Precision) -> Chip:
        target = self._target() or "unknown chip"
        peak = CORE_PEAKS.get(target)
        if peak is None or precision != "bf16":
            return Chip(f"NeuronCore of {target}")
        source = "the vendor's documentation, dense, half of a chip"
        return Chip(f"NeuronCore of {target}", {"bf16": peak}, source)

    def _target(self) -> str | None:
        if self.target != "auto":
            return self.target
        family = PRODUCT.read_text().split(".")[0].strip() if PRODUCT.exists() else ""
        return family if family in ("trn1", "trn2", "inf2") else None
