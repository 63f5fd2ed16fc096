"""Eager PyTorch: runs the program one operation at a time, on any accelerator."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from regauge.accelerators import Accelerator, Availability
from regauge.inference.backends import Backend, ExecutionContext, Payload, Runner


class EagerBackend(Backend):
    """Runs the program without compilation; all other backends are compared with it."""

    peer_names: ClassVar[tuple[str, ...]] = ("torch", "pytorch")

    compiles_in_seconds: ClassVar[bool] = True
    is_ahead_of_time: ClassVar[bool] = False
    supports_loops: ClassVar[bool] = True
    packages: ClassVar[tuple[str, ...]] = ("torch", "transformers")

    devices: int = Field(default=1, ge=1)
    """Devices on one machine that share the program, with one process each."""
    parallelism: Literal["tensor", "pipeline"] = "tensor"
    """`tensor` splits the weights of each layer, `pipeline` assigns whole layers to devices."""
    timeout_seconds: float = Field(default=60.0, gt=0)
    """Time limit when devices wait for each other."""

    @property
    def num_devices(self) -> int:
        return self.devices

    @classmethod
    def available(cls) -> Availability:
        return Availability(1, "part of torch")

    def obstacle(self, accelerator: Accelerator) -> str | None:
        if accelerator.is_lazy:
            return "the device records operations instead of running them"
        return _group_obstacle(accelerator.distributed_backend()) if self.devices > 1 else None

    def load(self, payload: Payload, context: ExecutionContext) -> Runner:
        """Load a payload; raises SettingsError if it cannot be split over the devices."""
        if self.devices > 1:
            from regauge.inference.backends._model_parallel.runner import ModelParallelRunner
            from regauge.inference.backends._model_parallel.worker import ParallelConfig

            config = ParallelConfig(self.devices, self.parallelism, self.timeout_seconds)
            return ModelParallelRunner(payload, context, config)
        from regauge.inference.backends._runners import ModuleRunner

        return ModuleRunner(payload, context)


def _group_obstacle(distributed_backend: str) -> str | None:
    from regauge.inference.backends._model_parallel.group import find_group_creator

    if find_group_creator(distributed_backend):
        return None
    return f"torch has no process group for '{distributed_backend}'"
