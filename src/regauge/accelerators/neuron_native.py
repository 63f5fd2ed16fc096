"""AWS Trainium 2 and 3 as a native torch device (torch-neuronx from 2.13, a public beta).

Written from the documentation of the Neuron SDK 2.33; not run on the hardware.
"""

from __future__ import annotations

import importlib.util
from importlib.metadata import version
from typing import ClassVar

from regauge.accelerators import Availability, Precision
from regauge.accelerators._native import NativeDevice, device_type


class NeuronNative(NativeDevice):
    """One logical NeuronCore per process; torch loads the backend by itself."""

    env_prefixes: ClassVar[tuple[str, ...]] = ("NEURON_", "TORCH_NEURONX_")
    chip_vendors: ClassVar[tuple[str, ...]] = ("AWS",)

    @classmethod
    def available(cls) -> Availability:
        if importlib.util.find_spec("torch_neuronx") is None:
            return Availability(0, "torch_neuronx is not installed (Neuron SDK 2.33 or later)")
        import torch

        device = torch.accelerator.current_accelerator(check_available=True)
        if device is None or device.type != "neuron":
            offered = "no device" if device is None else f"'{device.type}'"
            reason = f"torch_neuronx is installed, but torch.accelerator offers {offered}"
            return Availability(0, reason)
        return Availability(100, f"torch_neuronx {version('torch_neuronx')}")

    def precisions(self) -> tuple[Precision, ...]:
        return ("bf16", "fp32")

    def compile_backend(self) -> str:
        return device_type()
