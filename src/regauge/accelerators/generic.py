"""Any other device that torch.accelerator offers."""

from __future__ import annotations

import sys
from typing import ClassVar

from regauge.accelerators import Availability, list_device_plugins, offers_only_cpu
from regauge.accelerators._environment import compiler_obstacle
from regauge.accelerators._native import NativeDevice, device_type

NO_PLUGIN = "torch.accelerator offers no device, and no package adds one to torch"


class Generic(NativeDevice):
    """The device named by `torch.accelerator`."""

    peer_names: ClassVar[tuple[str, ...]] = ("mps", "xpu")

    @classmethod
    def available(cls) -> Availability:
        if offers_only_cpu() and "torch" not in sys.modules:
            return Availability(0, NO_PLUGIN)
        import torch

        device = torch.accelerator.current_accelerator(check_available=True)
        if device is None:
            plugins = ", ".join(list_device_plugins())
            reason = f"the plugins of torch offer no device: {plugins}" if plugins else NO_PLUGIN
            return Availability(0, reason)
        return Availability(10, f"torch.accelerator offers '{device.type}'")

    def compile_obstacle(self) -> str | None:
        """Return why Inductor cannot compile for the device: its package registers no backend."""
        from torch._inductor.codegen import common

        common.init_backend_registration()
        if common.get_scheduling_for_device(device_type()) is None:
            return f"no package registers a backend of Inductor for '{device_type()}'"
        return compiler_obstacle()
