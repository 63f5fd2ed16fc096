"""AWS Trainium 2 and 3 as a device of torch's own (torch-neuronx from 2.13, a public beta).

Written to the documentation of the Neuron SDK 2.33, and not run on its hardware.
"""

from __future__ import annotations

import importlib.util
from importlib.metadata import version
from typing import ClassVar

from regauge.accelerators import Availability, Precision
from regauge.accelerators._native import NativeDevice, device_type


class NeuronNative(NativeDevice):
    """One logical NeuronCore per process; torch finds the backend by itself."""

    variables: ClassVar[tuple[str, ...]] = ("NEURON_", "TORCH_NEURONX_")

    @classmethod
    def available(cls) -> Availability:
        if importlib.util.find_spec("torch_neuronx") is None:
            return Availability(0, "torch_neuronx is not installed (Neuron SDK 2.33 or later)")
        import torch

        found = torch.accelerator.current_accelerator(check_available=True)
        if found is None or found.type != "neuron":
            offered = "no device" if found is None else f"'{found.type}'"
            return Availability(0, f"torch_neuronx is there, torch.accelerator offers {offered}")
        return Availability(100, f"torch_neuronx {version('torch_neuronx')}")

    def precisions(self) -> tuple[Precision, ...]:
        return ("bf16", "fp32")

    def compile_backend(self) -> str:
        return device_type()
