"""Base class for accelerators behind torch.accelerator."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from regauge.accelerators import Accelerator, ChipPeak, Precision

if TYPE_CHECKING:
    import torch


class NativeDevice(Accelerator):
    """One `torch.accelerator` device per process; assumes nothing else."""

    is_indexed: ClassVar[bool] = True

    def claim(self, index: int, threads: int) -> torch.device:
        import torch

        torch.set_num_threads(threads)
        torch.accelerator.set_device_index(index)
        return torch.device(device_type(), index)

    def num_devices(self) -> int:
        import torch

        return torch.accelerator.device_count()

    def distributed_backend(self) -> str:
        import torch.distributed

        return torch.distributed.get_default_backend_for_device(device_type())

    def precisions(self) -> tuple[Precision, ...]:
        return ("fp32", "bf16")

    def synchronize(self) -> None:
        import torch

        torch.accelerator.synchronize()

    def chip_peak(self, precision: Precision) -> ChipPeak:  # noqa: ARG002 - the peak is unknown
        return ChipPeak(device_type())


def find_other_device(kind: str) -> str | None:
    """Return the device type that `torch.accelerator` offers instead, or None if it has this one.

    Only usable devices count.
    """
    import torch

    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return "torch.accelerator offers no device"
    return None if device.type == kind else f"torch.accelerator offers '{device.type}'"


def device_type() -> str:
    """Return the current torch accelerator type, or "cpu"."""
    import torch

    device = torch.accelerator.current_accelerator()
    return device.type if device is not None else "cpu"
