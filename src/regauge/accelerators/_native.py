"""What every device that torch reaches by its own accelerator interface shares."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from regauge.accelerators import Accelerator, Chip, Precision

if TYPE_CHECKING:
    import torch


class NativeDevice(Accelerator):
    """One device of `torch.accelerator` per process, with nothing assumed of it."""

    indexed: ClassVar[bool] = True

    def claim(self, index: int, threads: int) -> torch.device:
        import torch

        torch.set_num_threads(threads)
        torch.accelerator.set_device_index(index)
        return torch.device(device_type(), index)

    def count(self) -> int:
        import torch

        return torch.accelerator.device_count()

    def collectives(self) -> str:
        import torch.distributed

        return torch.distributed.get_default_backend_for_device(device_type())

    def precisions(self) -> tuple[Precision, ...]:
        return ("fp32", "bf16")

    def synchronize(self) -> None:
        import torch

        torch.accelerator.synchronize()

    def chip(self, precision: Precision) -> Chip:  # noqa: ARG002 - no peak is known
        return Chip(device_type())


def device_type() -> str:
    """Return the type of torch's current accelerator; "cpu" where there is none."""
    import torch

    device = torch.accelerator.current_accelerator()
    return device.type if device is not None else "cpu"
