"""Any other device that torch's own accelerator interface offers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from regauge.accelerators import Accelerator, Availability, Chip, Precision

if TYPE_CHECKING:
    import torch


class Generic(Accelerator):
    """The device that `torch.accelerator` names, with nothing assumed of it."""

    @classmethod
    def available(cls) -> Availability:
        import torch

        device = torch.accelerator.current_accelerator(check_available=True)
        if device is None:
            return Availability(0, "torch.accelerator offers no device")
        return Availability(10, f"torch.accelerator offers '{device.type}'")

    def claim(self, local_rank: int, threads: int) -> torch.device:
        import torch

        torch.set_num_threads(threads)
        torch.accelerator.set_device_index(local_rank)
        return torch.device(self._type(), local_rank)

    def count(self) -> int:
        import torch

        return torch.accelerator.device_count()

    def collectives(self) -> str:
        import torch.distributed

        return torch.distributed.get_default_backend_for_device(self._type())

    def precisions(self) -> tuple[Precision, ...]:
        return ("fp32", "bf16")

    def synchronize(self) -> None:
        import torch

        torch.accelerator.synchronize()

    def chip(self, precision: Precision) -> Chip:  # noqa: ARG002 - no peak is known
        return Chip(self._type())

    @staticmethod
    def _type() -> str:
        import torch

        device = torch.accelerator.current_accelerator()
        return device.type if device is not None else "cpu"
