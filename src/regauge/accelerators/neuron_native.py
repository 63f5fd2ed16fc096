"""AWS Trainium 2 and 3 as a native torch device (torch-neuronx from 2.13, a public beta).

Written from the Neuron SDK 2.33 documentation; not run on the hardware.
"""

from __future__ import annotations

import importlib.util
import os
from importlib.metadata import version
from typing import TYPE_CHECKING, ClassVar

from regauge.accelerators import Availability, Precision
from regauge.accelerators._environment import set_variable
from regauge.accelerators._native import NativeDevice, device_type, find_other_device

if TYPE_CHECKING:
    import torch

FLAGS_VARIABLE = "NEURON_CC_FLAGS"
NO_CAST = "--auto-cast none"
"""Compiler arguments that keep fp32 operations in fp32 (neuronx-cc CLI reference)."""


class NeuronNative(NativeDevice):
    """One logical NeuronCore per process; torch loads the backend by itself."""

    env_prefixes: ClassVar[tuple[str, ...]] = ("NEURON_", "TORCH_NEURONX_")
    chip_vendors: ClassVar[tuple[str, ...]] = ("AWS",)

    @classmethod
    def available(cls) -> Availability:
        if importlib.util.find_spec("torch_neuronx") is None:
            return Availability(0, "torch_neuronx is not installed (Neuron SDK 2.33 or later)")
        if problem := find_other_device("neuron"):
            return Availability(0, f"torch_neuronx is installed, but {problem}")
        return Availability(100, f"torch_neuronx {version('torch_neuronx')}")

    def claim(self, index: int, threads: int) -> torch.device:
        """Select the NeuronCore, and keep every shape static.

        A new length is compiled for 25 to 140 s. torch would replace the second length by a dynamic
        graph, which the compiler refuses.
        """
        set_variable("HF_DEACTIVATE_ASYNC_LOAD", "1")
        import torch._dynamo

        torch._dynamo.config.automatic_dynamic_shapes = False  # noqa: SLF001 - torch documents it
        return super().claim(index, threads)

    def set_precision(self, precision: Precision) -> None:
        """Compute fp32 products in fp32; the compiler may cast them to bf16 otherwise."""
        super().set_precision(precision)
        if precision == "fp32":
            set_variable(FLAGS_VARIABLE, NO_CAST)

    def fp32_settings(self) -> dict[str, str]:
        flags = os.environ.get(FLAGS_VARIABLE, "")
        return {**super().fp32_settings(), FLAGS_VARIABLE: flags}

    def precisions(self) -> tuple[Precision, ...]:
        return ("bf16", "fp32")

    def compile_backend(self) -> str:
        return device_type()
