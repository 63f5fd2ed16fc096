"""A device that is simulated on the processor, as a package of a vendor would add it to torch.

torch imports this package by its entry point. The device has separate memory, which the processor
can reach only while a kernel runs, streams, events, a generator, and a process group. Its kernels
are those of the CPU. An operator that gets a tensor of the CPU in addition to one of the device
fails.
"""

from __future__ import annotations

NAME = "sim"
GROUP = "simccl"


def register() -> None:
    """Add the device to torch; torch calls this when it is imported."""
    import torch

    from simulated_device import build, device

    library = build.load()
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, device.create_module(library))
    torch.utils.generate_methods_for_privateuse1_backend()
    if torch.distributed.is_available():
        device.register_group(library)
